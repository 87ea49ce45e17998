"""A plug-in of quantdrift for quantile forecasts: a task, a protocol and a runtime, one module for each."""

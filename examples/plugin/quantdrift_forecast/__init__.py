"""A plug-in of quantdrift for quantile forecasts: a task, a signal, a protocol and a runtime, one module for each."""

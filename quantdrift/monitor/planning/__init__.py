"""The calculations for `plan` and `backtest`: expected delays, and stored history under another policy."""

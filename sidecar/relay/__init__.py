"""On the serving path: carries bytes unchanged, delimits the exchanges in them, draws the first sample."""

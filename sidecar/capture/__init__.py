"""The capture process: decodes, draws the second sample, redacts, publishes; off the serving path."""

"""The queries of the commands."""

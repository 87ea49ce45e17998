"""The roof: the one command line."""

"""Comparisons: the rows that a worker stores of a batch, and how."""

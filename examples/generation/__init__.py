"""A language model and what its answers are compared with."""

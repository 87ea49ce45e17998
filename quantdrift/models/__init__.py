"""Models: run one of any kind, and compare the outputs of two."""

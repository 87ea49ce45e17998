"""Candidates that the field's own tools have quantised, held against the model that they were made from."""

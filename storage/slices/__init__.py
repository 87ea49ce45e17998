"""Discovered slices and clusters as rows."""

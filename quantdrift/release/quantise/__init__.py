"""Quantised models of a reference: built by many recipes, measured on every slice, and judged as the gate does."""

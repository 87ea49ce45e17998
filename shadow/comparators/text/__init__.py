"""Comparators of generated text."""

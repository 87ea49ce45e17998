"""Comparators of embedding vectors."""

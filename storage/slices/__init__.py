"""Slices: their list for people, what the search and the clusters found, and the places of values."""

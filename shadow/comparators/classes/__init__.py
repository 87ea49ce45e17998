"""Comparators of classes and labels."""

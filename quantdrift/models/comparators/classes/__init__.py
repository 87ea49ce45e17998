"""The comparators for classes and labels."""

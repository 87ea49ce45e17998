"""The search for undeclared slices, and their confirmation on later traffic."""

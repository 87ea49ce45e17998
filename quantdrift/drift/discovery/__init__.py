"""The search for slices that nobody declared, and their confirmation on later traffic."""

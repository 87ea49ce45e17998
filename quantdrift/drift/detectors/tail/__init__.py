"""The detector of a tail that grows, and its parts."""

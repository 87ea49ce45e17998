"""The detector of a change against a learned baseline, and its parts."""

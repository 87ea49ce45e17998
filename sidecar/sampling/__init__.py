"""The two sampling phases, and load shedding between them."""

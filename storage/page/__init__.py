"""What the live page reads: records, and functions of a connection that make one bounded query each."""

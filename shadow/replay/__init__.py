"""The replay of captured exchanges through the reference, the comparison of both sides, and the noise of each side."""

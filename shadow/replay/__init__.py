"""The replay of captured exchanges: references, pairing of outputs, rows, noise."""

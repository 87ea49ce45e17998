"""The search for the quantised places of a candidate that cause its divergence on a slice."""

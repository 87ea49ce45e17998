"""The diagnosis: which quantised places of a candidate cause its divergence on a slice."""

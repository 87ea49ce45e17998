"""Figures: the sums of slices over a time, from single comparisons or from roll-ups."""

"""The arithmetic of explanations: traffic mix, numeric damage, other measures that moved, overlapping slices."""

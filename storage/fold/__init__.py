"""What the fold reads and writes: its position, its batches in their order, and the results."""

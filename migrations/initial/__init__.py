"""What the first revision creates."""

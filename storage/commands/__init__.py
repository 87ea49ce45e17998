"""What the commands read."""

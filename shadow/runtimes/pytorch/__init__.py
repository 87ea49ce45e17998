"""References in PyTorch."""

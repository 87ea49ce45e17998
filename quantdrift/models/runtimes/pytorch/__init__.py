"""The runtime of references in PyTorch."""

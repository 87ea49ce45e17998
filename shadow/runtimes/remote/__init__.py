"""References at an Open Inference server."""

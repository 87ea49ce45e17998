"""Beside the inference pod: relay workers and the capture process."""

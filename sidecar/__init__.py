"""Beside the inference pod: relay workers, the capture process, the intake; and the tap for servers in Python."""

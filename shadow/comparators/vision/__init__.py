"""Comparators of detected objects and of masks."""

"""Replays captured exchanges through the FP32 reference and compares."""

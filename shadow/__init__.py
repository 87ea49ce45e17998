"""The shadow worker: replays captured exchanges through the FP32 reference and compares the answers."""

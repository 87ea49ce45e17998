"""References in ONNX Runtime."""

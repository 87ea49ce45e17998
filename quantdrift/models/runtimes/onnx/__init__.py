"""The runtime of references in ONNX Runtime."""

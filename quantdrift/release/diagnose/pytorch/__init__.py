"""Copies of PyTorch candidates whose sites can be switched to FP32."""

"""Tensors of an exchange: decoding, mapping to the reference, features."""

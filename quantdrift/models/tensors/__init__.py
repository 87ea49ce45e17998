"""The tensors of an exchange: decoding, mapping to the reference's inputs, features."""

"""Canaries: fixed inputs whose answers show whether a reference still answers as it did."""

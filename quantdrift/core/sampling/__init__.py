"""Sampling code of sidecars and monitor: rates, inclusion probabilities, policy messages, pauses."""

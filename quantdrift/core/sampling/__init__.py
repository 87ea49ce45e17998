"""What sidecars and the monitor share about sampling: rates, inclusion probabilities, policy messages, pauses."""

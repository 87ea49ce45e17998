"""Ways in beside the relay: what the serving path has already answered, told by others. Never on the serving path."""

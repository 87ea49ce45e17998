"""What the observers of both protocols share."""

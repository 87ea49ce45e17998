"""What the shadow writes."""

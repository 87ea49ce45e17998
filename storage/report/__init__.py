"""What the report reads."""

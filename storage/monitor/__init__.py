"""What the monitor reads and writes."""

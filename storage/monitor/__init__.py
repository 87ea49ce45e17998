"""The monitor's reads and writes."""

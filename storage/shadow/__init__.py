"""The shadow's writes."""

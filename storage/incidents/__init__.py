"""Incidents: how they are counted after a fold, and what people read and do."""

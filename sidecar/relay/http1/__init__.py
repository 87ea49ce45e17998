"""Observing HTTP/1.1: framing, heads, and the observer of a connection."""

"""Observing HTTP/2: frames, header blocks, and the observer of a connection."""

"""The HTTP/2 observer, its frames and its header blocks."""

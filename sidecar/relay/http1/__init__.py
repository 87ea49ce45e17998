"""The HTTP/1.1 observer and its message framing."""

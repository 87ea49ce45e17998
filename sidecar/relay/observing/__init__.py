"""The common parts of the HTTP/1.1 and HTTP/2 observers."""

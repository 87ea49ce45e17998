"""The intake process: it takes exchanges from senders other than the relay, off the serving path."""

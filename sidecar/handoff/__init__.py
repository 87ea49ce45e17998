"""The Unix socket between relay, intake and capture: its frames, sender and receiver."""

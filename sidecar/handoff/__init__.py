"""The hand-off over a Unix socket, from relay and intake to the capture process."""

"""Processes: running one, keeping child processes alive, the admin port, the embedded NATS server."""

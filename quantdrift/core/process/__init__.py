"""Process tools: event loop and stop signal, child processes, the admin port, the embedded NATS server."""

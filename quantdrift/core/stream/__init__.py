"""The client of NATS JetStream: connection, publishing, consuming, key-value store, backlog."""

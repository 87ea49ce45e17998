"""The client of the JetStream stream: connecting, publishing, consuming, key-value store, backlog."""

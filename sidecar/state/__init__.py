"""What a sidecar keeps and shares between its processes: configuration, policy, pauses, counters."""

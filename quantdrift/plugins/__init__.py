"""What a plug-in imports: one module for each kind, so that a protocol in a sidecar loads nothing of comparators and runtimes."""

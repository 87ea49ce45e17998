"""The sidecar of an inference pod: relay workers, capture and intake process, and the tap for Python."""

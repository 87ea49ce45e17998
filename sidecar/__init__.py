"""The sidecar of an inference pod: relay workers, capture process, intake process, and the tap for Python servers."""

"""The slices of a replayed item: clusters, discovered slices, and their refresh."""

"""The slices of a replayed item that are not configured: learned (clusters) and discovered ones, and their refresh."""

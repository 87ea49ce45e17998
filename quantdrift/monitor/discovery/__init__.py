"""The nightly work: searching slices, fitting clusters, confirming and retiring slices."""

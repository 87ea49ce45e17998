"""Clusters of inputs: fitting them, matching them over refits, describing them in words."""

"""Figures: what is known, each computed by one function that every surface uses. Nothing is read or written here."""

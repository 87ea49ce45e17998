"""Runnable stories, users of the product like anyone."""

"""Requests to language models and their answers: reading them from exchanges, and scoring them."""

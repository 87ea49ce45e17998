"""The requests to language models and their answers: reading them from exchanges, and records for scoring them."""

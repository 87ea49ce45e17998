"""References that are language models, here or at an OpenAI-compatible server."""

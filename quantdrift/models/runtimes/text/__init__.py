"""The runtimes of language models and text embeddings, in this process or at an OpenAI-compatible server."""

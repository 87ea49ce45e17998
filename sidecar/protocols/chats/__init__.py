"""Decoders of other interfaces of language models: each makes of an exchange what OpenAI's chat or completions would have."""

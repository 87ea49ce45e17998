"""For LitServe: a chat that says each word of the last message in capitals, and letters counted as embeddings.

Argument: port.
"""

import sys
from collections.abc import Iterator
from typing import Any

import litserve


class Chat(litserve.LitAPI):
    """Speaks a word at a time; asked with tools, it calls the first one."""

    def setup(self, device: str) -> None:
        """Load nothing."""

    def predict(self, request: Any, context: Any = None) -> Iterator[Any]:
        """Answer one request."""
        message = request.messages[-1].content
        for number, word in enumerate(message.split()):
            yield {"role": "assistant", "content": f"{' ' if number else ''}{word.upper()}"}
        if request.tools:
            called = {"name": request.tools[0].function.name, "arguments": '{"text": "größe"}'}
            call = {"id": "call_1", "type": "function", "function": called}
            yield {"role": "assistant", "content": "", "tool_calls": [call]}


class Letters(litserve.LitAPI):
    """Counts the vowels of a text: its embedding."""

    def setup(self, device: str) -> None:
        """Load nothing."""

    def decode_request(self, request: Any) -> list[str]:
        """Return the texts."""
        return [request.input] if isinstance(request.input, str) else list(request.input)

    def predict(self, texts: list[str]) -> list[list[float]]:
        """Answer one request."""
        return [[text.count(vowel) / 4 for vowel in "aeiou"] for text in texts]

    def encode_response(self, output: list[list[float]]) -> dict[str, Any]:
        """Return the embeddings as the specification of LitServe wants them."""
        return {"embeddings": output, "prompt_tokens": 0, "total_tokens": 0}


if __name__ == "__main__":
    chat = Chat(spec=litserve.OpenAISpec())
    letters = Letters(spec=litserve.OpenAIEmbeddingSpec())
    server = litserve.LitServer([chat, letters], accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False)

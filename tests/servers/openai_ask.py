"""Ask an OpenAI-compatible server with OpenAI's own client, and print what it understood as JSON.

Arguments: port, name of the header that carries the mark, mark, and as JSON what is asked: to each name the kind
(`chat`, `completions`, `embeddings`, `responses`) and the client's arguments. The mark of a request is `mark`, a hyphen and its
name. A stream is the list of its chunks.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import openai


def ask(client: openai.OpenAI, fields: dict[str, str], kind: str, arguments: dict[str, Any]) -> Any:
    """Return the answer as the client shows it."""
    resources = {
        "chat": client.chat.completions,
        "completions": client.completions,
        "embeddings": client.embeddings,
        "responses": client.responses,
    }
    answer = resources[kind].create(**arguments, extra_headers=fields)
    if arguments.get("stream"):
        return [chunk.model_dump(exclude_unset=True) for chunk in answer]
    return answer.model_dump(exclude_unset=True)


def main(arguments: Sequence[str]) -> None:
    """Ask, and print."""
    port, header, mark, document = arguments
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        answers = {
            name: ask(client, {header: f"{mark}-{name}"}, kind, given)
            for name, (kind, given) in json.loads(document).items()
        }
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1:])

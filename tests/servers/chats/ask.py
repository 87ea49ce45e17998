"""Ask a server with the clients of OpenAI, Anthropic and Ollama, and print what they understood as JSON.

Arguments: port, name of the header that carries the mark, mark, and as JSON what is asked: to each name the kind (`responses`,
`messages`, `chat`, `generate`) and the client's arguments. The mark of a request is `mark`, a hyphen and its name.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import anthropic
import ollama
import openai


def of_openai(url: str, fields: dict[str, str], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return text and calls as OpenAI's client shows them."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = arguments.pop("stream", False)
        if stream:
            with client.responses.stream(**arguments, extra_headers=fields) as events:
                deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
                answer = events.get_final_response()
            assert "".join(deltas) == answer.output_text
        else:
            answer = client.responses.create(**arguments, extra_headers=fields)
    calls = [
        (item.name, json.loads(item.arguments)) for item in answer.output if item.type == "function_call"
    ]
    return {"text": answer.output_text, "calls": calls}


def of_anthropic(url: str, fields: dict[str, str], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return text and calls as Anthropic's client shows them."""
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        if arguments.pop("stream", False):
            with client.messages.stream(**arguments, extra_headers=fields) as events:
                pieces = list(events.text_stream)
                message = events.get_final_message()
            assert len(pieces) > 1
        else:
            message = client.messages.create(**arguments, extra_headers=fields)
    return {
        "text": "".join(block.text for block in message.content if block.type == "text"),
        "calls": [(block.name, block.input) for block in message.content if block.type == "tool_use"],
    }


def of_ollama(url: str, fields: dict[str, str], kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return text and calls as Ollama's client shows them."""
    client = ollama.Client(host=url, headers=fields)
    answer = getattr(client, kind)(**arguments)
    parts = list(answer) if arguments.get("stream") else [answer]
    if kind == "generate":
        return {"text": "".join(part.response for part in parts), "calls": []}
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    return {
        "text": "".join(part.message.content or "" for part in parts),
        "calls": [(call.function.name, dict(call.function.arguments)) for call in calls],
    }


def main(arguments: Sequence[str]) -> None:
    """Ask, and print."""
    port, header, mark, document = arguments
    url = f"http://127.0.0.1:{port}"
    answers = {}
    for name, (kind, given) in json.loads(document).items():
        fields = {header: f"{mark}-{name}"}
        if kind == "responses":
            answers[name] = of_openai(url, fields, given)
        elif kind == "messages":
            answers[name] = of_anthropic(url, fields, given)
        else:
            answers[name] = of_ollama(url, fields, kind, given)
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1:])

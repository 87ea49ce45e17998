"""A small server of `/v1/responses`, `/v1/messages`, `/api/chat` and `/api/generate`, which says each word in capitals.

It answers with the typed models of the clients' own packages, so that the form is theirs. Offered a tool, it calls it. Argument: port.
"""

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anthropic.types as of_anthropic
import ollama
import openai.types.responses as of_openai

CALL = {"text": "größe"}


def pieces_of(text: str) -> list[str]:
    """Return the pieces in which an answer to a text is streamed."""
    return [f"{' ' if index else ''}{word.upper()}" for index, word in enumerate(text.split())]


def text_of(content: Any) -> str:
    """Return the text of a message."""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content if "text" in part)


def counts(text: str) -> tuple[int, int]:
    """Return the tokens of prompt and answer: words."""
    return len(text.split()), len(text.split())


def response_to(asked: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a response, and the events that stream it."""
    given = asked["input"]
    said = given if isinstance(given, str) else text_of(given[-1]["content"])
    pieces = pieces_of(said)
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "".join(pieces), "annotations": []}],
    }
    call = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "measure",
        "arguments": json.dumps(CALL),
        "status": "completed",
    }
    n_prompt, n_answer = counts(said)
    whole: dict[str, Any] = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1795277902,
        "model": asked["model"],
        "status": "completed",
        "output": [message, *([call] if asked.get("tools") else [])],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": asked.get("tools") or [],
        "usage": {
            "input_tokens": n_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": n_answer,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": n_prompt + n_answer,
        },
    }
    of_openai.Response.model_validate(whole)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**message, "content": [], "status": "in_progress"},
        },
        {
            "type": "response.content_part.added",
            **place,
            "part": {"type": "output_text", "text": "", "annotations": []},
        },
        *(
            {"type": "response.output_text.delta", **place, "delta": piece, "logprobs": []}
            for piece in pieces
        ),
        {"type": "response.output_text.done", **place, "text": "".join(pieces), "logprobs": []},
        {"type": "response.output_item.done", "output_index": 0, "item": message},
        {"type": "response.completed", "response": whole},
    ]
    return whole, [{**event, "sequence_number": number} for number, event in enumerate(events)]


def message_to(asked: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a message, and the events that stream it."""
    said = text_of(asked["messages"][-1]["content"])
    pieces = pieces_of(said)
    n_prompt, n_answer = counts(said)
    blocks: list[dict[str, Any]] = []
    if asked.get("thinking", {}).get("type") == "enabled":
        blocks.append({"type": "thinking", "thinking": "loud, then", "signature": "c2ln"})
    blocks.append({"type": "text", "text": "".join(pieces)})
    if asked.get("tools"):
        blocks.append({"type": "tool_use", "id": "toolu_1", "name": "measure", "input": CALL})
    whole: dict[str, Any] = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": asked["model"],
        "content": blocks,
        "stop_reason": "tool_use" if asked.get("tools") else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": n_prompt - 1, "cache_read_input_tokens": 1, "output_tokens": n_answer},
    }
    of_anthropic.Message.model_validate(whole)
    begun = {
        **whole,
        "content": [],
        "stop_reason": None,
        "usage": {**whole["usage"], "output_tokens": 1},
    }
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}, {"type": "ping"}]
    for index, block in enumerate(blocks):
        events += block_events(index, block, pieces)
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    events += [
        {"type": "message_delta", "delta": ended, "usage": {"output_tokens": n_answer}},
        {"type": "message_stop"},
    ]
    return whole, events


def block_events(index: int, block: dict[str, Any], pieces: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of one block of a message."""
    empty: dict[str, Any]
    if block["type"] == "text":
        empty, deltas = {"text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces]
    elif block["type"] == "thinking":
        empty = {"thinking": "", "signature": ""}
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    else:
        empty, written = {"input": {}}, json.dumps(block["input"])
        deltas = [{"type": "input_json_delta", "partial_json": part} for part in (written[:9], written[9:])]
    yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
    for delta in deltas:
        yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}


def lines_to(path: str, asked: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what Ollama answers, and the lines that stream it."""
    is_chat = path == "/api/chat"
    said = text_of(asked["messages"][-1]["content"]) if is_chat else asked["prompt"]
    pieces = pieces_of(said)
    n_prompt, n_answer = counts(said)
    ended = {
        "done": True,
        "done_reason": "stop",
        "total_duration": 9,
        "prompt_eval_count": n_prompt,
        "eval_count": n_answer,
    }
    told = {"model": asked["model"], "created_at": "2026-11-27T12:00:00Z"}

    def line(text: str, *, calls: bool = False) -> dict[str, Any]:
        if not is_chat:
            return {**told, "response": text, "done": False}
        made = [{"function": {"name": "measure", "arguments": CALL}}] if calls else None
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text,
            **({"tool_calls": made} if made else {}),
        }
        return {**told, "message": message, "done": False}

    with_call = bool(asked.get("tools"))
    whole = {**line("".join(pieces), calls=with_call), **ended}
    (ollama.ChatResponse if is_chat else ollama.GenerateResponse).model_validate(whole)
    lines = [line(piece) for piece in pieces] + ([line("", calls=True)] if with_call else [])
    return whole, [*lines, {**line(""), **ended}]


class Handler(BaseHTTPRequestHandler):
    """Answers, whole or streamed."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Say that the server is there, and which models it has."""
        documents: dict[str, dict[str, Any]] = {
            "/": {},
            "/v1/models": {"object": "list", "data": [{"id": "loud", "object": "model"}]},
            "/api/tags": {"models": [{"name": "loud"}]},
        }
        listed = documents.get(self.path)
        if listed is None:
            self.send_error(404)
        else:
            self._send(json.dumps(listed).encode(), "application/json")

    def do_POST(self) -> None:
        """Answer a request."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_ollama = self.path.startswith("/api/")
        answer = {"/v1/responses": response_to, "/v1/messages": message_to}.get(self.path)
        whole, parts = lines_to(self.path, asked) if answer is None else answer(asked)
        if not asked.get("stream", is_ollama):
            self._send(json.dumps(whole).encode(), "application/json")
        elif is_ollama:
            self._send(*[json.dumps(part).encode() + b"\n" for part in parts], "application/x-ndjson")
        else:
            self._send(
                *[f"event: {part['type']}\ndata: {json.dumps(part)}\n\n".encode() for part in parts],
                "text/event-stream",
            )

    def _send(self, *pieces_and_kind: Any) -> None:
        *pieces, kind = pieces_and_kind
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()

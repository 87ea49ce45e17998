"""Decoder of Anthropic's `POST /v1/messages`, as vLLM, llama.cpp, SGLang and gateways serve it, whole and streamed."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from quantdrift.core.records import Loss
from quantdrift.sidecar.protocols.chats.form import (
    Generated,
    PieceReader,
    call,
    entries,
    image_part,
    joined_parts,
    number,
    object_in,
    request_of,
    response_of,
    text_part,
    tool,
    word,
)
from quantdrift.sidecar.protocols.decoder import DecodedRequest, DecodedResponse, WireContext
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head
from quantdrift.sidecar.protocols.json_tensors import read_document, write_json
from quantdrift.sidecar.protocols.openai import read_events

_ENDS: Final[Mapping[str, str]] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_CHOICES: Final[Mapping[str, str]] = {"auto": "auto", "any": "required", "none": "none"}
_OWN_TOOL: Final = "custom"  # a tool that the client runs; the others run at the server
_PROMPT_COUNTS: Final = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


class AnthropicMessages:
    """Decoder of `POST /v1/messages`."""

    def request(self, head: Head, body: bytes, wire: WireContext) -> DecodedRequest:
        """Return the request.

        Raises
        ------
        LostError
            `decode`: it does not follow the protocol. `too_large`: too many values.
        """
        document = read_document(body, wire.max_values)
        messages = [
            message
            for sent in entries(document.get("messages"), "messages")
            for message in _messages(word(sent.get("role")), sent.get("content"))
        ]
        if not messages:
            raise LostError(Loss.DECODE, "there are no messages")
        if system := _text(document.get("system")):
            messages.insert(0, {"role": "system", "content": system})
        offered = list(entries(document.get("tools"), "tools"))
        at_server = any(entry.get("type", _OWN_TOOL) != _OWN_TOOL for entry in offered)
        options = {
            **document,
            "stop": document.get("stop_sequences") or None,
            "tool_choice": _tool_choice(object_in(document.get("tool_choice"))),
            "response_format": _response_format(document),
            "thinking": _thinking(document.get("thinking")),
            "server_tools": True if at_server else None,
        }
        tools = [
            tool(entry.get("name"), entry.get("description"), entry.get("input_schema")) for entry in offered
        ]
        return request_of(document, options, messages=messages, tools=tools)

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the response.

        Raises
        ------
        LostError
            As for a request; for a stream also `truncated` if `message_stop` is missing, and `error_status` if it reports an error.
        """
        is_stream = body.lstrip()[:1] != b"{"
        message = _joined(body, wire) if is_stream else read_document(body, wire.max_values)
        if message.get("type") == "error":
            raise LostError(Loss.ERROR_STATUS, "the server reports an error")
        if message.get("content") is None:
            raise LostError(Loss.DECODE, "a message without content")
        generated = Generated(
            finish_reason=_ENDS.get(word(message.get("stop_reason")), ""), response_id=word(message.get("id"))
        )
        for block in entries(message["content"], "content"):
            _add(generated, block)
        counts = object_in(message.get("usage"))
        if number(counts.get("output_tokens")):
            n_prompt = sum(number(counts.get(name)) for name in _PROMPT_COUNTS)
            generated.usage = (n_prompt, number(counts.get("output_tokens")))
        return response_of(generated, wire, is_stream=is_stream)


def _add(generated: Generated, block: Mapping[str, Any]) -> None:
    kind = block.get("type")
    if kind == "text":
        generated.texts.append(word(block.get("text")))
    elif kind == "thinking":
        generated.reasoning.append(word(block.get("thinking")) or "[thinking]")  # a server may hide it
    elif kind == "tool_use":
        given = block.get("input")
        arguments = given if isinstance(given, str) else write_json({} if given is None else given).decode()
        generated.calls.append(
            {"id": word(block.get("id")), "name": word(block.get("name")), "arguments": arguments}
        )
    else:  # hidden thinking, or what a tool at the server did: more was generated than is known
        generated.reasoning.append(f"[{word(kind)}]")


class _Stream:
    """The message that the events of a stream bring in pieces. The arguments of a call stay text."""

    def __init__(self) -> None:
        self._blocks: dict[int, dict[str, Any]] = {}
        self._pieces: dict[tuple[int, str], list[str]] = {}
        self._ended: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._id: Any = None

    def add(self, kind: str, document: Mapping[str, Any]) -> None:
        """Add an event."""
        index, delta = number(document.get("index")), object_in(document.get("delta"))
        if kind == "message_start":
            message = object_in(document.get("message"))
            self._id = message.get("id")
            self._usage |= object_in(message.get("usage"))
        elif kind == "content_block_start":
            self._blocks[index] = object_in(document.get("content_block"))
        elif kind == "content_block_delta":
            for name, piece in _pieces(delta):
                self._pieces.setdefault((index, name), []).append(piece)
        elif kind == "message_delta":
            self._ended |= delta
            counts = object_in(document.get("usage"))
            self._usage |= {name: count for name, count in counts.items() if count is not None}

    def message(self) -> dict[str, Any]:
        """Return the message in the form of one that was not streamed."""
        for (index, name), pieces in self._pieces.items():
            block = self._blocks.setdefault(index, {})
            block[name] = word(block.get(name)) + "".join(pieces)
        content = [self._blocks[index] for index in sorted(self._blocks)]
        return {**self._ended, "id": self._id, "usage": self._usage, "content": content}


def _joined(body: bytes, wire: WireContext) -> dict[str, Any]:
    stream, reader = _Stream(), PieceReader(wire)
    for event in read_events(body, b""):
        document = reader.read(event.data)
        kind = word(document.get("type"))
        if kind == "error":
            raise LostError(Loss.ERROR_STATUS, "the stream reports an error")
        if kind == "message_stop":
            return stream.message()
        stream.add(kind, document)
    raise LostError(Loss.TRUNCATED, "the end of the stream is missing")


def _pieces(delta: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the member of its block that a delta adds to, and the piece."""
    for name, of_block in (("text", "text"), ("thinking", "thinking"), ("partial_json", "input")):
        if isinstance(delta.get(name), str):
            yield of_block, delta[name]


def _messages(role: str, content: Any) -> Iterator[dict[str, Any]]:
    """Yield a message in OpenAI's form, after the results of tools that it brings."""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    parts: list[dict[str, Any]] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in entries(content, "content"):
        kind = block.get("type")
        if kind == "thinking":
            reasoning.append(word(block.get("thinking")))
        elif kind == "tool_use":
            arguments = write_json(block.get("input") or {}).decode()
            calls.append(call(block.get("id"), block.get("name"), arguments))
        elif kind == "tool_result":
            result = _text(block.get("content"))
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        else:
            parts.append(_part(block))
    message: dict[str, Any] = {"role": role, "content": joined_parts(parts) if parts else None}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    if parts or calls or reasoning:
        yield message


def _part(block: dict[str, Any]) -> dict[str, Any]:
    """Return a text or an image in OpenAI's form; a document as it is, so that the shadow says what it cannot replay."""
    if block.get("type") == "text":
        return text_part(word(block.get("text")))
    url = _image_url(object_in(block.get("source"))) if block.get("type") == "image" else ""
    return image_part(url) if url else block


def _image_url(source: Mapping[str, Any]) -> str:
    if source.get("type") != "base64":
        return word(source.get("url"))
    return f"data:{word(source.get('media_type'))};base64,{word(source.get('data'))}"


def _text(content: Any) -> Any:
    """Return a text, or the texts of blocks joined; blocks of which one is no text stay parts."""
    if not isinstance(content, list):
        return word(content)
    blocks = list(entries(content, "content"))
    if any(block.get("type") != "text" for block in blocks):
        return blocks
    return "".join(word(block.get("text")) for block in blocks)


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return _CHOICES.get(word(choice.get("type")))


def _response_format(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return OpenAI's form of a schema that the client asked for."""
    wanted = object_in(
        object_in(document.get("output_config")).get("format") or document.get("output_format")
    )
    if wanted.get("type") != "json_schema":
        return None
    return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}


def _thinking(thinking: Any) -> bool | None:
    kind = object_in(thinking).get("type")
    return None if kind is None else kind != "disabled"

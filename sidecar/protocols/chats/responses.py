"""Decoder of OpenAI's `POST /v1/responses`, whole and streamed."""

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
from quantdrift.sidecar.protocols.json_tensors import read_document
from quantdrift.sidecar.protocols.openai import read_events

_TEXTS: Final = frozenset({"input_text", "output_text", "text"})
_ENDED: Final = frozenset({"response.completed", "response.incomplete"})
_FAILED: Final = frozenset({"response.failed", "error"})
_CUT: Final[Mapping[str, str]] = {"max_output_tokens": "length", "content_filter": "content_filter"}
# What the server adds to the prompt from elsewhere: the request alone does not say what the model read.
_STORED: Final = ("previous_response_id", "conversation", "prompt")


class OpenAIResponses:
    """Decoder of `POST /v1/responses`."""

    def request(self, head: Head, body: bytes, wire: WireContext) -> DecodedRequest:
        """Return the request.

        Raises
        ------
        LostError
            `decode`: it does not follow the protocol. `too_large`: too many values.
        """
        document = read_document(body, wire.max_values)
        given = document.get("input")
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(_messages(given))
        if not messages:
            raise LostError(Loss.DECODE, "there is no input")
        if instructions := document.get("instructions"):
            messages.insert(0, {"role": "system", "content": word(instructions)})
        offered = list(entries(document.get("tools"), "tools"))
        reasoning, text = object_in(document.get("reasoning")), object_in(document.get("text"))
        options = {
            **document,
            "max_tokens": document.get("max_output_tokens"),
            "tool_choice": _tool_choice(document.get("tool_choice")),
            "response_format": _response_format(object_in(text.get("format"))),
            "verbosity": text.get("verbosity"),
            "reasoning_effort": reasoning.get("effort"),
            "stored_prompt": True if any(document.get(name) for name in _STORED) else None,
            "server_tools": True if any(entry.get("type") != "function" for entry in offered) else None,
        }
        tools = [
            tool(entry.get("name"), entry.get("description"), entry.get("parameters")) for entry in offered
        ]
        return request_of(document, options, messages=messages, tools=tools)

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the response.

        Raises
        ------
        LostError
            As for a request; `error_status`: it failed, or is to be fetched later (`background`); `truncated`: a stream without
            its last event.
        """
        is_stream = body.lstrip()[:1] != b"{"
        answered = _last(body, wire) if is_stream else read_document(body, wire.max_values)
        status = word(answered.get("status")) or "completed"
        if answered.get("error") or status not in {"completed", "incomplete"}:
            raise LostError(Loss.ERROR_STATUS, "the response failed, or is not complete")
        if answered.get("output") is None:
            raise LostError(Loss.DECODE, "a response without output")
        generated = Generated(response_id=word(answered.get("id")))
        for item in entries(answered["output"], "output"):
            _add(generated, item)
        why = word(object_in(answered.get("incomplete_details")).get("reason"))
        generated.finish_reason = "tool_calls" if generated.calls else "stop"
        if status == "incomplete":
            generated.finish_reason = _CUT.get(why, "")
        counts = object_in(answered.get("usage"))
        if number(counts.get("input_tokens")):
            generated.usage = (number(counts.get("input_tokens")), number(counts.get("output_tokens")))
        return response_of(generated, wire, is_stream=is_stream)


def _last(body: bytes, wire: WireContext) -> dict[str, Any]:
    """Return the whole response, which the last event of a stream brings.

    Only this event is parsed, and those that bring a finished item, in case the last one leaves the items out.
    """
    items: list[Any] = []
    reader = PieceReader(wire)
    for event in read_events(body, b"[DONE]"):
        kind = event.kind.decode(errors="replace")
        if kind in {"", "message"} and event.data[:1] == b"{":
            kind = word(reader.read(event.data).get("type"))
        if kind in _FAILED:
            raise LostError(Loss.ERROR_STATUS, "the stream reports an error")
        if kind == "response.output_item.done":
            items.append(reader.read(event.data).get("item"))
        elif kind in _ENDED:
            answered = object_in(reader.read(event.data).get("response"))
            return {**answered, "output": answered.get("output") or items}
    raise LostError(Loss.TRUNCATED, "the end of the stream is missing")


def _add(generated: Generated, item: Mapping[str, Any]) -> None:
    kind = item.get("type")
    if kind == "message":
        for part in entries(item.get("content"), "content"):
            if part.get("type") == "refusal":
                generated.refusals.append(word(part.get("refusal")))
            else:
                generated.texts.append(word(part.get("text")))
            generated.add_logprobs(entries(part.get("logprobs"), "logprobs"))
    elif kind == "function_call":
        generated.calls.append(
            {
                "id": word(item.get("call_id")),
                "name": word(item.get("name")),
                "arguments": word(item.get("arguments")),
            }
        )
    elif kind == "reasoning":
        texts = [word(part.get("text")) for part in entries(item.get("content"), "content")]
        # Without its content reasoning was generated and is hidden: its summary is another text.
        generated.reasoning.append("".join(texts) or "[reasoning]")
    else:  # what a tool at the server did: more was generated than is known
        generated.reasoning.append(f"[{word(kind)}]")


def _messages(given: Any) -> Iterator[dict[str, Any]]:
    """Yield the messages of a conversation; reasoning, text and calls of one answer are one message, as servers make it."""
    answer: dict[str, Any] = {}
    for item in entries(given, "input"):
        kind = item.get("type") or "message"
        if kind == "reasoning":
            texts = [word(part.get("text")) for part in entries(item.get("content"), "content")]
            if answer:
                yield answer
            answer = {"role": "assistant", "content": None, "reasoning_content": "".join(texts)}
        elif kind == "function_call":
            answer = answer or {"role": "assistant", "content": None}
            made = call(item.get("call_id"), item.get("name"), word(item.get("arguments")))
            answer["tool_calls"] = [*answer.get("tool_calls", ()), made]
        elif kind == "message" and item.get("role") == "assistant":
            if answer.get("content") is not None or "tool_calls" in answer:
                yield answer
                answer = {}
            answer = {**answer, "role": "assistant", "content": _content(item.get("content"))}
        else:
            if answer:
                yield answer
                answer = {}
            yield _other(kind, item)
    if answer:
        yield answer


def _other(kind: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message of an item that is no part of an answer."""
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
    if kind == "message":
        return {"role": word(item.get("role")), "content": _content(item.get("content"))}
    # As it is, so that the shadow says what it cannot replay.
    return {"role": "user", "content": [{"type": kind}]}


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return word(content)
    return joined_parts([_part(part) for part in entries(content, "content")])


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") in _TEXTS:
        return text_part(word(part.get("text")))
    if part.get("type") == "input_image" and isinstance(part.get("image_url"), str):
        return image_part(part["image_url"])
    return dict(part)


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    if wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}
    return {"type": "json_object"} if wanted.get("type") == "json_object" else None

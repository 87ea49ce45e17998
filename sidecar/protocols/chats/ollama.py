"""Decoders of Ollama's `POST /api/chat` and `POST /api/generate`, whole and streamed (a JSON object for each line)."""

import io
from collections.abc import Iterator, Mapping
from typing import Any, Final

from quantdrift.core.records import Loss
from quantdrift.sidecar.protocols.chats.form import (
    Generated,
    PieceReader,
    call,
    entries,
    image_part,
    number,
    object_in,
    request_of,
    response_of,
    text_part,
    word,
)
from quantdrift.sidecar.protocols.cost import check
from quantdrift.sidecar.protocols.decoder import DecodedRequest, DecodedResponse, WireContext
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head
from quantdrift.sidecar.protocols.json_tensors import read_document, write_json

_MAX_LINES: Final = 200_000
# How base64 of each kind of image begins.
_IMAGES: Final[Mapping[str, str]] = {
    "/9j/": "image/jpeg",
    "R0lGOD": "image/gif",
    "UklGR": "image/webp",
}


class OllamaChat:
    """Decoder of `POST /api/chat`."""

    def request(self, head: Head, body: bytes, wire: WireContext) -> DecodedRequest:
        """Return the request.

        Raises
        ------
        LostError
            `decode`: it does not follow the protocol. `too_large`: too many values.
        """
        document = read_document(body, wire.max_values)
        messages = [_message(message) for message in entries(document.get("messages"), "messages")]
        if not messages:
            raise LostError(Loss.DECODE, "there are no messages")
        tools = list(entries(document.get("tools"), "tools"))
        return request_of(document, _options(document), messages=messages, tools=tools)

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the response.

        Raises
        ------
        LostError
            As for a request; `truncated`: its last line is missing; `error_status`: a line reports an error.
        """
        return _generated(body, wire)


class OllamaGenerate:
    """Decoder of `POST /api/generate`, which is a chat of one message; with `raw` it completes a text without a template."""

    def request(self, head: Head, body: bytes, wire: WireContext) -> DecodedRequest:
        """Return the request; errors as for a chat."""
        document = read_document(body, wire.max_values)
        options = _options(document)
        options["chat_template"] = document.get("template") or None
        options["stored_prompt"] = True if document.get("context") else None
        options["suffix"] = document.get("suffix") or None
        prompt = word(document.get("prompt"))
        if document.get("raw") is True:
            return request_of(document, options, prompt=prompt)
        messages = [_message({"role": "user", "content": prompt, "images": document.get("images")})]
        if system := word(document.get("system")):
            messages.insert(0, {"role": "system", "content": system})
        return request_of(document, options, messages=messages)

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the response; errors as for a chat."""
        return _generated(body, wire)


def _options(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by OpenAI's names."""
    sampling = object_in(document.get("options"))
    n_most = sampling.get("num_predict")
    wanted, think = document.get("format"), document.get("think")
    options = {
        **sampling,
        "stream": document.get("stream"),
        "max_tokens": n_most if number(n_most) else None,  # -1 and -2: no limit
        "stop": sampling.get("stop") or None,
        "reasoning_effort": think if isinstance(think, str) else None,
        "thinking": think if isinstance(think, bool) else None,
        "logprobs": document.get("logprobs"),
        "top_logprobs": document.get("top_logprobs"),
    }
    if isinstance(wanted, dict):
        options["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted}}
    elif wanted:
        options["response_format"] = {"type": "json_object"}
    return options


def _message(sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's form."""
    content: Any = word(sent.get("content"))
    if images := sent.get("images"):
        content = [text_part(content), *map(_image, images if isinstance(images, list) else [images])]
    message: dict[str, Any] = {"role": word(sent.get("role")), "content": content}
    if thinking := word(sent.get("thinking")):
        message["reasoning_content"] = thinking
    if name := word(sent.get("tool_name")):
        message["name"] = name
    if calls := list(_calls(sent.get("tool_calls"))):
        message["tool_calls"] = [call(made["id"], made["name"], made["arguments"]) for made in calls]
    return message


def _image(sent: Any) -> dict[str, Any]:
    """Return an image, which is sent as base64 without its type."""
    encoded = word(sent)
    kind = next((kind for begin, kind in _IMAGES.items() if encoded.startswith(begin)), "image/png")
    return image_part(f"data:{kind};base64,{encoded}")


def _calls(sent: Any) -> Iterator[dict[str, str]]:
    for made in entries(sent, "tool_calls"):
        function = object_in(made.get("function"))
        given = function.get("arguments")
        arguments = given if isinstance(given, str) else write_json({} if given is None else given).decode()
        yield {"id": word(made.get("id")), "name": word(function.get("name")), "arguments": arguments}


def _generated(body: bytes, wire: WireContext) -> DecodedResponse:
    generated = Generated()
    n_lines, reader = 0, PieceReader(wire)
    for line in io.BytesIO(body):
        if not line.strip():
            continue
        check()
        n_lines += 1
        if n_lines > _MAX_LINES:
            raise LostError(Loss.TOO_LARGE, f"a stream of more than {_MAX_LINES} lines")
        if not line.endswith(b"\n") and not line.rstrip().endswith(b"}"):
            raise LostError(Loss.TRUNCATED, "a stream ends within a line")
        document = reader.read(line)
        if document.get("error"):
            raise LostError(Loss.ERROR_STATUS, "the server reports an error")
        message = object_in(document.get("message"))
        generated.texts.append(word(message.get("content")) or word(document.get("response")))
        generated.reasoning.append(word(message.get("thinking")) or word(document.get("thinking")))
        generated.calls += _calls(message.get("tool_calls"))
        generated.add_logprobs(entries(document.get("logprobs"), "logprobs"))
        if document.get("done") is True:
            reason = word(document.get("done_reason"))
            generated.finish_reason = "tool_calls" if generated.calls and reason == "stop" else reason
            if number(document.get("prompt_eval_count")):
                generated.usage = (
                    number(document.get("prompt_eval_count")),
                    number(document.get("eval_count")),
                )
            return response_of(generated, wire, is_stream=n_lines > 1)
    raise LostError(Loss.TRUNCATED, "the end of the answer is missing")

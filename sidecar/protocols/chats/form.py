"""The form of OpenAI's chat and completions, in which every exchange with a language model is recorded.

What reads a record then needs to know one form of messages, tools, options and answers.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from quantdrift.core.records import Loss
from quantdrift.sidecar.protocols.decoder import DecodedRequest, DecodedResponse, WireContext
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.json_tensors import read_document, text_tensor, write_json
from quantdrift.sidecar.protocols.openai import OPTIONS
from quantdrift.sidecar.protocols.openai_choices import JoinedPieces

_MOST_ENTRIES = 100_000


class Generated(msgspec.Struct, kw_only=True):
    """What was generated, as far as it is read.

    Parameters
    ----------
    texts, reasoning, refusals
        Pieces, in order.
    calls
        Tool calls, in order: `id`, `name`, `arguments` as text.
    logprobs
        Of the tokens of the text, each as in OpenAI's chat; None: the server sent none.
    token_ids
        Of the answer; None: the server sent none.
    finish_reason
        In OpenAI's words; empty: not known.
    usage
        Tokens of prompt and answer; None: not known.
    response_id
        That the server gave it; empty: none.
    """

    texts: list[str] = []
    reasoning: list[str] = []
    refusals: list[str] = []
    calls: list[dict[str, str]] = []
    logprobs: list[Any] | None = None
    token_ids: list[int] | None = None
    finish_reason: str = ""
    usage: tuple[int, int] | None = None
    response_id: str = ""

    def add_logprobs(self, tokens: Iterable[Any]) -> None:
        """Add the log-probabilities of more tokens, if there are any."""
        if tokens := list(tokens):
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs += tokens


class PieceReader:
    """Reads the JSON objects of a stream, which have together at most the values that one document may have."""

    def __init__(self, wire: WireContext) -> None:
        self._most = self._left = wire.max_values

    def read(self, piece: bytes) -> dict[str, Any]:
        """Return the next object.

        Raises
        ------
        LostError
            `decode`: it is not a JSON object. `too_large`: there are too many values.
        """
        self._left -= piece.count(b",") + piece.count(b"[") + piece.count(b"{")
        if self._left < 0:
            raise LostError(Loss.TOO_LARGE, f"a stream of more than {self._most} values")
        return read_document(piece, self._most)


def request_of(
    document: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    messages: Sequence[Mapping[str, Any]] = (),
    tools: Sequence[Any] = (),
    prompt: str = "",
) -> DecodedRequest:
    """Return a request in the form of OpenAI's.

    Parameters
    ----------
    document
        As it was sent.
    options
        By OpenAI's names. Those that affect no answer, and those that are None, are left out.
    messages, tools
        Of a chat.
    prompt
        A text to complete, without a chat template, where there are no messages.
    """
    kept = {name: value for name, value in sorted(options.items()) if name in OPTIONS and value is not None}
    inputs = [text_tensor("prompt", [prompt])]
    text: dict[str, Any] = {"prompt": prompt}
    if messages:
        inputs, text = [text_tensor("messages", [write_json(messages)])], {"messages": messages}
    if tools:
        inputs.append(text_tensor("tools", [write_json(tools)]))
        text["tools"] = tools
    model = document.get("model")
    return DecodedRequest(
        inputs=(*inputs, text_tensor("options", [write_json(kept)])),
        parameters=kept,
        document=document,
        text=text,
        model=model if isinstance(model, str) else "",
    )


def response_of(
    generated: Generated, wire: WireContext, *, is_stream: bool, version: str = ""
) -> DecodedResponse:
    """Return a response in the form of OpenAI's chat, which has one choice.

    Raises
    ------
    LostError
        `decode`: what was read has other types. `too_large`: too many values.
    """
    message: dict[str, Any] = {
        "content": "".join(generated.texts),
        "reasoning_content": "".join(generated.reasoning),
        "refusal": "".join(generated.refusals),
        "tool_calls": [
            {"id": call["id"], "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in generated.calls
        ],
    }
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": generated.finish_reason,
        "token_ids": generated.token_ids,
        "logprobs": None if generated.logprobs is None else {"content": generated.logprobs},
    }
    whole: dict[str, Any] = {"id": generated.response_id, "choices": [choice]}
    if generated.usage is not None:
        whole["usage"] = {"prompt_tokens": generated.usage[0], "completion_tokens": generated.usage[1]}
    joined = JoinedPieces(wire.max_values)
    joined.add(whole)
    return DecodedResponse(
        version=version,
        outputs=joined.tensors(tokens_are_ids=False),
        is_stream=is_stream,
        n_tokens=joined.n_tokens,
        response_id=joined.response_id,
    )


def tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Return a tool that is offered, in OpenAI's form."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {
        "type": "function",
        "function": {key: value for key, value in function.items() if value is not None},
    }


def call(identifier: Any, name: Any, arguments: str) -> dict[str, Any]:
    """Return a call in an earlier answer of a conversation, in OpenAI's form."""
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def joined_parts(parts: list[dict[str, Any]]) -> Any:
    """Return the content of a message: a lone text as text, else its parts."""
    if len(parts) == 1 and parts[0].get("type") == "text":
        return parts[0]["text"]
    return parts


def text_part(text: str) -> dict[str, Any]:
    """Return a part of a message with a text."""
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Any]:
    """Return a part of a message with an image, in OpenAI's form, of its address or its content (`data:...`)."""
    return {"type": "image_url", "image_url": {"url": url}}


def entries(value: Any, name: str) -> Iterable[dict[str, Any]]:
    """Return the objects of a list; none where there is no list.

    Raises
    ------
    LostError
        `decode`: it is not a list of objects.
    """
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise LostError(Loss.DECODE, f"{name} is not a list of objects")
    if len(value) > _MOST_ENTRIES:
        raise LostError(Loss.TOO_LARGE, f"more than {_MOST_ENTRIES} entries in {name}")
    return value


def word(value: Any) -> str:
    """Return a text, and an empty one in place of anything else."""
    return value if isinstance(value, str) else ""


def object_in(value: Any) -> dict[str, Any]:
    """Return an object, and an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def number(value: Any) -> int:
    """Return a count, and 0 in place of anything else."""
    return value if type(value) is int and 0 <= value < 2**62 else 0

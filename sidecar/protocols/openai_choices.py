"""The generated output of an OpenAI-compatible server, whole or in the pieces of a stream, as tensors.

A whole response is treated as a stream of one piece. Each choice has text, reasoning, refusal, tool calls, a
finish reason, and on request the ids and log-probabilities of its tokens.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quantdrift.core.records import Loss, Tensor
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.json_tensors import convert, pack_values, text_tensor, write_json

_TOKEN_ID = "token_id:"  # noqa: S105 - the prefix of vLLM for a token that is named by its id

_Index = Annotated[int, Meta(ge=0, lt=1024)]
_TokenId = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _CalledFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: _Index | None = None
    id: str | None = None
    type: str | None = None
    function: _CalledFunction | None = None


class _ServedMessage(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: _CalledFunction | None = None  # the predecessor of tool_calls


class _ServedToken(msgspec.Struct):
    token: str
    logprob: float | None = None
    bytes: list[Annotated[int, Meta(ge=0, le=255)]] | None = None


class _Token(_ServedToken):
    top_logprobs: list[_ServedToken] | None = None


class _Logprobs(msgspec.Struct):
    """Log-probabilities: `content` of a chat, or three lists of equal length of a completion."""

    content: list[_Token] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _ServedChoice(msgspec.Struct):
    index: _Index
    message: _ServedMessage | None = None
    delta: _ServedMessage | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[_TokenId] | None = None
    prompt_token_ids: list[_TokenId] | None = None


class _ServedUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Piece(msgspec.Struct):
    choices: list[_ServedChoice] = []
    usage: _ServedUsage | None = None
    prompt_token_ids: list[_TokenId] | None = None
    system_fingerprint: str | None = None
    id: Any = None
    error: Any = None


class _Joined:
    """One choice, joined from the pieces so far."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {"text": []}
        self.finish_reason = ""
        self.calls: dict[int, dict[str, Any]] = {}
        self.tokens: list[_Token] | None = None
        self.token_ids: list[int] | None = None
        self.prompt_token_ids: list[int] | None = None

    def add(self, choice: _ServedChoice) -> None:
        """Add a piece."""
        message = choice.message or choice.delta or _ServedMessage()
        self._append_text("text", message.content if choice.text is None else choice.text)
        self._append_text("reasoning", message.reasoning_content or message.reasoning)
        self._append_text("refusal", message.refusal)
        for index, call in enumerate(message.tool_calls or ()):
            if call.index is None and choice.message is None:
                raise LostError(Loss.DECODE, "a piece of a tool call has no index")
            self._append_call(index if call.index is None else call.index, call)
        if message.function_call is not None:
            self._append_call(0, _Call(function=message.function_call))
        self.finish_reason = choice.finish_reason or self.finish_reason
        if choice.token_ids is not None:
            self.token_ids = self.token_ids or []
            self.token_ids += choice.token_ids
        if choice.prompt_token_ids is not None:
            self.prompt_token_ids = choice.prompt_token_ids
        if choice.logprobs is not None and (tokens := _tokens(choice.logprobs)) is not None:
            self.tokens = self.tokens or []
            self.tokens += tokens

    def text(self, name: str) -> str:
        """Return the text called `name`."""
        return "".join(self.texts.get(name, ()))

    def _append_text(self, name: str, text: str | None) -> None:
        if text:
            self.texts.setdefault(name, []).append(text)

    def _append_call(self, index: int, piece: _Call) -> None:
        function = piece.function or _CalledFunction()
        call = self.calls.setdefault(index, {"id": "", "type": "function", "name": [], "arguments": []})
        call["id"] = piece.id or call["id"]
        call["type"] = piece.type or call["type"]
        call["name"].append(function.name or "")
        call["arguments"].append(function.arguments or "")


class JoinedPieces:
    """Joins the pieces of a response.

    Parameters
    ----------
    max_values
        Most values in a tensor.
    """

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._choices: dict[int, _Joined] = {}
        self._prompt_token_ids: list[int] | None = None
        self._usage: _ServedUsage | None = None
        self.fingerprint = ""  # of the server and its model, as it says
        self.response_id = ""

    def add(self, document: Mapping[str, Any]) -> None:
        """Add a piece: a chunk of a stream, or the whole response.

        Raises
        ------
        LostError
            `decode`: it is not such a piece. `error_status`: it reports an error.
        """
        piece = convert(document, _Piece)
        if piece.error is not None:
            raise LostError(Loss.ERROR_STATUS, "the server reports an error")
        if len({choice.index for choice in piece.choices}) != len(piece.choices):
            raise LostError(Loss.DECODE, "two choices with the same index")
        for choice in piece.choices:
            self._choices.setdefault(choice.index, _Joined()).add(choice)
        self._usage = piece.usage or self._usage
        self.fingerprint = piece.system_fingerprint or self.fingerprint
        if isinstance(piece.id, str):
            self.response_id = self.response_id or piece.id
        if piece.prompt_token_ids is not None:
            self._prompt_token_ids = piece.prompt_token_ids

    @property
    def n_ended(self) -> int:
        """The number of choices, or 0 if one of them has no finish reason."""
        return len(self._choices) if all(choice.finish_reason for choice in self._choices.values()) else 0

    @property
    def n_tokens(self) -> int:
        """The generated tokens, of several choices those of the longest; 0 if nothing says how many."""
        counted = max((len(of.token_ids or of.tokens or ()) for of in self._choices.values()), default=0)
        if not counted and len(self._choices) == 1 and self._usage is not None:
            return self._usage.completion_tokens
        return counted

    def tensors(self, *, tokens_are_ids: bool) -> tuple[Tensor, ...]:
        """Return the generated output as tensors.

        Parameters
        ----------
        tokens_are_ids
            Whether the client requested tokens to be named by their ids.

        Raises
        ------
        LostError
            `decode`: a choice is missing, or a text is not UTF-8. `too_large`: too many values in a tensor.
        """
        choices = [self._choices[index] for index in sorted(self._choices)]
        if not choices or len(choices) != max(self._choices) + 1:
            raise LostError(Loss.DECODE, "a choice is missing")
        tensors = [text_tensor("text", [choice.text("text") for choice in choices])]
        tensors += [
            text_tensor(name, [choice.text(name) for choice in choices])
            for name in ("reasoning", "refusal")
            if any(name in choice.texts for choice in choices)
        ]
        if any(choice.calls for choice in choices):
            tensors.append(text_tensor("tool_calls", [_tool_calls(choice.calls) for choice in choices]))
        tensors.append(text_tensor("finish_reason", [choice.finish_reason for choice in choices]))
        if self._usage is not None:
            counts = [self._usage.prompt_tokens, self._usage.completion_tokens]
            tensors.append(numbers("usage", "INT64", counts))
        if self._prompt_token_ids is not None:
            tensors.append(numbers("prompt_token_ids", "INT64", self._prompt_token_ids))
        for index, choice in enumerate(choices):
            tensors += self._of_tokens(index, choice, tokens_are_ids=tokens_are_ids)
        return tuple(tensors)

    def _of_tokens(self, index: int, choice: _Joined, *, tokens_are_ids: bool) -> list[Tensor]:
        tensors = []
        ids = choice.token_ids
        if choice.prompt_token_ids is not None:
            tensors.append(numbers(f"prompt_token_ids.{index}", "INT64", choice.prompt_token_ids))
        if choice.tokens is not None:
            if ids is None and tokens_are_ids:
                ids = [_id_of(token.token) for token in choice.tokens]
            tensors.append(text_tensor(f"tokens.{index}", [_token_bytes(token) for token in choice.tokens]))
            logprobs = [token.logprob for token in choice.tokens]
            tensors.append(numbers(f"logprobs.{index}", "FP64", logprobs))
            tensors += self._top(index, choice.tokens)
        if ids is not None:
            tensors.append(numbers(f"token_ids.{index}", "INT64", ids))
        return tensors

    def _top(self, index: int, tokens: list[_Token]) -> list[Tensor]:
        """Return the most likely tokens at each position, padded with empty tokens of unknown probability."""
        width = max((len(token.top_logprobs or ()) for token in tokens), default=0)
        if not width:
            return []
        shape = (len(tokens), width)
        if math.prod(shape) > self._max_values:
            raise LostError(Loss.TOO_LARGE, f"more than {self._max_values} values in top_logprobs")
        filler = _ServedToken(token="")
        rows = [token.top_logprobs or [] for token in tokens]
        flat = [likely for row in rows for likely in (*row, *([filler] * (width - len(row))))]
        names = pack_values([_token_bytes(likely) for likely in flat], "BYTES")
        values = pack_values([likely.logprob for likely in flat], "FP64")
        return [
            Tensor(name=f"top_tokens.{index}", datatype="BYTES", shape=shape, data=names),
            Tensor(name=f"top_logprobs.{index}", datatype="FP64", shape=shape, data=values),
        ]


def numbers(name: str, datatype: str, values: list[Any]) -> Tensor:
    """Return a tensor of one dimension; None becomes NaN."""
    return Tensor(name=name, datatype=datatype, shape=(len(values),), data=pack_values(values, datatype))


def _tool_calls(calls: Mapping[int, Mapping[str, Any]]) -> bytes:
    """Return tool calls as JSON, in the form of a whole response."""
    return write_json(
        [
            {
                "id": call["id"],
                "type": call["type"],
                "function": {"name": "".join(call["name"]), "arguments": "".join(call["arguments"])},
            }
            for _, call in sorted(calls.items())
        ]
    )


def _tokens(logprobs: _Logprobs) -> Iterable[_Token] | None:
    if logprobs.content is not None or logprobs.tokens is None:
        return logprobs.content
    n_tokens = len(logprobs.tokens)
    values = logprobs.token_logprobs or [None] * n_tokens
    tops = logprobs.top_logprobs or [None] * n_tokens
    if len(values) != n_tokens or len(tops) != n_tokens:
        raise LostError(Loss.DECODE, "the numbers of tokens and probabilities differ")
    return [
        _Token(
            token=token,
            logprob=value,
            top_logprobs=[_ServedToken(token=name, logprob=logprob) for name, logprob in (top or {}).items()],
        )
        for token, value, top in zip(logprobs.tokens, values, tops, strict=True)
    ]


def _token_bytes(token: _ServedToken) -> str | bytes:
    """Return the bytes of a token if given, else its text, in which invalid bytes may have been replaced."""
    return token.token if token.bytes is None else bytes(token.bytes)


def _id_of(token: str) -> int:
    digits = token.removeprefix(_TOKEN_ID)
    if digits == token or not digits.isdecimal() or len(digits) > 18:
        raise LostError(Loss.DECODE, "a token is not named by its id")
    return int(digits)

"""From an exchange of an OpenAI-compatible server to what its answers are scored with: one item for each choice."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from quantdrift.core.config.schema import Generation
from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.records import Exchange, Tensor
from quantdrift.shadow.language.answer import Answer, ToolCall
from quantdrift.shadow.language.free_running_answer import wanted
from quantdrift.shadow.language.request_options import (
    changes_prompt,
    ended_itself,
    functions,
    has_grammar,
    json_asked,
    may_be_cut,
    object_of,
    takes_likeliest,
    template_of,
    wanted_choices,
)
from quantdrift.shadow.language.scoring import ANSWER, ASKED, PROMPT, SCORES, Scores, ScoringRequest, objects
from quantdrift.shadow.tensors.arrays import Array, Outputs
from quantdrift.shadow.tensors.codec import MAX_ITEMS, decode

_NAMED: Final = b"token_id:"  # how vLLM spells a token that it was asked to name by its id
_DEFAULTS: Final = Generation()
_LEAST: Final = -9999.0  # what vLLM writes for a log-probability that it has not, and for minus infinity


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str = ""


class _Called(msgspec.Struct):
    function: _Function = msgspec.field(default_factory=_Function)


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange, its tensors by name, its documents read."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    options: dict[str, Any]
    tools: list[dict[str, Any]]
    texts: list[str]


def served(
    exchange: Exchange, generation: Generation = _DEFAULTS, *, copied: bool = False
) -> tuple[dict[str, Array], Outputs]:
    """Return what a reference is asked about an exchange, and what the candidate gave.

    Parameters
    ----------
    exchange
        As captured.
    generation
        What is configured: what the candidate's server takes where a request names nothing, and how many of the exchanges
        the reference answers itself.
    copied
        Whether a copy of the candidate is there to tell log-probabilities that were not served.

    Returns
    -------
    inputs
        `prompt` and `answer`, texts, and `asked`, an `ScoringRequest` each : (choices,).
    candidate
        `scores`, a `Scores` each or None where none of the model's log-probabilities were served, and `answer`, an
        `Answer` each : (choices,).

    Raises
    ------
    QuarantineError
        Reason `schema`: it is no exchange of text. `output`: what was served is not what was generated.
    """
    try:
        return _served(exchange, generation, copied=copied)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise _schema(f"the tensors do not fit together: {type(error).__name__}") from error


def embedded(exchange: Exchange) -> tuple[Tensor, ...]:
    """Return what embeddings are made of: all inputs but the options.

    Raises
    ------
    QuarantineError
        Reason `output`: shorter vectors were asked for than the model gives, or vectors of a part of the text.
    """
    options = next((tensor for tensor in exchange.inputs if tensor.name == "options"), None)
    asked = {} if options is None else _document(options, dict[str, Any])
    if cut := next((name for name in ("dimensions", "truncate_prompt_tokens") if asked.get(name)), ""):
        raise QuarantineError(
            QuarantineReason.OUTPUT, f"the client asked for `{cut}`: the vectors were cut, or the texts"
        )
    return tuple(tensor for tensor in exchange.inputs if tensor.name != "options")


def _served(exchange: Exchange, generation: Generation, *, copied: bool) -> tuple[dict[str, Array], Outputs]:
    said = _read(exchange, generation.repetition_penalty)
    answers = _answers(said)
    told = [_scores(said, index) for index in range(len(answers))]
    scores = [None] * len(told) if has_grammar(said.options) else told
    asked = [
        msgspec.structs.replace(
            _asked(said, index, tokens, answer), is_copied=copied and of_candidate is None
        )
        for index, (tokens, of_candidate, answer) in enumerate(zip(told, scores, answers, strict=True))
    ]
    own = wanted(exchange.id, generation, said.options, answers[0])
    asked[0] = msgspec.structs.replace(asked[0], own=own)  # one answer of an exchange
    return (
        {
            PROMPT: objects([_prompt_text(one) for one in asked]),
            ANSWER: objects(said.texts),
            ASKED: objects(asked),
        },
        {SCORES: objects(scores), ANSWER: objects(answers)},
    )


def _read(exchange: Exchange, repetition_penalty: float) -> _Said:
    inputs = {tensor.name: tensor for tensor in exchange.inputs}
    outputs = {tensor.name: tensor for tensor in exchange.outputs}
    if "text" not in outputs or "options" not in inputs:
        raise _schema(
            f"the exchange has the inputs {sorted(inputs)} and the outputs {sorted(outputs)}: it is no exchange of text with "
            "an OpenAI-compatible server"
        )
    options = {
        "repetition_penalty": repetition_penalty,
        **_document(inputs["options"], dict[str, Any]),
    }
    if options.get("echo"):
        raise QuarantineError(
            QuarantineReason.OUTPUT, "the client had the prompt echoed: it cannot be told from the answer"
        )
    texts = _texts(outputs["text"])
    if not 1 <= len(texts) <= MAX_ITEMS:
        raise _schema(f"an exchange must hold 1 to {MAX_ITEMS} choices, this one holds {len(texts)}")
    tools = _document(inputs["tools"], list[dict[str, Any]]) if "tools" in inputs else []
    return _Said(inputs=inputs, outputs=outputs, options=options, tools=tools, texts=texts)


def _answers(said: _Said) -> list[Answer]:
    texts, outputs = said.texts, said.outputs
    n_choices = len(texts)
    reasons = _texts(outputs["finish_reason"]) if "finish_reason" in outputs else [""] * n_choices
    calls = _texts(outputs["tool_calls"]) if "tool_calls" in outputs else ["[]"] * n_choices
    aside = [_texts(outputs[name]) for name in ("reasoning", "refusal") if name in outputs]
    if not all(len(column) == n_choices for column in (reasons, calls, *aside)):
        raise _schema("the choices differ in number from tensor to tensor")
    wants_json, schema = json_asked(said.options)
    is_greedy = takes_likeliest(said.options)
    offered = {
        str(function.get("name", "")): object_of(function.get("parameters"))
        for function in (*(object_of(tool.get("function")) for tool in said.tools), *functions(said.options))
    }
    return [
        Answer(
            text=text,
            calls=tuple(
                ToolCall(name=call.function.name, arguments=call.function.arguments)
                for call in _decoded(calls[index].encode(), list[_Called])
            ),
            finish_reason=reasons[index],
            is_empty=not text
            and calls[index] == "[]"
            and not any(column[index] for column in aside)
            and not may_be_cut(said.options, reasons[index]),
            n_tokens=_n_tokens(outputs, index, n_choices),
            is_cut=may_be_cut(said.options, reasons[index]),
            is_greedy=is_greedy,
            wants_json=wants_json,
            schema=schema,
            tools=offered,
        )
        for index, text in enumerate(texts)
    ]


def _asked(said: _Said, index: int, scores: Scores | None, answer: Answer) -> ScoringRequest:
    inputs, outputs, options = said.inputs, said.outputs, said.options
    served_ids = _ids(outputs.get(f"token_ids.{index}"))
    if served_ids is None and scores is not None and scores.ids:
        served_ids = scores.ids
    prompt_ids = _ids(outputs.get(f"prompt_token_ids.{index}", outputs.get("prompt_token_ids")))
    messages: tuple[dict[str, Any], ...] = ()
    prompt, n_prompts = "", 1
    if prompt_ids is None and (unlike := changes_prompt(options)):
        raise QuarantineError(
            QuarantineReason.OUTPUT,
            f"`{unlike}` changes the prompt as it was sent: have clients ask for `return_token_ids`",
        )
    if "messages" in inputs:
        messages = tuple(_document(inputs["messages"], list[dict[str, Any]]))
    else:
        n_prompts = len(_texts(inputs["prompt"])) if "prompt" in inputs else len(inputs) - 1
        place = index // wanted_choices(options)
        if place >= n_prompts:
            raise _schema(f"choice {index} answers none of the {n_prompts} prompts")
        if "prompt" in inputs:
            prompt = _texts(inputs["prompt"])[place]
        elif prompt_ids is None:
            prompt_ids = _ids(inputs.get(f"prompt_ids.{place}"))
    text = _served_text(outputs, scores, answer, index)
    return ScoringRequest(
        messages=messages,
        tools=tuple(said.tools),
        template=template_of(options),
        prompt=prompt,
        prompt_ids=prompt_ids,
        n_prompt_tokens=_usage(outputs)[0] if n_prompts == 1 else None,
        add_special_tokens=options.get("add_special_tokens") is not False,
        served=text,
        served_ids=served_ids,
        is_cut=text == answer.text and may_be_cut(options, answer.finish_reason),
        is_ended=ended_itself(options, answer.finish_reason),
    )


def _served_text(
    outputs: Mapping[str, Tensor], scores: Scores | None, answer: Answer, index: int
) -> str | None:
    """Return all that was generated; None where the wire shows only what a server made of it."""
    reasoned = "reasoning" in outputs and _texts(outputs["reasoning"])[index]
    spelt = "" if scores is None else b"".join(scores.tokens).decode(errors="replace")
    if reasoned or answer.calls:
        return spelt or None
    # Tokens that end within a character are spelt as a server likes; the text is whole. What follows it is the end.
    return spelt if spelt.startswith(answer.text) else answer.text


def _scores(said: _Said, index: int) -> Scores | None:
    """Return the candidate's own log-probabilities of a choice; None where it was not asked for them."""
    outputs = said.outputs
    if f"tokens.{index}" not in outputs or f"logprobs.{index}" not in outputs:
        return None
    tokens = tuple(decode(outputs[f"tokens.{index}"]).tolist())
    logprobs = decode(outputs[f"logprobs.{index}"]).astype(np.float64)
    ids = _ids(outputs.get(f"token_ids.{index}"))
    if ids is not None and len(ids) != len(tokens):
        ids = None
    top_tokens: tuple[tuple[bytes, ...], ...] = tuple(() for _ in tokens)
    top_logprobs = np.empty((len(tokens), 0))
    # With `logprob_token_ids` vLLM lists what the client named, and not the likeliest.
    is_listed = f"top_tokens.{index}" in outputs and f"top_logprobs.{index}" in outputs
    if is_listed and not said.options.get("logprob_token_ids"):
        top_tokens = tuple(map(tuple, decode(outputs[f"top_tokens.{index}"]).tolist()))
        top_logprobs = decode(outputs[f"top_logprobs.{index}"]).astype(np.float64)
    if len(logprobs) != len(tokens) or top_logprobs.shape != (
        len(tokens),
        len(top_tokens[0]) if tokens else 0,
    ):
        raise _schema(f"the tokens of choice {index} and their log-probabilities differ in number")
    # vLLM's chats spell what was served, and name what is listed.
    listed = [token for row in top_tokens for token in row if token]
    named = ids is not None and all(token.startswith(_NAMED) for token in listed or tokens)
    # Where a filter left a token nothing, no place tells what the model said; elsewhere a softmax is never zero.
    hidden = (logprobs <= _LEAST) | (top_logprobs <= _LEAST).any(axis=1)
    logprobs = np.where(hidden, np.nan, logprobs)
    top_logprobs = np.where(hidden[:, np.newaxis], np.nan, top_logprobs)
    return Scores(
        tokens=() if named else tokens,
        ids=ids or (),
        logprobs=logprobs,
        ranks=np.full(len(tokens), np.nan),
        top_tokens=() if named else top_tokens,
        top_ids=np.array([[_named(one) for one in row] for row in top_tokens], dtype=np.int64).reshape(
            top_logprobs.shape
        )
        if named
        else np.full(top_logprobs.shape, -1, dtype=np.int64),
        top_logprobs=top_logprobs,
    )


def _named(token: bytes) -> int:
    digits = token.removeprefix(_NAMED)
    return int(digits) if digits.isdigit() and len(digits) <= 18 else -1


def _prompt_text(asked: ScoringRequest) -> str:
    """Return a prompt as text: what is said in a chat, message by message."""
    said = [one for message in asked.messages for one in _said(message.get("content"))]
    return "\n".join(said) if asked.messages else asked.prompt


def _said(content: Any) -> Iterable[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (part["text"] for part in map(object_of, content) if isinstance(part.get("text"), str))


def _n_tokens(outputs: Mapping[str, Tensor], index: int, n_choices: int) -> int | None:
    for name in (f"token_ids.{index}", f"tokens.{index}"):
        if name in outputs:
            return outputs[name].shape[0]
    return (_usage(outputs)[1] or None) if n_choices == 1 else None


def _usage(outputs: Mapping[str, Tensor]) -> tuple[int | None, int | None]:
    """Return the tokens of prompt and answer, as far as they are told; some servers tell zero of both."""
    counts = decode(outputs["usage"]).tolist() if "usage" in outputs else [0, 0]
    return (counts[0], counts[1]) if counts[0] > 0 else (None, None)


def _ids(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(decode(tensor).tolist())


def _texts(tensor: Tensor) -> list[str]:
    try:
        return [one.decode() for one in decode(tensor).tolist()]
    except (UnicodeDecodeError, AttributeError) as error:
        raise _schema(f"`{tensor.name}` holds what is no UTF-8 text") from error


def _document(tensor: Tensor, kind: Any) -> Any:
    texts = decode(tensor).tolist()
    if len(texts) != 1 or not isinstance(texts[0], bytes):
        raise _schema(f"`{tensor.name}` holds no document")
    return _decoded(texts[0], kind)


def _decoded(text: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise _schema(f"what should be JSON of a chat is none: {error}") from error


def _schema(detail: str) -> QuarantineError:
    return QuarantineError(QuarantineReason.SCHEMA, detail)

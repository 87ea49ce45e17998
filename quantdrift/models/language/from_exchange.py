"""The reading of an exchange with an OpenAI-compatible server: scoring requests and the candidate's scores per choice."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from quantdrift.core.config.schema import Generation, Medium
from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.records import Exchange, Tensor
from quantdrift.core.text import misfit
from quantdrift.models.language.answer import Answer, ToolCall
from quantdrift.models.language.free_running_answer import free_answer_request
from quantdrift.models.language.media import media_problem
from quantdrift.models.language.request_options import (
    changes_prompt,
    draws_nothing,
    ended_itself,
    functions,
    has_grammar,
    json_asked,
    may_be_cut,
    object_of,
    sampling_temperature,
    takes_likeliest,
    template_of,
    wanted_choices,
)
from quantdrift.models.language.scoring import (
    ANSWER,
    NOT_FORCED,
    PROMPT,
    REQUEST,
    SCORES,
    Scores,
    ScoringRequest,
    objects,
)
from quantdrift.models.tensors.arrays import Array, Outputs
from quantdrift.models.tensors.codec import MAX_ITEMS, decode

_NAMED: Final = b"token_id:"  # vLLM's spelling of a token with `return_tokens_as_token_ids`
_DEFAULTS: Final = Generation()
_NOT_ALL_SENT: Final[Mapping[str, str]] = {
    "server_tools": "the client lets the server run tools of its own, and the request does not contain what they add to the prompt",
    "stored_prompt": "a part of the conversation is kept at the server (`previous_response_id`, `conversation`, `prompt` or"
    " `context`), so the reference cannot rebuild the prompt: have clients send the whole conversation",
}
_LEAST: Final = -9999.0  # vLLM's value for a missing log-probability, and for minus infinity


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str = ""


class _ToolCall(msgspec.Struct):
    function: _Function = msgspec.field(default_factory=_Function)


class _ExchangeParts(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of an exchange by name, and its decoded documents."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    options: dict[str, Any]
    messages: tuple[dict[str, Any], ...]
    tools: list[dict[str, Any]]
    texts: list[str]


def scoring_inputs(
    exchange: Exchange,
    generation: Generation = _DEFAULTS,
    *,
    has_replica: bool = False,
    media: tuple[Medium, ...] = (),
) -> tuple[dict[str, Array], Outputs]:
    """Return the inputs of the reference for an exchange, and the candidate's side of the comparison.

    Parameters
    ----------
    generation
        `models.generation`: the server's defaults for options that a request does not set, and the share of exchanges that
        the reference answers itself.
    has_replica
        Whether a replica of the candidate can score tokens whose log-probabilities were not served.
    media
        What the reference reads besides text.

    Returns
    -------
    inputs
        `prompt` and `answer`, texts, and `request`, a `ScoringRequest` each : (choices,).
    candidate
        `scores`, a `Scores` each or None where none of the model's log-probabilities were served, and `answer`, an
        `Answer` each : (choices,).

    Raises
    ------
    QuarantineError
        Reason `schema`: it is not a text exchange. `output`: the served text is not what the model generated. `media`: a message has
        an image or the like that the reference does not read.
    """
    try:
        return _read_exchange(exchange, generation, has_replica=has_replica, media=media)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise _schema(f"the tensors do not fit together: {type(error).__name__}") from error


def embedding_inputs(exchange: Exchange) -> tuple[Tensor, ...]:
    """Return the inputs of an embedding request: all tensors but the options.

    Raises
    ------
    QuarantineError
        Reason `output`: the client asked for shortened vectors, or for vectors of a part of the text.
    """
    options_tensor = next((tensor for tensor in exchange.inputs if tensor.name == "options"), None)
    options = {} if options_tensor is None else _document(options_tensor, dict[str, Any])
    if cut := next((name for name in ("dimensions", "truncate_prompt_tokens") if options.get(name)), ""):
        raise QuarantineError(
            QuarantineReason.OUTPUT,
            f"the client set `{cut}`, which shortens vectors or texts: they cannot be compared",
        )
    return tuple(tensor for tensor in exchange.inputs if tensor.name != "options")


def _read_exchange(
    exchange: Exchange, generation: Generation, *, has_replica: bool, media: tuple[Medium, ...]
) -> tuple[dict[str, Array], Outputs]:
    parts = _exchange_parts(exchange, generation.repetition_penalty)
    if problem := media_problem(parts.messages, media):
        raise QuarantineError(QuarantineReason.MEDIA, problem)
    answers = _answers(parts)
    served_scores = [_scores(parts, index) for index in range(len(answers))]
    scores = served_scores
    if has_grammar(parts.options):  # served log-probabilities are not those of the model
        scores = [None] * len(served_scores)
        answers = [
            _under_grammar(answer, served) for answer, served in zip(answers, served_scores, strict=True)
        ]
    requests = [
        msgspec.structs.replace(
            _scoring_request(parts, index, tokens, answer), ask_replica=has_replica and of_candidate is None
        )
        for index, (tokens, of_candidate, answer) in enumerate(
            zip(served_scores, scores, answers, strict=True)
        )
    ]
    # The reference answers once for each exchange.
    free_answer = free_answer_request(exchange.id, generation, parts.options, answers[0])
    requests[0] = msgspec.structs.replace(requests[0], free_answer=free_answer)
    return (
        {
            PROMPT: objects([prompt_text(request) for request in requests]),
            ANSWER: objects(parts.texts),
            REQUEST: objects(requests),
        },
        {SCORES: objects(scores), ANSWER: objects(answers)},
    )


def _exchange_parts(exchange: Exchange, repetition_penalty: float) -> _ExchangeParts:
    inputs = {tensor.name: tensor for tensor in exchange.inputs}
    outputs = {tensor.name: tensor for tensor in exchange.outputs}
    if "text" not in outputs or "options" not in inputs:
        raise _schema(
            f"the exchange has the inputs {sorted(inputs)} and the outputs {sorted(outputs)}: it is not a text exchange with "
            "an OpenAI-compatible server; check `task` in [[models]]"
        )
    options = {
        "repetition_penalty": repetition_penalty,
        **_document(inputs["options"], dict[str, Any]),
    }
    if options.get("echo"):
        raise QuarantineError(
            QuarantineReason.OUTPUT,
            "the client set `echo`: the prompt cannot be separated from the answer",
        )
    texts = _texts(outputs["text"])
    if not 1 <= len(texts) <= MAX_ITEMS:
        raise _schema(f"an exchange must hold 1 to {MAX_ITEMS} choices, this one holds {len(texts)}")
    tools = _document(inputs["tools"], list[dict[str, Any]]) if "tools" in inputs else []
    messages = _document(inputs["messages"], list[dict[str, Any]]) if "messages" in inputs else []
    return _ExchangeParts(
        inputs=inputs,
        outputs=outputs,
        options=options,
        messages=tuple(messages),
        tools=tools,
        texts=texts,
    )


def _answers(parts: _ExchangeParts) -> list[Answer]:
    texts, outputs = parts.texts, parts.outputs
    n_choices = len(texts)
    reasons = _texts(outputs["finish_reason"]) if "finish_reason" in outputs else [""] * n_choices
    calls = _texts(outputs["tool_calls"]) if "tool_calls" in outputs else ["[]"] * n_choices
    other_texts = [_texts(outputs[name]) for name in ("reasoning", "refusal") if name in outputs]
    if not all(len(column) == n_choices for column in (reasons, calls, *other_texts)):
        raise _schema("the choices differ in number from tensor to tensor")
    wants_json, schema = json_asked(parts.options)
    is_greedy, temperature = takes_likeliest(parts.options), sampling_temperature(parts.options)
    offered = offered_tools(parts.options, parts.tools)
    return [
        Answer(
            text=text,
            calls=tuple(
                ToolCall(name=call.function.name, arguments=call.function.arguments)
                for call in _decoded(calls[index].encode(), list[_ToolCall])
            ),
            finish_reason=reasons[index],
            is_empty=not text
            and calls[index] == "[]"
            and not any(column[index] for column in other_texts)
            and not may_be_cut(parts.options, reasons[index]),
            n_tokens=_n_tokens(outputs, index, n_choices),
            is_cut=may_be_cut(parts.options, reasons[index]),
            is_greedy=is_greedy,
            is_repeatable=draws_nothing(parts.options),
            temperature=temperature,
            wants_json=wants_json,
            schema=schema,
            tools=offered,
        )
        for index, text in enumerate(texts)
    ]


def offered_tools(
    options: Mapping[str, Any], tools: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the tools that a request offers: name to the JSON schema of its parameters."""
    return {
        str(function.get("name", "")): object_of(function.get("parameters"))
        for function in (*(object_of(tool.get("function")) for tool in tools), *functions(options))
    }


def _scoring_request(
    parts: _ExchangeParts, index: int, scores: Scores | None, answer: Answer
) -> ScoringRequest:
    inputs, outputs, options = parts.inputs, parts.outputs, parts.options
    served_ids = _ids(outputs.get(f"token_ids.{index}"))
    if served_ids is None and scores is not None and scores.ids:
        served_ids = scores.ids
    prompt_ids = _ids(outputs.get(f"prompt_token_ids.{index}", outputs.get("prompt_token_ids")))
    prompt, n_prompts = "", 1
    if prompt_ids is None and (changing_option := changes_prompt(options)):
        problem = _NOT_ALL_SENT.get(
            changing_option,
            f"the client's `{changing_option}` changes the prompt, so the reference cannot rebuild it: have clients set "
            "`return_token_ids`",
        )
        raise QuarantineError(QuarantineReason.OUTPUT, problem)
    if "messages" not in inputs:
        n_prompts = len(_texts(inputs["prompt"])) if "prompt" in inputs else len(inputs) - 1
        prompt_index = index // wanted_choices(options)
        if prompt_index >= n_prompts:
            raise _schema(f"choice {index} does not belong to one of the {n_prompts} prompts")
        if "prompt" in inputs:
            prompt = _texts(inputs["prompt"])[prompt_index]
        elif prompt_ids is None:
            prompt_ids = _ids(inputs.get(f"prompt_ids.{prompt_index}"))
    text = _served_text(outputs, scores, answer, index)
    return ScoringRequest(
        messages=parts.messages,
        tools=tuple(parts.tools),
        template=template_of(options),
        prompt=prompt,
        prompt_ids=prompt_ids,
        n_prompt_tokens=_usage(outputs)[0] if n_prompts == 1 else None,
        add_special_tokens=options.get("add_special_tokens") is not False,
        served=text,
        served_message=_served_message(outputs, answer, index) if text is None and parts.messages else {},
        served_ids=served_ids,
        is_cut=text == answer.text and may_be_cut(options, answer.finish_reason),
        is_ended=ended_itself(options, answer.finish_reason),
        temperature=answer.temperature,
    )


def _served_text(
    outputs: Mapping[str, Tensor], scores: Scores | None, answer: Answer, index: int
) -> str | None:
    """Return the generated text; None if the response holds only what the server's parsers made of it."""
    reasoned = "reasoning" in outputs and _texts(outputs["reasoning"])[index]
    spelt = "" if scores is None else b"".join(scores.tokens).decode(errors="replace")
    if reasoned or answer.calls:
        return spelt or None
    # Servers differ in the spelling of tokens that end within a character, so prefer the text; more text is an end token.
    return spelt if spelt.startswith(answer.text) else answer.text


def _served_message(outputs: Mapping[str, Tensor], answer: Answer, index: int) -> dict[str, Any]:
    """Return an answer as a message; empty without a number of its tokens, since then no other rendering would be noticed."""
    if answer.n_tokens is None:
        return {}
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if "reasoning" in outputs and (reasoning := _texts(outputs["reasoning"])[index]):
        message["reasoning_content"] = reasoning
    if answer.calls:
        message["tool_calls"] = _decoded(_texts(outputs["tool_calls"])[index].encode(), list[dict[str, Any]])
    return message


def _scores(parts: _ExchangeParts, index: int) -> Scores | None:
    """Return the served log-probabilities of a choice; None if the client did not ask for them."""
    outputs = parts.outputs
    if f"tokens.{index}" not in outputs or f"logprobs.{index}" not in outputs:
        return None
    tokens = tuple(decode(outputs[f"tokens.{index}"]).tolist())
    logprobs = decode(outputs[f"logprobs.{index}"]).astype(np.float64)
    ids = _ids(outputs.get(f"token_ids.{index}"))
    if ids is not None and len(ids) != len(tokens):
        ids = None
    top_tokens: tuple[tuple[bytes, ...], ...] = tuple(() for _ in tokens)
    top_logprobs = np.empty((len(tokens), 0))
    # With `logprob_token_ids` vLLM lists the tokens that the client named, not the most likely ones.
    is_listed = f"top_tokens.{index}" in outputs and f"top_logprobs.{index}" in outputs
    if is_listed and not parts.options.get("logprob_token_ids"):
        top_tokens = tuple(map(tuple, decode(outputs[f"top_tokens.{index}"]).tolist()))
        top_logprobs = decode(outputs[f"top_logprobs.{index}"]).astype(np.float64)
    if len(logprobs) != len(tokens) or top_logprobs.shape != (
        len(tokens),
        len(top_tokens[0]) if tokens else 0,
    ):
        raise _schema(f"the tokens of choice {index} and their log-probabilities differ in number")
    # vLLM's chat endpoint spells the served tokens, and gives the listed ones by id.
    listed = [token for row in top_tokens for token in row if token]
    named = ids is not None and all(token.startswith(_NAMED) for token in listed or tokens)
    # A filter that removes a token hides the model's value at this position; elsewhere a softmax is never zero.
    forced = _forced(logprobs, top_logprobs) if has_grammar(parts.options) else NOT_FORCED
    hidden = (logprobs <= _LEAST) | (top_logprobs <= _LEAST).any(axis=1)
    logprobs = np.where(hidden, np.nan, logprobs)
    top_logprobs = np.where(hidden[:, np.newaxis], np.nan, top_logprobs)
    return Scores(
        tokens=() if named else tokens,
        ids=ids or (),
        logprobs=logprobs,
        ranks=np.full(len(tokens), np.nan),
        top_tokens=() if named else top_tokens,
        top_ids=np.array([[_named(token) for token in row] for row in top_tokens], dtype=np.int64).reshape(
            top_logprobs.shape
        )
        if named
        else np.full(top_logprobs.shape, -1, dtype=np.int64),
        top_logprobs=top_logprobs,
        forced=forced,
    )


def _forced(logprobs: Array, top_logprobs: Array) -> Array:
    """Return at which positions a grammar left no other token : (tokens,); empty if the lists do not show it.

    A server that reports what the grammar left gives all removed tokens of a list `_LEAST`. One whose lists never show a removed
    token may report the model's own probabilities. Without lists of two tokens a certain model looks like one without a choice.
    """
    if top_logprobs.shape[1] < 2 or not (top_logprobs <= _LEAST).any():
        certain = logprobs == 0.0
        return NOT_FORCED if top_logprobs.shape[1] >= 2 or certain.any() else certain
    return np.asarray((top_logprobs > _LEAST).sum(axis=1) <= 1)


def _under_grammar(answer: Answer, served: Scores | None) -> Answer:
    """Return an answer with what its served log-probabilities show of the grammar."""
    if served is None or len(served.forced) != len(served.logprobs):
        return msgspec.structs.replace(answer, has_grammar=True)
    return msgspec.structs.replace(
        answer,
        has_grammar=True,
        forced=tuple(served.forced.tolist()),
        forced_tokens=() if served.ids else served.tokens,
    )


def _named(token: bytes) -> int:
    digits = token.removeprefix(_NAMED)
    return int(digits) if digits.isdigit() and len(digits) <= 18 else -1


def prompt_text(request: ScoringRequest) -> str:
    """Return the prompt as text; the messages of a chat are joined by newlines."""
    parts = [text for message in request.messages for text in _content_texts(message.get("content"))]
    return "\n".join(parts) if request.messages else request.prompt


def _content_texts(content: Any) -> Iterable[str]:
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
    """Return the token counts of prompt and answer, None if unknown; some servers report zero for both."""
    counts = decode(outputs["usage"]).tolist() if "usage" in outputs else [0, 0]
    return (counts[0], counts[1]) if counts[0] > 0 else (None, None)


def _ids(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(decode(tensor).tolist())


def _texts(tensor: Tensor) -> list[str]:
    try:
        return [text.decode() for text in decode(tensor).tolist()]
    except (UnicodeDecodeError, AttributeError) as error:
        raise _schema(f"`{tensor.name}` is not UTF-8 text") from error


def _document(tensor: Tensor, kind: Any) -> Any:
    texts = decode(tensor).tolist()
    if len(texts) != 1 or not isinstance(texts[0], bytes):
        raise _schema(f"`{tensor.name}` does not hold one JSON document")
    return _decoded(texts[0], kind)


def _decoded(text: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise _schema(f"a document of the chat is not valid: {misfit(error)}") from error


def _schema(detail: str) -> QuarantineError:
    return QuarantineError(QuarantineReason.SCHEMA, detail)

"""Recorded prompts of a language model: the answers to them, scored by the reference and by the candidate, token by token.

A recording is a file of JSON lines, or a folder of them: a prompt, its answer, and attributes. Both models score the tokens of the
answer, each given all tokens before it (teacher forcing), so it does not matter by which model the answer was drawn, and none of the
two is asked for an answer of its own. A line without an answer is answered by the candidate, which takes the most likely token at
each position.

Beside that the candidate may generate answers of its own to some of the prompts, with the options of the recorded request: whether they are broken,
and how many of their tokens are unlikely under the reference, is again what the comparator says.

An answer is one observation: its tokens depend on each other. Its divergence is the mean KL per token, in nats, as the comparator of
generated text defines it (`quantdrift.models.comparators.text.generation`); it counts at most `models.budget.cap`, so that the gate's bounds
of a bounded mean hold. Its changed tokens are the share of its positions at which the candidate's most likely token is none of the reference's.
A prompt that comes several times counts once.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from quantdrift.core.config.schema import Model, Reference, Runtime, Slice
from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.core.text import visible
from quantdrift.drift.evidence.observations import IntArray
from quantdrift.models.comparators.protocol import Comparator
from quantdrift.models.comparators.text.validity import repeats_itself
from quantdrift.models.language.answer import Answer
from quantdrift.models.language.free_running_answer import (
    FreeAnswer,
    FreeAnswerOutcome,
    FreeAnswerRequest,
    free_answer_request,
)
from quantdrift.models.language.from_exchange import offered_tools, prompt_text
from quantdrift.models.language.request_options import (
    draws_nothing,
    ended_itself,
    json_asked,
    may_be_cut,
    sampling_temperature,
    takes_likeliest,
    template_of,
)
from quantdrift.models.language.scoring import ANSWER, PROMPT, REQUEST, SCORES, ScoringRequest, objects
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference
from quantdrift.models.runtimes.self_test import SelfTestedRuntime
from quantdrift.models.runtimes.text.candidate_replica import CandidateReplica
from quantdrift.models.tensors.features import features_of
from quantdrift.release.gate.offline import Compared, capped
from quantdrift.release.recording import GROUP, RecordedFile, RecordedItems, RecordingLayout, attribute_key_of

SUFFIXES: Final = (".jsonl",)
_PROMPTS: Final = ("prompt", "messages", "prompt_ids")
_ANSWERS: Final = ("answer", "answer_ids")
_OWN: Final = frozenset({*_PROMPTS, *_ANSWERS, "tools", "options"})
_STEP: Final = 8  # answers that are scored in one call
_GREEDY: Final = {"temperature": 0}
_TOGETHER: Final = 64  # answers that are generated in one call
_LONGEST_S: Final = 600.0 * _TOGETHER  # of such a call: nobody waits for it but the gate


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """The members of a line that are no attributes."""

    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    options: dict[str, Any] = {}
    prompt_ids: tuple[int, ...] | None = None
    answer: str | None = None
    answer_ids: tuple[int, ...] | None = None


class RecordedPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one file.

    Parameters
    ----------
    items
        Their attributes and groups; the input `prompt` is all that is asked, as JSON.
    requests
        What is scored, of each.
    own
        Whether the answer is the candidate's own, which the recording does not have.
    options
        The options of each request, by which an answer is generated.
    """

    items: RecordedItems
    requests: tuple[ScoringRequest, ...]
    own: tuple[bool, ...]
    options: tuple[dict[str, Any], ...]


class ComparedPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of the answers of one file, how many tokens of each were scored : (items,), and the histograms of their divergence."""

    compared: Compared
    n_tokens: IntArray
    bins: tuple[str, ...]


def open_language_candidate(request: RuntimeRequest, where: str) -> ReferenceRuntime:
    """Return a candidate of any precision: a folder, or a model at an OpenAI-compatible server.

    Parameters
    ----------
    request
        That of the reference.
    where
        The folder, or the server's URL. A server is asked for the model by the name in the configuration, or as
        `[models.references.copy]` with this URL says, with the token there; never with the reference's token.

    Raises
    ------
    OperatorError
        It cannot be loaded, or scores no tokens.
    RetryError
        Its server is unreachable.
    """
    copy = request.reference.copy
    is_server = "://" in where
    known = copy if where in {copy.url, copy.path} else None
    reference = Reference(
        runtime=Runtime.OPENAI if is_server else Runtime.TRANSFORMERS,
        url=where if is_server else "",
        path="" if is_server else where,
        digest=known.digest if known else "",
        model=known.model if known else "",
        token_file=known.token_file if known else "",
        timeout_s=request.reference.timeout_s,
        media=request.reference.media if is_server else (),
    )
    generation = msgspec.structs.replace(request.model.generation, own_s=_LONGEST_S)
    model = msgspec.structs.replace(request.model, generation=generation)
    candidate = msgspec.structs.replace(request, model=model, reference=reference, is_copy=True, token="")
    try:
        return SelfTestedRuntime(open_reference(candidate), remote=is_server)
    except OperatorError as error:
        raise OperatorError(f"the candidate {where}: {error}") from error


def read_prompts(part: RecordedFile, layout: RecordingLayout) -> RecordedPrompts:
    """Return the prompts of a file.

    Raises
    ------
    OperatorError
        It cannot be read, or a line is no prompt with at most one answer.
    """
    try:
        lines: list[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any]).decode_lines(
            part.path.read_bytes()
        )
    except OSError as error:
        raise OperatorError(f"{part.path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise OperatorError(f"{part.path} has a line that is no JSON object: {error}") from error
    if not lines:
        raise OperatorError(f"{part.path} has no prompts")
    requests = [_request(part.path, number, line) for number, line in enumerate(lines, start=1)]
    names = list(dict.fromkeys(name for line in lines for name in line if name not in _OWN))
    texts = {
        name: [
            _text(part.path, number, name, line.get(name, "")) for number, line in enumerate(lines, start=1)
        ]
        for name in names
    }
    texts |= {name: [value] * len(lines) for name, value in part.folders.items()}
    attributes = {attribute_key_of(layout.keys, name): values for name, values in texts.items()}
    asked = [
        msgspec.json.encode({name: line[name] for name in (*_PROMPTS, "tools") if name in line}).decode()
        for line in lines
    ]
    items = RecordedItems(
        path=part.path,
        inputs={PROMPT: np.array(asked)},
        attributes=attributes,
        labels=None,
        groups=texts.get(GROUP) or attributes.get(layout.session),
    )
    own = tuple(request.served is None and request.served_ids is None for request in requests)
    options = tuple(dict(line.get("options", {})) for line in lines)
    return RecordedPrompts(items=items, requests=tuple(requests), own=own, options=options)


def with_answers(
    recorded: RecordedPrompts, candidate: ReferenceRuntime, model: Model, progress: Callable[[int], None]
) -> RecordedPrompts:
    """Return the prompts with answers of the candidate where the recording has none, of at most `models.generation.own_tokens`.

    Parameters
    ----------
    progress
        Called after each further answer with 1.

    Raises
    ------
    OperatorError
        The candidate does not answer.
    RetryError
        Its server is unreachable.
    """
    requests = list(recorded.requests)
    own = FreeAnswerRequest(max_tokens=model.generation.own_tokens, is_capped=True, options=_GREEDY, seed=1)
    numbers = np.flatnonzero(recorded.own).tolist()
    for begin in range(0, len(numbers), _TOGETHER):
        step = numbers[begin : begin + _TOGETHER]
        asked = [msgspec.structs.replace(requests[number], free_answer=own) for number in step]
        for number, answer in zip(step, _free_answers(candidate, asked, recorded, step), strict=True):
            if answer is None or not answer.is_there:
                why = "none" if answer is None else answer.outcome.value
                raise OperatorError(
                    f"{_where(recorded, number)}: the candidate gives no answer ({why}): record one as `answer`"
                )
            requests[number] = msgspec.structs.replace(
                requests[number], served=answer.text, is_ended=answer.finish_reason == "stop"
            )
            progress(1)
    return msgspec.structs.replace(recorded, requests=tuple(requests))


def compared_prompts(
    recorded: RecordedPrompts,
    *,
    model: Model,
    reference: ReferenceRuntime,
    candidate: ReferenceRuntime,
    comparator: Comparator,
    rules: Sequence[Slice],
    progress: Callable[[int], None],
) -> ComparedPrompts:
    """Return what is found of the answers of a file.

    Parameters
    ----------
    progress
        Called with the number of further answers that were scored.

    Raises
    ------
    OperatorError
        A model cannot score an answer.
    RetryError
        A server is unreachable.
    """
    both = CandidateReplica(reference, candidate, "")
    flip, divergence, changed, n_tokens, features = [], [], [], [], []
    bins: list[str] = []
    path = recorded.items.path
    for begin in range(0, len(recorded.requests), _STEP):
        requests = recorded.requests[begin : begin + _STEP]
        where = f"{path}, lines {begin + 1} to {begin + len(requests)}"
        try:
            answers = [
                Answer(text=request.served or "", is_greedy=is_own, is_repeatable=is_own)
                for request, is_own in zip(requests, recorded.own[begin : begin + _STEP], strict=True)
            ]
            asked = [msgspec.structs.replace(request, ask_replica=True) for request in requests]
            inputs = {
                PROMPT: objects([prompt_text(request) for request in asked]),
                ANSWER: objects([request.served or "" for request in asked]),
                REQUEST: objects(asked),
            }
            scores = both.run(inputs)[SCORES]
            found = comparator.compare(
                {SCORES: objects([None] * len(asked)), ANSWER: objects(answers)}, {SCORES: scores}
            )
        except QuarantineError as error:
            raise OperatorError(f"{where}: {error.detail}") from error
        flip.append(found.flip)
        divergence.append(capped(found, model.budget.cap))
        changed.append(found.detail["changed_tokens"])
        n_tokens.append(found.detail["n_scored"])
        bins += [each or "" for each in found.detail["divergence_bins"].tolist()]
        features += features_of(rules, {name: inputs[name] for name in (PROMPT, ANSWER)})
        progress(len(asked))
    return ComparedPrompts(
        compared=Compared(
            items=recorded.items,
            features=features,
            flip=np.concatenate(flip),
            served_flip=None,
            divergence=np.concatenate(divergence),
            right=None,
            learned=[()] * len(recorded.requests),
            changed_tokens=np.concatenate(changed),
        ),
        n_tokens=np.concatenate(n_tokens).astype(np.intp),
        bins=tuple(bins),
    )


def chosen_prompts(recorded: Sequence[RecordedPrompts], most: int) -> list[list[int]]:
    """Return the prompts of each file to which the candidate generates answers: `most` in all, drawn at random, always the same ones.

    A prompt that comes several times is drawn once.
    """
    first: dict[str, tuple[int, int]] = {}
    for number, part in enumerate(recorded):
        for row, prompt in enumerate(part.items.inputs[PROMPT].tolist()):
            first.setdefault(prompt, (number, row))
    places = list(first.values())
    drawn = np.random.default_rng(0).permutation(len(places))[:most]
    rows: list[list[int]] = [[] for _ in recorded]
    for place in sorted(places[index] for index in drawn.tolist()):
        rows[place[0]].append(place[1])
    return rows


def generated_answers(
    recorded: RecordedPrompts,
    rows: Sequence[int],
    compared: Compared,
    *,
    model: Model,
    reference: ReferenceRuntime,
    candidate: ReferenceRuntime,
    comparator: Comparator,
    progress: Callable[[int], None],
) -> Compared:
    """Return what was found of a file, with whether the candidate's own answers are broken, and the share of their unlikely tokens.

    Both are NaN where no answer was asked for, where the candidate could not be held to the request's options (a grammar in a folder), and
    where they are not known.

    Parameters
    ----------
    rows
        The prompts that it answers.
    compared
        What was found of the file.
    progress
        Called after each further answer with 1.

    Raises
    ------
    OperatorError
        The candidate gives no answer, or the reference cannot score one.
    RetryError
        A server is unreachable.
    """
    broken, unlikely = (np.full(len(recorded.requests), np.nan) for _ in range(2))
    for begin in range(0, len(rows), _TOGETHER):
        step = rows[begin : begin + _TOGETHER]
        asked = [_asked(recorded, row, model) for row in step]
        given = _free_answers(candidate, asked, recorded, step)
        said = {
            row: generated
            for row, request, answer in zip(step, asked, given, strict=True)
            if (generated := _generated(recorded, row, model, request, answer)) is not None
        }
        progress(len(step))
        if not said:
            continue
        # Of an answer that repeats itself the reference's own says whether a sound model would, too.
        own = dict(zip(step, asked, strict=True))
        requests = [
            msgspec.structs.replace(request, free_answer=own[row].free_answer)
            if repeats_itself(answer.text, answer.finish_reason)
            else request
            for row, (request, answer) in said.items()
        ]
        answers = objects([answer for _, answer in said.values()])
        inputs = {
            PROMPT: objects([""] * len(said)),
            ANSWER: objects([answer.text for _, answer in said.values()]),
            REQUEST: objects(requests),
        }
        try:
            scores = reference.run(inputs)[SCORES]
            found = comparator.compare(
                {SCORES: objects([None] * len(said)), ANSWER: answers}, {SCORES: scores}
            )
        except QuarantineError as error:
            lines = f"{recorded.items.path}, lines {step[0] + 1} to {step[-1] + 1}"
            raise OperatorError(f"{lines}: {error.detail}") from error
        broken[list(said)] = found.detail["broken"]
        unlikely[list(said)] = found.detail["unlikely"]
    return msgspec.structs.replace(compared, broken=broken, unlikely=unlikely)


def _asked(recorded: RecordedPrompts, row: int, model: Model) -> ScoringRequest:
    """Return a request for an answer by the options of its line."""
    generation = msgspec.structs.replace(model.generation, own_share=1.0)
    options = _options(recorded, row, model)
    own = free_answer_request(str(recorded.items.inputs[PROMPT][row]), generation, options, Answer(text=""))
    return msgspec.structs.replace(
        recorded.requests[row],
        served=None,
        served_ids=None,
        template=template_of(options),
        free_answer=own,
    )


def _generated(
    recorded: RecordedPrompts, row: int, model: Model, request: ScoringRequest, answer: FreeAnswer | None
) -> tuple[ScoringRequest, Answer] | None:
    """Return a request with the answer that the candidate generated by the options; None if it cannot be held to them.

    JSON that `models.generation.own_tokens` cut, and the client's limit did not, says nothing about the candidate.
    """
    options = _options(recorded, row, model)
    if answer is None or answer.outcome in {FreeAnswerOutcome.LATE, FreeAnswerOutcome.FAILED}:
        raise OperatorError(
            f"{_where(recorded, row)}: the candidate gives no answer ({answer.outcome.value if answer else 'none'})"
        )
    wants_json, schema = json_asked(options)
    is_cut_here = answer.is_capped and answer.finish_reason == "length"
    if answer.outcome is not FreeAnswerOutcome.DONE or (is_cut_here and (wants_json or not answer.text)):
        return None
    calls = answer.calls or ()
    temperature = sampling_temperature(options)
    said = Answer(
        text=answer.text,
        calls=calls,
        finish_reason=answer.finish_reason,
        is_empty=not answer.text and not calls and not may_be_cut(options, answer.finish_reason),
        n_tokens=answer.n_tokens,
        is_cut=may_be_cut(options, answer.finish_reason),
        is_greedy=takes_likeliest(options),
        is_repeatable=draws_nothing(options),
        temperature=temperature,
        wants_json=wants_json,
        schema=schema,
        tools=offered_tools(options, request.tools),
    )
    scored = msgspec.structs.replace(
        request,
        free_answer=None,
        served=None if calls else answer.text,
        served_ids=answer.ids
        or None,  # a text may be tokenised again into as many other tokens, which are less likely
        is_cut=said.is_cut,
        is_ended=ended_itself(options, answer.finish_reason),
        temperature=temperature,
    )
    return scored, said


def _free_answers(
    candidate: ReferenceRuntime,
    requests: Sequence[ScoringRequest],
    recorded: RecordedPrompts,
    rows: Sequence[int],
) -> list[FreeAnswer | None]:
    """Return the candidate's answers to the requests of these lines, which ask for one each."""
    texts = objects([""] * len(requests))
    try:
        scores = candidate.run({PROMPT: texts, ANSWER: texts, REQUEST: objects(requests)})[SCORES]
    except QuarantineError as error:
        raise OperatorError(
            f"{recorded.items.path}, lines {rows[0] + 1} to {rows[-1] + 1}: {error.detail}"
        ) from error
    return [of.free_answer for of in scores.tolist()]


def _options(recorded: RecordedPrompts, row: int, model: Model) -> dict[str, Any]:
    return {"repetition_penalty": model.generation.repetition_penalty, **recorded.options[row]}


def _where(recorded: RecordedPrompts, row: int) -> str:
    return f"{recorded.items.path}, line {row + 1}"


def _request(path: Path, number: int, line: dict[str, Any]) -> ScoringRequest:
    """Return the request of a line, with at most one answer."""
    try:
        fields = msgspec.convert({name: value for name, value in line.items() if name in _OWN}, _Line)
    except msgspec.ValidationError as error:
        raise OperatorError(f"{path}, line {number}: {error}") from error
    prompts = [name for name in _PROMPTS if getattr(fields, name) is not None]
    answers = [name for name in _ANSWERS if getattr(fields, name) is not None]
    if len(prompts) != 1 or len(answers) > 1:
        raise OperatorError(
            f"{path}, line {number}: give one of `prompt`, `messages` and `prompt_ids`, and at most one of `answer` and `answer_ids`"
        )
    return ScoringRequest(
        prompt=fields.prompt or "",
        messages=fields.messages or (),
        tools=fields.tools,
        prompt_ids=fields.prompt_ids,
        served=fields.answer,
        served_ids=fields.answer_ids,
    )


def _text(path: Path, number: int, name: str, value: object) -> str:
    if not isinstance(value, str | int | bool):
        raise OperatorError(
            f"{path}, line {number}: `{name}` is neither a part of the prompt nor an attribute (one text or whole number): rename or remove it"
        )
    return visible(str(value))

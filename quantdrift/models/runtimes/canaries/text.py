"""Canaries of language models: prompts and answers as tokens, with the log-probability of each token of the answers.

They are stored as tokens, so that they depend neither on a date in a chat template nor on a server's tokenizer. The arrays
of a set are (canaries, longest), padded with -1; log-probabilities are padded with 0.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.models.language.scoring import ANSWER, PROMPT, REQUEST, SCORES, ScoringRequest, objects
from quantdrift.models.runtimes.protocol import ReferenceRuntime, check_inputs
from quantdrift.models.runtimes.text.scoring_runtime import ScoringRuntime
from quantdrift.models.tensors.arrays import Array, TensorSpec

LOGPROBS: Final = "logprobs"
_PROMPTS: Final = "prompt_ids"
_ANSWERS: Final = "answer_ids"
_SPECS: Final = tuple(
    TensorSpec(name=name, dtype=np.dtype(np.int64), shape=(None, None)) for name in (_PROMPTS, _ANSWERS)
)
_NO_TOKEN: Final = -1
_SHORTEST, _LONGEST = 6, 16  # words of a random text
_WORDS: Final = tuple(
    """
    the a of to and in is that it for on was with as by at from which not are this be have an or but one all had
    their when there been who will more no if out so said what up its about into than them can only other new some
    could time these two may then do first any my now such like our over man me even most made after also did many
    before must through back years where much your way well down should because each just those people how too
    water river light morning between against nothing house question answer number zero 7 12 1984 3.14 100% (see
    below), however; "quoted" don't naïve Größe élan Москва 東京 def return x = y + 1 { } [ ] https://example.com
    """.split()  # noqa: SIM905 - a list of so many words would be a page
)


class _CanaryLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    answer: str | None = None
    answer_ids: tuple[int, ...] | None = None


def is_of_text(runtime: ReferenceRuntime) -> bool:
    """Return whether a reference scores served tokens."""
    return any(spec.name == REQUEST for spec in runtime.inputs)


def random_texts(*, n_items: int, seed: int) -> list[ScoringRequest]:
    """Return prompts and answers of random words; the same `seed` returns the same texts."""
    rng = np.random.default_rng(seed)

    def text() -> str:
        return " ".join(rng.choice(_WORDS, rng.integers(_SHORTEST, _LONGEST + 1)).tolist())

    return [ScoringRequest(prompt=text(), served=f" {text()}") for _ in range(n_items)]


def read_texts(path: Path) -> list[ScoringRequest]:
    """Return the prompts and answers of a file of JSON lines.

    Raises
    ------
    OperatorError
        It cannot be read, or a line is not a prompt with its answer.
    """
    try:
        lines = msgspec.json.Decoder(_CanaryLine).decode_lines(path.read_bytes())
    except OSError as error:
        raise OperatorError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise OperatorError(f"{path} holds no prompts and answers: {error}") from error
    if not lines:
        raise OperatorError(f"{path} holds no prompts and answers: it is empty")
    return [_scoring_request(path, number, line) for number, line in enumerate(lines, start=1)]


def tokenised_canaries(runtime: ReferenceRuntime, requests: Sequence[ScoringRequest]) -> dict[str, Array]:
    """Return the inputs of a set: prompts and answers as the reference tokenises them.

    Raises
    ------
    OperatorError
        The reference does not take text, or a canary has no tokens.
    RetryError
        Its server is unreachable.
    """
    if not isinstance(runtime, ScoringRuntime):
        raise OperatorError("the reference takes no text")
    rows = []
    for number, request in enumerate(requests, start=1):
        try:
            row = runtime.row(request)
        except QuarantineError as error:
            raise OperatorError(f"the reference does not take canary {number}: {error.detail}") from error
        if row is None:
            raise OperatorError(f"canary {number} has an answer without a token")
        rows.append(row)
    return {
        _PROMPTS: _filled([row.prompt for row in rows]),
        _ANSWERS: _filled([row.served for row in rows]),
    }


def scored(runtime: ReferenceRuntime, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return `logprobs` : (canaries, longest answer), float64, NaN where the reference no longer scores a token.

    Raises
    ------
    QuarantineError
        Reason `replay`: the inputs are not prompts and answers, or the reference does not compute them.
    RetryError
        Its server is unreachable.
    """
    check_inputs(inputs, _SPECS)
    prompts, answers = inputs[_PROMPTS], inputs[_ANSWERS]
    requests = [
        ScoringRequest(prompt_ids=_tokens(prompt), served_ids=_tokens(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    empty_texts = objects([""] * len(requests))
    answer_scores = runtime.run({PROMPT: empty_texts, ANSWER: empty_texts, REQUEST: objects(requests)})[
        SCORES
    ].tolist()
    logprobs = np.where(answers == _NO_TOKEN, 0.0, np.nan)
    for row, scores in zip(logprobs, answer_scores, strict=True):
        row[: len(scores.logprobs)] = scores.logprobs
    return {LOGPROBS: logprobs}


def _scoring_request(path: Path, number: int, line: _CanaryLine) -> ScoringRequest:
    prompts = (line.prompt, line.messages, line.prompt_ids)
    answers = (line.answer, line.answer_ids)
    if [sum(member is not None for member in side) for side in (prompts, answers)] != [1, 1]:
        raise OperatorError(
            f"{path}, line {number}: give one of `prompt`, `messages` and `prompt_ids`, and one of `answer` and `answer_ids`"
        )
    return ScoringRequest(
        prompt=line.prompt or "",
        messages=line.messages or (),
        tools=line.tools,
        prompt_ids=line.prompt_ids,
        served=line.answer,
        served_ids=line.answer_ids,
    )


def _filled(rows: Sequence[tuple[int, ...]]) -> Array:
    """Return rows of tokens as an array, padded : (rows, longest)."""
    filled = np.full((len(rows), max(map(len, rows))), _NO_TOKEN, dtype=np.int64)
    for index, row in enumerate(rows):
        filled[index, : len(row)] = row
    return filled


def _tokens(row: Array) -> tuple[int, ...]:
    return tuple(row[row != _NO_TOKEN].tolist())

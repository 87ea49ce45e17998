"""The comparison of an answer with the reference's free-running answer to the same prompt, if there is one, per answer.

Both are compared up to c tokens, c being the least of `own_tokens`, the client's limit, and the room in the model's context;
a longer answer counts as cut there by a limit. Otherwise a limit that cuts only the reference would look like brevity.

- `length_ratio` = min(n, c) / min(n', c), n and n' being the tokens of the candidate's and of the reference's answer, from 0
  to infinity: above 1 where the candidate's is longer.
- `finish_changed`: the two end for different reasons within c tokens.
- `own_json_valid`, `own_tool_calls_valid`: as for the candidate, and undefined where `own_tokens` cut the answer.
- `own_same`: the two call the same tools with the same arguments, or are the same JSON value (`same_structure`). Undefined where a limit
  cut one of them, and where the calls of one side cannot be told from its text.
- `own_finish_reason`, `own_n_tokens` of the reference's answer, and `own`: its outcome.

Two sampled answers differ by chance alone: only a mean over many says something about the candidate.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.models.comparators.text.validity import calls_valid, json_valid, same_structure
from quantdrift.models.language.answer import Answer
from quantdrift.models.language.free_running_answer import FreeAnswer, FreeAnswerOutcome
from quantdrift.models.language.scoring import Scores
from quantdrift.models.language.written_calls import has_written_call

_CALLED = frozenset({"tool_calls", "function_call"})


def compare_free_answers(answers: Sequence[Answer], scores: Sequence[Scores]) -> dict[str, npt.NDArray[Any]]:
    """Return the measures of each answer against the reference's, by name : (items,); None where unknown.

    Parameters
    ----------
    answers, scores
        The candidate's answers, and the reference's scores with its free-running answers.
    """
    rows = [
        _compare(answer, len(score.logprobs), score.free_answer)
        for answer, score in zip(answers, scores, strict=True)
    ]
    columns = {name: np.empty(len(rows), dtype=object) for name in _Comparison.__struct_fields__}
    for name, column in columns.items():
        column[:] = [getattr(row, name) for row in rows]
    return columns


def changed_structure(answer: Answer, score: Scores, *, same: bool | None) -> float:
    """Return whether an answer's calls or JSON are another value than the reference's own: 1, 0, or NaN where that is not decided.

    It is decided where equal models must give equal answers: no token was drawn by chance, and the reference had the same grammar.
    """
    own = score.free_answer
    if same is None or not answer.is_repeatable or own is None or own.outcome is not FreeAnswerOutcome.DONE:
        return math.nan
    return float(not same)


class _Comparison(msgspec.Struct, frozen=True, kw_only=True):
    finish_changed: bool | None = None
    length_ratio: float | None = None
    own: str | None = None
    own_finish_reason: str | None = None
    own_json_valid: bool | None = None
    own_n_tokens: int | None = None
    own_same: bool | None = None
    own_tool_calls_valid: bool | None = None


def _compare(answer: Answer, n_scored: int, free_answer: FreeAnswer | None) -> _Comparison:
    if free_answer is None:
        return _Comparison()
    if not free_answer.is_there:
        return _Comparison(own=free_answer.outcome.value)
    is_whole = not (free_answer.is_capped and free_answer.finish_reason == "length")
    reference_answer = msgspec.structs.replace(answer, text=free_answer.text, calls=free_answer.calls or ())
    n_tokens = answer.n_tokens or n_scored
    reason = answer.finish_reason
    if (
        free_answer.calls is None and reason in _CALLED
    ):  # a model that calls a tool ends as one that says something
        reason = "stop"
    if n_tokens > free_answer.max_tokens:
        reason = "length"
    return _Comparison(
        finish_changed=reason != free_answer.finish_reason if reason and free_answer.finish_reason else None,
        length_ratio=min(n_tokens, free_answer.max_tokens) / min(free_answer.n_tokens, free_answer.max_tokens)
        if n_tokens and free_answer.n_tokens
        else None,
        own=free_answer.outcome.value,
        own_finish_reason=free_answer.finish_reason or None,
        own_json_valid=json_valid(reference_answer) if is_whole else None,
        own_n_tokens=free_answer.n_tokens,
        own_same=same_structure(answer, reference_answer)
        if is_whole and reason != "length" and _are_told(answer, free_answer)
        else None,
        own_tool_calls_valid=calls_valid(reference_answer) if is_whole else None,
    )


def _are_told(answer: Answer, free_answer: FreeAnswer) -> bool:
    """Return whether it is known of both sides what they call: the candidate's server may leave calls in the text."""
    if free_answer.calls is None:
        return not answer.calls
    return not free_answer.calls or bool(answer.calls) or not has_written_call(answer.text)

"""The comparison of an answer with the reference's free-running answer to the same prompt, if there is one, per answer.

Both are compared up to c tokens, c being the least of `own_tokens`, the client's limit, and the room in the model's context;
a longer answer counts as cut there by a limit. Otherwise a limit that cuts only the reference would look like brevity.

- `length_ratio` = min(n, c) / min(n', c), n and n' being the tokens of the candidate's and of the reference's answer, from 0
  to infinity: above 1 where the candidate's is longer.
- `finish_changed`: the two end for different reasons within c tokens.
- `own_json_valid`, `own_tool_calls_valid`: as for the candidate, and undefined where `own_tokens` cut the answer.
- `own_finish_reason`, `own_n_tokens` of the reference's answer, and `own`: its outcome.

Two sampled answers differ by chance alone: only a mean over many says something about the candidate.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.shadow.comparators.text.validity import calls_valid, json_valid
from quantdrift.shadow.language.answer import Answer
from quantdrift.shadow.language.free_running_answer import FreeAnswer
from quantdrift.shadow.language.scoring import Scores

_CALLED = frozenset({"tool_calls", "function_call"})


def beside_own(answers: Sequence[Answer], found: Sequence[Scores]) -> dict[str, npt.NDArray[Any]]:
    """Return the measures of each answer against the reference's, by name : (items,); None where unknown.

    Parameters
    ----------
    answers, found
        The candidate's answers, and the reference's scores with its free-running answers.
    """
    told = [
        _beside(answer, len(of.logprobs), of.free_answer) for answer, of in zip(answers, found, strict=True)
    ]
    columns = {name: np.empty(len(told), dtype=object) for name in _Beside.__struct_fields__}
    for name, column in columns.items():
        column[:] = [getattr(one, name) for one in told]
    return columns


class _Beside(msgspec.Struct, frozen=True, kw_only=True):
    finish_changed: bool | None = None
    length_ratio: float | None = None
    own: str | None = None
    own_finish_reason: str | None = None
    own_json_valid: bool | None = None
    own_n_tokens: int | None = None
    own_tool_calls_valid: bool | None = None


def _beside(answer: Answer, n_scored: int, own: FreeAnswer | None) -> _Beside:
    if own is None:
        return _Beside()
    if not own.is_there:
        return _Beside(own=own.outcome.value)
    is_whole = not (own.is_capped and own.finish_reason == "length")
    theirs = msgspec.structs.replace(answer, text=own.text, calls=own.calls or ())
    n_tokens = answer.n_tokens or n_scored
    reason = answer.finish_reason
    if own.calls is None and reason in _CALLED:  # a model that calls a tool ends as one that says something
        reason = "stop"
    if n_tokens > own.max_tokens:
        reason = "length"
    return _Beside(
        finish_changed=reason != own.finish_reason if reason and own.finish_reason else None,
        length_ratio=min(n_tokens, own.max_tokens) / min(own.n_tokens, own.max_tokens)
        if n_tokens and own.n_tokens
        else None,
        own=own.outcome.value,
        own_finish_reason=own.finish_reason or None,
        own_json_valid=json_valid(theirs) if is_whole else None,
        own_n_tokens=own.n_tokens,
        own_tool_calls_valid=calls_valid(theirs) if is_whole else None,
    )

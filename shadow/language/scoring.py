"""What is said of the tokens of an answer, and the runtimes that score served tokens under a language model.

Two answers that were sampled freely tell little of a quantised model. So the reference is given the prompt together with
the tokens that were *served*, and says how likely it holds each of them (teacher forcing): one pass for an answer.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.shadow.language.free_running_answer import FreeAnswer, FreeAnswerRequest
from quantdrift.shadow.tensors.arrays import Array

SCORES: Final = "scores"
ANSWER: Final = "answer"
ASKED: Final = "asked"
PROMPT: Final = "prompt"
_OBJECT: Final = np.dtype(object)
UNTOLD: Final = np.empty(0)
UNTOLD.flags.writeable = False


class ScoringRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that is to be scored, with what it answers. Ids of tokens go before texts.

    Parameters
    ----------
    messages, tools
        Of a chat, as they were sent.
    template
        What else the chat template is given, by name.
    prompt
        Text to go on from, where it is no chat.
    prompt_ids
        Tokens of the prompt, as the candidate had them.
    n_prompt_tokens
        How many tokens the candidate made of the prompt; None where that is not told.
    add_special_tokens
        Whether special tokens, such as a beginning, are added to `prompt`.
    served
        The answer's text; None where its text is not all that was generated, and so cannot be made into tokens.
    served_ids
        Tokens of the answer.
    is_cut
        Whether `served` may end within a token: the last one that is made of it is then not what was generated.
    is_copied
        Whether a copy of the candidate is to tell the log-probabilities that were not served.
    is_ended
        Whether the candidate ended it of itself, and no limit did; None where a sequence of the client may have done so, or
        where that is not told.
    own
        How the reference is to answer itself; None where it is not to.
    """

    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    template: dict[str, Any] = {}
    prompt: str = ""
    prompt_ids: tuple[int, ...] | None = None
    n_prompt_tokens: int | None = None
    add_special_tokens: bool = True
    served: str | None = None
    served_ids: tuple[int, ...] | None = None
    is_cut: bool = False
    is_copied: bool = False
    is_ended: bool | None = None
    own: FreeAnswerRequest | None = None


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """How likely one model holds each token of an answer, given all before it.

    Parameters
    ----------
    tokens
        The tokens, as they are spelt.
    ids
        Their ids; empty where they are not told.
    logprobs
        (tokens,), float64, nats; not a number where it is not told.
    ranks
        (tokens,), float64, 1 for the likeliest; not a number where it is not told.
    top_tokens
        The likeliest at each place, as they are spelt; all rows of one length, filled up with empty ones.
    top_ids
        (tokens, k), int64, -1 where it is not told.
    top_logprobs
        (tokens, k), float64, nats; not a number where a row is filled up. In any order.
    ends, ends_upper
        (tokens,) or without the last one, float64: how likely the model would have ended at each place where the candidate
        went on, at least and at most; not a number where that is not told. Empty where it does not know what ends an answer.
    end_p
        How likely it would have ended where the candidate did; not a number where that did not, or it is not told.
    copy
        Of a reference's scores: what a copy of the candidate says of the same tokens; None where it was not asked.
    own
        Of a reference's scores: what it answers itself; None where it was not asked.
    """

    tokens: tuple[bytes, ...]
    ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float64]
    ranks: npt.NDArray[np.float64]
    top_tokens: tuple[tuple[bytes, ...], ...]
    top_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float64]
    ends: npt.NDArray[np.float64] = UNTOLD
    ends_upper: npt.NDArray[np.float64] = UNTOLD
    end_p: float = math.nan
    copy: "Scores | None" = None
    own: FreeAnswer | None = None


NOTHING: Final = Scores(
    tokens=(),
    ids=(),
    logprobs=np.empty(0),
    ranks=np.empty(0),
    top_tokens=(),
    top_ids=np.empty((0, 0), dtype=np.int64),
    top_logprobs=np.empty((0, 0)),
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a prompt, and those of the answer to be scored: at least one of each.

    Parameters
    ----------
    prompt, served
        The tokens.
    is_ended
        Whether the last one is the end.
    is_added
        Whether that end is none that was served: it is there to be asked about, and no part of the scores.
    """

    prompt: tuple[int, ...]
    served: tuple[int, ...]
    is_ended: bool = False
    is_added: bool = False


def refused(detail: str) -> QuarantineError:
    """Return the error that says that a reference cannot score this, and why."""
    return QuarantineError(QuarantineReason.REPLAY, detail[:300])


def without_own(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return inputs of which the same is computed again, but for the reference's own answers."""
    if ASKED not in inputs:
        return dict(inputs)
    asked = [
        msgspec.structs.replace(one, own=None) if isinstance(one, ScoringRequest) and one.own else one
        for one in inputs[ASKED].tolist()
    ]
    return {**inputs, ASKED: objects(asked)}


def objects(records: Sequence[Any]) -> Array:
    """Return records as an array : (items,)."""
    array = np.empty(len(records), dtype=object)
    for index, record in enumerate(records):
        array[index] = record
    return array

"""Scores of answers as a model with known distributions would give them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quantdrift.core.config.schema import Generation
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.comparators.text.generation import GenerationComparator
from quantdrift.models.language.answer import Answer
from quantdrift.models.language.scoring import (
    ANSWER,
    PROMPT,
    REQUEST,
    SCORES,
    Scores,
    ScoringRequest,
    objects,
)
from quantdrift.models.runtimes.protocol import ReferenceRuntime


def scores_of(logprobs: Any, served: Sequence[int], k: int = 20, *, ids: bool = True) -> Scores:
    """Return the scores of `served` by a model whose log-probabilities are `logprobs` : (places, tokens)."""
    values: npt.NDArray[np.float64] = np.asarray(logprobs, dtype=np.float64)
    own = np.take_along_axis(values, np.array(served)[:, np.newaxis], axis=1)
    top = np.argsort(-values, axis=1, kind="stable")[:, :k]
    return Scores(
        tokens=tuple(b"t%d" % one for one in served),
        ids=tuple(served) if ids else (),
        logprobs=own[:, 0],
        ranks=(values > own).sum(axis=1) + 1.0,
        top_tokens=tuple(tuple(b"t%d" % one for one in row) for row in top.tolist()),
        top_ids=top if ids else np.full(top.shape, -1),
        top_logprobs=np.take_along_axis(values, top, axis=1),
    )


def compared(
    candidate: Scores | None, reference: Scores, answer: Answer | None = None, tie: float = 0.001
) -> Divergences:
    """Compare one answer."""
    answers = objects([Answer(text="said", finish_reason="stop") if answer is None else answer])
    return GenerationComparator(Generation(tie=tie)).compare(
        {SCORES: objects([candidate]), ANSWER: answers}, {SCORES: objects([reference])}
    )


def told(found: Divergences) -> dict[str, Any]:
    """Return what is said of one answer."""
    detail = {name: column.tolist()[0] for name, column in found.detail.items()}
    return {"flip": found.flip.tolist()[0], "divergence": found.divergence.tolist()[0], **detail}


def scored(runtime: ReferenceRuntime, *asked: ScoringRequest) -> list[Scores]:
    """Return the scores of these answers, asked for together."""
    empty = objects([""] * len(asked))
    inputs = {PROMPT: empty, ANSWER: empty, REQUEST: objects(list(asked))}
    found: list[Scores] = runtime.run(inputs)["scores"].tolist()
    return found

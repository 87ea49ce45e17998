"""One case per comparator for what every comparator must do: it, and outputs that it takes."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from quantdrift.core.config.schema import Model, OutputKind
from quantdrift.core.config.tasks import RawTensor, Regression
from quantdrift.core.config.vision import Detection, Segmentation
from quantdrift.core.tasks import MEASURES, Task
from quantdrift.models.comparators.registry import comparator_of, task_plugin
from quantdrift.models.language.answer import Answer
from quantdrift.models.language.scoring import ANSWER, SCORES, Scores, objects
from quantdrift.models.tensors.arrays import Outputs
from quantdrift.testing.comparators import N_ITEMS, ComparatorCase


def _case(
    name: str,
    model: Model,
    outputs: Callable[[int], Outputs],
    spoilt: Callable[[Outputs], Outputs] | None = None,
    **more: Any,
) -> ComparatorCase:
    """Return the case of a built-in task, as a model's configuration makes its comparator."""
    if spoilt is not None:
        more["spoilt"] = spoilt
    return ComparatorCase(
        name,
        lambda: comparator_of(model),
        MEASURES[model.task],
        outputs,
        types=task_plugin(model.task).types,
        **more,
    )


def _logits(seed: int) -> Outputs:
    logits = np.random.default_rng(seed).normal(size=(N_ITEMS, 7))
    return {"scores": logits.astype(np.float32)}


def _probabilities(seed: int) -> Outputs:
    powers = np.exp(_logits(seed)["scores"].astype(np.float64))
    return {"scores": (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)}


def _series(seed: int) -> Outputs:
    return {"forecast": np.random.default_rng(seed).normal(size=(N_ITEMS, 4, 3)).astype(np.float32)}


def _padded(seed: int) -> Outputs:
    scores = np.random.default_rng(seed).normal(size=(N_ITEMS, 30)).astype(np.float32)
    scores[np.arange(30) > 9 + np.arange(N_ITEMS)[:, np.newaxis]] = -np.inf
    return {"scores": scores}


def _mixed(seed: int) -> Outputs:
    counts = np.random.default_rng(seed).integers(0, 99, size=(N_ITEMS, 2))
    words = np.array([[b"%d" % first] for first, _ in counts.tolist()], dtype=object)
    return {**_padded(seed), "counts": counts, "words": words}


def _objects(seed: int) -> Outputs:
    rng = np.random.default_rng(seed)
    corners = rng.uniform(0, 90, size=(N_ITEMS, 12, 2))
    labels = rng.integers(-1, 3, size=(N_ITEMS, 12))
    labels[:, 0] = 1  # the others may be padding
    return {
        "boxes": np.concatenate([corners, corners + rng.uniform(5, 40, corners.shape)], axis=2).astype(
            np.float32
        ),
        "scores": rng.uniform(0, 1, size=(N_ITEMS, 12)).astype(np.float32),
        "labels": labels,
    }


def _rows(seed: int) -> Outputs:
    found = _objects(seed)
    columns = [found["boxes"], found["scores"][..., np.newaxis], found["labels"][..., np.newaxis]]
    return {"output0": np.concatenate(columns, axis=2).astype(np.float32)}


def _planes(seed: int) -> Outputs:
    return {"masks": np.random.default_rng(seed).normal(size=(N_ITEMS, 4, 9, 11)).astype(np.float32)}


def _map(seed: int) -> Outputs:
    return {"masks": _planes(seed)["masks"].argmax(axis=1).astype(np.float32)}


def _mask(seed: int) -> Outputs:
    return {"masks": _planes(seed)["masks"][:, :1]}


def _scores(seed: int) -> Outputs:
    """Answers of 1 to 16 tokens, each with the five likeliest of 40 and one that was served."""
    generator = np.random.default_rng(seed)
    found = []
    for length in range(1, N_ITEMS + 1):
        logits = generator.normal(size=(length, 40)) * 2
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        # Both sides speak of the same tokens.
        served = np.random.default_rng(length).integers(0, 40, size=length)
        top = np.argsort(-logprobs, axis=1)[:, :5]
        own = np.take_along_axis(logprobs, served[:, np.newaxis], axis=1)
        found.append(
            Scores(
                tokens=tuple(b"%d" % one for one in served),
                ids=tuple(served.tolist()),
                logprobs=own[:, 0],
                ranks=(logprobs > own).sum(axis=1) + 1.0,
                top_tokens=tuple(tuple(b"%d" % one for one in row) for row in top),
                top_ids=top,
                top_logprobs=np.take_along_axis(logprobs, top, axis=1),
            )
        )
    answers = [Answer(text="an answer", finish_reason="stop") for _ in found]
    return {SCORES: objects(found), ANSWER: objects(answers)}


def _above_one(outputs: Outputs) -> Outputs:
    """Return outputs with a probability that is none; what is not a number was only not told by the server."""
    first, *others = outputs[SCORES].tolist()
    spoilt = msgspec.structs.replace(first, logprobs=np.full(len(first.logprobs), np.inf))
    return {**outputs, SCORES: objects([spoilt, *others])}


CASES = (
    _case("segmentation-scores", Model(name="m", task=Task.SEGMENTATION), _planes),
    _case(
        "segmentation-classes",
        Model(name="m", task=Task.SEGMENTATION, segmentation=Segmentation(classes_axis=0), background=0),
        _map,
    ),
    _case("segmentation-mask", Model(name="m", task=Task.SEGMENTATION), _mask),
    _case(
        "detection-boxes",
        Model(
            name="m",
            task=Task.DETECTION,
            detection=Detection(boxes="boxes", scores="scores", classes="labels"),
        ),
        _objects,
        nothing=None,
    ),
    _case("detection-rows", Model(name="m", task=Task.DETECTION), _rows, nothing=None),
    _case(
        "classification-logits",
        Model(name="m", top_k=3, interest=(1, 4)),
        _logits,
    ),
    _case(
        "classification-probabilities",
        Model(name="m", top_k=3, output_kind=OutputKind.PROBABILITIES),
        _probabilities,
    ),
    _case(
        "multilabel-logits",
        Model(name="m", task=Task.MULTILABEL, threshold=0.4, interest=(2,)),
        _logits,
    ),
    _case(
        "multilabel-probabilities",
        Model(
            name="m",
            task=Task.MULTILABEL,
            output_kind=OutputKind.PROBABILITIES,
            threshold=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7),
        ),
        _probabilities,
    ),
    _case(
        "regression",
        Model(name="m", task=Task.REGRESSION, regression=Regression(quantiles=(0.1, 0.5, 0.9))),
        _series,
    ),
    _case("embedding", Model(name="m", task=Task.EMBEDDING), _logits),
    _case("ranking", Model(name="m", task=Task.RANKING), _padded),
    _case("tensor", Model(name="m", task=Task.TENSOR), _series),
    _case(
        "tensor-outputs",
        Model(name="m", task=Task.TENSOR, tensor=RawTensor(outputs=("scores", "counts", "words"))),
        _mixed,
    ),
    _case(
        "generation",
        Model(name="m", task=Task.GENERATION),
        _scores,
        _above_one,
        nothing=None,
        is_numeric=False,
    ),
)

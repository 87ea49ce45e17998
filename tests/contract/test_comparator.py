"""What every comparator must do."""

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from quantdrift.core.config.schema import OutputKind
from quantdrift.core.errors import QuarantineError
from shadow.classification import ClassificationComparator
from shadow.comparator import Comparator

pytestmark = pytest.mark.contract


def _outputs(seed: int, *, probabilities: bool) -> npt.NDArray[np.float32]:
    logits = np.random.default_rng(seed).normal(size=(16, 7))
    if probabilities:
        logits = np.exp(logits)
        logits /= logits.sum(axis=1, keepdims=True)
    return logits.astype(np.float32)


COMPARATORS = pytest.mark.parametrize(
    ("comparator", "probabilities"),
    [
        (ClassificationComparator(OutputKind.LOGITS, 3), False),
        (ClassificationComparator(OutputKind.PROBABILITIES, 3), True),
    ],
    ids=["classification-logits", "classification-probabilities"],
)


@COMPARATORS
def test_identical_outputs_do_not_diverge(comparator: Comparator, *, probabilities: bool) -> None:
    """Every divergence of a model from itself is exactly zero."""
    outputs = _outputs(1, probabilities=probabilities)
    found = comparator.compare(outputs, outputs.copy())
    for name in ("flip", "topk", "js", "kl", "margin"):
        assert np.all(getattr(found, name) == 0), name


@COMPARATORS
def test_items_do_not_influence_each_other(comparator: Comparator, *, probabilities: bool) -> None:
    """Any order, and any part of a batch, gives every item the same divergences bit for bit."""
    candidate, reference = (_outputs(seed, probabilities=probabilities) for seed in (1, 2))
    whole = comparator.compare(candidate, reference)
    order = np.random.default_rng(3).permutation(len(candidate))
    shuffled = comparator.compare(candidate[order], reference[order])
    one = comparator.compare(candidate[4:5], reference[4:5])
    for name in msgspec.structs.asdict(whole):
        np.testing.assert_array_equal(getattr(whole, name)[order], getattr(shuffled, name))
        np.testing.assert_array_equal(getattr(whole, name)[4:5], getattr(one, name))


@COMPARATORS
def test_divergences_are_never_negative(comparator: Comparator, *, probabilities: bool) -> None:
    """Every metric is >= 0."""
    candidate, reference = (_outputs(seed, probabilities=probabilities) for seed in (1, 2))
    found = comparator.compare(candidate, reference)
    for name in ("flip", "topk", "js", "kl", "margin"):
        assert np.all(getattr(found, name) >= 0), name


@COMPARATORS
def test_outputs_of_different_shapes_are_refused(comparator: Comparator, *, probabilities: bool) -> None:
    """The error names both shapes."""
    outputs = _outputs(1, probabilities=probabilities)
    with pytest.raises(QuarantineError, match=r"output: .*\[16, 6\].*\[16, 7\]"):
        comparator.compare(outputs[:, :6], outputs)

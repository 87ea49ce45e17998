"""What every comparator must do."""

from collections.abc import Iterator

import numpy as np
import pytest

from quantdrift.core.errors import QuarantineError
from quantdrift.models.comparators.protocol import Divergences, Values
from quantdrift.models.comparators.registry import COMPARED_TYPES
from tests.support.shadow.comparator_cases import CASES, N_ITEMS, Case, part

pytestmark = pytest.mark.contract

EVERY = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def _columns(found: Divergences) -> Iterator[tuple[str, Values]]:
    for name in ("flip", "divergence", "topk", "js", "margin"):
        column = getattr(found, name)
        if len(column):
            yield name, column


@EVERY
def test_identical_outputs_do_not_diverge(case: Case) -> None:
    """Every divergence of a model from itself is exactly zero."""
    outputs = case.outputs(1)
    found = case.comparator.compare(outputs, {name: array.copy() for name, array in outputs.items()})
    assert len(found.flip) == N_ITEMS
    for name, column in _columns(found):
        assert np.all(column == 0), name


@EVERY
def test_items_do_not_influence_each_other(case: Case) -> None:
    """Any order, and any part of a batch, gives every item the same divergences."""
    candidate, reference = case.outputs(1), case.outputs(2)
    whole = case.comparator.compare(candidate, reference)
    order = np.random.default_rng(3).permutation(N_ITEMS)
    shuffled = case.comparator.compare(part(candidate, order), part(reference, order))
    one = case.comparator.compare(part(candidate, slice(4, 5)), part(reference, slice(4, 5)))
    for name, column in _columns(whole):
        np.testing.assert_array_equal(column[order], getattr(shuffled, name))
        np.testing.assert_array_equal(column[4:5], getattr(one, name))
    for name, values in whole.detail.items():
        np.testing.assert_array_equal(values[order], shuffled.detail[name])
        np.testing.assert_array_equal(values[4:5], one.detail[name])


@EVERY
def test_divergences_lie_in_their_range(case: Case) -> None:
    """None is negative or above its top, and sides that differ diverge."""
    found = case.comparator.compare(case.outputs(1), case.outputs(2))
    for name, column in _columns(found):
        assert np.all(column >= 0), name
    assert np.all(np.isin(found.flip, (0, 1)))
    assert np.all(found.divergence <= case.measure.top * (1 + 1e-12))
    assert np.all(found.divergence > 0)


@EVERY
def test_what_is_not_finite_is_an_outcome_of_its_item_alone(case: Case) -> None:
    """Of the candidate a flip without a divergence, of the reference nothing at all; the other items stay as they are."""
    candidate, reference = case.outputs(1), case.outputs(2)
    plain = case.comparator.compare(candidate, reference)
    broken = case.comparator.compare(case.spoilt(candidate), reference)
    blind = case.comparator.compare(candidate, case.spoilt(reference))
    assert (broken.flip[0], bool(broken.candidate_finite[0])) == (1, False)
    assert not blind.reference_finite[0]
    assert np.isnan([broken.divergence[0], blind.divergence[0], blind.flip[0]]).all()
    for found in (broken, blind):
        for name, column in _columns(found):
            np.testing.assert_array_equal(column[1:], getattr(plain, name)[1:])


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.nothing], ids=[case.name for case in CASES if case.nothing]
)
def test_an_output_without_anything_is_an_outcome(case: Case) -> None:
    """It is recorded, not set aside: of the candidate a flip without a divergence, of the reference nothing at all."""
    assert case.nothing
    outputs = case.outputs(1)
    nothing = case.nothing(outputs)
    found = case.comparator.compare(nothing, outputs)
    assert found.flip.tolist() == [1] * N_ITEMS
    assert not found.candidate_finite.any()
    assert found.reference_finite.all()
    assert np.isnan(found.divergence).all()
    blind = case.comparator.compare(outputs, nothing)
    assert not blind.reference_finite.any()
    assert np.isnan(blind.flip).all()
    neither = case.comparator.compare(nothing, nothing)
    assert not (neither.candidate_finite | neither.reference_finite).any()
    assert np.isnan(neither.flip).all()


@EVERY
def test_outputs_of_another_number_of_items_are_refused(case: Case) -> None:
    """The error is one that sets the exchange aside."""
    outputs = case.outputs(1)
    with pytest.raises(QuarantineError, match="output"):
        case.comparator.compare(part(outputs, slice(0, 3)), outputs)


@EVERY
def test_an_output_of_another_type_than_the_task_compares_is_refused(case: Case) -> None:
    """`config check` refuses such an output before the first exchange, by the same list."""
    kinds = COMPARED_TYPES.get(case.model.task, "")
    outputs = case.outputs(1)
    types = [np.dtype(name) for name in ("f4", "i8", "u1", "?", "O")]
    for refused in (one for one in types if kinds and one.kind not in kinds):
        others = {name: np.abs(np.nan_to_num(array)).astype(refused) for name, array in outputs.items()}
        with pytest.raises(QuarantineError):
            case.comparator.compare(others, others)

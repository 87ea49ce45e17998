"""What every comparator must do.

class TestForecast(ComparatorSuite):
    @pytest.fixture(scope="class")
    def case(self) -> ComparatorCase:
        return ComparatorCase("forecast", MODEL, comparator, FORECAST.measure, outputs)
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from quantdrift.core.config.models import Model
from quantdrift.core.errors import QuarantineError
from quantdrift.core.tasks import Measure
from quantdrift.models.comparators.protocol import Comparator, Divergences, TaskPlugin, Values
from quantdrift.models.comparators.registry import options_for
from quantdrift.models.tensors.arrays import Array, Outputs
from quantdrift.shadow.replay.rows import items_of

N_ITEMS = 16
"""Items in the outputs of a case."""

_LARGEST = 1.7e308
# What floating-point arithmetic goes wrong at, and what most models take.
_VALUES = st.sampled_from(
    [
        *(0.0, -0.0, 0.25, 0.5, 0.75, 1.0, 2.0, -1.0, -1e9, 1e-45, 5e-324),
        *(65504.0, 3.4e38, -3.4e38, _LARGEST, -_LARGEST, np.nan, np.inf, -np.inf),
    ]
)
_TYPES = st.sampled_from([np.float64, np.float32, np.float16, np.int8, np.uint8, np.int64, np.bool_])
_SHAPES = st.one_of(  # of an item
    st.just(()),
    st.tuples(st.sampled_from([0, 1, 2, 3])),
    st.tuples(st.integers(0, 3), st.sampled_from([0, 3, 6])),
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3)),
)


def _not_a_number(outputs: Outputs) -> Outputs:
    name = next(name for name, array in outputs.items() if array.dtype.kind == "f")
    array = outputs[name].copy()
    array.reshape(N_ITEMS, -1)[0, 0] = np.nan
    return {**outputs, name: array}


def _nothing(outputs: Outputs) -> Outputs:
    return {name: array[:, :0] for name, array in outputs.items()}


class ComparatorCase(NamedTuple):
    """A comparator, as a model's configuration makes it, and outputs that it takes.

    Parameters
    ----------
    name
        For the test's id.
    make
        Returns a fresh comparator.
    measure
        The meaning of its divergences.
    outputs
        Returns the outputs of `N_ITEMS` items that a seed gives, by name. Two seeds give sides that differ in every item.
    types
        Kinds of NumPy types that the task compares; empty: any.
    spoilt
        Returns outputs whose first item has a value that is no number, or none of its kind.
    nothing
        Returns outputs that are empty; None where an empty output is an answer like any other.
    is_numeric
        Whether it takes arrays of numbers, so that it can be asked about any array.
    """

    name: str
    make: Callable[[], Comparator]
    measure: Measure
    outputs: Callable[[int], Outputs]
    types: str = ""
    spoilt: Callable[[Outputs], Outputs] = _not_a_number
    nothing: Callable[[Outputs], Outputs] | None = _nothing
    is_numeric: bool = True

    @classmethod
    def of_plugin(
        cls, plugin: TaskPlugin, model: Model, outputs: Callable[[int], Outputs]
    ) -> "ComparatorCase":
        """Return the case of a plug-in's task, with the options of `model`."""
        options = options_for(plugin, model)
        return cls(
            str(model.task),
            lambda: plugin.comparator(model, options),
            plugin.measure,
            outputs,
            types=plugin.types,
        )


class ComparatorSuite:
    """Derive a class `Test...` from it, and give it `cases`."""

    cases: ClassVar[Sequence[ComparatorCase]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test with each case."""
        metafunc.parametrize("case", self.cases, ids=[case.name for case in self.cases])

    def test_identical_outputs_do_not_diverge(self, case: ComparatorCase) -> None:
        """Every divergence of a model from itself is exactly zero."""
        outputs = case.outputs(1)
        found = case.make().compare(outputs, {name: array.copy() for name, array in outputs.items()})
        assert len(found.flip) == N_ITEMS
        for name, column in _columns(found):
            assert np.all(column == 0), name

    def test_items_do_not_influence_each_other(self, case: ComparatorCase) -> None:
        """Any order, and any part of a batch, gives every item the same divergences."""
        candidate, reference = case.outputs(1), case.outputs(2)
        comparator = case.make()
        whole = comparator.compare(candidate, reference)
        order = np.random.default_rng(3).permutation(N_ITEMS)
        shuffled = comparator.compare(part(candidate, order), part(reference, order))
        alone = comparator.compare(part(candidate, slice(4, 5)), part(reference, slice(4, 5)))
        for name, column in _columns(whole):
            np.testing.assert_array_equal(column[order], getattr(shuffled, name))
            np.testing.assert_array_equal(column[4:5], getattr(alone, name))
        for name, values in whole.detail.items():
            np.testing.assert_array_equal(values[order], shuffled.detail[name])
            np.testing.assert_array_equal(values[4:5], alone.detail[name])

    def test_divergences_lie_in_their_range(self, case: ComparatorCase) -> None:
        """None is negative or above its top, and sides that differ diverge."""
        found = case.make().compare(case.outputs(1), case.outputs(2))
        for name, column in _columns(found):
            assert np.all(column >= 0), name
        assert np.all(np.isin(found.flip, (0, 1)))
        assert np.all(found.divergence <= case.measure.top * (1 + 1e-12))
        assert np.all(found.divergence > 0)

    def test_what_is_not_finite_is_an_outcome_of_its_item_alone(self, case: ComparatorCase) -> None:
        """Of the candidate a flip without a divergence, of the reference nothing at all; the other items stay as they are."""
        candidate, reference = case.outputs(1), case.outputs(2)
        comparator = case.make()
        plain = comparator.compare(candidate, reference)
        broken = comparator.compare(case.spoilt(candidate), reference)
        blind = comparator.compare(candidate, case.spoilt(reference))
        assert (broken.flip[0], bool(broken.candidate_finite[0])) == (1, False)
        assert not blind.reference_finite[0]
        assert np.isnan([broken.divergence[0], blind.divergence[0], blind.flip[0]]).all()
        for found in (broken, blind):
            for name, column in _columns(found):
                np.testing.assert_array_equal(column[1:], getattr(plain, name)[1:])

    def test_an_output_without_anything_is_an_outcome(self, case: ComparatorCase) -> None:
        """It is recorded, not set aside: of the candidate a flip without a divergence, of the reference nothing at all."""
        if case.nothing is None:
            return  # an empty output is an answer like any other
        outputs = case.outputs(1)
        nothing = case.nothing(outputs)
        comparator = case.make()
        found = comparator.compare(nothing, outputs)
        assert found.flip.tolist() == [1] * N_ITEMS
        assert not found.candidate_finite.any()
        assert found.reference_finite.all()
        assert np.isnan(found.divergence).all()
        blind = comparator.compare(outputs, nothing)
        assert not blind.reference_finite.any()
        assert np.isnan(blind.flip).all()
        neither = comparator.compare(nothing, nothing)
        assert not (neither.candidate_finite | neither.reference_finite).any()
        assert np.isnan(neither.flip).all()

    def test_outputs_of_another_number_of_items_are_refused(self, case: ComparatorCase) -> None:
        """The error is one that sets the exchange aside."""
        outputs = case.outputs(1)
        with pytest.raises(QuarantineError, match="output"):
            case.make().compare(part(outputs, slice(0, 3)), outputs)

    def test_an_output_of_another_type_than_the_task_compares_is_refused(self, case: ComparatorCase) -> None:
        """`config check` refuses such an output before the first exchange, by the same list."""
        outputs = case.outputs(1)
        types = [np.dtype(name) for name in ("f4", "i8", "u1", "?", "O")]
        for refused in (kind for kind in types if case.types and kind.kind not in case.types):
            others = {name: np.abs(np.nan_to_num(array)).astype(refused) for name, array in outputs.items()}
            with pytest.raises(QuarantineError):
                case.make().compare(others, others)

    def test_finite_sides_have_a_divergence_however_large_they_are(self, case: ComparatorCase) -> None:
        """Sums and differences of values near the largest double overflow; what is recorded is no NaN."""
        if not case.is_numeric:
            return
        names = [name for name, array in case.outputs(1).items() if array.dtype.kind == "f"]
        sides = [case.outputs(seed) for seed in (1, 2)]
        for opposite in (1, -1):
            large = [
                {
                    name: np.where(array > 0, _LARGEST, -_LARGEST) * sign if name in names else array
                    for name, array in side.items()
                }
                for side, sign in zip(sides, (1, opposite), strict=True)
            ]
            check_outcome(case, *large)

    @settings(suppress_health_check=[HealthCheck.differing_executors])  # each subclass is one
    @given(st.data())
    def test_two_outputs_are_an_outcome_or_refused(self, case: ComparatorCase, data: st.DataObject) -> None:
        """Of any type, shape and size of values: nothing overflows aloud, and the record can hold what is found."""
        if not case.is_numeric:
            return
        sides = data.draw(any_outputs(case.make().outputs or ("y",)))
        check_outcome(case, *sides)
        check_outcome(case, sides[0], {name: array.copy() for name, array in sides[0].items()})


def part(outputs: Outputs, items: Any) -> Outputs:
    """Return some items of outputs."""
    return {name: array[items] for name, array in outputs.items()}


@st.composite
def any_outputs(draw: st.DrawFn, names: tuple[str, ...]) -> tuple[Outputs, Outputs]:
    """Draw the outputs of two sides : arrays of one shape, of any types and values; one side may be empty."""
    sides: tuple[dict[str, Array], dict[str, Array]] = {}, {}
    n_items = draw(st.integers(1, 3))
    for name in names:
        shape = (n_items, *draw(_SHAPES))
        emptied = draw(st.sampled_from([None, None, None, 0, 1]))
        for number, side in enumerate(sides):
            array = _as(draw(arrays(np.float64, shape, elements=_VALUES)), draw(_TYPES))
            if number == emptied:
                array = array[:, np.newaxis][:, :0].reshape(shape[0], 0)
            side[name] = array
    return sides


def check_outcome(case: ComparatorCase, candidate: Outputs, reference: Outputs) -> None:
    """Check that two sides are refused, or have a figure for each item that a record can hold.

    A side that is finite on an item where the other is has a divergence in its range; a candidate that is not flips; of a
    reference that is not nothing is said; and no output differs from itself.
    """
    try:
        found = case.make().compare(candidate, reference)
    except QuarantineError:
        return
    n = len(next(iter(reference.values())))
    stored = items_of(found, slices=[()] * n, features=[{}] * n, clusterings=[0] * n)
    assert len(stored) == n
    is_same = all(
        candidate[name].dtype == array.dtype and candidate[name].tobytes() == array.tobytes()
        for name, array in reference.items()
    )
    for item, q_finite, p_finite in zip(stored, found.candidate_finite, found.reference_finite, strict=True):
        detail = json.loads(item.detail or "", parse_constant=pytest.fail)
        assert detail.get("candidate_not_finite", False) == (not q_finite)
        assert (item.flip is None) == (not p_finite)
        assert (item.divergence is None) == (not (q_finite and p_finite))
        if item.divergence is None:
            assert item.flip is not False
        else:
            assert 0 <= item.divergence <= case.measure.top * (1 + 1e-12)
            if is_same:
                assert (item.flip, item.divergence) == (False, 0.0)


def _as(values: npt.NDArray[Any], kind: Any) -> npt.NDArray[Any]:
    if np.issubdtype(kind, np.integer):
        values = np.nan_to_num(values, posinf=9, neginf=-9).clip(-9, 9)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(kind)


def _columns(found: Divergences) -> Iterator[tuple[str, Values]]:
    for name in ("flip", "divergence", "topk", "js", "margin"):
        column = getattr(found, name)
        if len(column):
            yield name, column

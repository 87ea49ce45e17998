"""What every signal of a plug-in must do.

class TestMissed(SignalSuite):
    cases = (SignalCase("missed", MISSED, ComparatorCase.of_plugin(FORECAST, MODEL, outputs)),)
"""

import json
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantdrift.core.errors import QuarantineError
from quantdrift.core.signals import Signal, SignalPlugin
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.tensors.arrays import Outputs
from quantdrift.shadow.replay.rows import items_of
from quantdrift.testing.comparators import N_ITEMS, ComparatorCase, any_outputs, part

_ERRORS, _ROUNDING = 4.0, 1e-9


class SignalCase(NamedTuple):
    """A signal with the comparator that gives its values.

    Parameters
    ----------
    name
        For the test's id.
    plugin
        The signal.
    comparator
        As for `ComparatorSuite`: outputs of two seeds differ in every item.
    """

    name: str
    plugin: SignalPlugin | Signal
    comparator: ComparatorCase


class SignalSuite:
    """Derive a class `Test...` from it, and give it `cases`."""

    cases: ClassVar[Sequence[SignalCase]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test with each case."""
        metafunc.parametrize("case", self.cases, ids=[case.name for case in self.cases])

    def test_it_has_a_number_for_each_item(self, case: SignalCase) -> None:
        """Of outputs that are finite on both sides, finite and from 0 to 1: that is what its budget is a mean of."""
        values = _values(case, case.comparator.outputs(1), case.comparator.outputs(2))
        assert values.shape == (N_ITEMS,)
        assert np.isfinite(values).all()
        assert ((values >= 0) & (values <= 1)).all()

    def test_equal_outputs_have_the_mean_that_it_says(self, case: SignalCase) -> None:
        """A model does not drift from itself: each value is `equal`, or where chance decides, their mean is, within four standard errors."""
        outputs = case.comparator.outputs(1)
        values = _values(case, outputs, {name: array.copy() for name, array in outputs.items()})
        error = values.std(ddof=1) / np.sqrt(N_ITEMS)
        assert abs(values.mean() - case.plugin.equal) <= _ERRORS * error + _ROUNDING

    def test_the_order_of_items_does_not_matter(self, case: SignalCase) -> None:
        """Any order, and any part of a batch, gives every item the same value."""
        candidate, reference = case.comparator.outputs(1), case.comparator.outputs(2)
        values = _values(case, candidate, reference)
        order = np.random.default_rng(3).permutation(N_ITEMS)
        shuffled = _values(case, part(candidate, order), part(reference, order))
        np.testing.assert_array_equal(values[order], shuffled)
        alone = _values(case, part(candidate, slice(4, 5)), part(reference, slice(4, 5)))
        np.testing.assert_array_equal(values[4:5], alone)

    def test_its_words_make_a_sentence(self, case: SignalCase) -> None:
        """They stand inside of one: no full stop, no capital at the beginning."""
        for words in (case.plugin.things, case.plugin.verb):
            assert words == words.strip().rstrip("."), words
            assert words[0] == words[0].lower(), words

    @settings(suppress_health_check=[HealthCheck.differing_executors])  # each subclass is one
    @given(st.data())
    def test_any_two_outputs_have_a_value_in_range_or_none(
        self, case: SignalCase, data: st.DataObject
    ) -> None:
        """Of any type, shape and size of values: what is stored is a number from 0 to 1, or nothing."""
        if not case.comparator.is_numeric:
            return
        sides = data.draw(any_outputs(case.comparator.make().outputs or ("y",)))
        try:
            compared = case.comparator.make().compare(*sides)
        except QuarantineError:
            return
        n = len(compared.flip)
        for item in items_of(compared, slices=[()] * n, features=[{}] * n, clusterings=[0] * n):
            value = json.loads(item.detail or "{}", parse_constant=pytest.fail).get(case.plugin.detail)
            assert value is None or (not isinstance(value, bool) and 0 <= value <= 1)


def _values(case: SignalCase, candidate: Outputs, reference: Outputs) -> npt.NDArray[np.float64]:
    """Return the value of each item, (items,)."""
    compared: Divergences = case.comparator.make().compare(candidate, reference)
    assert case.plugin.detail in compared.detail, (
        f"the comparator gives {', '.join(compared.detail) or 'nothing'} in `detail`, and not `{case.plugin.detail}`"
    )
    return np.asarray(compared.detail[case.plugin.detail], dtype=np.float64)

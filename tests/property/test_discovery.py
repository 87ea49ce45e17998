"""Discovered slices: the text, the search and the shadow mean the same items, and tests may be cut anywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.core.config.schema import Config, Slice
from quantdrift.core.records import Metric, Predicate
from quantdrift.core.slices import SliceAssigner, holds, slice_of
from quantdrift.drift.discovery.confirmation import ConfirmationTrial
from quantdrift.drift.discovery.items import Gathering

pytestmark = pytest.mark.property

NUMBERS = st.floats(-10, 10, allow_nan=False)
ATTRIBUTES = st.dictionaries(st.sampled_from(["header.a", "json.b"]), st.sampled_from(["x", 'y"\\', "", "é"]))
FEATURES = st.dictionaries(st.sampled_from(["feature.length", "feature.mean"]), NUMBERS)
VALUES = st.builds(
    lambda key, value: Predicate(key=key, equals=value),
    st.sampled_from(["header.a", "json.b"]),
    st.sampled_from(["x", 'y"\\', "", "é", "other"]),
)
RANGES = st.builds(
    lambda key, low, high: Predicate(key=key, low=low, high=high),
    st.sampled_from(["feature.length", "feature.mean"]),
    NUMBERS | st.none(),
    NUMBERS,
)
WHERE = st.lists(VALUES | RANGES, min_size=1, max_size=3, unique_by=lambda condition: condition.key)


@given(st.lists(st.tuples(ATTRIBUTES, FEATURES), max_size=20), WHERE)
def test_a_search_and_the_shadow_mean_the_same_items(
    items: list[tuple[dict[str, str], dict[str, float]]], where: list[Predicate]
) -> None:
    """Which items lie in a slice does not depend on who asks."""
    gathering = Gathering()
    for index, (attributes, features) in enumerate(items):
        gathering.add(str(index), 1.0, attributes, features, {Metric.FLIP: 0.0})
    members = gathering.items().members(where)
    expected = [all(holds(one, attributes, features) for one in where) for attributes, features in items]
    assert members.tolist() == expected


@given(WHERE)
def test_the_order_of_conditions_does_not_name_another_slice(where: list[Predicate]) -> None:
    """One text whatever the order."""
    assert slice_of("m", where) == slice_of("m", where[::-1])


@given(st.sampled_from(["x", 'y"\\', "é"]), st.lists(NUMBERS, min_size=1, max_size=4, unique=True))
def test_a_discovered_slice_has_the_text_of_a_declared_one(value: str, edges: list[float]) -> None:
    """What a rule would call the same items is the same slice, with the same id."""
    rules = (
        Slice(name="a", header="a", values=(value,)),
        Slice(name="length", feature="length", edges=tuple(sorted(edges))),
    )
    for declared in SliceAssigner(Config(slices=rules), "m").declared()[1:]:
        assert slice_of("m", declared.where).predicate == declared.predicate


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 1)), max_size=60),
    st.integers(0, 60),
    st.sampled_from([0.001, 0.02, 0.5]),
)
def test_a_test_may_be_cut_anywhere(values: list[tuple[float, float]], cut: int, m: float) -> None:
    """The same bits of wealth and evidence, however the exchanges are shared out among the nights."""
    v = np.array([weight for _, weight in values])
    vx = np.array([x * weight for x, weight in values])
    whole = ConfirmationTrial(m=m).after(vx, v)
    assert ConfirmationTrial(m=m).after(vx[:cut], v[:cut]).after(vx[cut:], v[cut:]) == whole
    assert np.isfinite(whole.log_wealth).all()
    assert whole.highest >= 0


@given(st.floats(1.01, 5), st.floats(0, 1))
def test_weights_above_one_are_refused(v: float, x: float) -> None:
    """They would break the bound."""
    with pytest.raises(ValueError, match="0 <= vx <= v <= 1"):
        ConfirmationTrial(m=0.1).after(np.array([x]), np.array([v]))

"""Stored details of an item: six significant digits."""

import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from quantdrift.models.comparators.protocol import Divergences
from quantdrift.shadow.replay.rows import items_of

_LEAST, _MOST = 1e-15, 1e6  # outside of it a number is stored whole, or with seven digits

pytestmark = pytest.mark.property


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=20))
def test_a_detail_is_the_number_to_six_digits(values: list[float]) -> None:
    """Whole numbers are as they were, undefined ones are left out, and no other is off by more than half of its sixth digit."""
    column, n = np.array(values), len(values)
    nothing, defined = np.full(n, np.nan), np.ones(n, dtype=bool)
    divergences = Divergences(
        flip=nothing,
        divergence=nothing,
        candidate_finite=defined,
        reference_finite=defined,
        detail={"measured": column},
    )
    items = items_of(divergences, slices=[()] * n, features=[{}] * n, clusterings=[0] * n)
    for value, item in zip(values, items, strict=True):
        assert item.detail is not None
        stored = json.loads(item.detail).get("measured")
        if not np.isfinite(value):
            assert stored is None
        elif value.is_integer():
            assert stored == value
        else:
            assert stored == pytest.approx(value, rel=5.1e-6)
            has_six = len(repr(abs(stored)).replace(".", "").split("e")[0].strip("0")) <= 6
            assert has_six or not _LEAST < abs(value) < _MOST

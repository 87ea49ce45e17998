"""Hourly sums over items, some of which have no divergence."""

import numpy as np
import pytest

from quantdrift.monitor.fold.groups import Columns, Observation
from quantdrift.monitor.fold.rollup import Rollup
from quantdrift.storage.fold_rows import ComparisonRow

pytestmark = pytest.mark.unit


def _row(
    item: int,
    *,
    flip: float | None,
    divergence: float | None,
    tie: float | None = None,
    exchange_id: str = "e",
    slice_id: int = 1,
    group_key: str = "",
) -> ComparisonRow:
    return ComparisonRow(
        exchange_id=exchange_id,
        item=item,
        captured_us=0,
        model_version_id=1,
        policy_id=1,
        slice_ids=(slice_id,),
        group_key=group_key,
        pi1=0.25,
        pi2=1.0,
        u1=0.0,
        u2=0.0,
        candidate_margin=0.5,
        flip=flip,
        topk=flip,
        js=divergence,
        divergence=divergence,
        margin=None,
        tie=tie,
    )


def test_what_an_item_lacks_weighs_nothing() -> None:
    """A candidate that is not finite flips without a KL; a reference that is not finite says nothing at all."""
    rollup = Rollup()
    items = (
        _row(0, flip=1.0, divergence=None),
        _row(1, flip=0.0, divergence=0.5),
        _row(2, flip=None, divergence=None),
    )
    rows = (*items, _row(3, flip=0.0, divergence=float("inf")))
    columns = Columns([Observation(order=0, rows=rows, now_us=0, closed=False)])
    rollup.add(
        columns, np.ones(1, dtype=np.bool_), cap=np.full(4, 2.0), unmeasured=np.zeros(4, dtype=np.bool_)
    )
    (row,) = rollup.rows()
    assert (row.weight, row.n_items, row.n_groups, row.n_infinite) == (4.0, 4, 1, 1)
    assert (row.flip, row.flip_weight) == (1.0, 3.0)
    assert (row.divergence, row.divergence_weight, row.js_weight) == (2.5, 2.0, 2.0)
    assert (row.margin, row.margin_weight) == (0.0, 0.0)
    assert sum(row.divergence_bins) == row.divergence_weight


def test_a_divergence_that_is_not_a_number_is_no_value() -> None:
    """An item whose divergence is NaN adds nothing to that metric's sums, and the other items of its hour keep theirs."""
    rollup = Rollup()
    rows = (_row(0, flip=1.0, divergence=float("nan")), _row(1, flip=0.0, divergence=0.5))
    columns = Columns([Observation(order=0, rows=rows, now_us=0, closed=False)])
    rollup.add(
        columns, np.ones(1, dtype=np.bool_), cap=np.full(2, 2.0), unmeasured=np.zeros(2, dtype=np.bool_)
    )
    (row,) = rollup.rows()
    assert (row.divergence, row.divergence_weight) == (1.0, 2.0)
    assert (row.js, row.js_weight) == (1.0, 2.0)
    assert (row.flip, row.flip_weight, row.n_items) == (2.0, 4.0, 2)
    assert sum(row.divergence_bins) == row.divergence_weight


def test_ties_are_summed_beside_flips() -> None:
    """With their own weight: an item of a task, or of a release, without ties is not counted as one that has none."""
    rollup = Rollup()
    rows = (
        _row(0, flip=1.0, divergence=0.1, tie=1.0),
        _row(1, flip=1.0, divergence=0.1, tie=0.0),
        _row(2, flip=0.0, divergence=0.1, tie=None),
        _row(3, flip=0.0, divergence=0.1, tie=0.0),
    )
    columns = Columns([Observation(order=0, rows=rows, now_us=0, closed=False)])
    rollup.add(
        columns, np.ones(1, dtype=np.bool_), cap=np.full(4, 2.0), unmeasured=np.zeros(4, dtype=np.bool_)
    )
    (row,) = rollup.rows()
    assert (row.flip, row.flip_weight, row.tie, row.tie_weight) == (2.0, 4.0, 1.0, 3.0)


def test_a_closed_session_counts_as_one_in_the_square_of_the_weights() -> None:
    """Its exchanges, two of one item and one of two, weigh 4 each: 3 times 16 becomes 12 squared."""
    rollup = Rollup()
    rows = tuple(
        _row(item, flip=1.0, divergence=0.1, exchange_id=one, group_key="user")
        for one, item in (("a", 0), ("b", 0), ("c", 0), ("c", 1))
    )
    alone = [
        Observation(place, [row for row in rows if row.exchange_id == one], 0, closed=False)
        for place, one in enumerate("abc")
    ]
    columns = Columns([*alone, Observation(3, rows, 0, closed=True)])
    closed = np.array([False, False, False, True])[columns.observation]
    rollup.add(columns, ~closed, cap=np.full(8, 2.0), unmeasured=np.zeros(8, dtype=np.bool_))
    assert rollup.rows()[0].weight_sq == 3 * 16.0
    rollup.close(columns, closed)
    (row,) = rollup.rows()
    assert (row.weight, row.weight_sq, row.n_groups, row.n_items) == (12.0, 144.0, 3, 4)

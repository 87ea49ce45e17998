"""Hourly sums over items, some of which have no divergence."""

import numpy as np
import pytest

from quantdrift.monitor.fold.groups import Columns, Observation
from quantdrift.monitor.fold.rollup import Rollup
from quantdrift.storage.monitor.rows import ComparisonRow

pytestmark = pytest.mark.unit


def _row(item: int, *, flip: float | None, divergence: float | None) -> ComparisonRow:
    return ComparisonRow(
        exchange_id="e",
        item=item,
        captured_us=0,
        model_version_id=1,
        policy_id=1,
        slice_ids=(1,),
        group_key="",
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
    rollup.add(columns, np.ones(1, dtype=np.bool_), cap=np.full(4, 2.0))
    (row,) = rollup.rows()
    assert (row.weight, row.n_items, row.n_groups, row.n_infinite) == (4.0, 4, 1, 1)
    assert (row.flip, row.flip_weight) == (1.0, 3.0)
    assert (row.divergence, row.divergence_weight, row.js_weight) == (2.5, 2.0, 2.0)
    assert (row.margin, row.margin_weight) == (0.0, 0.0)
    assert sum(row.divergence_bins) == row.divergence_weight

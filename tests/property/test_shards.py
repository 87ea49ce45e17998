"""What is summed of shards is what is summed of the whole stream, however it was dealt out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantdrift.drift.detectors.change.baseline import Baseline
from quantdrift.drift.detectors.tail.quantile import N_BINS as N_TAIL_BINS
from quantdrift.drift.detectors.tail.quantile import quantile, shortfall, tail_bin
from quantdrift.drift.evidence.margin import N_BINS
from quantdrift.monitor.fold.groups import Columns, Observation
from quantdrift.monitor.fold.rollup import Rollup
from quantdrift.storage.fold.write import LARGEST
from quantdrift.storage.fold_rows import ComparisonRow, RollupRow
from tests.support.monitor.change_streams import baseline_of, observed

pytestmark = pytest.mark.property

HOUR_US = 3_600_000_000


@given(seed=st.integers(0, 2**32), n_shards=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_baselines_of_change_add_up(seed: int, n_shards: int) -> None:
    """Sums of shares and of x per margin bin, groups and events; and so do the strata that follow from them."""
    rng = np.random.default_rng(seed)
    x, bins = rng.random((400, 1)), rng.integers(0, N_BINS, (400, 1))
    groups = observed(x, bins)[:, 0]
    dealt = rng.integers(0, n_shards, 400)
    whole = baseline_of(groups, since_us=0, until_us=1)
    parts = [baseline_of(groups[dealt == one], since_us=0, until_us=1) for one in range(n_shards)]
    merged = Baseline(
        share=tuple(np.sum([one.share for one in parts], axis=0).tolist()),
        total=tuple(np.sum([one.total for one in parts], axis=0).tolist()),
        n_groups=sum(one.n_groups for one in parts),
        until_us=1,
    ).settled()
    assert (merged.n_groups, merged.cuts) == (whole.n_groups, whole.cuts)
    np.testing.assert_allclose(merged.share, whole.share, rtol=1e-12)
    np.testing.assert_allclose(merged.total, whole.total, rtol=1e-12)
    np.testing.assert_allclose(merged.bounds, whole.bounds, rtol=1e-9)


@given(seed=st.integers(0, 2**32), q=st.sampled_from([0.95, 0.99]))
@settings(max_examples=15, deadline=None)
def test_histograms_add_up_and_so_does_what_is_shown_of_them(seed: int, q: float) -> None:
    """Counts of single items are whole numbers: sums, quantiles and shortfall are the same to the last bit."""
    rng = np.random.default_rng(seed)
    places, dealt = tail_bin(0.01 * np.exp(rng.standard_normal(3000))), rng.integers(0, 3, 3000)
    parts = [np.bincount(places[dealt == one], minlength=N_TAIL_BINS) for one in range(3)]
    merged = np.sum(parts, axis=0).astype(np.float64)
    whole = np.bincount(places, minlength=N_TAIL_BINS).astype(np.float64)
    assert merged.tobytes() == whole.tobytes()
    assert quantile(merged, 3000.0, q) == quantile(whole, 3000.0, q)
    assert shortfall(merged, 3000.0, q) == shortfall(whole, 3000.0, q)


def _row(rng: np.random.Generator, number: int) -> ComparisonRow:
    divergence = float(rng.choice([0.0, 0.01, 2.0, np.inf]))
    return ComparisonRow(
        exchange_id=f"{number:032x}",
        item=0,
        captured_us=int(rng.integers(0, 3)) * HOUR_US,
        model_version_id=1,
        policy_id=1,
        slice_ids=tuple(range(1, 1 + int(rng.integers(1, 4)))),
        group_key=str(rng.choice(["", "a", "b", "c"])),
        pi1=float(rng.choice([0.25, 0.5, 1.0])),
        pi2=1.0,
        u1=0.0,
        u2=0.0,
        candidate_margin=0.5,
        flip=float(rng.random() < 0.2),
        topk=0.0,
        js=0.001,
        divergence=divergence,
        margin=0.01,
    )


@given(seed=st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_roll_ups_add_up(seed: int) -> None:
    """Every sum of every hour and slice by shards of exchanges, with what is the largest of them; the keys are the same."""
    rng = np.random.default_rng(seed)
    rows = [_row(rng, number) for number in range(60)]
    dealt = rng.integers(0, 3, len(rows))

    def sums(chosen: list[ComparisonRow]) -> dict[tuple[int, int, int], RollupRow]:
        rollup = Rollup()
        if chosen:
            columns = Columns(
                [
                    Observation(order=place, rows=(row,), now_us=0, closed=False)
                    for place, row in enumerate(chosen)
                ]
            )
            rollup.add(
                columns,
                np.ones(len(columns.ends), dtype=np.bool_),
                cap=columns.column("pi1"),
                unmeasured=columns.column("u1") < 0.5,
            )
        return {(row.model_version_id, row.slice_id, row.hour_us): row for row in rollup.rows()}

    whole = sums(rows)
    shards = [sums([row for row, one in zip(rows, dealt, strict=True) if one == shard]) for shard in range(3)]
    assert set().union(*shards) == whole.keys()
    for key, expected in whole.items():
        parts = [shard[key] for shard in shards if key in shard]
        for name in RollupRow.__struct_fields__[3:]:
            values = [value for part in parts if (value := getattr(part, name)) != ()]
            merged = max(values) if name in LARGEST else np.sum(values, axis=0) if values else ()
            np.testing.assert_allclose(merged, getattr(expected, name), rtol=1e-12, atol=1e-12, err_msg=name)
    assert any(row.people for row in whole.values())

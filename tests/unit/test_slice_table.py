"""The table of the states of many slices, and what is worked out of it for many rows at a time."""

import numpy as np
import pytest

from quantdrift.core.records import Verdict
from quantdrift.drift.detectors.protocol import BUDGET, CHANGE, DETECTORS, TAIL
from quantdrift.drift.evidence import interval
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.evidence.state import dump_rows, dump_state
from quantdrift.drift.watch import SignalKey, SliceWatch, Thresholds
from quantdrift.monitor.fold.fold import Fold
from quantdrift.monitor.fold.slice_state import FoldArrays, SliceState, new_slice
from quantdrift.storage.fold_rows import Position, Snapshot
from tests.support.monitor.fold_stream import CONFIG, batches
from tests.support.monitor.folds import fold_all

pytestmark = pytest.mark.unit

FLIP, TAILS = SignalKey("flip", BUDGET.kind), SignalKey("divergence", TAIL.kind)
THRESHOLDS = Thresholds(page=10.0, ticket=1.0)


def state(budget: float) -> FloatArray:
    """Return the state of a budget's signal."""
    return BUDGET.fresh(budget=budget, scale=1.0, weighted=False, mass=0.0, at_us=1)


def slice_in(table: FoldArrays, slice_id: int) -> SliceState:
    """Return a slice in a table."""
    return new_slice(
        (1, slice_id),
        table,
        reason="",
        at_us=1,
        last_us=slice_id,
        thresholds=THRESHOLDS,
        fold_seq=1,
        may_page=True,
    )


def test_a_table_that_grows_keeps_every_state() -> None:
    """Of slices with different signals, and what else is known of them."""
    table, slices = FoldArrays(), []
    for number in range(40):
        slices.append(slice_in(table, number))
        slices[-1].watch.add(FLIP, state(0.01 + number / 100))
        if number % 3 == 0:
            slices[-1].watch.add(TAILS, TAIL.fresh(tau=0.25, scale=1.0, mass=0.0, at_us=number))
        table.noise[FLIP][slices[-1].row] = number
    for number, one in enumerate(slices):
        assert (one.watch.states[FLIP] == state(0.01 + number / 100)).all()
        assert list(one.watch.states) == ([TAILS, FLIP] if number % 3 == 0 else [FLIP])
        assert (one.last_us, one.noise(FLIP)) == (number, number)


def test_the_row_of_a_removed_slice_says_nothing_of_the_next_one() -> None:
    """Neither a state nor a verdict that need not be found again, nor a row to be written."""
    table = FoldArrays()
    gone = slice_in(table, 1)
    gone.watch.add(FLIP, state(0.01))
    table.noise[FLIP][gone.row] = 0.5
    table.judged[gone.row] = table.checked[gone.row] = 7
    gone.say(Verdict.OK, "", at_us=1, fold_seq=1)
    table.dirty[gone.row] = True
    table.free_row(gone.row)
    after = slice_in(table, 2)
    assert after.row == gone.row
    assert not after.watch.states
    assert after.noise(FLIP) == 0.0
    assert (table.judged[after.row], table.checked[after.row]) == (0, -1)
    assert not (table.dirty | table.stale | table.unweighed)[after.row]


def test_watches_of_several_tables_are_advanced_together() -> None:
    """Each brings its state along."""
    one, other = SliceWatch(states={FLIP: state(0.01)}), SliceWatch(states={FLIP: state(0.02)})
    other.move(one.table)
    assert one.table is other.table
    assert (other.states[FLIP] == state(0.02)).all()


def test_many_windows_have_the_estimates_of_each_to_the_bit() -> None:
    """Also one that has seen nothing."""
    rng = np.random.default_rng(3)
    sums = np.zeros((50, interval.SUMS))
    for row in sums[1:]:
        for _ in range(int(rng.integers(1, 40))):
            v = float(rng.random())
            interval.advance(row, v, v * float(rng.random()))
    scale = rng.random(50)
    for row, factor, found in zip(sums, scale, interval.estimates(sums, scale), strict=True):
        alone = interval.estimate(row, factor)
        assert tuple(found) == (
            (0, 0, 0, 0, 0) if alone is None else (alone.mean, alone.low, alone.high, alone.n, alone.missing)
        )


@pytest.mark.parametrize("kind", DETECTORS)
def test_rows_of_a_table_are_dumped_as_single_states_are(kind: str) -> None:
    """The same bytes: header, checksum and values."""
    states = np.random.default_rng(4).random((5, DETECTORS[kind].size))
    assert dump_rows(kind, states, [3, 0]) == [dump_state(kind, states[row]) for row in (3, 0)]


def test_a_fold_that_resumes_has_the_states_that_were_written() -> None:
    """What it writes of them is the same to the byte."""
    _, outcome = fold_all(batches(60))
    resumed = Fold(
        CONFIG, Snapshot(position=Position(), detectors=outcome.detectors, verdicts=outcome.verdicts)
    )
    resumed.state.table.dirty[:] = True
    assert {(row.slice_id, row.metric, row.kind): row.state for row in resumed.take().detectors} == {
        (row.slice_id, row.metric, row.kind): row.state for row in outcome.detectors
    }
    assert {row.kind for row in outcome.detectors} == {BUDGET.kind, CHANGE.kind, TAIL.kind}

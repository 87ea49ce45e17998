"""The fold as a pure function of stored batches: its bits, its order, its time, its roll-ups."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from quantdrift.core.records import Verdict
from quantdrift.drift.detectors.protocol import DETECTORS
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.evidence.state import dump_state, load_state
from quantdrift.storage.fold_rows import (
    BatchRows,
    DetectorRow,
    ExpiryRow,
    FoldResult,
    Position,
    Snapshot,
    TallyRow,
    TransitionRow,
    VerdictRow,
)
from tests.support.monitor.fold_stream import ALL_ID, BEGIN_US, SECOND_US, batches, diverging
from tests.support.monitor.folds import fold_all

pytestmark = pytest.mark.unit

FINITE, INFINITE = "finite", "one in eight infinite"
DAY_US = 86_400 * SECOND_US
Kept = Callable[[FloatArray], FloatArray]
MUTANTS: dict[str, Kept] = {
    "single precision": lambda state: state.astype(np.float32).astype(np.float64),
    "fifteen digits": lambda state: np.array([float(f"{value:.15g}") for value in state]),
}


@pytest.mark.slow
def test_the_same_batches_give_the_same_bits() -> None:
    """Two runs over the same batches give identical states, verdicts, transitions and roll-ups."""
    assert fold_all(batches(80))[1] == fold_all(batches(80))[1]


def in_parts(stream: list[BatchRows], every: int, kept: Kept) -> FoldResult:
    """Return what comes of folds of `every` batches, each resumed from the rows that the one before left behind."""
    detectors: dict[tuple[int, str, str], DetectorRow] = {}
    verdicts: dict[tuple[int, int], VerdictRow] = {}
    tallies: list[TallyRow] = []
    transitions: list[TransitionRow] = []
    position = Position()
    for begin in range(0, len(stream), every):
        snapshot = Snapshot(
            position=position,
            detectors=tuple(stored(row, kept) for row in detectors.values()),
            verdicts=tuple(verdicts.values()),
            tallies=tuple(tallies),
        )
        part = stream[begin : begin + every]
        _, outcome = fold_all(part, snapshot)
        tallies += [row for rows in part for row in rows.tallies]
        detectors |= {(row.slice_id, row.metric, row.kind): row for row in outcome.detectors}
        verdicts |= {(row.model_version_id, row.slice_id): row for row in outcome.verdicts}
        transitions += outcome.transitions
        position = outcome.position
    return msgspec.structs.replace(
        outcome,
        detectors=tuple(detectors[key] for key in sorted(detectors)),
        verdicts=tuple(verdicts[key] for key in sorted(verdicts)),
        transitions=tuple(transitions),
    )


def stored(row: DetectorRow, kept: Kept) -> DetectorRow:
    """Return a detector as it comes back from a store that keeps its state in this way."""
    state = kept(load_state(row.kind, row.state, DETECTORS[row.kind].size))
    return msgspec.structs.replace(row, state=dump_state(row.kind, state))


def same(one: FoldResult, other: FoldResult) -> bool:
    """Return whether two folds come to the same bits, with the same story."""

    def told(outcome: FoldResult) -> object:
        return (
            outcome.position,
            sorted(outcome.detectors, key=lambda row: (row.slice_id, row.metric, row.kind)),
            sorted(
                (row for row in outcome.verdicts if row.n_groups),
                key=lambda row: (row.model_version_id, row.slice_id),
            ),
            list(outcome.transitions),
        )

    return told(one) == told(other)


def stream_of(name: str, n: int) -> list[BatchRows]:
    """Return a stream of `n` batches of this name."""
    return batches(n) if name == FINITE else diverging(batches(n), every=8)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), [(FINITE, 300), (INFINITE, 60)])
def test_cutting_the_batches_into_folds_changes_nothing(name: str, n: int) -> None:
    """Resumed from its stored rows after every few batches, the fold ends in the same bits, with the same story."""
    stream = stream_of(name, n)
    _, whole = fold_all(stream)
    assert same(in_parts(stream, 7, lambda state: state), whole)
    assert {row.to_verdict for row in whole.transitions} >= {Verdict.FIRING}
    for row in whole.detectors:
        assert np.isfinite(load_state(row.kind, row.state, DETECTORS[row.kind].size)).all()


@pytest.mark.parametrize("kept", MUTANTS.values(), ids=MUTANTS)
def test_a_store_that_loses_a_bit_does_not_come_to_the_same(kept: Kept) -> None:
    """States in single precision, or in fifteen digits: the fold that resumes from them is another one."""
    stream = stream_of(INFINITE, 16)
    _, whole = fold_all(stream)
    assert not same(in_parts(stream, 7, kept), whole)


def test_a_clock_that_runs_ahead_does_not_move_the_folds_time() -> None:
    """Capture times after the storing of their batch count as the time of storing."""
    row = msgspec.structs.replace(batches(1)[0].comparisons[0], captured_us=BEGIN_US + 400 * DAY_US)
    fold, _ = fold_all([BatchRows(fold_seq=1, stored_us=BEGIN_US, comparisons=(row,))])
    assert fold.position.event_us == BEGIN_US


def test_what_expires_before_anything_was_compared_is_folded() -> None:
    """Expired exchanges are folded when they are stored, those that were compared seconds later: at first there is no slice to judge."""
    expired = ExpiryRow(stratum="default", model="digits", n=7, at_us=BEGIN_US)
    fold, _ = fold_all([BatchRows(fold_seq=1, stored_us=BEGIN_US, expiries=(expired,))])
    assert (fold.position.event_us, fold.position.exchange_us) == (BEGIN_US, None)


def test_tallies_do_not_pass_the_time_of_exchanges_that_wait() -> None:
    """A tally of a minute later, folded before: a new version's exchanges still get the allowance of their own time, and page."""
    late = TallyRow(
        source="pod",
        boot="b" * 32,
        stratum="default",
        sequence=1,
        at_us=BEGIN_US + 3600 * SECOND_US,
        offered=0,
        taken=0,
        lost=0,
    )
    rows = tuple(
        row for batch in batches(60, faint_flips=1.0, tally_every=10**9) for row in batch.comparisons
    )
    at_once = msgspec.structs.replace(batches(1)[0], fold_seq=2, stored_us=late.at_us, comparisons=rows)
    fold, outcome = fold_all([BatchRows(fold_seq=1, stored_us=late.at_us, tallies=(late,)), at_once])
    assert {row.to_verdict for row in outcome.transitions} >= {Verdict.FIRING}
    assert fold.position.event_us == late.at_us
    assert fold.position.exchange_us == max(row.captured_us for row in rows)
    assert all(row.onset_us < late.at_us for row in outcome.transitions if row.to_verdict is Verdict.FIRING)


def test_batches_come_consecutively() -> None:
    """A batch that does not follow is refused."""
    fold, _ = fold_all(batches(2))
    with pytest.raises(ValueError, match="does not follow"):
        fold.batch(batches(1)[0])


def test_rollups_add_up_to_what_was_offered() -> None:
    """Sums of 1 / pi estimate the exchanges offered, and the histogram holds every group once."""
    stream = batches(50)
    _, outcome = fold_all(stream)
    rows = [row for row in outcome.rollups if row.slice_id == ALL_ID]
    pi = {row.exchange_id: row.pi for rows_ in stream for row in rows_.comparisons}
    assert sum(row.weight for row in rows) == pytest.approx(sum(1 / value for value in pi.values()))
    assert sum(row.n_groups for row in rows) == len(pi)
    for row in rows:
        assert sum(row.divergence_bins) == pytest.approx(row.weight)

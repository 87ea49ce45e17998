"""Folds of stored batches in one go, streams that differ in nothing, and what a fold says of a slice."""

from functools import cache

import msgspec

from quantdrift.core.config.schema import Config
from quantdrift.core.records import Verdict
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.fold_rows import BatchRows, ComparisonRow, FoldResult, Position, Snapshot, TallyRow
from tests.support.monitor.fold_stream import BEGIN_US, CATALOG, CONFIG, FAINT_ID, SECOND_US, batches

EMPTY = Snapshot(position=Position())


def fold_all(
    stream: list[BatchRows], snapshot: Snapshot = EMPTY, config: Config = CONFIG
) -> tuple[Fold, FoldResult]:
    """Fold everything in one go."""
    fold = Fold(config, snapshot)
    fold.learn(CATALOG)
    for rows in stream:
        fold.batch(rows)
    return fold, fold.take()


@cache
def _comparison() -> ComparisonRow:
    return batches(1)[0].comparisons[0]


def clean(number: int, at_us: int) -> ComparisonRow:
    """Return a comparison of `faint` in which the two outputs are the same."""
    return msgspec.structs.replace(
        _comparison(),
        exchange_id=f"{number:032x}",
        captured_us=at_us,
        slice_ids=(FAINT_ID,),
        group_key="",
        pi1=1.0,
        pi2=1.0,
        u1=0.0,
        u2=0.0,
        candidate_margin=0.5,
        flip=0.0,
        divergence=0.0,
    )


def quiet(n: int, *, first: int = 1, lost: int = 0, step_us: int = SECOND_US) -> list[BatchRows]:
    """Return `n` batches of exchanges of `faint` that never differ, each followed by a tally."""
    found = []
    for number in range(n):
        at_us = BEGIN_US + (first + number) * step_us
        row = clean(first + number, at_us)
        tally = TallyRow(
            source="pod",
            boot="b" * 32,
            stratum="faint",
            sequence=first + number,
            at_us=at_us,
            offered=10 * (first + number),
            taken=first + number,
            lost=lost * (first + number) // 100,
        )
        seq = 2 * (first + number) - 1
        found.append(BatchRows(fold_seq=seq, stored_us=at_us, comparisons=(row,)))
        found.append(BatchRows(fold_seq=seq + 1, stored_us=at_us, compares=False, tallies=(tally,)))
    return found


def verdict_of(fold: Fold, slice_id: int) -> tuple[Verdict, str]:
    """Return verdict and reason of a slice."""
    row = next(row for row in fold.verdicts() if row.slice_id == slice_id and row.n_groups)
    return row.verdict, row.reason

"""Stored batches folded again, without a database."""

from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from statistics import fmean

import msgspec
import pytest

from quantdrift.core.config.schema import Budget, Config, Model
from quantdrift.core.records import Metric, Verdict
from quantdrift.monitor.fold.fold import Fold
from quantdrift.monitor.planning.alerts import Match
from quantdrift.monitor.planning.backtest import Backtest, Findings, accepted
from quantdrift.monitor.planning.backtest_report import build_report
from quantdrift.storage.fold.history import HistoryExtent, StoredTransition
from quantdrift.storage.fold_rows import BatchRows, Position, Snapshot
from tests.support.monitor.fold_stream import (
    ALL_ID,
    BEGIN,
    CATALOG,
    CLEAR_ID,
    CONFIG,
    FAINT_ID,
    batches,
    with_noise,
)

pytestmark = pytest.mark.unit

STREAM = batches(80)
TOLERANT = msgspec.structs.replace(
    CONFIG, models=(Model(name="digits", budget=Budget(flip=0.2, divergence=0.5)),)
)
STRICT = msgspec.structs.replace(CONFIG, models=(Model(name="digits", budget=Budget(flip=0.005)),))


def extent(stream: Sequence[BatchRows], first: int = 1) -> HistoryExtent:
    """Return the extent of a stream."""
    return HistoryExtent(
        first=first,
        last=first + len(stream) - 1,
        begin=BEGIN,
        end=BEGIN + timedelta(hours=1),
        n_items=sum(len(rows.comparisons) for rows in stream),
    )


@cache
def recorded() -> list[StoredTransition]:
    """Return the changes of verdict that a monitor would have stored of the whole stream."""
    fold = Fold(CONFIG, Snapshot(position=Position()))
    fold.learn(CATALOG)
    for rows in STREAM:
        fold.batch(rows)
    return [
        StoredTransition(**{name: getattr(row, name) for name in StoredTransition.__struct_fields__})
        for row in fold.take().transitions
    ]


def compared(config: Config, stream: Sequence[BatchRows], *, chunk: int = 64, first: int = 1) -> Findings:
    """Return what a back-test finds beside what `CONFIG` had recorded of the whole stream."""
    test = Backtest(config, CATALOG, extent(stream, first))
    for begin in range(0, len(stream), chunk):
        test.fold(stream[begin : begin + chunk])
    return test.findings(recorded())


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.release), 7, 80])
def test_the_same_configuration_gives_the_same_alerts(chunk: int) -> None:
    """However it is read; the alert on the drifted slice is the same to the microsecond."""
    found = compared(CONFIG, STREAM, chunk=chunk)
    assert found.identical
    assert {one.match for one in found.pairings} == {Match.SAME}
    assert {one.key[1] for one in found.pairings} == {FAINT_ID}
    assert found.n_items == extent(STREAM).n_items
    assert not found.n_missing


@pytest.mark.slow
def test_a_tolerant_budget_misses_and_a_strict_one_is_earlier() -> None:
    """What the record paged on is missed; with half the budget the same drift pages sooner."""
    tolerant = compared(TOLERANT, STREAM)
    assert not tolerant.identical
    assert {one.match for one in tolerant.pairings} == {Match.MISSED}
    strict = compared(STRICT, STREAM)
    (faint,) = (one for one in strict.pairings if one.key[1] == FAINT_ID)
    assert faint.match is Match.EARLIER
    assert faint.later_s is not None
    assert faint.later_s < 0


@pytest.mark.slow
def test_what_nobody_alerted_on_although_it_was_above_its_budget_is_named() -> None:
    """Thresholds that are never reached, and the slice's mean is surely above its budget all the same."""
    rare = msgspec.structs.replace(CONFIG.monitor, pages_per_30_days=1e-300, tickets_per_30_days=1e-300)
    silent = msgspec.structs.replace(CONFIG, monitor=rare)
    test = Backtest(silent, CATALOG, extent(STREAM))
    test.fold(STREAM)
    found = test.findings([])
    assert not found.pairings
    assert [(one.key[1], one.metric, one.recorded) for one in found.breaches] == [
        (FAINT_ID, Metric.FLIP, False)
    ]
    (breach,) = found.breaches
    assert breach.budget < breach.low < breach.mean
    assert [one.recorded for one in test.findings(recorded()).breaches] == [True]
    assert not compared(CONFIG, STREAM).breaches


@pytest.mark.slow
def test_what_lies_within_budget_and_noise_was_not_missed() -> None:
    """It is above the budget alone: no alert is meant to come of it."""
    noisy = with_noise(batches(200, faint_flips=0.03), 0.05)
    found = compared(CONFIG, noisy)
    assert {one.match for one in found.pairings} == {Match.MISSED}
    assert not found.breaches


def test_a_stretch_that_begins_later_is_folded_from_nothing() -> None:
    """It keeps the numbers of the fold, and its text says that the state at the beginning is not known."""
    late = STREAM[40:]
    found = compared(CONFIG, late, first=41)
    told = build_report(found, extent(late, 41), CATALOG, ["first note"])
    assert not told.complete
    assert told.notes[0] == "first note"
    assert "start empty there" in told.notes[1]
    assert "fold 41 to 80" in told.text()


def test_a_model_can_be_looked_at_alone() -> None:
    """Nothing of the others is shown."""
    test = Backtest(CONFIG, CATALOG, extent(STREAM))
    test.fold(STREAM)
    assert test.findings(recorded(), "digits").pairings
    assert not test.findings(recorded(), "another").pairings


def test_hours_hold_the_means_of_every_slice() -> None:
    """Each exchange counts by its weight, whatever the number of its items."""
    test = Backtest(CONFIG, CATALOG, extent(STREAM))
    test.fold(STREAM)
    means = {key[1]: next(iter(hours.values())).mean(Metric.FLIP) for key, hours in test.hours.items()}
    assert means.keys() == {ALL_ID, FAINT_ID, CLEAR_ID}
    rows = [row for one in STREAM for row in one.comparisons if FAINT_ID in row.slice_ids]
    exchanges: dict[str, list[float]] = {}
    for row in rows:
        exchanges.setdefault(row.exchange_id, []).append(row.flip or 0.0)
    assert means[FAINT_ID] == pytest.approx(fmean(fmean(flips) for flips in exchanges.values()))


@pytest.mark.slow
def test_the_text_names_slices_and_says_what_became_of_each_alert() -> None:
    """For people; a missed page stands out."""
    found = compared(TOLERANT, STREAM)
    told = build_report(found, extent(STREAM), CATALOG, [])
    text = told.text()
    assert "digits 1, scanner=faint" in text
    assert "MISSED" in text
    assert f"pages    {told.pages_recorded} recorded, 0 under test" in text
    assert told.pages_recorded == sum(one.to_verdict is Verdict.FIRING for one in recorded())
    same = build_report(compared(CONFIG, STREAM), extent(STREAM), CATALOG, []).text()
    assert "Every change of verdict is as recorded" in same


def test_a_model_without_a_configuration_has_the_default_budget() -> None:
    """As the monitor does it."""
    assert accepted(Config(), "digits", Metric.DIVERGENCE) == (0.02, 2.0)
    assert accepted(STRICT, "digits", Metric.FLIP) == (0.005, 1.0)

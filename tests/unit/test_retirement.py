"""When a discovered slice is monitored no more, and what the fold makes of that."""

from datetime import timedelta

import msgspec
import pytest

from quantdrift.core.config.schema import Budget, Capture, Config, Model, Slice
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Predicate, Verdict
from quantdrift.core.slices import is_declared, slice_of
from quantdrift.monitor.discovery.limits import LIMITS, DiscoveryLimits
from quantdrift.monitor.discovery.retirement import UNSEEN, reason_to_retire, restored, retired_by_hand
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.fold_rows import BatchRows, Episode, FoldResult, Position, SliceChange, Snapshot
from quantdrift.storage.schema.slice_tables import DiscoveryStatus
from quantdrift.storage.slices.confirmed import ConfirmedSums, SlicePeriod, VersionSums
from quantdrift.storage.slices.discovery import DiscoveryRow
from tests.support.monitor.fold_stream import ALL_ID, CATALOG, CLEAR_ID, CONFIG, FAINT_ID, batches
from tests.support.storage.discovered_traffic import DAY, FAINT, NOW, discovery

pytestmark = pytest.mark.unit

DECLARED = Config(
    models=(Model(name="digits"),),
    capture=Capture(headers=("x-scanner",)),
    slices=(Slice(name="scanner", header="x-scanner"),),
)
PLAIN = Config(models=(Model(name="digits"),))
MONTH = timedelta(days=LIMITS.retire_days)
WATCHED = discovery(status=DiscoveryStatus.CONFIRMED, slice_id=4, confirmed_at=NOW, seen_at=NOW + MONTH)


def sums(n: int, flips: float, divergence: float = 0.0) -> ConfirmedSums:
    """Return those of `n` exchanges of weight 1, with these means."""
    return ConfirmedSums(
        weight=n, weight_sq=n, flip=n * flips, flip_weight=n, divergence=n * divergence, divergence_weight=n
    )


def seen(*inside: ConfirmedSums, rest: float = 0.003, n: int = 200_000) -> SlicePeriod:
    """Return slices of versions that flip at `rest` elsewhere."""
    elsewhere = sums(n, rest)
    return SlicePeriod(
        versions=tuple(
            VersionSums(inside=one, everything=ConfirmedSums.together((one, elsewhere))) for one in inside
        )
    )


def why(
    watched: SlicePeriod | None,
    row: DiscoveryRow = WATCHED,
    config: Config = PLAIN,
    after: timedelta = MONTH,
    *,
    compared: bool = True,
    limits: DiscoveryLimits = LIMITS,
) -> str:
    """Return why a slice is retired so long after it was confirmed."""
    return reason_to_retire(row, watched, config, Budget(), NOW + after, compared=compared, limits=limits)


def test_a_slice_that_was_no_worse_than_the_rest_for_a_month_is_retired() -> None:
    """Not a day sooner; the reason says what was seen. With 0 it is never retired for that."""
    calm = seen(sums(20_000, 0.003))
    assert why(calm).startswith("quiet for 30 days: mean flip 0.003, at most 0.00")
    assert why(calm, after=MONTH - DAY) == ""
    assert why(calm, limits=DiscoveryLimits(retire_days=0)) == ""


@pytest.mark.parametrize(
    ("watched", "told"),
    [
        (seen(sums(20_000, 0.02)), "it is still above the budget and the rest"),
        (seen(sums(60, 0.0)), "sixty exchanges show nothing: silence is no health"),
        (seen(sums(20_000, 0.003, divergence=0.2)), "KL counts as well"),
        (seen(sums(1_000_000, 0.003), sums(3_000, 0.05)), "a canary is bad, and hides in the mean"),
        (None, "nothing was seen in that time"),
        (msgspec.structs.replace(seen(sums(20_000, 0.003)), alerted=True), "an alert was open"),
        (msgspec.structs.replace(seen(sums(20_000, 0.003)), evidence_ratio=0.01), "evidence is growing"),
    ],
)
def test_a_slice_that_is_not_shown_to_be_calm_stays(watched: SlicePeriod | None, told: str) -> None:
    """Whatever speaks against it is enough."""
    assert why(watched) == "", told


def test_what_everything_suffers_from_is_no_reason_to_keep_a_slice() -> None:
    """Two per cent of flips in it and elsewhere: it says nothing that `all` does not."""
    assert why(seen(sums(20_000, 0.02), rest=0.02)).startswith("quiet")
    assert why(seen(sums(20_000, 0.05), rest=0.02)) == ""


def test_weights_count_and_few_effective_exchanges_do_not_suffice() -> None:
    """Twenty thousand of traffic that thirty exchanges stand for tell as much as thirty."""
    few = ConfirmedSums(weight=20_000, weight_sq=20_000**2 / 30, flip_weight=20_000, flip=60)
    assert why(seen(few)) == ""


def test_unseen_and_declared_slices_need_no_place() -> None:
    """After 30 days without traffic, whether or not it was watched for so long; at once where it is declared."""
    unseen = msgspec.structs.replace(WATCHED, seen_at=NOW)
    assert why(None, unseen, after=UNSEEN - DAY) == ""
    assert why(None, unseen, after=UNSEEN).startswith("unseen: ")
    assert why(None, unseen, after=UNSEEN, compared=False) == "", "it is the shadow that was away"
    assert why(None, config=DECLARED, after=DAY).startswith("declared: ")


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ((FAINT,), True),
        ((Predicate(key="feature.contrast", high=0.1),), True),
        ((Predicate(key="feature.contrast", low=0.1, high=0.2),), True),
        ((Predicate(key="feature.contrast", low=0.2),), True),
        ((Predicate(key="feature.contrast", low=0.15),), False),
        ((Predicate(key="header.x-site", equals="s3"),), False),
        ((FAINT, Predicate(key="feature.contrast", high=0.1)), True),
        ((FAINT, Predicate(key="header.x-site", equals="s3")), False),
    ],
)
def test_the_configuration_knows_its_own_slices(where: tuple[Predicate, ...], *, expected: bool) -> None:
    """By value, by bin and crossed; whoever wrote down the same conditions."""
    rules = (
        *DECLARED.slices,
        Slice(name="contrast", feature="contrast", edges=(0.1, 0.2)),
        Slice(name="both", cross=("scanner", "contrast")),
    )
    config = msgspec.structs.replace(DECLARED, slices=rules)
    assert is_declared(config, slice_of("digits", where)) is expected


def test_a_person_retires_and_takes_it_back() -> None:
    """It is held until then; it comes back as what it was, if there is a place."""
    done = retired_by_hand(WATCHED, PLAIN, "a load test")
    assert (done.row.status, done.row.held, done.reason) == (DiscoveryStatus.RETIRED, True, "a load test")
    with pytest.raises(OperatorError, match="already"):
        retired_by_hand(done.row, PLAIN, "")
    with pytest.raises(OperatorError, match="take it out of the configuration"):
        retired_by_hand(WATCHED, DECLARED, "")
    back = restored(done.row, [done.row], NOW + DAY, "").row
    assert (back.status, back.held, back.slice_id) == (DiscoveryStatus.CONFIRMED, False, 4)
    assert back.confirmed_at == NOW + DAY, "the month begins anew"
    full = [discovery(id=n, status=DiscoveryStatus.CONFIRMED) for n in range(20)]
    with pytest.raises(OperatorError, match="20 discovered slices"):
        restored(done.row, full, NOW + DAY, "")
    with pytest.raises(OperatorError, match="is confirmed"):
        restored(WATCHED, [], NOW + DAY, "")
    dropped = retired_by_hand(discovery(), PLAIN, "").row
    assert restored(dropped, full, NOW + DAY, "").row.status is DiscoveryStatus.EXPIRED


RETIRE = SliceChange(slice_id=FAINT_ID, watched=False, made_by="anna", reason="a load test")
RESTORE = msgspec.structs.replace(RETIRE, watched=True)


def folded(
    stream: list[BatchRows], snapshot: Snapshot | None = None, config: Config = CONFIG
) -> tuple[Fold, FoldResult]:
    """Fold everything in one go."""
    fold = Fold(config, snapshot or Snapshot(position=Position()))
    fold.learn(CATALOG)
    for rows in stream:
        fold.batch(rows)
    return fold, fold.take()


def with_change(stream: list[BatchRows], at: int, change: SliceChange) -> list[BatchRows]:
    """Return the stream with a change that the batch of this number follows."""
    return [
        msgspec.structs.replace(rows, slices=(change,)) if rows.fold_seq == at else rows for rows in stream
    ]


@pytest.mark.slow
def test_an_open_alert_of_a_slice_that_is_retired_ends_unknown_and_it_is_watched_no_more() -> None:
    """With who and why; its detectors count no more, and what still comes in for it begins nothing."""
    stream = batches(120)
    before, outcome = folded(stream[:80])
    assert [row.verdict for row in outcome.verdicts if row.slice_id == FAINT_ID] == [Verdict.FIRING]
    n_live = before.position.n_detectors
    fold, outcome = folded(with_change(stream, 81, RETIRE))
    (last,) = [row for row in outcome.transitions if row.slice_id == FAINT_ID][-1:]
    assert (last.from_verdict, last.to_verdict, last.episode) == (
        Verdict.FIRING,
        Verdict.UNKNOWN,
        Episode.CLOSE,
    )
    assert last.reason == "retired by anna: a load test"
    assert {row.slice_id for row in fold.verdicts()} == {ALL_ID, CLEAR_ID}
    assert fold.position.n_detectors < n_live
    retired = [row for row in outcome.detectors if row.slice_id == FAINT_ID]
    assert retired
    assert all(row.retired_us == last.at_us for row in retired)
    (verdict,) = (row for row in outcome.verdicts if row.slice_id == FAINT_ID)
    assert (verdict.verdict, verdict.reason) == (Verdict.UNKNOWN, "retired by anna: a load test")
    assert any(row.slice_id == FAINT_ID and row.hour_us for row in outcome.rollups), "the sums go on"


def test_a_fold_that_resumes_ignores_retired_slices_and_a_restored_slice_starts_empty() -> None:
    """The record says what is retired; once it is restored its detectors know nothing of before."""
    stream = batches(60)
    _, first = folded(with_change(stream[:30], 20, RETIRE))
    snapshot = Snapshot(
        position=first.position,
        detectors=tuple(row for row in first.detectors if row.retired_us is None),
        verdicts=tuple(row for row in first.verdicts if row.slice_id != FAINT_ID),
        retired=(FAINT_ID,),
    )
    fold, _ = folded(stream[30:], snapshot)
    assert FAINT_ID not in {row.slice_id for row in fold.verdicts()}
    fold, _ = folded(with_change(stream[30:], 50, RESTORE), snapshot)
    (again,) = (row for row in fold.verdicts() if row.slice_id == FAINT_ID)
    _, fresh = folded(stream[:10])
    (begun,) = (row for row in fresh.verdicts if row.slice_id == FAINT_ID)
    assert abs(again.n_groups - begun.n_groups) < 30, "ten batches, whatever came before"


@pytest.mark.slow
def test_a_slice_that_is_declared_as_well_is_watched_on() -> None:
    """The configuration has the last word, also after a restart."""
    stream = batches(40)
    config = msgspec.structs.replace(
        CONFIG, capture=DECLARED.capture, slices=(Slice(name="scanner", header="x-scanner"),)
    )
    plain, expected = folded(stream, config=config)
    fold, outcome = folded(with_change(stream, 20, RETIRE), config=config)
    assert fold.verdicts() == plain.verdicts()
    assert outcome.detectors == expected.detectors
    resumed, _ = folded(stream, Snapshot(position=Position(), retired=(FAINT_ID,)), config)
    assert resumed.verdicts() == plain.verdicts()


@pytest.mark.slow
def test_a_slice_whose_value_lost_its_place_is_watched_no_more_although_its_rule_is_declared() -> None:
    """Its alert and its detectors end with who and why, also after a restart; with its place back it starts empty."""
    stream = batches(120)
    config = msgspec.structs.replace(
        CONFIG, capture=DECLARED.capture, slices=(Slice(name="scanner", header="x-scanner"),)
    )
    lapse = SliceChange(slice_id=FAINT_ID, watched=False, lapsed=True, made_by="monitor", reason="0.01 %")
    before, _ = folded(stream[:80], config=config)
    fold, outcome = folded(with_change(stream, 81, lapse), config=config)
    (last,) = [row for row in outcome.transitions if row.slice_id == FAINT_ID][-1:]
    assert (last.to_verdict, last.episode) == (Verdict.UNKNOWN, Episode.CLOSE)
    assert last.reason == "lapsed, ended by monitor: 0.01 %"
    assert {row.slice_id for row in fold.verdicts()} == {ALL_ID, CLEAR_ID}
    assert fold.position.n_detectors < before.position.n_detectors, "its part of the allowance is free"
    resumed, _ = folded(stream, Snapshot(position=Position(), lapsed=(FAINT_ID,)), config)
    assert FAINT_ID not in {row.slice_id for row in resumed.verdicts()}
    admitted = msgspec.structs.replace(lapse, watched=True, lapsed=False)
    again, _ = folded(with_change(with_change(stream, 20, lapse), 100, admitted), config=config)
    assert FAINT_ID in {row.slice_id for row in again.verdicts()}

"""A version that unverified senders report: it opens tickets, never pages, and changes nothing in another version."""

import msgspec
import numpy as np
import pytest

from quantdrift.core.records import UNVERIFIED, Verdict
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.fold_rows import BatchRows, Catalog, Position, Snapshot, Source
from tests.support.monitor.fold_stream import CATALOG, CONFIG, FAINT_ID, SECOND_US, WITH_REFERENCE, batches

pytestmark = pytest.mark.unit

OTHER = 3
STALE_US = int(CONFIG.monitor.stale_after_s * SECOND_US)


def _begin(name: str, snapshot: Snapshot | None = None) -> Fold:
    other = msgspec.structs.replace(CATALOG.versions[WITH_REFERENCE], id=OTHER, candidate_version=name)
    fold = Fold(CONFIG, snapshot or Snapshot(position=Position()))
    fold.learn(msgspec.structs.replace(CATALOG, versions={**CATALOG.versions, OTHER: other}))
    return fold


def _moved(stream: list[BatchRows], *, first: int = 1, by_us: int = 0) -> list[BatchRows]:
    """Return batches of comparisons with other numbers and times."""
    compared = [rows for rows in stream if rows.comparisons]
    return [
        msgspec.structs.replace(
            rows,
            fold_seq=number,
            stored_us=rows.stored_us + by_us,
            comparisons=tuple(
                msgspec.structs.replace(row, captured_us=row.captured_us + by_us) for row in rows.comparisons
            ),
        )
        for number, rows in enumerate(compared, start=first)
    ]


def _said(fold: Fold, version: int) -> tuple[Verdict, str]:
    (row,) = [row for row in fold.verdicts() if (row.model_version_id, row.slice_id) == (version, FAINT_ID)]
    return row.verdict, row.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdicts"),
    [("3", {Verdict.WARNING, Verdict.FIRING}), (f"3{UNVERIFIED}", {Verdict.WARNING})],
)
def test_what_pages_for_a_known_sender_is_a_ticket_for_an_unverified_one(
    name: str, verdicts: set[Verdict]
) -> None:
    """With the same evidence, also after the monitor was restarted; the reason says why it is no page."""
    fold, outcomes = _begin(name), []
    stream = _moved(batches(400, version=OTHER, faint_flips=0.2))
    for rows in stream[:40]:
        fold.batch(rows)
    outcomes.append(fold.take())
    stored = Snapshot(position=fold.position, verdicts=outcomes[0].verdicts, detectors=outcomes[0].detectors)
    fold = _begin(name, stored)
    for rows in stream[40:]:
        fold.batch(rows)
    outcomes.append(fold.take())
    alerts = [
        row.to_verdict
        for outcome in outcomes
        for row in outcome.transitions
        if row.to_verdict in {Verdict.WARNING, Verdict.FIRING}
    ]
    assert set(alerts) <= verdicts
    assert max(alerts, key=list(Verdict).index) is max(verdicts, key=list(Verdict).index)
    assert _said(fold, OTHER)[0] in verdicts
    assert ("nobody checked who sent these exchanges" in _said(fold, OTHER)[1]) is (
        Verdict.FIRING not in verdicts
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["3", f"3{UNVERIFIED}"])
def test_an_unverified_version_replaces_no_other(name: str) -> None:
    """Else a stranger could end the alert of the version that serves, when its traffic pauses."""
    fold, stream = _begin(name), _moved(batches(300))
    for rows in stream:
        fold.batch(rows)
    assert _said(fold, WITH_REFERENCE)[0] is Verdict.FIRING
    for rows in _moved(batches(2, version=OTHER), first=len(stream) + 1, by_us=2 * STALE_US):
        fold.batch(rows)
    is_replaced = _said(fold, WITH_REFERENCE)[1].startswith("replaced")
    assert is_replaced is (name == "3")


@pytest.mark.parametrize("name", ["3", f"3{UNVERIFIED}"])
def test_an_unverified_version_takes_no_evidence_and_no_baseline(name: str) -> None:
    """A new version of a known sender gets most of the evidence of the one before; a stranger's leaves every bit."""
    fold, stream = _begin(name), _moved(batches(60, faint_flips=0.02))
    for rows in stream:
        fold.batch(rows)
    states = fold.state.slices[WITH_REFERENCE, FAINT_ID].watch.states
    before = {signal: np.array(state) for signal, state in states.items()}
    fold.take()
    (rows,) = _moved(batches(1, version=OTHER), first=len(stream) + 1, by_us=60 * 4 * SECOND_US)
    fold.batch(rows)
    same = all(np.array_equal(before[signal], states[signal]) for signal in before)
    assert same is (name != "3")
    inherited = [row for row in fold.take().learned if row.source is Source.INHERITED]
    assert not (inherited and name != "3")


def test_a_catalog_says_of_each_version_whether_its_senders_are_known() -> None:
    """By its name, as the shadow stores it."""
    catalog = Catalog(versions=CATALOG.versions, slices={}, policies={})
    version = catalog.versions[WITH_REFERENCE]
    assert version.is_verified
    assert not msgspec.structs.replace(version, candidate_version=f"1{UNVERIFIED}").is_verified

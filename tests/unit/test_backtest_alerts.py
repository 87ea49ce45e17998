"""Alerts of a back-test: episodes of a slice, and one policy's alerts compared with another's."""

from datetime import timedelta

import pytest

from quantdrift.core.records import Verdict
from quantdrift.monitor.planning.alerts import Alert, Match, alerts, pair
from quantdrift.storage.fold.history import StoredTransition
from quantdrift.storage.fold_rows import from_us
from tests.support.monitor.alert_cases import event_with
from tests.support.monitor.fold_stream import BEGIN_US, SECOND_US

pytestmark = pytest.mark.unit

OK, WARNING, FIRING, UNKNOWN = Verdict.OK, Verdict.WARNING, Verdict.FIRING, Verdict.UNKNOWN
KEY = (1, 2)


def change(
    at_s: int, before: Verdict, after: Verdict, *, slice_id: int = 2, onset_s: int | None = None
) -> StoredTransition:
    """Return a change of verdict, `at_s` after the begin."""
    onset = None if onset_s is None else (from_us(BEGIN_US) + timedelta(seconds=onset_s)).isoformat()
    return StoredTransition(
        model_version_id=1,
        slice_id=slice_id,
        from_verdict=before,
        to_verdict=after,
        at_us=BEGIN_US + at_s * SECOND_US,
        fold_seq=1 + at_s,
        event=event_with(onset=onset),
    )


def seconds(at_us: int | None) -> float | None:
    """Return a time as seconds since the begin."""
    return None if at_us is None else (at_us - BEGIN_US) / SECOND_US


def alert(
    opened: int,
    *,
    paged: int | None = None,
    ended: int | None = None,
    onset: int | None = None,
    slice_id: int = 2,
) -> Alert:
    """Return an alert; times in seconds since the begin."""

    def at(value: int) -> int:
        return BEGIN_US + value * SECOND_US

    return Alert(
        key=(1, slice_id),
        metric="flip",
        onset_us=at(opened if onset is None else onset),
        opened_us=at(opened),
        paged_us=None if paged is None else at(paged),
        ended_us=None if ended is None else at(ended),
    )


def test_a_ticket_that_becomes_a_page_is_one_alert() -> None:
    """It opens with the warning, pages later, ends when it is ok again; one that lasts has no end."""
    found = alerts(
        [
            change(0, UNKNOWN, OK),
            change(10, OK, WARNING, onset_s=5),
            change(12, OK, FIRING, slice_id=3),
            change(20, WARNING, FIRING, onset_s=6),
            change(30, FIRING, OK),
            change(31, OK, UNKNOWN),
            change(40, OK, WARNING),
        ]
    )
    assert [
        (one.key[1], *map(seconds, (one.onset_us, one.opened_us, one.paged_us, one.ended_us)))
        for one in found
    ] == [
        (2, 5, 10, 20, 30),
        (3, 12, 12, 12, None),
        (2, 40, 40, None, None),
    ]


@pytest.mark.parametrize(
    ("recorded", "tested", "match", "later_s"),
    [
        (alert(10, paged=20), alert(10, paged=20), Match.SAME, 0),
        (alert(10, paged=20), alert(12, paged=15), Match.EARLIER, -5),
        (alert(10, paged=20, ended=40), alert(12, paged=39), Match.LATER, 19),
        (alert(10), alert(12), Match.LATER, 2),
        (alert(10, paged=20), alert(12), Match.WEAKER, 2),
        (alert(10), alert(8, paged=9), Match.STRONGER, -2),
        (alert(10, ended=20), alert(21, onset=15), Match.LATER, 11),
    ],
)
def test_two_alerts_on_the_same_drift_belong_together(
    recorded: Alert, tested: Alert, match: Match, later_s: float
) -> None:
    """Compared by the page where both paged, by the opening where not."""
    (found,) = pair([recorded], [tested])
    assert (found.match, found.later_s) == (match, later_s)


def test_alerts_without_a_partner_are_missed_or_new() -> None:
    """Of another slice or another time; each alert is used once."""
    recorded = [alert(10, ended=20), alert(100, paged=101)]
    tested = [
        alert(30, onset=25, ended=50),
        alert(105, paged=106),
        alert(107, paged=108),
        alert(10, slice_id=3),
    ]
    found = pair(recorded, tested)
    assert [(one.match, one.key[1]) for one in found] == [
        (Match.MISSED, 2),
        (Match.NEW, 3),
        (Match.NEW, 2),
        (Match.LATER, 2),
        (Match.NEW, 2),
    ]

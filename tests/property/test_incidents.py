"""Incidents: one for each cause in whatever order its alerts and explanations come, and no alert in two."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.facts.incidents import (
    IncidentAlert,
    IncidentState,
    Mitigation,
    SliceTraffic,
    grouped,
    standing,
)

pytestmark = pytest.mark.property

AT = datetime(2026, 11, 23, 12, tzinfo=UTC)
ENDINGS = st.sampled_from(["", "recovered", "replaced", "retired", "closed"])


class Store:
    """What the monitor stores: alerts with their incidents. After each event the incidents are arranged, as after each fold."""

    def __init__(self) -> None:
        self.alerts: dict[int, IncidentAlert] = {}
        self.merged: dict[int, int] = {}
        self.last = 0

    def put(self, number: int, **values: object) -> None:
        """Add an alert, or change what is known of it."""
        known = self.alerts.get(number) or IncidentAlert(
            id=number, incident=None, onset_at=AT, opened_at=AT + timedelta(minutes=number)
        )
        self.alerts[number] = msgspec.structs.replace(known, **values)
        self.arrange()

    def arrange(self) -> None:
        """Give each alert the incident of its group."""
        for group in grouped(self.alerts.values()):
            incident = group.incident
            if incident is None:
                self.last = incident = self.last + 1
            for absorbed in group.absorbed:
                assert absorbed > incident
                assert absorbed not in self.merged
                self.merged[absorbed] = incident
            for alert in group.alerts:
                self.alerts[alert.id] = msgspec.structs.replace(alert, incident=incident)

    def incidents(self) -> set[frozenset[int]]:
        """Return the alerts of each incident."""
        found: dict[int | None, set[int]] = {}
        for alert in self.alerts.values():
            found.setdefault(alert.incident, set()).add(alert.id)
        return {frozenset(some) for some in found.values()}


@st.composite
def explanations(draw: st.DrawFn) -> dict[int, int | None]:
    """Return up to twelve alerts, each with the one that explains it or None: a forest, whose roots are causes."""
    n = draw(st.integers(1, 12))
    return {
        number: draw(st.none() | st.integers(1, number - 1)) if number > 1 else None
        for number in range(1, n + 1)
    }


def _by_cause(forest: Mapping[int, int | None]) -> set[frozenset[int]]:
    def cause(number: int) -> int:
        by = forest[number]
        return number if by is None else cause(by)

    found: dict[int, set[int]] = {}
    for number in forest:
        found.setdefault(cause(number), set()).add(number)
    return {frozenset(some) for some in found.values()}


@given(explanations(), st.data())
def test_alerts_in_any_order_are_one_incident_for_each_cause(
    forest: dict[int, int | None], data: st.DataObject
) -> None:
    """Alerts open, are explained and end in any order; explanations that end take nothing apart."""
    events = data.draw(st.permutations([(number, what) for number in forest for what in ("open", "explain")]))
    store = Store()
    for number, what in events:
        # An explanation of an alert that has not opened yet comes with its opening.
        if what == "explain" and number not in store.alerts:
            continue
        known = (number, "explain") in events[: events.index((number, "open")) + 1]
        if what == "open":
            store.put(number, explained_by=forest[number] if known else None)
        else:
            store.put(number, explained_by=forest[number])
        everyone = [alert for group in grouped(store.alerts.values()) for alert in group.alerts]
        assert sorted(alert.id for alert in everyone) == sorted(store.alerts)
    assert store.incidents() == _by_cause(forest)
    for number in forest:
        store.put(number, explained_by=None, ended=data.draw(ENDINGS), ended_at=AT + timedelta(hours=1))
    assert store.incidents() == _by_cause(forest)


@given(explanations())
def test_an_arrangement_of_what_is_arranged_changes_nothing(forest: dict[int, int | None]) -> None:
    """Each fold may look at every alert again."""
    store = Store()
    for number, by in forest.items():
        store.put(number, explained_by=by)
    before = dict(store.alerts)
    store.arrange()
    assert store.alerts == before
    for group in grouped(before.values()):
        assert group.absorbed == ()


def test_an_explanation_joins_two_incidents_and_the_older_number_stays() -> None:
    """The younger one has no alert any more, and says where they are."""
    store = Store()
    store.put(1)
    store.put(2)
    store.put(3, explained_by=2)
    assert store.incidents() == {frozenset({1}), frozenset({2, 3})}
    store.put(1, explained_by=2)
    assert store.incidents() == {frozenset({1, 2, 3})}
    assert store.merged == {2: 1}
    assert {alert.incident for alert in store.alerts.values()} == {1}


@pytest.mark.parametrize("at_once", [False, True])
def test_an_alert_of_two_causes_does_not_join_them(at_once: bool) -> None:  # noqa: FBT001 - a parameter
    """Two damaged stores of a city are two incidents: the city's alert belongs to one of them."""
    store = Store()
    store.put(1)
    if at_once:
        store.alerts |= {
            number: IncidentAlert(id=number, incident=None, onset_at=AT, opened_at=AT) for number in (2, 3)
        }
        store.put(1, explained_by=2, has_several_causes=True)
    else:
        store.put(2)
        store.put(1, explained_by=2)
        store.put(3)
        store.put(1, explained_by=3, has_several_causes=True)
    assert store.incidents() == {frozenset({1, 2}), frozenset({3})}


def test_alerts_of_two_causes_leave_no_incident_without_a_cause() -> None:
    """A city and all traffic alert first, together; the two stores that explain both come later: each is the cause of one incident."""
    store = Store()
    store.put(1)
    store.put(2, explained_by=1)
    store.alerts |= {
        number: IncidentAlert(id=number, incident=None, onset_at=AT, opened_at=AT) for number in (3, 4)
    }
    store.alerts[1] = msgspec.structs.replace(store.alerts[1], explained_by=3, has_several_causes=True)
    store.put(2, explained_by=4, has_several_causes=True)
    assert store.incidents() == {frozenset({1, 2, 3}), frozenset({4})}


def _began(number: int, minutes: int, took: int, *where: str, **values: object) -> IncidentAlert:
    """Return an alert of a slice that began so many minutes after the first, and took so many until it opened."""
    onset_at = AT + timedelta(minutes=minutes)
    alert = IncidentAlert(
        id=number,
        incident=None,
        onset_at=onset_at,
        opened_at=onset_at + timedelta(minutes=took),
        where=frozenset(where),
    )
    return msgspec.structs.replace(alert, **values)


@pytest.mark.parametrize(
    ("alerts", "incidents"),
    [
        ((_began(1, 0, 2), _began(2, 4, 26, "a")), [[1, 2]]),
        ((_began(1, 0, 4000), _began(2, 3900, 30, "a")), [[1], [2]]),
        ((_began(1, 0, 2), _began(2, 0, 2, "a"), _began(3, 0, 2, "b")), [[1, 2, 3]]),
        ((_began(1, 0, 2, "a"), _began(2, 0, 2, "b")), [[1], [2]]),
        ((_began(1, 0, 2, "a"), _began(2, 0, 2, "a", "b"), _began(3, 0, 2, "b", "c")), [[1, 2], [3]]),
        ((_began(1, 0, 2), _began(2, 0, 2, "a", is_slow=True)), [[1], [2]]),
        ((_began(1, 0, 2, explained_by=2), _began(2, 0, 2, "a"), _began(3, 0, 2, "b")), [[1, 2], [3]]),
        ((_began(1, 0, 2), _began(2, 0, 2, "a", where=None)), [[1], [2]]),
    ],
    ids=[
        "a small slice later",
        "much later",
        "all slices",
        "no slice in the other",
        "slices in slices",
        "another measure",
        "one slice explains all",
        "conditions not known",
    ],
)
def test_alerts_that_begin_together_are_one_incident_where_a_slice_contains_the_other(
    alerts: tuple[IncidentAlert, ...], incidents: list[list[int]]
) -> None:
    """Nothing explains any of them: an alert that one slice explains says that the others are not its cause."""
    for order in (alerts, alerts[::-1]):
        assert [[alert.id for alert in group.alerts] for group in grouped(order)] == incidents


def _alert(number: int, ended: str = "", *, minutes: int | None = None, **values: object) -> IncidentAlert:
    ended_at = None if minutes is None else AT + timedelta(minutes=minutes)
    alert = IncidentAlert(id=number, incident=1, onset_at=AT, opened_at=AT, ended=ended, ended_at=ended_at)
    return msgspec.structs.replace(alert, **values)


@given(st.lists(ENDINGS, min_size=1, max_size=6), st.integers(0, 6))
def test_an_incident_is_open_exactly_while_an_alert_of_it_lasts(endings: list[str], n_lasting: int) -> None:
    """Whatever the others ended by; it has an end exactly when it is not open, and that is the last one of its alerts."""
    over = [_alert(number, ended, minutes=number) for number, ended in enumerate(endings)]
    lasting = [_alert(100 + number) for number in range(n_lasting)]
    found = standing([*over, *lasting])
    assert (found.state is IncidentState.OPEN) is bool(lasting)
    assert (found.ended_at is None) is bool(lasting)
    if not lasting:
        assert found.ended_at == AT + timedelta(minutes=len(endings) - 1)
        assert (found.state is IncidentState.MITIGATED) is ("replaced" in endings)
        assert (found.state is IncidentState.RECOVERED) is (set(endings) <= {"", "recovered"})


def test_the_comeback_of_a_replaced_version_opens_its_incident_again() -> None:
    """The alert lasts again, and so does the incident."""
    gone = standing([_alert(1, "replaced", minutes=5), _alert(2, "recovered", minutes=3)])
    assert (gone.state, gone.mitigation) == (IncidentState.MITIGATED, Mitigation.REPLACED)
    assert standing([_alert(1), _alert(2, "recovered", minutes=3)]).state is IncidentState.OPEN


def test_what_a_person_reported_lasts_until_there_is_news() -> None:
    """A new alert, or one that becomes worse, opens it again; an older one does not."""
    reported = AT + timedelta(hours=1)
    before, after = AT + timedelta(minutes=30), AT + timedelta(minutes=90)
    for alert, is_open in (
        (_alert(1), False),
        (_alert(1, worse_at=before), False),
        (_alert(1, worse_at=after), True),
        (_alert(1, opened_at=after), True),
    ):
        found = standing([alert], reported)
        assert (found.state is IncidentState.OPEN) is is_open
        assert (found.mitigation is Mitigation.REPORTED) is not is_open
    assert standing([_alert(1, "recovered", minutes=90)], reported).state is IncidentState.RECOVERED


def test_an_incident_is_routed_away_once_every_lasting_alert_is() -> None:
    """Its end is the last answer of its slices."""
    away = {1: AT + timedelta(minutes=7), 2: AT + timedelta(minutes=9)}
    assert standing([_alert(1), _alert(2)], routed={1: away[1]}).state is IncidentState.OPEN
    found = standing([_alert(1), _alert(2), _alert(3, "recovered", minutes=4)], routed=away)
    assert (found.mitigation, found.ended_at) == (Mitigation.ROUTED, away[2])


@given(st.floats(0, 1), st.floats(0, 1e6), st.integers(0, 100))
def test_a_slice_is_routed_away_only_after_ten_minutes_and_a_hundred_answers_that_did_not_come(
    share: float, n_since: float, minutes: int
) -> None:
    """And has not returned before three answers and a tenth of its share came."""
    traffic = SliceTraffic(last_at=AT, now=AT + timedelta(minutes=minutes), share=share, n_since=n_since)
    assert traffic.is_routed_away is (minutes >= 10 and share * n_since >= 100)
    assert not traffic.has_returned(2)
    assert traffic.has_returned(max(3, int(share * n_since) + 1))

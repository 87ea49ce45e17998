"""Incidents: alerts that explain each other, or are of one damage, as one thing with a beginning, a state and an end. Pure.

An alert belongs to one incident from the moment it opens. It starts one of its own unless an alert that explains it, or that it
explains, has one already; when a later explanation joins two, all alerts move to the older one. An explanation that ends takes
nothing apart: what was one cause stays one incident.

Damage that is everywhere makes all traffic and some slices alert, and no slice explains the rest. So two alerts that nothing
explains are one incident, too, if one slice contains the other, and thus all its changed answers, and both began together.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import combinations
from types import MappingProxyType
from typing import Final

import msgspec

from quantdrift.facts.figures import Figure

LEAST_SILENCE: Final = timedelta(minutes=10)
LEAST_EXPECTED: Final = 100.0
"""Answers that would have been compared during a silence: by chance alone it has a probability of at most exp(-100) where requests
come independently, and of exp(-10) where ten that are alike come at a time."""
LEAST_RETURNED: Final = 3
RETURNED_RATIO: Final = 0.1


class IncidentState(StrEnum):
    """The states of an incident, in the order in which lists show them."""

    OPEN = "open"
    """An alert of it lasts, and people get its answers."""
    MITIGATED = "mitigated"
    """Nobody gets its answers any more: its version was replaced, or its slice was routed away."""
    RECOVERED = "recovered"
    """The evidence of every alert says so."""
    CLOSED = "closed"
    """A person said so, with the reason, or its slice is not compared any more."""


class Mitigation(StrEnum):
    """Why nobody gets the answers of an incident any more."""

    REPLACED = "replaced"
    """Another version of the model serves. It opens again if the version serves again."""
    ROUTED = "routed"
    """No request of its slices reaches the version, which serves others. It opens again if they come back."""
    REPORTED = "reported"
    """A person said so. It opens again if they take it back, or an alert becomes worse or is added."""


_ENDED: Final = frozenset({"closed", "retired"})


class IncidentAlert(msgspec.Struct, frozen=True, kw_only=True):
    """What of an alert decides about its incident.

    Parameters
    ----------
    incident
        The incident it belongs to; None: it has just been opened.
    explained_by, has_several_causes
        The alert that explains it, or None, and whether it takes others besides. Such an alert joins no two causes: it stays where a
        cause is already, and else goes to the incident of `explained_by`.
    where
        Conditions of its slice; none: all traffic. A slice contains those that have all its conditions and others. None: not known,
        and it contains nothing.
    is_slow
        It is about the latency, and not about answers.
    ended, ended_at
        Why and since when it is over: `recovered`, `replaced`, `retired` or `closed`, empty where that is not known; the time is None
        while it lasts.
    worse_at
        When it last became a page after a ticket, or clearly worse than when somebody acknowledged it; None: it did not.
    """

    id: int
    incident: int | None
    explained_by: int | None = None
    has_several_causes: bool = False
    where: frozenset[str] | None = None
    is_slow: bool = False
    onset_at: datetime
    opened_at: datetime
    ended: str = ""
    ended_at: datetime | None = None
    worse_at: datetime | None = None

    def began_with(self, other: "IncidentAlert") -> bool:
        """Return whether both may have begun at one time.

        The less the evidence says, the longer it takes, and the less exact is the onset that is estimated from it: it is known to
        half of the time from there to the alert.
        """
        known_to = (self.opened_at - self.onset_at + other.opened_at - other.onset_at) / 2
        return abs(self.onset_at - other.onset_at) <= known_to


class Grouping(msgspec.Struct, frozen=True, kw_only=True):
    """Alerts that are one incident.

    Parameters
    ----------
    incident
        Its number: the oldest of those that the alerts had; None: it is new.
    absorbed
        Other incidents whose alerts it takes over.
    """

    incident: int | None
    absorbed: tuple[int, ...]
    alerts: tuple[IncidentAlert, ...]


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an incident, why, and since when it is not open any more; None while it is."""

    state: IncidentState
    mitigation: Mitigation | None = None
    ended_at: datetime | None = None


class SliceTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared of an alert's slice, and of its version, around the last answer of the slice.

    Parameters
    ----------
    last_at, now
        Capture times of the slice's last answer, and of the version's.
    share
        Share of the slice in the version's traffic until then, of the exchanges offered.
    n_since
        Exchanges of the version that were compared since then.
    """

    last_at: datetime
    now: datetime
    share: float
    n_since: float

    @property
    def is_routed_away(self) -> bool:
        """Whether the requests of the slice go elsewhere.

        The version has served for ten minutes since the slice's last answer, and so much was compared of it that a hundred answers
        of the slice would be among it, had the slice kept its share. Assumption: its requests are sampled no less often than the
        version's others, and come independently. A slice that ends by itself, such as a batch job, looks the same: nobody gets its
        answers in either case.
        """
        return self.now - self.last_at >= LEAST_SILENCE and self.share * self.n_since >= LEAST_EXPECTED

    def has_returned(self, n_slice: int) -> bool:
        """Return whether the requests of a slice that was routed away reach the version again.

        Parameters
        ----------
        n_slice
            Exchanges of the slice that were compared since it was found to be routed away; `n_since` counts from there, too. Three
            of them and a tenth of its former share: a straggler is no return.
        """
        return n_slice >= LEAST_RETURNED and n_slice >= RETURNED_RATIO * self.share * self.n_since


def grouped(alerts: Iterable[IncidentAlert]) -> list[Grouping]:
    """Return the incidents that alerts form, in the order of their first alert. Each alert is in exactly one.

    Parameters
    ----------
    alerts
        Of one version; all alerts of each incident among them.
    """
    by_id = {alert.id: alert for alert in sorted(alerts, key=lambda alert: alert.id)}
    of_incident: dict[int, list[int]] = {}
    for alert in by_id.values():
        if alert.incident is not None:
            of_incident.setdefault(alert.incident, []).append(alert.id)
    links = [(numbers[0], number) for numbers in of_incident.values() for number in numbers]
    explained = [(alert, alert.explained_by) for alert in by_id.values() if alert.explained_by in by_id]
    links += [(alert.id, by) for alert, by in explained if not alert.has_several_causes]
    links += _of_one_damage([alert for alert in by_id.values() if alert.explained_by not in by_id])
    sets = {number: some for some in _joined(by_id, links) for number in some}
    for alert, by in explained:
        own = sets[alert.id]
        if alert.has_several_causes and all(by_id[number].explained_by in by_id for number in own):
            together = sorted({*own, *sets[by]})
            sets |= dict.fromkeys(together, together)
    different = {some[0]: some for some in sets.values()}
    return [_grouping([by_id[number] for number in different[first]]) for first in sorted(different)]


def _of_one_damage(alerts: Sequence[IncidentAlert]) -> list[tuple[int, int]]:
    """Return the pairs of alerts that began together of which one slice contains the other; nothing explains any of them."""
    of_slice: dict[tuple[frozenset[str] | None, bool], list[IncidentAlert]] = {}
    for alert in alerts:
        of_slice.setdefault((alert.where, alert.is_slow), []).append(alert)
    return [
        (larger.id, alert.id)
        for alert in alerts
        if alert.where is not None
        for n_conditions in range(len(alert.where))
        for conditions in combinations(alert.where, n_conditions)
        for larger in of_slice.get((frozenset(conditions), alert.is_slow), ())
        if alert.began_with(larger)
    ]


def _joined(numbers: Iterable[int], links: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the numbers in ascending order, by what links join, directly or through others."""
    above = {number: number for number in numbers}

    def root(number: int) -> int:
        while above[number] != number:
            above[number] = number = above[above[number]]
        return number

    for left, right in links:
        low, high = sorted((root(left), root(right)))
        above[high] = low
    sets: dict[int, list[int]] = {}
    for number in sorted(above):
        sets.setdefault(root(number), []).append(number)
    return list(sets.values())


def _grouping(alerts: Sequence[IncidentAlert]) -> Grouping:
    numbers = sorted({alert.incident for alert in alerts if alert.incident is not None})
    return Grouping(
        incident=numbers[0] if numbers else None, absorbed=tuple(numbers[1:]), alerts=tuple(alerts)
    )


def standing(
    alerts: Sequence[IncidentAlert],
    reported_at: datetime | None = None,
    routed: Mapping[int, datetime] = MappingProxyType({}),
) -> Standing:
    """Return the state of an incident from its alerts.

    Parameters
    ----------
    alerts
        All of them, at least one.
    reported_at
        When a person said that it is mitigated; None: nobody did, or took it back.
    routed
        Alerts whose slice was routed away, each with the time of its last answer.
    """
    lasting = [alert for alert in alerts if alert.ended_at is None]
    over_at = [alert.ended_at for alert in alerts if alert.ended_at is not None]
    if lasting:
        if reported_at is not None and not any(_is_news(alert, reported_at) for alert in lasting):
            return Standing(
                state=IncidentState.MITIGATED, mitigation=Mitigation.REPORTED, ended_at=reported_at
            )
        if all(alert.id in routed for alert in lasting):
            ended_at = max([*over_at, *(routed[alert.id] for alert in lasting)])
            return Standing(state=IncidentState.MITIGATED, mitigation=Mitigation.ROUTED, ended_at=ended_at)
        return Standing(state=IncidentState.OPEN)
    endings = {alert.ended for alert in alerts}
    ended_at = max(over_at)
    if Mitigation.REPLACED.value in endings:
        return Standing(state=IncidentState.MITIGATED, mitigation=Mitigation.REPLACED, ended_at=ended_at)
    state = IncidentState.CLOSED if endings & _ENDED else IncidentState.RECOVERED
    return Standing(state=state, ended_at=ended_at)


def _is_news(alert: IncidentAlert, reported_at: datetime) -> bool:
    """Return whether an alert says more than was known when a person said that its incident is mitigated."""
    return alert.opened_at > reported_at or (alert.worse_at is not None and alert.worse_at > reported_at)


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """An incident as people read it.

    Parameters
    ----------
    severity
        Highest of its alerts so far: `warning` or `firing`.
    slices
        The slices that drifted and that no other one explains, the oldest alert first.
    said_by, reason
        Of a state that a person gave it: who, and why; else empty.
    ended_at
        Since when it is not open any more; None while it is.
    changed
        Changed answers from its beginning to its end, or so far, estimated; None: not counted yet, or of no use, as for a latency.
    people
        People with at least one changed answer in this time, at least; None: it is not known who sends a request.
    cost
        What they cost; None where no price is configured.
    serving
        Where its version was replaced: the versions that serve now.
    alerts
        Numbers of its alerts, the oldest first.
    """

    id: int
    model: str
    version: str
    version_id: int
    severity: str
    slices: tuple[str, ...]
    slice_ids: tuple[int, ...]
    state: IncidentState
    mitigation: Mitigation | None
    said_by: str
    reason: str
    began_at: datetime
    opened_at: datetime
    ended_at: datetime | None
    changed: Figure | None
    people: Figure | None
    cost: Figure | None = None
    serving: tuple[str, ...] = ()
    alerts: tuple[int, ...]

    @property
    def is_open(self) -> bool:
        """Whether people get its answers, as far as is known."""
        return self.state is IncidentState.OPEN


class StoryKind(StrEnum):
    """What happens in the story of an incident."""

    ONSET = "onset"
    TICKET = "ticket"
    PAGE = "page"
    END = "end"
    ACK = "acknowledged"
    UNACK = "not acknowledged any more"
    NOTE = "note"
    WORSE = "worse"
    CLOSE = "closed"
    DIAGNOSIS = "diagnosis"
    REPAIR = "repair"
    GATE = "gate"
    RELEASE = "release"
    STATE = "state"


class StoryEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened in an incident.

    Parameters
    ----------
    who
        The person; empty: the monitor, or the traffic.
    text
        What happened, in a sentence or as the person said it.
    alert
        The alert that it is about; None: the whole incident, or the model.
    """

    at: datetime
    kind: StoryKind
    who: str = ""
    text: str
    alert: int | None = None


def changes_of(incident: Incident) -> tuple[str, ...]:
    """Return what a person can say of the state of an incident: `mitigate`, `reopen`, `close`; nothing where it is over."""
    possible = {
        (IncidentState.OPEN, None): ("mitigate", "close"),
        (IncidentState.MITIGATED, Mitigation.REPORTED): ("reopen", "close"),
        (IncidentState.MITIGATED, Mitigation.ROUTED): ("close",),
        (IncidentState.MITIGATED, Mitigation.REPLACED): ("close",),
    }
    return possible.get((incident.state, incident.mitigation), ())

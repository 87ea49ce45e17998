"""Alerts as intervals of time, and the pairing of recorded alerts with those of a policy under test."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import StrEnum

import msgspec

from quantdrift.core.records import Verdict
from quantdrift.monitor.fold.slice_state import Key
from quantdrift.storage.fold.history import StoredTransition
from quantdrift.storage.fold_rows import to_us

_ALERTS = (Verdict.WARNING, Verdict.FIRING)


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One alert of a slice, from its first warning or page to its end. Times are microseconds since 1970.

    Parameters
    ----------
    key
        Candidate version and slice.
    metric
        The metric with the most evidence when it opened.
    onset_us
        Estimated onset, or when it opened where there is no estimate.
    opened_us
        First warning or page.
    paged_us
        First page; None: it remained a ticket.
    ended_us
        End; None: it is still open.
    """

    key: Key
    metric: str
    onset_us: int
    opened_us: int
    paged_us: int | None
    ended_us: int | None

    @property
    def decided_us(self) -> int:
        """When it reached its highest severity."""
        return self.opened_us if self.paged_us is None else self.paged_us

    def overlaps(self, other: "Alert") -> bool:
        """Return whether both are about the same drift: their times from onset to end overlap."""
        begins, ends = max(self.onset_us, other.onset_us), (self.ended_us, other.ended_us)
        return all(end is None or begins <= end for end in ends)


class Match(StrEnum):
    """The difference between an alert of the policy under test and the recorded one."""

    SAME = "same"
    EARLIER = "earlier"
    LATER = "later"
    NEW = "new"  # there is no recorded alert
    MISSED = "missed"  # the policy under test raises no alert
    STRONGER = "stronger"  # a page instead of a ticket
    WEAKER = "weaker"  # a ticket instead of a page


class Pairing(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded alert and that of the policy under test; one of them may be None.

    Parameters
    ----------
    later_s
        By how much the tested alert is later, in event time; negative: earlier. None where one of them is missing.
    """

    recorded: Alert | None
    tested: Alert | None
    match: Match
    later_s: float | None

    @property
    def key(self) -> Key:
        """Candidate version and slice."""
        alert = self.recorded or self.tested
        assert alert is not None
        return alert.key


def alerts(transitions: Iterable[StoredTransition]) -> list[Alert]:
    """Return the alerts that changes of verdict make up, in the order in which they opened."""
    running: dict[Key, Alert] = {}
    ended: list[Alert] = []
    for change in transitions:
        key = (change.model_version_id, change.slice_id)
        before = running.pop(key, None)
        if change.to_verdict not in _ALERTS:
            if before is not None:
                ended.append(msgspec.structs.replace(before, ended_us=change.at_us))
            continue
        paged_us = change.at_us if change.to_verdict is Verdict.FIRING else None
        if before is None:
            evidence = change.event.evidence if change.event else None
            onset = evidence.onset if evidence else None
            running[key] = Alert(
                key=key,
                metric=evidence.metric.value if evidence else "",
                onset_us=to_us(datetime.fromisoformat(onset)) if onset else change.at_us,
                opened_us=change.at_us,
                paged_us=paged_us,
                ended_us=None,
            )
        else:
            first_us = paged_us if before.paged_us is None else before.paged_us
            running[key] = msgspec.structs.replace(before, paged_us=first_us)
    return sorted([*ended, *running.values()], key=lambda alert: (alert.opened_us, alert.key))


def pair(recorded: Sequence[Alert], tested: Sequence[Alert]) -> list[Pairing]:
    """Return both sides' alerts in pairs, each alert once, in the order in which they opened.

    Alerts of one slice are a pair where they overlap; the first that overlaps is taken.
    """
    unpaired = list(tested)
    pairs = []
    for alert in recorded:
        match = next((other for other in unpaired if other.key == alert.key and other.overlaps(alert)), None)
        if match is not None:
            unpaired.remove(match)
        pairs.append(_pairing(alert, match))
    pairs += [_pairing(None, alert) for alert in unpaired]
    return sorted(pairs, key=_opened)


def _pairing(recorded: Alert | None, tested: Alert | None) -> Pairing:
    if recorded is None or tested is None:
        match = Match.NEW if recorded is None else Match.MISSED
        return Pairing(recorded=recorded, tested=tested, match=match, later_s=None)
    if (recorded.paged_us is None) is not (tested.paged_us is None):
        match = Match.STRONGER if recorded.paged_us is None else Match.WEAKER
        later_us = tested.opened_us - recorded.opened_us
    else:
        later_us = tested.decided_us - recorded.decided_us
        match = Match.SAME if later_us == 0 else Match.LATER if later_us > 0 else Match.EARLIER
    return Pairing(recorded=recorded, tested=tested, match=match, later_s=later_us / 1e6)


def _opened(pairing: Pairing) -> tuple[int, Key]:
    alert = pairing.recorded or pairing.tested
    assert alert is not None
    return alert.opened_us, alert.key

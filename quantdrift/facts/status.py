"""The states of a slice, as programs and as people read them: one table, from which every surface takes its words and its order."""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec

from quantdrift.core.notation import moment
from quantdrift.core.records import Verdict

_T = TypeVar("_T")


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict in words.

    Parameters
    ----------
    verdict
        As tables, the read API and telemetry have it. It is the class of the colour, too.
    words
        As people read it, everywhere.
    meaning
        A sentence for a legend.
    alert
        What an alert of this severity is called; empty where there is none.
    """

    verdict: Verdict
    words: str
    meaning: str
    alert: str = ""


class Serves(StrEnum):
    """Whether a version serves: stands beside its status and never in its place."""

    SERVING = "serving"
    REPLACED = "replaced"
    """Another version of the model serves instead."""
    SILENT = "silent"
    """Nothing of it was seen for ten times its usual gap, at least ten minutes."""


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside the status of a version's slices.

    Parameters
    ----------
    serves
        None: no exchange of it was folded yet.
    replaced_by
        The version that serves instead; empty: it is not replaced.
    seen_at
        Its newest exchange.
    paused
        By whom and since when sampling is paused; empty: it is not.
    """

    serves: Serves | None = None
    replaced_by: str = ""
    seen_at: datetime | None = None
    paused: str = ""

    def attributes(self) -> dict[str, str]:
        """Return it as telemetry has it: names of programs; what is not known or does not apply is left out."""
        values = {
            "version_serving": "" if self.serves is None else self.serves.value,
            "replaced_by": self.replaced_by,
            "paused": self.paused,
        }
        return {name: value for name, value in values.items() if value}

    @property
    def words(self) -> str:
        """As people read it: `serving`, `replaced by int8-2`, `silent since 2026-11-23 21:42 UTC`, `serving, paused by ann since ...`."""
        if self.serves is None:
            text = "not seen yet"
        elif self.serves is Serves.REPLACED:
            text = f"replaced by {self.replaced_by}" if self.replaced_by else "replaced"
        elif self.serves is Serves.SILENT and self.seen_at is not None:
            text = f"silent since {moment(self.seen_at)}"
        else:
            text = self.serves.value
        return f"{text}, paused {self.paused}" if self.paused else text


STATUSES: Final = (
    Status(
        verdict=Verdict.FIRING,
        words="drifted",
        meaning="outside of its budget, or worse than it was: this pages",
        alert="page",
    ),
    Status(
        verdict=Verdict.WARNING,
        words="possible drift",
        meaning="the evidence grows, and is not enough for a page: this opens a ticket",
        alert="ticket",
    ),
    Status(
        verdict=Verdict.UNKNOWN,
        words="not known",
        meaning="too little was compared, too much was lost, or nothing can be compared; the reason stands beside it",
    ),
    Status(verdict=Verdict.OK, words="OK", meaning="within its budget, and enough was measured to say so"),
)
"""The worst first."""
_OF: Final = MappingProxyType({status.verdict.value: status for status in STATUSES})
RANK: Final = MappingProxyType({status.verdict.value: rank for rank, status in enumerate(STATUSES)})
"""Places of the verdicts in an order, the worst first."""
LEVEL: Final = MappingProxyType({name: len(STATUSES) - 1 - rank for name, rank in RANK.items()})
"""Numbers of the verdicts for plots and gauges, of which a larger one is worse: 0 is OK."""
SERVES: Final = MappingProxyType({serves: float(number) for number, serves in enumerate(Serves)})
"""Numbers for gauges, in the order of the states: 0 serves."""
ALERTS: Final = frozenset(status.verdict.value for status in STATUSES if status.alert)
"""The verdicts in which a slice has an alert."""
WORST_FIRST: Final = f"array[{', '.join(repr(name) for name in RANK)}]"
"""The same order in SQL, for `array_position`."""


def said(verdict: str) -> str:
    """Return a verdict as people read it."""
    return _OF[verdict].words


def alert_kind(severity: str) -> str:
    """Return what an alert of a severity is called: `page` or `ticket`."""
    return _OF[severity].alert


def worst(verdicts: Iterable[str]) -> Verdict:
    """Return the worst of some verdicts; unknown where there is none."""
    return Verdict(min(verdicts, key=RANK.__getitem__, default=Verdict.UNKNOWN))


def answering(versions: Sequence[_T], verdict: Callable[[_T], str], *, serves: Callable[[_T], bool]) -> _T:
    """Return the version that answers for its model: the worst of those that serve.

    Of equally bad ones, and where none serves, it is the first: `versions` has that with the newest traffic first.
    """
    return min(filter(serves, versions), key=lambda version: RANK[verdict(version)], default=versions[0])

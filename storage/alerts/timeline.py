"""What happened, in order: the verdicts of an alert, releases and decisions of a slice, and how many alerts a period had."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.storage import queries
from quantdrift.storage.snapshot import rows

_EVENTS: Final = text(queries.EVENTS)
_STEPS: Final = text("""
    select at, from_verdict as before, to_verdict as after, details ->> 'reason' as reason, slice_id from transition
    where alert_id = :id order by id limit 100
""")
_CHANGES = text("""
    select count(*) filter (where paged_now) as pages, count(*) filter (where warned_now and not paged) as tickets
    from (
        select bool_or(to_verdict = 'firing') as paged, bool_or(to_verdict = 'firing' and at >= :begin) as paged_now,
            bool_or(to_verdict = 'warning' and at >= :begin) as warned_now
        from transition
        where at < :end and alert_id in (
            select alert_id from transition
            where at >= :begin and at < :end and model_version_id = any(cast(:versions as int[]))
        )
        group by alert_id
    ) told
""")


class SliceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A release or a decision: what happened, to what, who did it and why; values are those of a budget."""

    at: datetime
    kind: str
    subject: str
    who: str
    why: str = ""
    old_value: str | None = None
    new_value: str | None = None


class VerdictStep(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a slice's verdict: in the timeline of an alert with its reason, in the history of a slice without."""

    at: datetime
    before: str
    after: str
    reason: str | None = None
    slice_id: int


class AlertCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The number of alerts in the period: those that paged, and those that remained tickets."""

    pages: int
    tickets: int


async def events_of(
    connection: AsyncConnection, version_id: int, slice_id: int, begin: datetime, end: datetime
) -> list[SliceEvent]:
    """Return the releases of the model and the decisions about the slice in a time, in order; the first 200."""
    wanted = {"version": version_id, "slice": slice_id, "begin": begin, "end": end}
    return await rows(connection, SliceEvent, _EVENTS, **wanted)


async def steps(connection: AsyncConnection, alert_id: int) -> list[VerdictStep]:
    """Return the timeline of an alert."""
    return await rows(connection, VerdictStep, _STEPS, id=alert_id)


async def alert_counts(
    connection: AsyncConnection, begin: datetime, end: datetime, versions: Sequence[int]
) -> AlertCounts:
    """Return how many alerts paged in a period, and how many warned in it and did not page by its end."""
    return (await rows(connection, AlertCounts, _CHANGES, begin=begin, end=end, versions=list(versions)))[0]

"""The inputs of the triage list: the evidence of every watched slice, and how long the fleet has been watched."""

from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.facts.events import AlertEvent, event_of
from quantdrift.storage.alerts.alerts import DETAILS, LAST_EVENT

_MONTH_S: Final = 30 * 86_400
_EVIDENCE: Final = text(f"""
    select w.model, w.candidate_version as version, s.name as slice, s.id as slice_id, v.verdict, v.reason,
        v.evidence, v.threshold, v.n_groups, v.last_at, v.estimate, {DETAILS} as details
    from verdict v left join alert a on a.id = v.alert_id {LAST_EVENT} join model_version w on w.id = v.model_version_id join slice s on s.id = v.slice_id
    where exists (
        select from detector d
        where d.model_version_id = v.model_version_id and d.slice_id = v.slice_id and d.retired_at is null
    )
    order by v.evidence desc, w.id, s.id
""")  # noqa: S608 - constants
_MONTHS: Final = text("""
    select extract(epoch from (select event_time from fold) - min(created_at)) / :month_s from detector
""")


class TriagedSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A slice of a candidate version with its evidence; a firing slice has that of its alarm.

    Parameters
    ----------
    alert
        The event of its open alert, with the figures that decided; None: no alert is open.
    """

    model: str
    version: str
    slice: str
    slice_id: int
    verdict: str
    reason: str
    evidence: float
    threshold: float
    n_groups: int
    last_at: datetime
    estimate: dict[str, dict[str, Any]]
    alert: AlertEvent | None = None


async def watched(connection: AsyncConnection) -> tuple[list[TriagedSlice], float]:
    """Return every watched slice, most evidence first, and for how many months the fleet has been watched."""
    rows = (await connection.execute(_EVIDENCE)).mappings().all()
    months = await connection.scalar(_MONTHS, {"month_s": _MONTH_S})
    slices = []
    for row in rows:
        values = dict(row)
        alert = event_of(values.pop("details") or {})
        slices.append(msgspec.structs.replace(msgspec.convert(values, TriagedSlice), alert=alert))
    return slices, float(months or 0.0)

"""The events that wait for the collector, in the order of their ids.

An event that the collector refused although it accepted others waits behind those that it never refused, so that it
does not delay them. It is never given up: the outbox contains only alert transitions and changes of noise, which are few.
"""

from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.records import Verdict
from quantdrift.facts.status import Serving
from quantdrift.facts.words.text import AlertText
from quantdrift.storage.alerts.alerts import words_of
from quantdrift.storage.fold_rows import to_us
from quantdrift.storage.serving import servings

_UNSENT: Final = text("""
    select o.id, o.attempts, coalesce(t.at, n.at) as at, t.from_verdict, t.to_verdict,
        coalesce(t.details, n.details) as details, t.text, n.exceeds, t.alert_id
    from outbox o
    left join transition t on t.id = o.transition_id
    left join noise_change n on n.id = o.noise_change_id
    where o.sent_at is null order by o.attempts, o.id limit :most
""")
_SENT: Final = text("update outbox set sent_at = now(), last_error = null where id = :id")
_REFUSED: Final = text("update outbox set attempts = attempts + 1, last_error = :error where id = :id")
_UNREACHED: Final = text("update outbox set last_error = :error where id = :id")


class WaitingEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A transition, or a change of noise, that the collector has not accepted yet.

    Parameters
    ----------
    attempts
        How often the collector refused it while it accepted others.
    at_us
        Event time, microseconds since 1970.
    from_verdict, to_verdict
        The change of verdict; None for a change of noise.
    details, text
        Attributes of the event, without their prefix; and its words, None for a change of noise.
    exceeds
        Whether noise is too high from now on; None for a change of verdict.
    alert_id
        The alert that the change of verdict opens, changes or ends; None for a change of noise.
    serving
        Whether its version serves and is paused when the event is read.
    """

    id: int
    attempts: int
    at_us: int
    from_verdict: Verdict | None
    to_verdict: Verdict | None
    details: dict[str, Any]
    text: AlertText | None = None
    exceeds: bool | None = None
    alert_id: int | None = None
    serving: Serving = Serving()


async def unsent(connection: AsyncConnection, most: int, max_share: float = 1.0) -> list[WaitingEvent]:
    """Return waiting events in the order of sending: those that the collector refused come last.

    Parameters
    ----------
    max_share
        As of `quantdrift.storage.serving.servings`.
    """
    rows = (await connection.execute(_UNSENT, {"most": most})).mappings().all()
    beside = await servings(connection, max_share) if rows else {}
    return [
        WaitingEvent(
            id=row["id"],
            attempts=row["attempts"],
            at_us=to_us(row["at"]),
            from_verdict=Verdict(row["from_verdict"]) if row["from_verdict"] else None,
            to_verdict=Verdict(row["to_verdict"]) if row["to_verdict"] else None,
            details=row["details"],
            text=words_of(row["text"], row["details"]) if row["exceeds"] is None else None,
            exceeds=row["exceeds"],
            alert_id=row["alert_id"],
            serving=beside.get(
                (row["details"].get("model", ""), row["details"].get("version", "")), Serving()
            ),
        )
        for row in rows
    ]


async def mark_sent(connection: AsyncConnection, event_id: int) -> None:
    """Mark an event as accepted by the collector, or as done where there is no collector."""
    await connection.execute(_SENT, {"id": event_id})


async def mark_failed(connection: AsyncConnection, event_id: int, error: str, *, refused: bool) -> None:
    """Record that an export failed; it will be tried again, behind the others where it was `refused`."""
    await connection.execute(_REFUSED if refused else _UNREACHED, {"id": event_id, "error": error})


async def count_unsent(connection: AsyncConnection) -> tuple[int, datetime | None]:
    """Return the number of waiting events, and when the oldest of them was written."""
    count = text("select count(*) as n, min(created_at) as oldest from outbox where sent_at is null")
    row = (await connection.execute(count)).one()
    return int(row.n), row.oldest

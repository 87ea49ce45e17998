"""Events that wait for the collector, in the order of their numbers.

An event that the collector refused although it took others waits behind those that it never refused, so that it
holds up nobody. It is never given up: the outbox holds alert transitions alone, and their number is its bound.
"""

from typing import Any, Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.records import Verdict
from quantdrift.storage.monitor.rows import to_us

_UNSENT: Final = text("""
    select o.id, o.attempts, coalesce(t.at, n.at) as at, t.from_verdict, t.to_verdict,
        coalesce(t.details, n.details) as details, n.exceeds
    from outbox o
    left join transition t on t.id = o.transition_id
    left join noise_change n on n.id = o.noise_change_id
    where o.sent_at is null order by o.attempts, o.id limit :most
""")
_SENT: Final = text("update outbox set sent_at = now(), last_error = null where id = :id")
_REFUSED: Final = text("update outbox set attempts = attempts + 1, last_error = :error where id = :id")
_UNREACHED: Final = text("update outbox set last_error = :error where id = :id")


class WaitingEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A transition, or a change of noise, that the collector has not taken yet.

    Parameters
    ----------
    id
        Its number in the outbox.
    attempts
        How often the collector refused it while it took others.
    at_us
        Event time, microseconds since 1970.
    from_verdict, to_verdict
        What changed; None where noise did.
    details
        Its attributes, without their prefix.
    exceeds
        Whether noise is too much from here on; None where a verdict changed.
    """

    id: int
    attempts: int
    at_us: int
    from_verdict: Verdict | None
    to_verdict: Verdict | None
    details: dict[str, Any]
    exceeds: bool | None = None


async def unsent(connection: AsyncConnection, most: int) -> list[WaitingEvent]:
    """Return waiting events in their order, those that the collector refused behind the others."""
    return [
        WaitingEvent(
            id=row["id"],
            attempts=row["attempts"],
            at_us=to_us(row["at"]),
            from_verdict=Verdict(row["from_verdict"]) if row["from_verdict"] else None,
            to_verdict=Verdict(row["to_verdict"]) if row["to_verdict"] else None,
            details=row["details"],
            exceeds=row["exceeds"],
        )
        for row in (await connection.execute(_UNSENT, {"most": most})).mappings()
    ]


async def mark_sent(connection: AsyncConnection, event_id: int) -> None:
    """Note that the collector took an event, or that there is none to be told."""
    await connection.execute(_SENT, {"id": event_id})


async def mark_failed(connection: AsyncConnection, event_id: int, error: str, *, refused: bool) -> None:
    """Note that an export failed; it will be tried again, behind the others where it was `refused`."""
    await connection.execute(_REFUSED if refused else _UNREACHED, {"id": event_id, "error": error})


async def count_unsent(connection: AsyncConnection) -> int:
    """Return how many events wait."""
    return int(await connection.scalar(text("select count(*) from outbox where sent_at is null")) or 0)

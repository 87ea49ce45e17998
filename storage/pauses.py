"""What is paused now: in the whole fleet, as the audit has it, and at single sidecars, as these reported."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.notation import count_of
from quantdrift.core.sampling.pause import Order, Pause
from quantdrift.storage.audit import Action, newest
from quantdrift.storage.snapshot import KNOWN_STRATA

EVERYTHING: Final = ""
"""In the place of a model: all of them."""
# A report is stored again each hour while its sidecar lives. There is always a row: of the time alone where no sidecar paused itself.
_HERE: Final = text("""
    select clock.now, r.source, r.pause, r.reported_at from (select now() as now) clock
    left join process_report r on r.role = 'sidecar' and r.pause is not null and r.seen_at > clock.now - interval '2 hours'
    order by r.source
""")
_SIDECARS: Final = text("""
    select source from process_report where role = 'sidecar' and seen_at > now() - interval '2 hours'
""")
# The samples of each model that a sidecar has taken since its start: it serves these models.
_TAKEN: Final = text(f"""
    {KNOWN_STRATA}
    select t.source, m.key as model, sum((m.value ->> 'taken')::bigint)::bigint as taken
    from known k cross join lateral (
        select * from tally t where t.source = k.source and t.boot = k.boot and t.stratum = k.stratum
        order by t.sequence desc limit 1
    ) t cross join lateral jsonb_each(t.models) m
    where t.at > now() - interval '1 day'
    group by 1, 2
""")  # noqa: S608 - constants
_ACTIONS: Final = (Action.PAUSE, Action.RESUME, Action.PAUSE_SEEN)


class SidecarPause(msgspec.Struct, frozen=True, kw_only=True):
    """What is paused at one sidecar alone.

    Parameters
    ----------
    source
        Its name.
    """

    source: str
    pause: Pause


async def local_pauses(connection: AsyncConnection) -> list[SidecarPause]:
    """Return the pauses in effect at sidecars that have reported in the last two hours."""
    return (await _local(connection))[1]


async def _local(connection: AsyncConnection) -> tuple[datetime, list[SidecarPause]]:
    """Return the time, and the same as `local_pauses`."""
    rows = (await connection.execute(_HERE)).all()
    now: datetime = rows[0].now
    pauses = [
        SidecarPause(source=row.source, pause=_read(row.pause, row.reported_at).at(now))
        for row in rows
        if row.source is not None
    ]
    return now, [local for local in pauses if local.pause.everything is not None or local.pause.models]


async def paused(connection: AsyncConnection, max_share: float) -> dict[str, str]:
    """Return by whom and since when models are paused, by model; under `EVERYTHING` what holds for all.

    Parameters
    ----------
    max_share
        Share of a model's sidecars from which on a pause at them alone counts as one of the model. Which sidecars serve it is
        known from their samples; before there are any, all may.
    """
    now, here = await _local(connection)
    entry = await newest(connection, _ACTIONS)
    fleet = Pause() if entry is None else _read(entry.after, entry.at).at(now)
    words = await _at_sidecars(connection, here, max_share) if here else {}
    words |= {model: order.in_words() for model, order in fleet.models.items()}
    if fleet.everything is not None:
        words[EVERYTHING] = fleet.everything.in_words()
    return words


async def _at_sidecars(
    connection: AsyncConnection, here: list[SidecarPause], max_share: float
) -> dict[str, str]:
    """Return the models that enough of their sidecars have paused by themselves."""
    serves: dict[str, set[str]] = {}
    for source, model, taken in (await connection.execute(_TAKEN)).all():
        if model and taken > 0:
            serves.setdefault(model, set()).add(source)
    sources = set((await connection.scalars(_SIDECARS)).all())
    models = serves.keys() | {model for pause in here for model in pause.pause.models}
    words = {}
    for model in sorted(models) or [EVERYTHING]:
        of_model = serves.get(model) or sources
        orders = [
            (pause.source, order)
            for pause in here
            if pause.source in of_model
            and (order := pause.pause.everything or pause.pause.models.get(model)) is not None
        ]
        if orders and len(orders) > max_share * len(of_model):
            source, order = min(orders, key=lambda entry: entry[1].at)
            where = f"at sidecar {source}" if len(of_model) == 1 else _where(len(orders), len(of_model))
            words[model] = f"{where} {order.in_words()}"
    return words


def _where(n: int, of: int) -> str:
    return f"at {n} of {count_of(of, 'sidecar')}"


def _read(state: Mapping[str, Any] | None, reported_at: datetime) -> Pause:
    """Return the pause in a stored state, whose times are text; one that cannot be read is one of everything.

    A sidecar with very many paused models reports their number alone.
    """
    try:
        return msgspec.convert(state or {}, Pause, strict=False)
    except msgspec.ValidationError:
        return Pause(everything=Order(by="somebody (too many models to name)", at=reported_at))

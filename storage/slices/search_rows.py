"""The rows for the search of slices and the tests of candidates: limited, and chosen independently of their values.

Where there are more than are wanted, whole sessions or exchanges are kept by a hash of their key: that share says
nothing about their divergence.
"""

from collections.abc import AsyncIterator, Collection, Sequence
from datetime import datetime
from math import ceil
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.records import Policy, Predicate
from quantdrift.core.slices import is_describing, time_attributes
from quantdrift.storage.fold_rows import ComparisonRow, to_us

_SHARES: Final = 1 << 20
_AT_ONCE: Final = 1000
_AS_STORED: Final = (
    "item",
    "model_version_id",
    "policy_id",
    "group_key",
    "pi1",
    "pi2",
    "u1",
    "u2",
    "candidate_margin",
    "js",
    "divergence",
    "margin",
)

_N_ITEMS: Final = text("""
    select coalesce(sum(h.n_items), 0)::bigint from rollup_hour h join slice s on s.id = h.slice_id
    where h.model_version_id = :version and s.predicate = 'true'
        and h.hour >= date_trunc('hour', cast(:begin as timestamptz)) and h.hour < :end
""")
_FROM: Final = """
    from comparisons(:begin, :end) c
    where c.model_version_id = :version
        and (hashtextextended(coalesce(nullif(c.group_key, ''), c.exchange_id::text), 0) & 1048575) < :kept
"""
_SEARCHED: Final = text(f"""
    select c.exchange_id::text, c.captured_at, c.pi1 * c.pi2 as pi, c.flip, c.divergence, c.attributes, c.features
    {_FROM} order by c.captured_at desc, c.exchange_id, c.item limit :most
""")
_LOCAL: Final = "(c.captured_at at time zone :zone)"
_FIRST_HOUR: Final = f"extract(hour from {_LOCAL})::int / 6 * 6"
# The attributes that `time_attributes` returns, as expressions.
_TIME: Final = {
    "time.week": f"case when extract(isodow from {_LOCAL}) >= 6 then 'weekend' else 'weekday' end",
    "time.day": f"trim(to_char({_LOCAL}, 'day'))",
    "time.hours": f"to_char({_FIRST_HOUR}, 'FM00') || '-' || to_char({_FIRST_HOUR} + 6, 'FM00')",
}
_POLICIES: Final = text("select id, definition from policy where id = any(cast(:wanted as int[]))")


class SearchedItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item of a search; columns as in `comparison`, `pi` is the total inclusion probability.

    `attributes` has those of the time of capture, too.
    """

    exchange_id: str
    pi: float
    flip: bool | None
    divergence: float | None
    attributes: dict[str, str]
    features: dict[str, float]


class SearchWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Items of one version, captured from `begin` to `end`, exclusive; `share` of them, in (0, 1]."""

    version_id: int
    begin: datetime
    end: datetime
    share: float = 1.0

    def parameters(self) -> dict[str, Any]:
        """Return it as the statements' parameters."""
        return {
            "version": self.version_id,
            "begin": self.begin,
            "end": self.end,
            "kept": ceil(self.share * _SHARES),
        }


async def n_items(connection: AsyncConnection, window: SearchWindow) -> int:
    """Return the number of items that the roll-ups count in whole hours around a window: a cheap estimate."""
    wanted = {"version": window.version_id, "begin": window.begin, "end": window.end}
    return int(await connection.scalar(_N_ITEMS, wanted) or 0)


async def searched_items(
    connection: AsyncConnection, window: SearchWindow, most: int, zone: ZoneInfo
) -> AsyncIterator[SearchedItem]:
    """Yield the newest items of a window, at most `most`, without keeping them all in memory.

    `zone` is that of `capture.time_zone`.
    """
    parameters = {**window.parameters(), "most": most}
    result = await connection.stream(_SEARCHED, parameters, execution_options={"yield_per": _AT_ONCE})
    async for row in result.mappings():
        yield SearchedItem(
            exchange_id=row["exchange_id"],
            pi=row["pi"],
            flip=row["flip"],
            divergence=row["divergence"],
            attributes=row["attributes"] | time_attributes(row["captured_at"], zone),
            features={key: value for key, value in row["features"].items() if not is_describing(key)},
        )


async def tested_items(
    connection: AsyncConnection,
    window: SearchWindow,
    candidates: Sequence[Sequence[Predicate]],
    most: int,
    zone: ZoneInfo,
) -> AsyncIterator[ComparisonRow]:
    """Yield the items of a window that lie in any of the candidates, in the order of capture, at most `most`.

    Their `slice_ids` are the places, in `candidates`, of those that they lie in. `zone` is that of `capture.time_zone`.
    """
    parameters = {**window.parameters(), "most": most, "zone": zone.key}
    inside = []
    for index, where in enumerate(candidates):
        conditions = [
            condition_part
            for number, condition in enumerate(where)
            for condition_part in _condition(condition, f"{index}_{number}", parameters)
        ]
        inside.append(f"coalesce({' and '.join(conditions)}, false)")
    statement = text(f"""
        select {", ".join(f"c.{name}" for name in _AS_STORED)}, c.exchange_id::text, c.captured_at, c.flip, c.topk,
            array[{", ".join(inside)}] as inside
        {_FROM} and ({" or ".join(inside)})
        order by c.captured_at, c.exchange_id, c.item limit :most
    """)
    result = await connection.stream(statement, parameters, execution_options={"yield_per": _AT_ONCE})
    async for row in result.mappings():
        yield ComparisonRow(
            **{name: row[name] for name in _AS_STORED},
            exchange_id=row["exchange_id"],
            captured_us=to_us(row["captured_at"]),
            slice_ids=tuple(index for index, is_in in enumerate(row["inside"]) if is_in),
            flip=None if row["flip"] is None else float(row["flip"]),
            topk=None if row["topk"] is None else float(row["topk"]),
        )


async def policies_of(connection: AsyncConnection, wanted: Collection[int]) -> dict[int, Policy]:
    """Return the stored policies of these ids, by id."""
    rows = await connection.execute(_POLICIES, {"wanted": sorted(wanted)})
    return {row.id: msgspec.convert(row.definition, Policy) for row in rows}


def _condition(condition: Predicate, name: str, parameters: dict[str, Any]) -> list[str]:
    if condition.key in _TIME:
        parameters[f"equals_{name}"] = condition.equals
        return [f"{_TIME[condition.key]} = :equals_{name}"]
    parameters[f"key_{name}"] = condition.key
    if condition.equals is not None:
        parameters[f"equals_{name}"] = condition.equals
        return [f"c.attributes ->> cast(:key_{name} as text) = :equals_{name}"]
    value = f"(c.features ->> cast(:key_{name} as text))::double precision"
    ends = []
    if condition.low is not None:
        parameters[f"low_{name}"] = condition.low
        ends.append(f"{value} >= :low_{name}")
    if condition.high is not None:
        parameters[f"high_{name}"] = condition.high
        ends.append(f"{value} < :high_{name}")
    return ends or ["false"]

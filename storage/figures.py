"""Reads of figures: the sums of slices in a window, from roll-ups, which have whole hours exactly."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.facts import figures
from quantdrift.facts.figures import HOUR, Counted, Figure, FigureName, Scope, Served, Subject, Window
from quantdrift.facts.interval import HIGHEST
from quantdrift.storage.estimates import ROLL_UP, roll_up_of

# Sums over people are added for the slices that are shown alone: there may be thousands of slices.
_SUMS_OF_ALL: Final = f"""
    select r.slice_id, s.name as slice, s.predicate, {ROLL_UP},
        sum(weight * n_items / nullif(n_groups, 0)) as items, min(hour) as first_hour
    from rollup_hour r join slice s on s.id = r.slice_id
    where r.model_version_id = :version and r.hour >= :begin and r.hour <= :end group by 1, 2, 3
"""  # noqa: S608 - constants
_SUMS: Final = text(
    _SUMS_OF_ALL.replace(
        "people is not null",
        "people is not null and (cast(:shown as int[]) is null or slice_id = any(cast(:shown as int[])))",
    ).replace("::", "\\:\\:")
)
_NEWEST_HOURS: Final = text("""
    select hour, n_items from rollup_hour
    where model_version_id = :version and slice_id = :slice order by hour desc limit 24
""")


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """A version that figures are of; `first_at` and `last_at` are its first and its newest exchange."""

    id: int
    model: str
    version: str
    first_at: datetime
    last_at: datetime


class SliceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one slice of one version in one window.

    Parameters
    ----------
    changed_share, divergence
        None where no answer has one. Of a slice that was not asked for, people who come back count as others do.
    requests, changed
        As rates of a day, or, where there is too little to say so, as counts so far; `changed` is None where answers are not compared.
    share
        Of the answers of the version.
    sampled
        Share of its requests that were compared.
    """

    changed_share: Figure | None
    divergence: Figure | None
    requests: Figure
    changed: Figure | None
    share: float
    sampled: float

    @property
    def n(self) -> int:
        """Answers compared."""
        return self.requests.n

    @property
    def basis(self) -> str:
        """What the rates rest on while that is less than a day; `so far` where they are counts."""
        return self.requests.basis if self.requests.name is FigureName.REQUESTS_PER_DAY else "so far"


async def last_day(
    connection: AsyncConnection,
    version: Version,
    as_of: datetime,
    *,
    slice_ids: Sequence[int] | None = None,
    unit: str = "",
) -> dict[int, SliceFigures]:
    """Return the figures of every slice in the last 24 hours with data.

    Parameters
    ----------
    slice_ids
        Slices whose intervals are wanted; None: all.
    unit
        Of the model's divergence.
    """
    return await in_window(
        connection, version, figures.last_day(version.last_at), as_of, slice_ids=slice_ids, unit=unit
    )


async def now(
    connection: AsyncConnection, version: Version, slice_id: int, as_of: datetime, *, unit: str = ""
) -> SliceFigures | None:
    """Return the figures of a slice in the newest hours that hold 100 answers; None where there are none."""
    values = {"version": version.id, "slice": slice_id}
    hours = [(row.hour, row.n_items) for row in await connection.execute(_NEWEST_HOURS, values)]
    if not hours:
        return None
    # The slice's newest hour may be long ago: its end is that hour's.
    last_at = min(version.last_at, max(hours)[0] + HOUR)
    window = figures.now(hours, last_at)
    found = await in_window(connection, version, window, as_of, slice_ids=[slice_id], unit=unit)
    return found.get(slice_id)


async def in_window(
    connection: AsyncConnection,
    version: Version,
    window: Window,
    as_of: datetime,
    *,
    slice_ids: Sequence[int] | None = None,
    unit: str = "",
) -> dict[int, SliceFigures]:
    """Return the figures of every slice in a window that begins with an hour of the clock."""
    values = {
        "version": version.id,
        "begin": window.begin,
        "end": window.end,
        "shown": None if slice_ids is None else list(slice_ids),
    }
    rows = (await connection.execute(_SUMS, values)).mappings().all()
    whole = next((row for row in rows if row["predicate"] == "true"), None)
    if whole is None or not whole["items"]:
        return {}
    # Of data that was loaded later the first time is that of loading.
    hour: datetime = whole["first_hour"]
    is_new = hour <= version.first_at < hour + HOUR
    served = Served.within(hour, window.end, version.first_at if is_new else None, version.last_at)
    found = {}
    for row in rows:
        of = Subject(model=version.model, version=version.version, slice=row["slice"])
        scope = Scope(window=window, of=of, as_of=as_of)
        found[row["slice_id"]] = _of_slice(scope, row, whole, served, unit)
    return found


def _of_slice(scope: Scope, row: RowMapping, whole: RowMapping, served: Served, unit: str) -> SliceFigures:
    """Return the figures of a slice as a part of its version: of a request with several answers it has their part."""
    share = min(1.0, (row["items"] or 0.0) / whole["items"])
    counted = Counted(n=row["n_items"], requests=whole["weight"] * share, served=served)
    clusters = roll_up_of(row)
    changed = figures.changed_share(scope, counted, clusters["flip"])
    daily = figures.requests_per_day(scope, counted)
    return SliceFigures(
        changed_share=changed,
        divergence=figures.divergence(
            scope, counted, clusters["divergence"], cap=row["cap"] or HIGHEST, unit=unit
        ),
        requests=daily or figures.requests(scope, counted),
        changed=figures.changed_per_day(daily, changed)
        if daily
        else figures.changed(scope, counted, changed),
        share=share,
        sampled=min(1.0, row["n_exchanges"] / row["weight"]) if row["weight"] else 0.0,
    )

"""Reads of figures: the sums of slices in a window, from roll-ups, which have whole hours exactly."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.clusters import CLUSTER_KEY, NOVELTY_KEY
from quantdrift.core.records import Metric
from quantdrift.facts import figures
from quantdrift.facts.events import AlertEvent
from quantdrift.facts.figures import HOUR, Counted, Figure, Scope, Served, Subject, Window
from quantdrift.facts.words.amount import rate_of
from quantdrift.storage.alerts.alerts import AlertFact
from quantdrift.storage.figures.estimates import ROLL_UP, Sums, sums_of_roll_up

# Sums over people are added for the slices that are shown alone: there may be thousands of slices. A declared slice without rows in an
# hour had no traffic then; a fitted or discovered one was not counted before it existed, so its figures are of the whole hours since.
_SUMS_OF_ALL: Final = f"""
    select r.slice_id, s.name as slice, s.predicate, {ROLL_UP},
        min(hour) as first_hour,
        max(date_trunc('hour', s.created_at + interval '1 hour', 'UTC')) filter (where s.created_at > :begin and s.created_at <= :end and (
            s.definition -> 'where' -> 0 ->> 'key' in ('{CLUSTER_KEY}', '{NOVELTY_KEY}')
            or exists (select from discovery d where d.slice_id = s.id)
        )) as counted_from
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
    where model_version_id = :version and slice_id = :slice and hour <= :until order by hour desc limit 24
""")
_VERSIONS: Final = text("""
    select w.id, w.model, w.candidate_version as version, w.first_seen_at as first_at,
        least(max(v.last_at), cast(:until as timestamptz)) as last_at
    from model_version w join verdict v on v.model_version_id = w.id
    where w.id = any(cast(:ids as int[])) group by w.id
""")
_PEOPLE: Final = text("""
    select s.id as slice_id, s.name as slice, count(*) as n, count(distinct c.group_key) as n_people
    from comparisons(:begin, cast(:end as timestamptz) + interval '1 microsecond', cast(:slices as int[]), true) c
    cross join lateral unnest(c.slice_ids) as member (slice_id) join slice s on s.id = member.slice_id
    where c.flip and c.group_key <> '' and c.model_version_id = :version
        and (cast(:slices as int[]) is null or member.slice_id = any(cast(:slices as int[])))
    group by 1, 2
""")
# Whether the newest requests name the person who sends them: without `sampling.sticky_header` none does.
_NAMES_PEOPLE: Final = text("""
    select exists (
        select from (
            select group_key from comparison where model_version_id = :version order by captured_at desc limit 1000
        ) as newest where group_key <> ''
    ) or exists (
        select from condensed_block b cross join lateral block_rows(b) c
        where c.group_key <> '' and b.model_version_id = :version
            and b.captured_to >= (select newest_from(1000, '-infinity', 'infinity', :version))
    )
""")


class SeenVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version that figures are of; `first_at` and `last_at` are its first and its newest exchange."""

    id: int
    model: str
    version: str
    first_at: datetime
    last_at: datetime

    def served(self, begin: datetime, end: datetime, width: timedelta = HOUR) -> Served:
        """Return the time before `end` in which it served, of data that begins in the bucket of `begin`.

        Of data that was loaded later `first_at` is the time of loading, and does not count.
        """
        is_new = begin <= self.first_at < begin + width
        return Served.within(begin, end, self.first_at if is_new else None, self.last_at)


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
        return self.requests.basis if self.requests.name in figures.RATES else rate_of(self.requests)


class AlertFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured of the slice of an alert.

    Parameters
    ----------
    when_paged
        The share of changed answers from the onset until the alert, frozen with it; None where it does not say so.
    now
        In the newest hours with data; None where there are none.
    a_day
        Changed answers a day at the rate of that time.
    people
        Those with a changed answer since the onset, on its last day with data; None: none is known, or it was not asked for.
    """

    when_paged: Figure | None = None
    a_day: Figure | None = None
    now: SliceFigures | None = None
    people: Figure | None = None


async def versions(
    connection: AsyncConnection, version_ids: Sequence[int], until: datetime | None = None
) -> dict[int, SeenVersion]:
    """Return versions by id, each with its newest exchange before `until`; those of which nothing was folded are left out."""
    values = {"ids": list(version_ids), "until": until}
    return {row["id"]: SeenVersion(**row) for row in (await connection.execute(_VERSIONS, values)).mappings()}


async def people_affected(
    connection: AsyncConnection,
    version: SeenVersion,
    as_of: datetime,
    *,
    slice_ids: Sequence[int] | None = None,
    since: datetime | None = None,
) -> dict[int, Figure] | None:
    """Return by slice how many people got a changed answer in the last 24 hours with data; None: no request names its person.

    A slice in which none is known to is left out. The window begins at `since` where that is later.
    """
    window = figures.last_day(version.last_at)
    if since is not None and since > window.begin:
        window = msgspec.structs.replace(window, begin=since)
    values = {
        "version": version.id,
        "begin": window.begin,
        "end": window.end,
        "slices": None if slice_ids is None else list(slice_ids),
    }
    rows = (await connection.execute(_PEOPLE, values)).mappings().all()
    if not rows and not await connection.scalar(_NAMES_PEOPLE, values):
        return None
    return {
        row["slice_id"]: figures.people_affected(
            Scope(
                window=window,
                of=Subject(model=version.model, version=version.version, slice=row["slice"]),
                as_of=as_of,
            ),
            Counted(n=row["n"]),
            row["n_people"],
        )
        for row in rows
    }


def frozen(event: AlertEvent | None, written_at: datetime) -> AlertFigures:
    """Return how large an alert was when its event was written."""
    if event is None:
        return AlertFigures()
    return AlertFigures(when_paged=event.when_paged(written_at), a_day=event.changed_per_day(written_at))


async def of_alert(
    connection: AsyncConnection,
    alert: AlertFact,
    version: SeenVersion | None,
    as_of: datetime,
    *,
    unit: str = "",
    with_people: bool = False,
) -> AlertFigures:
    """Return how large an alert was when it was written, and how large it is in its slice's newest hours.

    Parameters
    ----------
    version
        That of the alert, as `versions` has it; None: nothing of it was folded yet. The newest hours are those before its newest
        exchange, or before the alert was over.
    """
    measured = frozen(alert.event, alert.written_at)
    if version is None:
        return measured
    if alert.resolved_at is not None and alert.resolved_at < version.last_at:
        version = msgspec.structs.replace(version, last_at=alert.resolved_at)
    people = (
        await people_affected(connection, version, as_of, slice_ids=[alert.slice_id], since=alert.onset_at)
        if with_people
        else None
    )
    return msgspec.structs.replace(
        measured,
        now=await now(connection, version, alert.slice_id, as_of, unit=unit),
        people=(people or {}).get(alert.slice_id),
    )


async def last_day(
    connection: AsyncConnection,
    version: SeenVersion,
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
    connection: AsyncConnection, version: SeenVersion, slice_id: int, as_of: datetime, *, unit: str = ""
) -> SliceFigures | None:
    """Return the figures of a slice in the newest hours that hold 100 answers; None where there are none."""
    values = {"version": version.id, "slice": slice_id, "until": version.last_at}
    hours = [(row.hour, row.n_items) for row in await connection.execute(_NEWEST_HOURS, values)]
    if not hours:
        return None
    # The slice's newest hour may be long ago: its end is that hour's.
    last_at = min(version.last_at, max(hours)[0] + HOUR)
    window = figures.now(hours, last_at)
    by_slice = await in_window(connection, version, window, as_of, slice_ids=[slice_id], unit=unit)
    return by_slice.get(slice_id)


async def in_window(
    connection: AsyncConnection,
    version: SeenVersion,
    window: Window,
    as_of: datetime,
    *,
    slice_ids: Sequence[int] | None = None,
    unit: str = "",
) -> dict[int, SliceFigures]:
    """Return the figures of every slice in a window that begins with an hour of the clock.

    Those of a slice that was fitted or found in this window are of the whole hours since then, and left out before there is one.
    """
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
    hour: datetime = whole["first_hour"]
    served = version.served(hour, window.end)
    by_slice = {}
    late: dict[datetime, list[int]] = {}
    for row in rows:
        if row["counted_from"] is not None:
            late.setdefault(row["counted_from"], []).append(row["slice_id"])
            continue
        of = Subject(model=version.model, version=version.version, slice=row["slice"])
        scope = Scope(window=window, of=of, as_of=as_of)
        by_slice[row["slice_id"]] = of_slice(
            scope, sums_of_roll_up(row), sums_of_roll_up(whole), served, unit
        )
    for counted_from, ids in late.items():
        since = msgspec.structs.replace(window, begin=counted_from)
        of_late = await in_window(connection, version, since, as_of, slice_ids=slice_ids, unit=unit)
        by_slice |= {number: of_late[number] for number in ids if number in of_late}
    return by_slice


def of_slice(scope: Scope, part: Sums, whole: Sums, served: Served | None, unit: str = "") -> SliceFigures:
    """Return the figures of a slice as a part of its version: of a request with several answers it has their part.

    Parameters
    ----------
    part, whole
        The sums of the slice, and of all traffic of its version, over one window.
    served
        The time in the window during which the version served; None: not known.
    """
    share = min(1.0, part.items / whole.items) if whole.items else 0.0
    counted = Counted(n=part.n_items, requests=whole.weight * share, served=served)
    changed = figures.changed_share(scope, counted, part.sums_of(Metric.FLIP))
    daily = figures.requests_per_day(scope, counted)
    return SliceFigures(
        changed_share=changed,
        divergence=figures.divergence(
            scope, counted, part.sums_of(Metric.DIVERGENCE), cap=part.cap, unit=unit
        ),
        requests=daily or figures.requests(scope, counted),
        changed=figures.changed_per_day(daily, changed)
        if daily
        else figures.changed(scope, counted, changed),
        share=share,
        sampled=min(1.0, part.n_groups / part.weight) if part.weight else 0.0,
    )

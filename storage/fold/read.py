"""The fold's reads: its position, the catalog of ids, the numbers of new batches, and the next batches.

The monitor that leads numbers batches, in one order for all models: the row of `fold` is locked first, so that a leader that lost its
lock without noticing cannot number at the same time as the new one. A model is folded in that order, by whoever folds it: it sees the
batches of its own comparisons and those of no model, and its result does not depend on what else is folded beside it. All
reads of it, and the writes in `storage.fold.write`, are in one transaction, which locks its row of `model_fold`.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import RowMapping, TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.errors import RetryError
from quantdrift.core.records import UNANSWERED, Loss, Policy, Predicate, Verdict
from quantdrift.storage.fold.discovery_log import follow, followed, lapsed, retired
from quantdrift.storage.fold.models import begin_models, note_numbers, note_spans, position_of
from quantdrift.storage.fold.reading_order import ReadingOrder, Stretch, WaitingBatch, closed_up
from quantdrift.storage.fold.undeclared_sessions import found_sessions
from quantdrift.storage.fold_rows import (
    RETIRED_AFTER,
    AlertClose,
    BaselineRow,
    BatchRows,
    Catalog,
    ComparisonRow,
    DetectorRow,
    ExpiryRow,
    ItemCount,
    NoiseRow,
    Position,
    ServingRow,
    SessionRow,
    SliceChange,
    SliceRow,
    Snapshot,
    Source,
    TallyRow,
    VerdictRow,
    VersionRow,
    from_us,
    to_us,
)
from quantdrift.storage.noise import floors, noise_of, pairs
from quantdrift.storage.signals import named_values
from quantdrift.storage.snapshot import KNOWN_STRATA

_HOUR: Final = timedelta(hours=1)
_ALL: Final = 2**62
_CLAIMS_AHEAD: Final = 6  # a process that folds may keep four of them in memory before it writes its position
_Row = RowMapping | Mapping[str, Any]
_MONITOR: Final = "monitor"  # worker of the batches that it makes itself

# The row must exist to be locked: without it, two monitors could both begin.
_BEGIN: Final = text("""
    insert into fold (id, fold_seq, mass, n_detectors) values (1, 0, 0, 0) on conflict (id) do nothing
""")
_POSITION: Final = text("select * from fold where id = 1 for update")
_NUMBERING: Final = text(
    "select fold_seq, coalesce(model_seq = fold_seq, false) as by_model, shards from fold where id = 1"
)
_FASTEST: Final = text("select max(fold_seq) from model_fold")
_LAST_COMPARED: Final = text(
    "select stored_at from batch where kind = 'comparison' and fold_seq <= :last order by fold_seq desc limit 1"
)
# Comparisons of several models in one batch are those of long ago, if any.
_LAST_COMPARED_OF: Final = text("""
    select max(stored_at) as stored_at from (
        (
            select fold_seq, stored_at from batch where compared_model = :model and fold_seq <= :last order by fold_seq desc limit 1
        )
        union all
        (
            select fold_seq, stored_at from (
                select kind, fold_seq, stored_at from batch
                where compared_model is null and fold_seq <= :last order by fold_seq desc limit 1000
            ) of_none where kind = 'comparison' order by fold_seq desc limit 1
        )
    ) last having count(*) > 0
""")
_NEXT: Final = "select {batch} from batch where fold_seq > :after and fold_seq <= :last and (compared_model is null or compared_model = any(cast(:models as text[])) or fold_seq = any(cast(:decided as bigint[]))) order by fold_seq limit :most"
_BATCH: Final = """
    batch.id, batch.fold_seq, batch.kind, batch.worker, batch.n_rows, batch.stored_at, batch.captured_from, batch.captured_to,
    batch.unreferenced, batch.compared_model as model, batch.read_after, batch.read_until, batch.rest_until, batch.read_from, batch.horizon_s
"""
_UNNUMBERED: Final = text(f"""
    select {_BATCH} from batch where fold_seq is null and id <= (
        select max(id) from (
            select id, sum(n_rows) over (order by id) - n_rows as n_before
            from batch where fold_seq is null order by id limit :most
        ) waiting where n_before < :most_rows
    ) order by id for update
""")  # noqa: S608 - constants
# Batches of no model have tallies: they are folded within the next turn of each model.
_UNFOLDED: Final = text("""
    select compared_model as model, count(*) as n, min(stored_at) as oldest from batch where fold_seq is null group by 1
    union all
    select f.model, waiting.n, waiting.oldest
    from model_fold f cross join lateral (
        select count(*) as n, min(stored_at) as oldest from batch where compared_model = f.model and fold_seq > f.fold_seq
    ) waiting
    where waiting.n > 0
""")
# Of each model its last numbered batch, and the earlier ones with rows that were not folded yet.
_WAITING: Final = text("""
    select wanted.model, last.read_after, last.read_until, last.rest_until, last.horizon_s, last.stored_at as last_stored_at,
        b.fold_seq, b.stored_at, b.captured_to
    from unnest(cast(:models as text[])) wanted (model)
    cross join lateral (
        select * from batch where batch.compared_model = wanted.model and fold_seq <= :last order by fold_seq desc limit 1
    ) last
    left join batch b on b.compared_model = wanted.model and b.rest_until > last.read_until
        and b.fold_seq between case when last.worker = :worker then last.fold_seq + 1 else last.read_from end and :last
    where last.read_until is not null
    order by wanted.model, b.fold_seq
""")
# Number and marks at once: each change of a row is a new version of it, with an entry in each index.
_NUMBER: Final = text("""
    update batch set fold_seq = numbers.fold_seq, read_after = numbers.read_after, read_until = numbers.read_until,
        rest_until = numbers.rest_until, horizon_s = numbers.horizon_s, read_from = numbers.read_from
    from unnest(
        cast(:id as bigint[]), cast(:fold_seq as bigint[]), cast(:read_after as timestamptz[]), cast(:read_until as timestamptz[]),
        cast(:rest_until as timestamptz[]), cast(:horizon_s as float8[]), cast(:read_from as bigint[])
    ) numbers (id, fold_seq, read_after, read_until, rest_until, horizon_s, read_from)
    where batch.id = numbers.id
""")
_NUMBERS: Final = ("id", "fold_seq", "read_after", "read_until", "rest_until", "horizon_s", "read_from")
# A model that is silent gets an empty batch, with which all that waits is folded.
_PASS_MARK: Final = text("""
    insert into batch (kind, worker, captured_from, captured_to, n_rows, compared_model)
    select 'comparison', :worker, silent.until, silent.until, 0, silent.model
    from (
        select known.model, greatest(last.read_until, least(now() - make_interval(secs => last.horizon_s), max(b.rest_until))) as until
        from (select distinct model from model_version) known
        cross join lateral (
            select * from batch where batch.compared_model = known.model and fold_seq is not null order by fold_seq desc limit 1
        ) last
        join batch b on b.compared_model = known.model and b.fold_seq >= last.read_from and b.rest_until > last.read_until
        where last.worker <> :worker and last.stored_at <= now() - make_interval(secs => last.horizon_s)
            and not exists (select from batch n where n.compared_model = known.model and n.fold_seq is null)
        group by known.model, last.read_until, last.horizon_s
    ) silent
    order by silent.until, silent.model
""")
_COMPARED: Final = """
    c.batch_id, c.exchange_id::text, c.item, c.captured_at, c.model_version_id, c.policy_id, c.slice_ids, c.group_key,
    c.pi1, c.pi2, c.u1, c.u2, c.candidate_margin, c.flip, c.tie, c.topk, c.js, c.divergence, c.margin, c.latency_s
"""
_ANY_DAY: Final = "comparisons(:begin, cast(:end as timestamptz) + interval '1 microsecond')"
_OF_BATCHES: Final = "comparisons_of(cast(:batches as bigint[]))"
_COMPARISONS: Final = f"""
    select {_COMPARED}, {{signals}} as signals from {{rows}} c
    where c.captured_at between :begin and :end and c.batch_id = any(cast(:batches as bigint[]))
    order by c.batch_id, c.captured_at, c.exchange_id, c.item
"""  # noqa: S608 - constants
_SOURCES: Final = text(f"""
    select {_BATCH} from batch where compared_model = :model and fold_seq between :first and :last and rest_until > :after
""")  # noqa: S608 - constants
# Late rows too: only the hash of their exchange says when they are folded.
_STRETCH: Final = f"""
    select {_COMPARED}, {{signals}} as signals from {{rows}} c join batch b on b.id = c.batch_id
    where c.captured_at between :begin and :end and c.batch_id = any(cast(:batches as bigint[]))
        and (
            least(c.captured_at, b.stored_at) <= b.read_after
            or least(c.captured_at, b.stored_at) between :after and :until
        )
"""  # noqa: S608 - constants
_TALLY: Final = """
    t.source, t.boot::text, t.stratum, t.sequence, least(t.at, b.stored_at) as at, t.offered, t.taken,
    t.thinned, t.published, t.final, t.models, t.lost
"""
_TALLIES: Final = text(f"""
    select t.batch_id, {_TALLY} from tally t join batch b on b.id = t.batch_id
    where t.batch_id = any(cast(:batches as bigint[])) order by t.batch_id, t.source, t.boot, t.sequence, t.stratum
""")  # noqa: S608 - constants
_RECENT_TALLIES: Final = text(f"""
    select {_TALLY} from tally t join batch b on b.id = t.batch_id
    where b.fold_seq <= :last and t.at > :horizon and b.stored_at > :horizon
    order by b.fold_seq, t.source, t.boot, t.sequence, t.stratum
""")  # noqa: S608 - constants
_EXPIRY: Final = (
    "e.batch_id, e.stratum, e.model, e.n, b.stored_at from expiry e join batch b on b.id = e.batch_id"
)
_EXPIRIES: Final = text(f"""
    select {_EXPIRY} where e.batch_id = any(cast(:batches as bigint[])) order by e.batch_id, e.boot, e.counts_row
""")
_RECENT_EXPIRIES: Final = text(f"""
    select {_EXPIRY} where b.fold_seq <= :last and b.stored_at > :horizon
    order by b.fold_seq, e.boot, e.counts_row
""")
# The last tally of each sidecar, however old: its next tally is compared with it. One step per sidecar start and
# stratum along the primary key; reading every tally would take minutes in a large fleet.
_BASELINES: Final = text(f"""
    {KNOWN_STRATA}
    select newest.* from known k cross join lateral (
        select {_TALLY} from tally t join batch b on b.id = t.batch_id
        where t.source = k.source and t.boot = k.boot and t.stratum = k.stratum
            and b.fold_seq <= :last and least(t.at, b.stored_at) <= :horizon
        order by t.sequence desc limit 1
    ) newest
    where newest.at > cast(:horizon as timestamptz) - interval '30 days'
""")  # noqa: S608 - constants

# A decision of a person waits for a batch: where none comes, an empty one takes it over.
_TAKE_OVER: Final = text("""
    insert into batch (kind, worker, captured_from, captured_to, n_rows)
    select 'tally', :worker, now(), now(), 0
    where exists (select from alert_action where action = 'close' and fold_seq is null)
""")
_CLOSE: Final = text("""
    with taken as (
        update alert_action set fold_seq = :fold_seq where action = 'close' and fold_seq is null
        returning id, alert_id, fold_seq, coalesce(nullif(identity, ''), made_by) as made_by, reason
    )
    select taken.*, a.model_version_id, a.slice_id from taken join alert a on a.id = taken.alert_id
    where a.resolved_at is null or a.ended = 'replaced' order by taken.id
""")
_CLOSES: Final = """
    select c.id, c.fold_seq, coalesce(nullif(c.identity, ''), c.made_by) as made_by, c.reason, a.model_version_id, a.slice_id
    from alert_action c join alert a on a.id = c.alert_id
    where c.action = 'close' and c.fold_seq between :first and :last
"""
_CLOSED: Final = text(f"{_CLOSES} order by c.id")
# An alert that has ended since is not closed, and no later one of its slice in its place.
_CLOSED_NEXT: Final = text(f"{_CLOSES} and (a.resolved_at is null or a.ended = 'replaced') order by c.id")
# Decisions of people apply from the next batch on, so that folding again gives the same result.
_DECIDE: Final = text("update baseline set fold_seq = :fold_seq where fold_seq is null returning *")
_FOLDED: Final = text(f"select {_BATCH} from batch where fold_seq between :first and :last")  # noqa: S608
_DECIDED: Final = text("""
    select * from baseline
    where fold_seq between :first and :last and source in ('accepted', 'imported', 'frozen', 'kept')
""")
_OF_MODEL: Final = "(cast(:model as text) is null or {table}.model_version_id in (select id from model_version where model = :model))"
_DETECTORS: Final = text(f"""
    select * from detector where retired_at is null and {_OF_MODEL.format(table="detector")}
    order by model_version_id, slice_id, metric, kind
""")  # noqa: S608 - constants
_SESSIONS: Final = text(f"select * from session where {_OF_MODEL.format(table='session')}")  # noqa: S608
_SERVING: Final = text(f"""
    select * from serving v
    where {_OF_MODEL.format(table="v")} and (v.last_at >= cast(:silent as timestamptz) or exists (
        select from detector d where d.retired_at is null and d.model_version_id = v.model_version_id
    ))
    order by v.model_version_id
""")  # noqa: S608
# A verdict without a live detector is history, except for a version without a reference, which never has a detector, and for
# a slice that nothing was measured of yet.
_VERDICTS: Final = text("""
    select v.* from verdict v join model_version m on m.id = v.model_version_id
    where (cast(:model as text) is null or m.model = :model) and (
        (m.reference_digest = '' and coalesce(v.last_at >= cast(:silent as timestamptz), true))
        or exists (
            select from detector d where d.retired_at is null
                and d.model_version_id = v.model_version_id and d.slice_id = v.slice_id
        )
        or (m.reference_digest <> '' and v.last_at >= cast(:silent as timestamptz) and not exists (
            select from detector d where d.model_version_id = v.model_version_id and d.slice_id = v.slice_id
        ))
    )
    order by v.model_version_id, v.slice_id
""")
_RECENT_ITEMS: Final = text(f"""
    select model_version_id, slice_id, hour, n_items, n_unmeasured, people is not null as names_people
    from rollup_hour where hour >= :horizon and {_OF_MODEL.format(table="rollup_hour")}
    order by hour, model_version_id, slice_id
""")  # noqa: S608
_VERSIONS: Final = text("select id from model_version where model = :model")
_VERSIONS_OF: Final = text("""
    select id, model, candidate_version, reference_digest, first_seen_at from model_version
    where cast(:models as text[]) is null or model = any(cast(:models as text[]))
""")
_SLICES_OF: Final = text("""
    select id, model, name, predicate, definition from slice
    where cast(:models as text[]) is null or model = any(cast(:models as text[])) order by id
""")
_SUMS_OF: Final = text("""
    select v.n, v.ids, s.n, s.ids
    from (
        select count(*) as n, coalesce(sum(id), 0)::bigint as ids from model_version
        where cast(:models as text[]) is null or model = any(cast(:models as text[]))
    ) v, (
        select count(*) as n, coalesce(sum(id), 0)::bigint as ids from slice
        where cast(:models as text[]) is null or model = any(cast(:models as text[]))
    ) s
""")
_EVERYTHING: Final = text("""
    insert into slice (model, predicate, name, definition)
    select distinct v.model, 'true', 'all', '{"where": []}'::jsonb from model_version v
    where not exists (select from slice s where s.model = v.model and s.predicate = 'true')
    on conflict do nothing
""")
_POLICIES_KEPT: Final = 1_000
_POLICIES: Final = text("""
    select id, definition from policy where cast(:wanted as int[]) is null or id = any(cast(:wanted as int[]))
""")
_IMPORTED: Final = text(f"""
    select distinct on (model_version_id, slice_id, metric) * from baseline
    where kind = 'budget' and source = 'imported' and fold_seq <= :last and {_OF_MODEL.format(table="baseline")}
    order by model_version_id, slice_id, metric, id desc
""")  # noqa: S608


async def resume(
    connection: AsyncConnection, model: str | None = None, position: Position | None = None
) -> Snapshot:
    """Return the state from which a fold starts or continues; retired detectors are left out.

    Parameters
    ----------
    model
        None: all models in one fold, from the position in `fold`.
    position
        That of the model, whose row is locked.
    """
    if position is None:
        position = await _position(connection)
    # In one fold of all models, all that has a number is folded.
    last = _ALL if model is None else position.fold_seq
    of_model: dict[str, Any] = {"model": model, "last": last}

    async def rows(statement: TextClause, **more: Any) -> Sequence[RowMapping]:
        wanted = {name: value for name, value in of_model.items() if f":{name}" in statement.text}
        return (await connection.execute(statement, wanted | more)).mappings().all()

    silent = None if position.event_us is None else from_us(position.event_us) - RETIRED_AFTER
    verdicts = await rows(_VERDICTS, silent=silent)
    baselines: Sequence[RowMapping] = ()
    recent: Sequence[RowMapping] = ()
    expired: Sequence[RowMapping] = ()
    items: Sequence[RowMapping] = ()
    if position.event_us is not None:
        horizon = from_us(position.event_us) - _HOUR
        baselines = await rows(_BASELINES, horizon=horizon)
        recent = await rows(_RECENT_TALLIES, horizon=horizon)
        expired = await rows(_RECENT_EXPIRIES, horizon=horizon)
        hour = from_us(position.event_us).replace(minute=0, second=0, microsecond=0)
        items = await rows(_RECENT_ITEMS, horizon=hour - _HOUR)
    compared = await rows(_LAST_COMPARED if model is None else _LAST_COMPARED_OF)
    versions = None if model is None else set(await connection.scalars(_VERSIONS, {"model": model}))
    return Snapshot(
        position=position,
        detectors=tuple(detector_row(row) for row in await rows(_DETECTORS)),
        verdicts=tuple(_verdict(row) for row in verdicts),
        baselines=tuple(_tally(row) for row in baselines),
        tallies=tuple(_tally(row) for row in recent),
        expiries=tuple(_expiry(row) for row in expired),
        sessions=tuple(_session(row) for row in await rows(_SESSIONS)),
        imported=tuple(_baseline(row) for row in await rows(_IMPORTED)),
        recent_items=tuple(_item_count(row) for row in items),
        retired=await retired(connection, last),
        lapsed=await lapsed(connection, last),
        floors=tuple(
            row for row in await floors(connection) if versions is None or row.model_version_id in versions
        ),
        pairs=tuple(
            row for row in await pairs(connection) if versions is None or row.model_version_id in versions
        ),
        serving=tuple(_serving(row) for row in await rows(_SERVING, silent=silent)),
        compared_us=to_us(compared[0]["stored_at"]) if compared else None,
    )


async def load_catalog(
    connection: AsyncConnection,
    *,
    wanted: Collection[int] | None = None,
    known: Catalog | None = None,
    models: Collection[str] | None = None,
) -> Catalog:
    """Return all versions and slices, and the policies; each model with a version gets its slice `all`.

    Parameters
    ----------
    models
        Those whose versions and slices are wanted; None: all.
    wanted
        Policies that must be in it, since hundreds are made in a day; None: all of them.
    known
        An earlier catalog of the same models: what is in it is not read again, and where nothing was added it is returned itself. Policies that
        are not wanted are kept, the newest of them.
    """
    if known is not None and await _is_unchanged(connection, known, models):
        policies = await _policies(connection, wanted, known.policies)
        sessions = await found_sessions(connection)
        if policies == known.policies and sessions == known.undeclared_sessions:
            return known
        return msgspec.structs.replace(known, policies=policies, undeclared_sessions=sessions)
    await connection.execute(_EVERYTHING)
    return await read_catalog(connection, wanted=wanted, known=known, models=models)


async def _is_unchanged(connection: AsyncConnection, known: Catalog, models: Collection[str] | None) -> bool:
    """Return whether there are the same versions and slices as in a catalog: their rows never change but for columns that it leaves out."""
    if models is not None and any(version.model not in models for version in known.versions.values()):
        return False
    row = (await connection.execute(_SUMS_OF, {"models": None if models is None else sorted(models)})).one()
    # What begins has a larger id than what has ended since, so equally many with the same sum are the same.
    return tuple(row) == (
        len(known.versions),
        sum(known.versions),
        len(known.slices),
        sum(known.slices),
    )


async def read_catalog(
    connection: AsyncConnection,
    *,
    wanted: Collection[int] | None = None,
    known: Catalog | None = None,
    models: Collection[str] | None = None,
) -> Catalog:
    """Return the same as `load_catalog`, without writing anything."""
    of = {"models": None if models is None else sorted(models)}
    versions = (await connection.execute(_VERSIONS_OF, of)).mappings().all()
    slices = (await connection.execute(_SLICES_OF, of)).mappings().all()
    policies = await _policies(connection, wanted, {} if known is None else known.policies)
    return Catalog(
        undeclared_sessions=await found_sessions(connection),
        versions={
            row["id"]: VersionRow(
                id=row["id"],
                model=row["model"],
                candidate_version=row["candidate_version"],
                reference_digest=row["reference_digest"],
                first_seen_us=to_us(row["first_seen_at"]),
            )
            for row in versions
        },
        slices={
            row["id"]: SliceRow(
                id=row["id"],
                model=row["model"],
                name=row["name"],
                predicate=row["predicate"],
                where=msgspec.convert(row["definition"]["where"], tuple[Predicate, ...]),
            )
            for row in slices
        },
        policies=policies,
    )


async def _policies(
    connection: AsyncConnection, wanted: Collection[int] | None, known: Mapping[int, Policy]
) -> dict[int, Policy]:
    missing = None if wanted is None else sorted(set(wanted) - known.keys())
    policies = dict(known)
    if missing is None or missing:
        rows = await connection.execute(_POLICIES, {"wanted": missing})
        policies |= {row.id: msgspec.convert(row.definition, Policy) for row in rows}
    if wanted is not None:
        old = sorted(policies.keys() - set(wanted))
        for policy_id in old[: len(policies) - _POLICIES_KEPT] if len(policies) > _POLICIES_KEPT else ():
            del policies[policy_id]
    return policies


async def claim(
    connection: AsyncConnection,
    after: int,
    most: int,
    horizon: timedelta = timedelta(0),
    *,
    most_rows: int = 1_000_000_000,
) -> list[BatchRows]:
    """Assign numbers to up to `most` new batches, consecutively after `after`; return them with what is folded with each.

    Parameters
    ----------
    most_rows
        Number of rows after which it takes no further batch.
    horizon
        How long exchanges wait for those that were captured earlier: `quantdrift.storage.fold.reading_order`. Without it a batch
        comes with its own rows.

    Raises
    ------
    RetryError
        The stored position is not `after`: another monitor has folded; resume.
    """
    position = await _position(connection)
    if position.fold_seq != after:
        raise RetryError(
            f"the database is at fold {position.fold_seq}, not at {after}: another monitor leads"
        )
    numbered = await _number(connection, after, most, horizon, most_rows)
    if not numbered:
        return []
    decisions = await _take_over(connection, min(row["fold_seq"] for row in numbered))
    return await _batches(connection, numbered, *decisions)


async def number(
    connection: AsyncConnection, most: int, horizon: timedelta, *, most_rows: int, shards: int = 1
) -> tuple[int, bool]:
    """Assign numbers to up to `most` new batches; return how far batches have numbers, and whether more may wait for one.

    Only the monitor that leads does it. Where other processes fold, it goes no further ahead of the fastest than `_CLAIMS_AHEAD`.

    Parameters
    ----------
    horizon, most_rows
        As for `claim`.
    shards
        In how many shards models are folded from now on.
    """
    row = await _fold_row(connection)
    last: int = row["fold_seq"]
    await begin_models(connection, last, known=row["model_seq"] == last)
    fastest = None if shards == 1 else await connection.scalar(_FASTEST)
    numbered: list[dict[str, Any]] = []
    if fastest is None or last - fastest < _CLAIMS_AHEAD * most:
        numbered = await _number(connection, last, most, horizon, most_rows)
    if numbered:
        await _take_over(connection, min(each["fold_seq"] for each in numbered))
        last = max(each["fold_seq"] for each in numbered)
    newest = row["newest_capture"]
    if row["model_seq"] != row["fold_seq"]:
        newest = max((at for at in (newest, row["exchange_time"]) if at is not None), default=None)
    if numbered:
        newest = await note_spans(connection, numbered, newest)
    if (last, last, shards, newest) != tuple(
        row[name] for name in ("fold_seq", "model_seq", "shards", "newest_capture")
    ):
        await note_numbers(connection, last, shards, newest)
    return last, len(numbered) >= most or sum(each["n_rows"] for each in numbered) >= most_rows


class Numbering(NamedTuple):
    """How far batches have numbers, and in how many shards models are folded; `by_model`: this release folds them."""

    fold_seq: int
    shards: int
    by_model: bool


async def numbering(connection: AsyncConnection) -> Numbering:
    """Return how far batches have numbers; no lock is taken."""
    row = (await connection.execute(_NUMBERING)).one_or_none()
    return (
        Numbering(0, 1, by_model=False) if row is None else Numbering(row.fold_seq, row.shards, row.by_model)
    )


async def next_batches(
    connection: AsyncConnection, models: Collection[str], after: int, last: int, most: int, *, most_rows: int
) -> tuple[list[BatchRows], int]:
    """Return the next numbered batches of models, and how far these are folded with them.

    Parameters
    ----------
    models
        Others' comparisons are left out. A batch in which people's decisions take effect comes whatever it has.
    after, last
        The batches after the first, up to the second.
    most, most_rows
        Number of batches, and of rows in them, after which no further batch comes.
    """
    if after >= last:
        return [], last
    borders = {"first": after + 1, "last": last}
    decided = (await connection.execute(_DECIDED, borders)).mappings().all()
    closed = (await connection.execute(_CLOSED_NEXT, borders)).mappings().all()
    changed = await followed(connection, after + 1, last)
    decided_with = {row["fold_seq"] for row in (*decided, *closed)} | changed.keys()
    wanted = {"after": after, "last": last, "most": most, "models": sorted(models)}
    wanted["decided"] = sorted(decided_with)
    found = (await connection.execute(text(_NEXT.format(batch=_BATCH)), wanted)).mappings().all()
    rows_before = [0, *accumulate(row["n_rows"] for row in found)]
    n = sum(before < most_rows for before in rows_before[:-1])
    numbered = found[:n]
    until = last if n == len(found) < most else numbered[-1]["fold_seq"]
    return await _batches(connection, numbered, decided, closed, changed, models=models), until


async def _number(
    connection: AsyncConnection, after: int, most: int, horizon: timedelta, most_rows: int
) -> list[dict[str, Any]]:
    """Assign numbers after `after` and read marks to new batches; return these."""
    if horizon:
        await connection.execute(_PASS_MARK, {"worker": _MONITOR})
    numbered = await _unnumbered(connection, after, most, most_rows)
    if not numbered and (await connection.execute(_TAKE_OVER, {"worker": _MONITOR})).rowcount:
        numbered = await _unnumbered(connection, after, most, most_rows)
    if numbered and horizon:
        await _mark(connection, numbered, after, horizon)
    if numbered:
        await connection.execute(_NUMBER, {name: [row[name] for row in numbered] for name in _NUMBERS})
    return numbered


async def _unnumbered(
    connection: AsyncConnection, after: int, most: int, most_rows: int
) -> list[dict[str, Any]]:
    """Return new batches with their numbers, which are not stored yet."""
    waiting = await connection.execute(_UNNUMBERED, {"most": most, "most_rows": most_rows})
    return [{**row, "fold_seq": number} for number, row in enumerate(waiting.mappings(), start=after + 1)]


async def _take_over(
    connection: AsyncConnection, fold_seq: int
) -> tuple[Sequence[RowMapping], Sequence[RowMapping], Mapping[int, tuple[SliceChange, ...]]]:
    """Let what people decided since take effect with a batch: return decisions about baselines, closed alerts, and slices."""
    at = {"fold_seq": fold_seq}
    decided = (await connection.execute(_DECIDE, at)).mappings().all()
    closed = (await connection.execute(_CLOSE, at)).mappings().all()
    return decided, closed, await follow(connection, fold_seq)


async def unfolded(connection: AsyncConnection) -> dict[str, tuple[int, datetime]]:
    """Return by model how many stored batches are not folded, and when the oldest was stored; under an empty name those of no model."""
    waiting: dict[str, tuple[int, datetime]] = {}
    for model, n, oldest in (await connection.execute(_UNFOLDED)).all():
        before = waiting.get(model or "", (0, oldest))
        waiting[model or ""] = before[0] + n, min(before[1], oldest)
    return waiting


async def refold(connection: AsyncConnection, first: int, last: int) -> list[BatchRows]:
    """Return the batches that were folded as `first` to `last`, with the same rows; nothing is written."""
    borders = {"first": first, "last": last}
    numbered = (await connection.execute(_FOLDED, borders)).mappings().all()
    decided = (await connection.execute(_DECIDED, borders)).mappings().all()
    closed = (await connection.execute(_CLOSED, borders)).mappings().all()
    changed = await followed(connection, first, last)
    return await _batches(connection, numbered, decided, closed, changed, condensed=True)


async def _batches(
    connection: AsyncConnection,
    numbered: Sequence[_Row],
    decided: Sequence[RowMapping],
    closed: Sequence[RowMapping],
    changed: Mapping[int, tuple[SliceChange, ...]],
    *,
    models: Collection[str] | None = None,
    condensed: bool = False,
) -> list[BatchRows]:
    """Return numbered batches with their rows and the decisions that apply from them on, in order.

    Parameters
    ----------
    models
        Batches of other models come without their rows; None: there are none.
    condensed
        Whether comparisons are read that are condensed, too: some of these batches were folded hours or days ago.
    """
    decisions: dict[int, list[BaselineRow]] = {}
    for row in sorted(decided, key=lambda row: row["id"]):
        decisions.setdefault(row["fold_seq"], []).append(_baseline(row))
    closes: dict[int, list[AlertClose]] = {}
    for row in closed:
        values = {name: row[name] for name in AlertClose.__struct_fields__}
        closes.setdefault(row["fold_seq"], []).append(AlertClose(**values))
    own = [row for row in numbered if models is None or row["model"] is None or row["model"] in models]
    ids = [row["id"] for row in own]
    comparisons, noise = await _read(connection, own, condensed=condensed)
    tallies: dict[int, list[TallyRow]] = {}
    expiries: dict[int, list[ExpiryRow]] = {}
    if ids:
        for row in (await connection.execute(_TALLIES, {"batches": ids})).mappings():
            tallies.setdefault(row["batch_id"], []).append(_tally(row))
        for row in (await connection.execute(_EXPIRIES, {"batches": ids})).mappings():
            expiries.setdefault(row["batch_id"], []).append(_expiry(row))
    return [
        BatchRows(
            fold_seq=row["fold_seq"],
            model=row["model"] or "",
            n_rows=row["n_rows"],
            stored_us=to_us(row["stored_at"]),
            captured_us=to_us(row["captured_to"]),
            compares=row["kind"] == "comparison",
            comparisons=tuple(comparisons.get(row["id"], ())),
            tallies=tuple(tallies.get(row["id"], ())),
            decisions=tuple(decisions.get(row["fold_seq"], ())),
            slices=changed.get(row["fold_seq"], ()),
            closes=tuple(closes.get(row["fold_seq"], ())),
            unreferenced=tuple(row["unreferenced"]),
            noise=tuple(noise.get(row["id"], ())),
            expiries=tuple(expiries.get(row["id"], ())),
        )
        for row in sorted(numbered, key=lambda row: row["fold_seq"])
    ]


async def _mark(
    connection: AsyncConnection, numbered: Sequence[dict[str, Any]], last: int, horizon: timedelta
) -> None:
    """Give new batches their read marks, after those up to `last`."""
    of_model: dict[str, list[dict[str, Any]]] = {}
    for of in numbered:
        if of["model"] is not None:
            of_model.setdefault(of["model"], []).append(of)
    if not of_model:
        return
    wanted = {"models": list(of_model), "last": last, "worker": _MONITOR}
    lasts: dict[str, tuple[Stretch, int]] = {}
    waiting: dict[str, list[WaitingBatch]] = {}
    for row in (await connection.execute(_WAITING, wanted)).mappings():
        lasts[row["model"]] = _stretch(row), to_us(row["last_stored_at"])
        if row["fold_seq"] is not None:
            batch = WaitingBatch(row["fold_seq"], to_us(row["stored_at"]), to_us(row["captured_to"]))
            waiting.setdefault(row["model"], []).append(batch)
    for model, batches in of_model.items():
        before = waiting.get(model, [])
        order = ReadingOrder(horizon // timedelta(microseconds=1), lasts.get(model), before)
        first = min((batch.fold_seq for batch in before), default=batches[0]["fold_seq"])
        for of in batches:
            times = (to_us(of[name]) for name in ("stored_at", "captured_from", "captured_to"))
            ends = of["worker"] == _MONITOR
            stretch = order.stretch(*times, ends=ends)
            names = ("read_after", "read_until", "rest_until")
            of |= {name: from_us(at_us) for name, at_us in zip(names, stretch[:3], strict=True)}
            of |= {"horizon_s": stretch.horizon_us / 1e6, "read_from": first}
            first = of["fold_seq"] + 1 if ends else first


async def _read(
    connection: AsyncConnection, numbered: Sequence[_Row], *, condensed: bool
) -> tuple[dict[int, list[ComparisonRow]], dict[int, list[NoiseRow]]]:
    """Return what is folded with each batch, by id and in order: comparisons, and items that were computed twice."""
    comparisons: dict[int, list[ComparisonRow]] = {}
    compared = [row for row in numbered if row["kind"] == "comparison" and row["read_until"] is None]
    if compared:
        of_batches = {**_captured(compared), "batches": [row["id"] for row in compared]}
        statement = _statement(_COMPARISONS, condensed=condensed)
        for row in (await connection.execute(statement, of_batches)).mappings():
            comparisons.setdefault(row["batch_id"], []).append(comparison_row(row))
    of_compared = await noise_of(connection, [row["id"] for row in compared])
    noise = {key: list(rows) for key, rows in of_compared.items()}
    marked = sorted(
        (row for row in numbered if row["read_until"] is not None), key=itemgetter("model", "fold_seq")
    )
    for model, rows in groupby(marked, key=itemgetter("model")):
        batches: list[_Row] = []
        for batch in rows:
            batches.append(batch)
            if batch["worker"] == _MONITOR:
                await _read_stretches(connection, model, batches, comparisons, noise, condensed=condensed)
                batches = []
        if batches:
            await _read_stretches(connection, model, batches, comparisons, noise, condensed=condensed)
    return comparisons, noise


def _statement(query: str, *, condensed: bool) -> TextClause:
    return text(query.format(signals=named_values(), rows=_ANY_DAY if condensed else _OF_BATCHES))


async def _read_stretches(
    connection: AsyncConnection,
    model: str,
    batches: Sequence[_Row],
    comparisons: dict[int, list[ComparisonRow]],
    noise: dict[int, list[NoiseRow]],
    *,
    condensed: bool,
) -> None:
    """Add what is folded with consecutive batches of a model, whichever batches brought it; only the last may fold all that waits."""
    after_us, ids = to_us(batches[0]["read_after"]), [row["id"] for row in batches]
    borders = {"first": min(row["read_from"] for row in batches), "last": batches[-1]["fold_seq"]}
    wanted = {"model": model, "after": batches[0]["read_after"], **borders}
    sources = {row["id"]: row for row in (await connection.execute(_SOURCES, wanted)).mappings()}
    if not sources:
        return
    stretches = {key: _stretch(row) for key, row in sources.items()}
    until_us = [to_us(row["read_until"]) for row in batches]
    if batches[-1]["worker"] == _MONITOR:
        until_us[-1] = max(until_us[-1], *(source.rest_us for source in stretches.values()))
    window = {"after": batches[0]["read_after"], "until": from_us(until_us[-1]), "batches": list(sources)}
    stretch = _statement(_STRETCH, condensed=condensed)
    rows = (await connection.execute(stretch, {**window, **_captured(list(sources.values()))})).mappings()
    ends_us = to_us(batches[-1]["read_after"]) if batches[-1]["worker"] == _MONITOR else None
    for at_us, item in _in_order(rows, sources, ends_us):
        if after_us < at_us <= until_us[-1]:
            comparisons.setdefault(ids[bisect_left(until_us, at_us)], []).append(item)
    # The noise of an exchange may not be known before the exchange itself: its budget must rest on the past alone.
    for key, items in (await noise_of(connection, list(sources))).items():
        own = stretches[key]
        for noisy in items:
            if noisy.captured_us > own.after_us:
                at_us = min(noisy.captured_us, own.rest_us)
                if after_us < at_us <= until_us[-1]:
                    noise.setdefault(ids[bisect_left(until_us, at_us)], []).append(noisy)
            elif key in ids:
                noise.setdefault(key, []).append(noisy)


def _in_order(
    rows: Iterable[RowMapping], sources: Mapping[int, RowMapping], ends_us: int | None
) -> list[tuple[int, ComparisonRow]]:
    """Return comparisons with the marks with which they are folded, in that order; after `ends_us` comes all that waits."""
    stretches = {key: _stretch(row) for key, row in sources.items()}
    read: list[tuple[int, ComparisonRow]] = []
    late: list[bool] = []
    for row in rows:
        item, stretch = comparison_row(row), stretches[row["batch_id"]]
        captured_us = min(item.captured_us, to_us(sources[row["batch_id"]]["stored_at"]))
        read.append((stretch.place_us(item.exchange_id, captured_us), item))
        late.append(stretch.is_late(captured_us))
    if ends_us is not None:
        waiting = [number for number, (at_us, _) in enumerate(read) if at_us > ends_us]
        places_us = closed_up(
            [read[number][0] for number in waiting], [late[number] for number in waiting], ends_us
        )
        for number, at_us in zip(waiting, places_us, strict=True):
            read[number] = at_us, read[number][1]
    return sorted(read, key=lambda pair: (pair[0], pair[1].exchange_id, pair[1].item))


def _stretch(row: _Row) -> Stretch:
    return Stretch(
        after_us=to_us(row["read_after"]),
        until_us=to_us(row["read_until"]),
        rest_us=to_us(row["rest_until"]),
        horizon_us=round(row["horizon_s"] * 1e6),
    )


def _captured(batches: Sequence[_Row]) -> dict[str, Any]:
    """Return between which times the rows of batches were captured."""
    return {
        "begin": min(row["captured_from"] for row in batches),
        "end": max(row["captured_to"] for row in batches),
    }


async def _position(connection: AsyncConnection) -> Position:
    return position_of(await _fold_row(connection))


async def _fold_row(connection: AsyncConnection) -> RowMapping:
    row = (await connection.execute(_POSITION)).mappings().one_or_none()
    if row is None:
        await connection.execute(_BEGIN)
        row = (await connection.execute(_POSITION)).mappings().one()
    return row


def _item_count(row: RowMapping) -> ItemCount:
    return ItemCount(
        row["model_version_id"],
        row["slice_id"],
        to_us(row["hour"]),
        row["n_items"],
        row["n_unmeasured"],
        row["names_people"],
    )


def comparison_row(row: RowMapping) -> ComparisonRow:
    """Return a row of `comparison` as the fold reads it."""
    return ComparisonRow(
        exchange_id=row["exchange_id"],
        item=row["item"],
        captured_us=to_us(row["captured_at"]),
        model_version_id=row["model_version_id"],
        policy_id=row["policy_id"],
        slice_ids=tuple(row["slice_ids"]),
        group_key=row["group_key"],
        pi1=row["pi1"],
        pi2=row["pi2"],
        u1=row["u1"],
        u2=row["u2"],
        candidate_margin=row["candidate_margin"],
        flip=None if row["flip"] is None else float(row["flip"]),
        topk=None if row["topk"] is None else float(row["topk"]),
        js=row["js"],
        divergence=row["divergence"],
        margin=row["margin"],
        tie=None if row["tie"] is None else float(row["tie"]),
        latency_s=row["latency_s"],
        signals=row.get("signals") or {},
    )


def _tally(row: RowMapping) -> TallyRow:
    named: dict[str, Any] = row["models"]
    open_of = {
        name: of["taken"] - of.get("thinned", 0) - of.get("published", 0) - sum(of["lost"].values())
        for name, of in named.items()
    }
    n_open = row["taken"] - row["thinned"] - row["published"] - sum(row["lost"].values())
    open_of[""] = n_open - sum(open_of.values())
    taken, lost = _answered(row["taken"], row["lost"])
    return TallyRow(
        source=row["source"],
        boot=row["boot"],
        stratum=row["stratum"],
        sequence=row["sequence"],
        at_us=to_us(row["at"]),
        offered=row["offered"],
        taken=taken,
        lost=lost,
        models={
            name: _answered(of["taken"], of["lost"])
            for name, of in named.items()
            if of["taken"] or of["lost"] or of.get("configured")
        },
        unknown={name: n for name, of in named.items() if (n := of.get("unknown"))},
        final=row["final"],
        open={name: n for name, n in open_of.items() if n},
    )


def _answered(taken: int, lost: Mapping[str, int]) -> tuple[int, int]:
    """Return how many requests were taken and lost, without those that are no loss of the answers of a configured model."""
    apart = sum(lost.get(reason, 0) for reason in (*UNANSWERED, Loss.UNKNOWN_MODEL))
    return taken - apart, sum(lost.values()) - apart


def _expiry(row: RowMapping) -> ExpiryRow:
    return ExpiryRow(stratum=row["stratum"], model=row["model"], n=row["n"], at_us=to_us(row["stored_at"]))


def detector_row(row: RowMapping) -> DetectorRow:
    """Return a row of `detector` as the fold reads it."""
    return DetectorRow(
        model_version_id=row["model_version_id"],
        slice_id=row["slice_id"],
        metric=row["metric"],
        kind=row["kind"],
        state=bytes(row["state"]),
        budget=row["budget"],
        n_groups=row["n_groups"],
        evidence=row["evidence"],
        fold_seq=row["fold_seq"],
        created_us=to_us(row["created_at"]),
        last_us=to_us(row["last_at"]),
        retired_us=None if row["retired_at"] is None else to_us(row["retired_at"]),
        noise=row["noise"],
    )


def _verdict(row: RowMapping) -> VerdictRow:
    return VerdictRow(
        model_version_id=row["model_version_id"],
        slice_id=row["slice_id"],
        verdict=Verdict(row["verdict"]),
        reason=row["reason"],
        since_us=to_us(row["since"]),
        n_groups=row["n_groups"],
        evidence=row["evidence"],
        threshold=row["threshold"],
        estimate=row["estimate"],
        last_us=to_us(row["last_at"]),
        updated_us=to_us(row["updated_at"]),
        fold_seq=row["fold_seq"],
    )


def _baseline(row: RowMapping) -> BaselineRow:
    return BaselineRow(
        model_version_id=row["model_version_id"],
        slice_id=row["slice_id"],
        metric=row["metric"],
        kind=row["kind"],
        source=Source(row["source"]),
        made_by=row["made_by"],
        reason=row["reason"],
        from_us=None if row["from_at"] is None else to_us(row["from_at"]),
        to_us=None if row["to_at"] is None else to_us(row["to_at"]),
        n_groups=row["n_groups"],
        from_version_id=row["from_version_id"],
        content=row["content"],
        fold_seq=row["fold_seq"],
    )


def _serving(row: RowMapping) -> ServingRow:
    return ServingRow(
        model_version_id=row["model_version_id"],
        last_us=to_us(row["last_at"]),
        gap_s=row["gap_s"],
        gaps_s=row["gaps_s"],
        replaced_us=None if row["replaced_at"] is None else to_us(row["replaced_at"]),
        back_us=None if row["back_at"] is None else to_us(row["back_at"]),
    )


def _session(row: RowMapping) -> SessionRow:
    kept = {name: row[name] for name in ("model_version_id", "policy_id", "group_key", "fold_seq")}
    return SessionRow(**kept, opened_us=to_us(row["opened_at"]), items=bytes(row["items"]))

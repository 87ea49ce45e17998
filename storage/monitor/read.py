"""The fold's reads: its position, the catalog of ids, and the next batches, which get their numbers when read.

All reads, and the writes in `storage.monitor.write`, are in one transaction of the leader. The `fold` row is locked
first, so that a leader that lost its lock without noticing cannot fold at the same time as the new one.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.errors import RetryError
from quantdrift.core.records import UNANSWERED, Loss, Policy, Predicate, Verdict
from quantdrift.storage.monitor.discovery_log import follow, followed, lapsed, retired
from quantdrift.storage.monitor.noise import floors, noise_of
from quantdrift.storage.monitor.rows import (
    RETIRED_AFTER,
    AlertClose,
    BaselineRow,
    BatchRows,
    Catalog,
    ComparisonRow,
    DetectorRow,
    ExpiryRow,
    ItemCount,
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
from quantdrift.storage.monitor.undeclared_sessions import found_sessions

_HOUR: Final = timedelta(hours=1)

# The row must exist to be locked: without it, two monitors could both begin.
_BEGIN: Final = text("""
    insert into fold (id, fold_seq, mass, n_detectors) values (1, 0, 0, 0) on conflict (id) do nothing
""")
_POSITION: Final = text("select fold_seq, event_time, mass, n_detectors from fold where id = 1 for update")
_NUMBER: Final = text("""
    with next as (
        select id, row_number() over (order by id) as place
        from (select id from batch where fold_seq is null order by id limit :most for update) unfolded
    )
    update batch set fold_seq = :last + next.place from next where batch.id = next.id
    returning batch.id, batch.fold_seq, batch.kind, batch.stored_at, batch.captured_from, batch.captured_to,
        batch.unreferenced
""")
_COMPARISONS: Final = text("""
    select batch_id, exchange_id::text, item, captured_at, model_version_id, policy_id, slice_ids, group_key,
        pi1, pi2, u1, u2, candidate_margin, flip, tie, topk, js, divergence, margin, latency_s
    from comparison
    where captured_at between :begin and :end and batch_id = any(cast(:batches as bigint[]))
    order by batch_id, comparison.exchange_id, item
""")
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
    where b.fold_seq is not null and t.at > :horizon and b.stored_at > :horizon
    order by b.fold_seq, t.source, t.boot, t.sequence, t.stratum
""")  # noqa: S608 - constants
_EXPIRY: Final = (
    "e.batch_id, e.stratum, e.model, e.n, b.stored_at from expiry e join batch b on b.id = e.batch_id"
)
_EXPIRIES: Final = text(f"""
    select {_EXPIRY} where e.batch_id = any(cast(:batches as bigint[])) order by e.batch_id, e.boot, e.counts_row
""")
_RECENT_EXPIRIES: Final = text(f"""
    select {_EXPIRY} where b.fold_seq is not null and b.stored_at > :horizon
    order by b.fold_seq, e.boot, e.counts_row
""")
# The last tally of each sidecar, however old: its next tally is compared with it. One step per sidecar start and
# stratum along the primary key; reading every tally would take minutes in a large fleet.
_BASELINES: Final = text(f"""
    with recursive known as (
        (select source, boot, stratum from tally order by source, boot, stratum limit 1)
        union all
        select n.source, n.boot, n.stratum from known k cross join lateral (
            select t.source, t.boot, t.stratum from tally t
            where (t.source, t.boot, t.stratum) > (k.source, k.boot, k.stratum)
            order by t.source, t.boot, t.stratum limit 1
        ) n
    )
    select newest.* from known k cross join lateral (
        select {_TALLY} from tally t join batch b on b.id = t.batch_id
        where t.source = k.source and t.boot = k.boot and t.stratum = k.stratum
            and b.fold_seq is not null and least(t.at, b.stored_at) <= :horizon
        order by t.sequence desc limit 1
    ) newest
    where newest.at > cast(:horizon as timestamptz) - interval '30 days'
""")  # noqa: S608 - constants

# A decision of a person waits for a batch: where none comes, an empty one takes it over.
_TAKE_OVER: Final = text("""
    insert into batch (kind, worker, captured_from, captured_to, n_rows)
    select 'tally', 'monitor', now(), now(), 0
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
_CLOSED: Final = text("""
    select c.id, c.fold_seq, coalesce(nullif(c.identity, ''), c.made_by) as made_by, c.reason, a.model_version_id, a.slice_id
    from alert_action c join alert a on a.id = c.alert_id
    where c.action = 'close' and c.fold_seq between :first and :last order by c.id
""")
# Decisions of people apply from the next batch on, so that folding again gives the same result.
_DECIDE: Final = text("update baseline set fold_seq = :fold_seq where fold_seq is null returning *")
_FOLDED: Final = text("""
    select id, fold_seq, kind, stored_at, captured_from, captured_to, unreferenced from batch
    where fold_seq between :first and :last
""")
_DECIDED: Final = text("""
    select * from baseline
    where fold_seq between :first and :last and source in ('accepted', 'imported', 'frozen', 'kept')
""")
_SERVING: Final = text("""
    select * from serving v
    where v.last_at >= cast(:silent as timestamptz) or exists (
        select from detector d where d.retired_at is null and d.model_version_id = v.model_version_id
    )
    order by v.model_version_id
""")
# A verdict without a live detector is history, except for a version without a reference, which never has a detector, and for
# a slice that nothing was measured of yet.
_VERDICTS: Final = text("""
    select v.* from verdict v join model_version m on m.id = v.model_version_id
    where (m.reference_digest = '' and coalesce(v.last_at >= cast(:silent as timestamptz), true))
        or exists (
            select from detector d where d.retired_at is null
                and d.model_version_id = v.model_version_id and d.slice_id = v.slice_id
        )
        or (m.reference_digest <> '' and v.last_at >= cast(:silent as timestamptz) and not exists (
            select from detector d where d.model_version_id = v.model_version_id and d.slice_id = v.slice_id
        ))
    order by v.model_version_id, v.slice_id
""")
_RECENT_ITEMS: Final = text("""
    select model_version_id, slice_id, hour, n_items, n_unmeasured from rollup_hour where hour >= :horizon
    order by hour, model_version_id, slice_id
""")
_POLICIES_KEPT: Final = 1_000
_POLICIES: Final = text("""
    select id, definition from policy where cast(:wanted as int[]) is null or id = any(cast(:wanted as int[]))
""")
_IMPORTED: Final = """
    select distinct on (model_version_id, slice_id, metric) * from baseline
    where kind = 'budget' and source = 'imported' and fold_seq is not null
    order by model_version_id, slice_id, metric, id desc
"""


async def resume(connection: AsyncConnection) -> Snapshot:
    """Return the state from which a fold starts or continues; retired detectors are left out."""
    position = await _position(connection)
    detectors = await _rows(
        connection,
        "select * from detector where retired_at is null order by model_version_id, slice_id, metric, kind",
    )
    silent = None if position.event_us is None else from_us(position.event_us) - RETIRED_AFTER
    verdicts = (await connection.execute(_VERDICTS, {"silent": silent})).mappings().all()
    baselines: Sequence[RowMapping] = ()
    recent: Sequence[RowMapping] = ()
    expired: Sequence[RowMapping] = ()
    items: Sequence[RowMapping] = ()
    if position.event_us is not None:
        horizon = {"horizon": from_us(position.event_us) - _HOUR}
        baselines = (await connection.execute(_BASELINES, horizon)).mappings().all()
        recent = (await connection.execute(_RECENT_TALLIES, horizon)).mappings().all()
        expired = (await connection.execute(_RECENT_EXPIRIES, horizon)).mappings().all()
        hour = from_us(position.event_us).replace(minute=0, second=0, microsecond=0)
        items = (await connection.execute(_RECENT_ITEMS, {"horizon": hour - _HOUR})).mappings().all()
    return Snapshot(
        position=position,
        detectors=tuple(detector_row(row) for row in detectors),
        verdicts=tuple(_verdict(row) for row in verdicts),
        baselines=tuple(_tally(row) for row in baselines),
        tallies=tuple(_tally(row) for row in recent),
        expiries=tuple(_expiry(row) for row in expired),
        sessions=tuple(_session(row) for row in await _rows(connection, "select * from session")),
        imported=tuple(_baseline(row) for row in await _rows(connection, _IMPORTED)),
        recent_items=tuple(_item_count(row) for row in items),
        retired=await retired(connection),
        lapsed=await lapsed(connection),
        floors=await floors(connection),
        serving=tuple(
            _serving(row) for row in (await connection.execute(_SERVING, {"silent": silent})).mappings()
        ),
    )


async def load_catalog(
    connection: AsyncConnection, *, wanted: Collection[int] | None = None, known: Catalog | None = None
) -> Catalog:
    """Return all versions and slices, and the policies; each model with a version gets its slice `all`.

    Parameters
    ----------
    wanted
        Policies that must be in it, since hundreds are made in a day; None: all of them.
    known
        An earlier catalog: its policies, which never change, are not read again; the newest of them are kept.
    """
    await connection.execute(
        text("""
            insert into slice (model, predicate, name, definition)
            select distinct v.model, 'true', 'all', '{"where": []}'::jsonb from model_version v
            where not exists (select from slice s where s.model = v.model and s.predicate = 'true')
            on conflict do nothing
        """)
    )
    return await read_catalog(connection, wanted=wanted, known=known)


async def read_catalog(
    connection: AsyncConnection, *, wanted: Collection[int] | None = None, known: Catalog | None = None
) -> Catalog:
    """Return the same as `load_catalog`, without writing anything."""
    versions = await _rows(
        connection, "select id, model, candidate_version, reference_digest, first_seen_at from model_version"
    )
    slices = await _rows(connection, "select id, model, name, predicate, definition from slice order by id")
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


async def claim(connection: AsyncConnection, after: int, most: int) -> list[BatchRows]:
    """Assign numbers to up to `most` new batches, consecutively after `after`; return them with their rows.

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
    numbering = {"most": most, "last": after}
    numbered = (await connection.execute(_NUMBER, numbering)).mappings().all()
    if not numbered and (await connection.execute(_TAKE_OVER)).rowcount:
        numbered = (await connection.execute(_NUMBER, numbering)).mappings().all()
    if not numbered:
        return []
    first = min(row["fold_seq"] for row in numbered)
    decided = (await connection.execute(_DECIDE, {"fold_seq": first})).mappings().all()
    closed = (await connection.execute(_CLOSE, {"fold_seq": first})).mappings().all()
    return await _batches(connection, numbered, decided, closed, await follow(connection, first))


async def refold(connection: AsyncConnection, first: int, last: int) -> list[BatchRows]:
    """Return the batches that were folded as `first` to `last`, with the same rows; nothing is written."""
    borders = {"first": first, "last": last}
    numbered = (await connection.execute(_FOLDED, borders)).mappings().all()
    decided = (await connection.execute(_DECIDED, borders)).mappings().all()
    closed = (await connection.execute(_CLOSED, borders)).mappings().all()
    return await _batches(connection, numbered, decided, closed, await followed(connection, first, last))


async def _batches(
    connection: AsyncConnection,
    numbered: Sequence[RowMapping],
    decided: Sequence[RowMapping],
    closed: Sequence[RowMapping],
    changed: Mapping[int, tuple[SliceChange, ...]],
) -> list[BatchRows]:
    """Return numbered batches with their rows and the decisions that apply from them on, in order."""
    decisions: dict[int, list[BaselineRow]] = {}
    for row in sorted(decided, key=lambda row: row["id"]):
        decisions.setdefault(row["fold_seq"], []).append(_baseline(row))
    closes: dict[int, list[AlertClose]] = {}
    for row in closed:
        values = {name: row[name] for name in AlertClose.__struct_fields__}
        closes.setdefault(row["fold_seq"], []).append(AlertClose(**values))
    ids = [row["id"] for row in numbered]
    comparisons: dict[int, list[ComparisonRow]] = {}
    compared = [row for row in numbered if row["kind"] == "comparison"]
    if compared:
        window = {
            "begin": min(row["captured_from"] for row in compared),
            "end": max(row["captured_to"] for row in compared),
        }
        batches = [row["id"] for row in compared]
        for row in (await connection.execute(_COMPARISONS, {**window, "batches": batches})).mappings():
            comparisons.setdefault(row["batch_id"], []).append(comparison_row(row))
    noise = await noise_of(connection, [row["id"] for row in compared])
    tallies: dict[int, list[TallyRow]] = {}
    for row in (await connection.execute(_TALLIES, {"batches": ids})).mappings():
        tallies.setdefault(row["batch_id"], []).append(_tally(row))
    expiries: dict[int, list[ExpiryRow]] = {}
    for row in (await connection.execute(_EXPIRIES, {"batches": ids})).mappings():
        expiries.setdefault(row["batch_id"], []).append(_expiry(row))
    return [
        BatchRows(
            fold_seq=row["fold_seq"],
            stored_us=to_us(row["stored_at"]),
            captured_us=to_us(row["captured_to"]),
            comparisons=tuple(comparisons.get(row["id"], ())),
            tallies=tuple(tallies.get(row["id"], ())),
            decisions=tuple(decisions.get(row["fold_seq"], ())),
            slices=changed.get(row["fold_seq"], ()),
            closes=tuple(closes.get(row["fold_seq"], ())),
            unreferenced=tuple(row["unreferenced"]),
            noise=noise.get(row["id"], ()),
            expiries=tuple(expiries.get(row["id"], ())),
        )
        for row in sorted(numbered, key=lambda row: row["fold_seq"])
    ]


async def _position(connection: AsyncConnection) -> Position:
    await connection.execute(_BEGIN)
    row = (await connection.execute(_POSITION)).mappings().one()
    return Position(
        fold_seq=row["fold_seq"],
        event_us=None if row["event_time"] is None else to_us(row["event_time"]),
        mass=row["mass"],
        n_detectors=row["n_detectors"],
    )


def _item_count(row: RowMapping) -> ItemCount:
    return ItemCount(
        row["model_version_id"], row["slice_id"], to_us(row["hour"]), row["n_items"], row["n_unmeasured"]
    )


async def _rows(connection: AsyncConnection, statement: str) -> Sequence[RowMapping]:
    return (await connection.execute(text(statement))).mappings().all()


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

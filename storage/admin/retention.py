"""Retention: creates partitions ahead of time, and deletes old rows, payloads, sums and detector states.

`ENDS` says of each table when its rows go. Slices and versions that lost their place go last, when nothing that is kept
refers to them, together with their verdicts, detectors and baselines.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final

import msgspec
from sqlalchemy import CursorResult, text

from quantdrift.core.config.schema import Storage
from quantdrift.core.errors import RetryError
from quantdrift.storage.database import Database
from quantdrift.storage.schema.partitions import (
    AHEAD_DAYS,
    drop_partition,
    empty_partition,
    ensure_partitions,
    partition_days,
)

_CHUNK: Final = 10_000  # rows per transaction: each is short, and an interrupted run loses nothing
_DROP_TIMEOUT_S: Final = 2.0
SUPERSEDED_AFTER: Final = timedelta(days=90)
"""How long replaced baselines and detectors keep their content, and at least `storage.retention_days`: a quarter, so that
a change of the last release can still be explained."""

# Counts are cumulative: the last tally before the limit stays, because the first one after it is subtracted from it.
_OLD_TALLIES: Final = """
    delete from tally where (source, boot, stratum, sequence) in (
        select old.source, old.boot, old.stratum, old.sequence
        from tally old
        left join lateral (
            select t.at from tally t
            where t.source = old.source and t.boot = old.boot and t.stratum = old.stratum
                and t.sequence > old.sequence
            order by t.sequence
            limit 1
        ) next on true
        where old.at < :before and (next.at is null or next.at < :before)
        limit :chunk
    )
"""
# Of the model that is the furthest behind: each is folded by itself.
_FOLDED_TO: Final = (
    "select least((select min(event_time) from fold), (select min(event_time) from model_fold))"
)
# Counts are cumulative: of those between two that stay, the sums stay. A sidecar that sent none for five minutes counts as ended,
# also where the traffic is folded again.
_DENSE_TALLIES: Final = f"""
    with fold_time as (select ({_FOLDED_TO}) - interval '75 minutes' as before)
    delete from tally where (source, boot, stratum, sequence) in (
        select dense.source, dense.boot, dense.stratum, dense.sequence
        from fold_time
        join tally dense on dense.at < fold_time.before and (cast(:since as timestamptz) is null or dense.at >= :since)
        cross join lateral (
            select t.at from tally t
            where t.source = dense.source and t.boot = dense.boot and t.stratum = dense.stratum
                and t.sequence > dense.sequence
            order by t.sequence
            limit 1
        ) next
        where next.at < fold_time.before
            and date_bin('3 minutes', dense.at, '2000-01-01 00:00:00+00') = date_bin('3 minutes', next.at, '2000-01-01 00:00:00+00')
        limit :chunk
    )
"""  # noqa: S608 - constants
_OLD_BATCHES: Final = """
    delete from batch where id in (
        select id from batch
        where stored_at < :before and not exists (select from tally where tally.batch_id = batch.id)
        limit :chunk
    )
"""
# If a sidecar sent a tally after its row was deleted, its exchanges would count as expired: delete only rows without
# tallies.
_OLD_ARRIVALS: Final = """
    delete from arrival where (boot, counts_row) in (
        select a.boot, a.counts_row from arrival a
        where a.created_at < :before and not exists (
            select from tally t where t.source = a.source and t.boot = a.boot and t.stratum = a.stratum
        )
        limit :chunk
    )
"""
_OLD_BLOCKS: Final = "select * from blocks_drop(:before, :chunk)"
_CONDENSED: Final = text("select n, last_at from comparison_condense(:day, :since, :most)")
_FOLDED_UNTIL: Final = text(_FOLDED_TO)
_CONDENSED_AT_ONCE: Final = 65_536
"""Comparisons of a transaction that makes blocks of 1,024: some seconds."""
_WAITS: Final = timedelta(days=1)
"""How far the fold must be beyond a day before it is condensed: it reads single comparisons."""
_MERGED: Final = text("select blocks_merge(:before, :most)")
_MERGED_AFTER: Final = timedelta(hours=1)
"""How far the fold must be beyond a block of a worker before it is merged: until then it is read by its batch."""
# The monitor may not read payloads, nor learn which row still has one.
_OLD_PAYLOADS: Final = "select * from payloads_drop(:before, :chunk)"
_OLD_QUARANTINE: Final = """
    delete from quarantine where id in (
        select id from quarantine where quarantined_at < :before limit :chunk
    )
"""
# An epoch lasts a day at most: its comparisons were dropped with their partitions by then.
_OLD_POLICIES: Final = """
    delete from policy where id in (
        select p.id from policy p
        where p.first_seen_at < :before
            and not exists (select from session where session.policy_id = p.id)
        limit :chunk
    )
"""
# No longer in effect: a newer baseline followed, or its detector is retired. Imported budgets stay: each is one number,
# and applies again when its slice returns. A decision that was folded with a batch that still exists is its history.
_OLD_CONTENTS: Final = """
    update baseline set content = null where id in (
        select b.id from baseline b
        where b.content is not null and b.source <> 'imported' and b.fold_seq is not null and b.made_at < :before
            and (
                exists (
                    select from baseline n
                    where n.model_version_id = b.model_version_id and n.slice_id = b.slice_id
                        and n.metric = b.metric and n.kind = b.kind and n.id > b.id
                        and n.content is not null and n.fold_seq is not null and n.made_at < :before
                ) or not exists (
                    select from detector d
                    where d.model_version_id = b.model_version_id and d.slice_id = b.slice_id
                        and d.metric = b.metric and d.kind = b.kind
                        and (d.retired_at is null or d.retired_at >= :before)
                )
            )
            and not exists (select from batch where batch.fold_seq = b.fold_seq and batch.stored_at >= :kept_from)
        limit :chunk
    )
"""
# The condition is repeated: a detector that the fold has started again meanwhile is checked again before it is deleted.
_OLD_DETECTORS: Final = """
    delete from detector where retired_at < :before and (model_version_id, slice_id, metric, kind) in (
        select model_version_id, slice_id, metric, kind from detector where retired_at < :before limit :chunk
    )
"""
# What an open alert belongs to stays, however old it is, and so does an event that waits for the collector.
_OLD_EVENTS: Final = """
    delete from outbox where id in (
        select o.id from outbox o
        left join transition t on t.id = o.transition_id
        left join alert a on a.id = t.alert_id
        where o.sent_at < :before and (a.id is null or a.resolved_at < :before)
        limit :chunk
    )
"""
_OLD_TRANSITIONS: Final = """
    delete from transition where id in (
        select t.id from transition t left join alert a on a.id = t.alert_id
        where t.at < :before and (a.id is null or a.resolved_at < :before)
            and not exists (select from outbox where outbox.transition_id = t.id)
        limit :chunk
    )
"""
_OLD_ALERTS: Final = """
    delete from alert where id in (
        select a.id from alert a
        where a.resolved_at < :before
            and not exists (select from transition where transition.alert_id = a.id)
            and not exists (select from verdict where verdict.alert_id = a.id)
        limit :chunk
    )
"""
_OLD_INCIDENTS: Final = """
    delete from incident where id in (
        select i.id from incident i
        where i.opened_at < :before and not exists (select from alert where alert.incident_id = i.id)
            and not exists (
                select from incident m join alert on alert.incident_id = m.id where m.id = i.merged_into
            )
            and not exists (
                select from outbox o join incident_change c on c.id = o.incident_change_id where c.incident_id = i.id
            )
            and not exists (select from incident younger where younger.merged_into = i.id)
        limit :chunk
    )
"""
_OLD_NOISE_CHANGES: Final = """
    delete from noise_change where id in (
        select n.id from noise_change n
        where n.at < :before and not exists (select from outbox where outbox.noise_change_id = n.id)
        limit :chunk
    )
"""
# By version and slice, as the primary key sorts them: a search by time alone would read the whole table.
_OLD_ROLLUPS: Final = """
    delete from {table} where (model_version_id, slice_id, {column}) in (
        select old.* from model_version v join slice s on s.model = v.model
        cross join lateral (
            select r.model_version_id, r.slice_id, r.{column} from {table} r
            where r.model_version_id = v.id and r.slice_id = s.id and r.{column} < :before
        ) old
        limit :chunk
    )
"""
_OLD_REPORTS: Final = """
    delete from report_run where id in (
        select id from report_run where created_at < :before limit :chunk
    )
"""
_OLD_GATES: Final = """
    delete from gate_run where id in (
        select id from gate_run where begun_at < :before limit :chunk
    )
"""
# An open session whose model gets no traffic any more never closes.
_OLD_SESSIONS: Final = """
    delete from session where (model_version_id, policy_id, group_key) in (
        select model_version_id, policy_id, group_key from session where opened_at < :before limit :chunk
    )
"""
_OLD_VECTORS: Final = """
    delete from embedding where (captured_at, exchange_id, item) in (
        select captured_at, exchange_id, item from embedding where captured_at < :before limit :chunk
    )
"""
_OLD_LABELS: Final = """
    delete from label where (captured_at, exchange_id, item) in (
        select captured_at, exchange_id, item from label where captured_at < :before limit :chunk
    )
"""
_OLD_PROCESSES: Final = """
    delete from process_report where (role, source) in (
        select role, source from process_report where seen_at < :before limit :chunk
    )
"""
# The newest content of a detector, and the decisions about it, are in effect.
_OLD_BASELINES: Final = """
    delete from baseline where id in (
        select b.id from baseline b
        where b.content is null and b.fold_seq is not null and b.made_at < :before and exists (
            select from baseline n
            where n.model_version_id = b.model_version_id and n.slice_id = b.slice_id and n.metric = b.metric
                and n.kind = b.kind and n.id > b.id and n.content is not null and n.fold_seq is not null
                and n.made_at < :before
        )
        limit :chunk
    )
"""
# The newest change that the fold has applied says what is so now.
_OLD_CHANGES: Final = """
    delete from {table} where id in (
        select c.id from {table} c
        where c.made_at < :before and c.fold_seq is not null and exists (
            select from {table} n where n.{column} = c.{column} and n.id > c.id and n.fold_seq is not null
        )
        limit :chunk
    )
"""
_OLD_DOUBTS: Final = """
    delete from doubt where (model, reference_digest) in (
        select model, reference_digest from doubt where found_at < :before limit :chunk
    )
"""
_OLD_SHARES: Final = """
    delete from value_share where (model, source) in (
        select model, source from value_share where counted_at < :before limit :chunk
    )
"""
_ENDED_DISCOVERY: Final = """
    d.status in ('expired', 'retired') and not d.held
        and greatest(d.first_found_at, d.frozen_at, d.confirmed_at, d.expired_at) < :before
        and not exists (
            select from discovery_change c
            where c.discovery_id = d.id and (c.made_at >= :before or (c.fold_seq is null and d.slice_id is not null))
        )
"""
_OLD_DISCOVERIES: Final = f"""
    with ended as (
        select d.id from discovery d where d.slice_id is null and {_ENDED_DISCOVERY} limit :chunk for update skip locked
    ), changes as (
        delete from discovery_change where discovery_id in (select id from ended)
    )
    delete from discovery where id in (select id from ended)
"""  # noqa: S608 - a constant
# A slice lost its place, or was found by a search and retired, and only its last state is left of it.
_OLD_SLICES: Final = """
    with ended as (
        select s.id from slice s
        where (
                s.lapsed_at < :before and not exists (select from discovery d where d.slice_id = s.id)
                or exists (select from discovery d where d.slice_id = s.id and {ended_discovery})
            )
            and not exists (select from alert a where a.slice_id = s.id)
            and not exists (select from transition t where t.slice_id = s.id)
            and not exists (select from noise_change n where n.slice_id = s.id)
            and not exists (select from detector d where d.slice_id = s.id and d.retired_at is null)
            and not exists (select from verdict v where v.slice_id = s.id and v.updated_at >= :before)
            and not exists (
                select from slice_change c where c.slice_id = s.id and (c.made_at >= :before or c.fold_seq is null)
            )
            and not exists (
                select from model_version v join rollup_hour r on r.model_version_id = v.id and r.slice_id = s.id
            )
            and not exists (
                select from model_version v join rollup_day r on r.model_version_id = v.id and r.slice_id = s.id
            )
        limit :chunk for update skip locked
    ), changes as (
        delete from discovery_change where discovery_id in (
            select d.id from discovery d join ended on ended.id = d.slice_id
        )
    ), {children}
    delete from slice where id in (select id from ended)
""".format(  # noqa: S608 - constants
    ended_discovery=_ENDED_DISCOVERY,
    children=", ".join(
        f"of_{table} as (delete from {table} where slice_id in (select id from ended))"  # noqa: S608 - constants
        for table in (
            "discovery",
            "slice_change",
            "verdict",
            "detector",
            "baseline",
            "undeclared_session",
            "noise_slice",
            "noise_test",
        )
    ),
)
_OLD_VERSIONS: Final = """
    with ended as (
        select v.id from model_version v
        where v.lapsed_at < :before
            and not exists (select from alert a where a.model_version_id = v.id)
            and not exists (select from incident i where i.model_version_id = v.id)
            and not exists (select from transition t where t.model_version_id = v.id)
            and not exists (select from noise_change n where n.model_version_id = v.id)
            and not exists (select from session s where s.model_version_id = v.id)
            and not exists (select from discovery d where d.model_version_id = v.id)
            and not exists (select from detector d where d.model_version_id = v.id and d.retired_at is null)
            and not exists (select from verdict r where r.model_version_id = v.id and r.updated_at >= :before)
            and not exists (select from baseline b where b.from_version_id = v.id and b.model_version_id <> v.id)
            and not exists (select from rollup_hour r where r.model_version_id = v.id)
            and not exists (select from rollup_day r where r.model_version_id = v.id)
        limit :chunk for update skip locked
    ), {children}
    delete from model_version where id in (select id from ended)
""".format(  # noqa: S608 - constants
    children=", ".join(
        f"of_{table} as (delete from {table} where model_version_id in (select id from ended))"  # noqa: S608 - constants
        for table in (
            "verdict",
            "detector",
            "baseline",
            "undeclared_session",
            "noise_floor",
            "noise_slice",
            "noise_test",
            "discovery_search",
            "serving",
        )
    )
)
_WITH_ITS_SLICE: Final = "with its slice or version"
_EARLIEST: Final = datetime(2000, 1, 1, tzinfo=UTC)
_NEVER_MORE: Final = "one row"
ENDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "alert": "history_days after it was resolved",
        "alert_action": "with its alert",
        "arrival": "retention_days",
        "audit": "never: an audit from which entries go cannot be verified",
        "baseline": "history_days after a newer one took effect; the one in effect goes with its slice or version",
        "batch": "retention_days",
        "clustering": "retention_days after a newer one of its space; the newest is in use",
        "comparison": "retention_days; before that into condensed_block, where condense_after_days is set",
        "compatibility": _NEVER_MORE,
        "condensed_block": "retention_days",
        "detector": "90 days, or retention_days if that is longer, after it is retired",
        "discovery": "history_days after it expired or was retired; never while a person has retired it",
        "discovery_change": "history_days after a newer one, or with its discovery",
        "discovery_search": _WITH_ITS_SLICE,
        "doubt": "history_days after the last check",
        "embedding": "retention_days",
        "expiry": "with its batch",
        "fold": _NEVER_MORE,
        "gate_run": "history_days",
        "gate_verdict": "with its gate",
        "incident": "with the last of its alerts",
        "incident_change": "with its incident",
        "label": "retention_days",
        "leader": _NEVER_MORE,
        "model_fold": "one row for each model",
        "model_span": "one row for each model and time in which it had traffic",
        "monitor_process": "20 s after the monitor last said that it runs",
        "shard": "one row for each shard",
        "model_version": "history_days after it lost its place; those with a place are limited in number",
        "noise": "with its batch",
        "noise_change": "history_days",
        "noise_floor": _WITH_ITS_SLICE,
        "noise_slice": _WITH_ITS_SLICE,
        "noise_test": _WITH_ITS_SLICE,
        "outbox": "history_days after it was sent",
        "policy": "retention_days and two days",
        "process_report": "retention_days after its process reported last",
        "quarantine": "retention_days; its payload quarantine_days",
        "report_run": "history_days",
        "rollup_day": "history_days",
        "rollup_hour": "history_days",
        "serving": "with its version",
        "session": "when it closes, or retention_days",
        "slice": "history_days after it lost its place; those with a place are limited in number",
        "slice_change": "history_days after a newer one, or with its slice",
        "tally": "retention_days, and after 75 minutes only the last of every three minutes; the last of each start before that stays"
        " as long as a later one",
        "transition": "history_days",
        "undeclared_session": _WITH_ITS_SLICE,
        "value_share": "history_days after the last item",
        "verdict": _WITH_ITS_SLICE,
    }
)
"""When the rows of each table go. The options are in the section `storage`."""
_POLICY_LASTS: Final = timedelta(days=2)


class Maintenance(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one round of maintenance.

    Parameters
    ----------
    partitions_made, partitions_dropped
        UTC days whose partition of `comparison` was created or dropped.
    partitions_busy
        Days that are due but were locked; the next round tries again.
    n_condensed
        Comparisons that went into blocks.
    n_blocks, n_tallies, n_arrivals, n_batches, n_quarantined, n_policies
        Rows deleted.
    n_payloads
        Quarantined exchanges whose payload was deleted.
    n_contents
        Baselines no longer in effect whose content was deleted.
    n_detectors
        Retired detectors deleted.
    n_events, n_transitions, n_alerts, n_incidents, n_noise_changes
        Sent events, changes of verdict, resolved alerts and changes of noise deleted.
    n_hours, n_days
        Hourly and daily sums deleted.
    n_reports, n_gates
        Records of reports, whose files stay, and gates deleted.
    n_sessions, n_vectors, n_labels, n_baselines, n_changes
        Sessions that never closed, vectors, labels, replaced baselines, and replaced changes of slices and discoveries deleted.
    n_processes
        Reports of processes that ended.
    n_doubts, n_shares, n_discoveries, n_slices, n_versions
        Checks of references, weights, discoveries, slices and versions deleted, which nothing refers to any more.
    """

    partitions_made: tuple[date, ...]
    partitions_dropped: tuple[date, ...]
    partitions_busy: tuple[date, ...]
    n_condensed: int
    n_blocks: int
    n_tallies: int
    n_arrivals: int
    n_batches: int
    n_quarantined: int
    n_payloads: int
    n_policies: int
    n_contents: int
    n_detectors: int
    n_events: int
    n_transitions: int
    n_alerts: int
    n_incidents: int
    n_noise_changes: int
    n_hours: int
    n_days: int
    n_reports: int
    n_gates: int
    n_sessions: int
    n_vectors: int
    n_labels: int
    n_processes: int
    n_baselines: int
    n_changes: int
    n_doubts: int
    n_shares: int
    n_discoveries: int
    n_slices: int
    n_versions: int


async def maintain(
    database: Database, storage: Storage, now: datetime, *, ahead_days: int = AHEAD_DAYS
) -> Maintenance:
    """Run one round of maintenance; once a day is enough. Idempotent, in short transactions.

    It creates partitions first, so that samples can be stored whatever fails later.

    Parameters
    ----------
    storage
        How long rows and payloads are kept.
    now
        Aware.
    ahead_days
        How many days ahead partitions are made.

    Raises
    ------
    RetryError
        Postgres is unavailable or busy; what was done before stays done.
    """
    today = now.astimezone(UTC).date()
    kept_from = now - timedelta(days=storage.retention_days)
    async with database.begin() as connection:
        new_partitions = await ensure_partitions(
            connection, today - timedelta(days=1), today + timedelta(days=ahead_days)
        )
        days = await partition_days(connection)
    # A day is dropped when all of it is too old.
    due = [day for day in days if day < _midnight(kept_from).date()]
    dropped = [day for day in due if await _dropped(database, day)]
    superseded = {"before": now - max(SUPERSEDED_AFTER, timedelta(days=storage.retention_days))}
    history = {"before": now - timedelta(days=max(storage.history_days, storage.retention_days))}
    payloads_from = now - timedelta(days=storage.quarantine_days)
    return Maintenance(
        partitions_made=tuple(new_partitions),
        partitions_dropped=tuple(dropped),
        partitions_busy=tuple(day for day in due if day not in dropped),
        n_blocks=await in_chunks(database, _OLD_BLOCKS, {"before": _midnight(kept_from)}),
        n_tallies=await in_chunks(database, _OLD_TALLIES, {"before": kept_from}),
        n_arrivals=await in_chunks(database, _OLD_ARRIVALS, {"before": kept_from}),
        n_batches=await in_chunks(database, _OLD_BATCHES, {"before": kept_from}),
        n_payloads=await in_chunks(database, _OLD_PAYLOADS, {"before": payloads_from}),
        n_quarantined=await in_chunks(database, _OLD_QUARANTINE, {"before": kept_from}),
        n_sessions=await in_chunks(database, _OLD_SESSIONS, {"before": kept_from}),
        n_vectors=await in_chunks(database, _OLD_VECTORS, {"before": kept_from}),
        n_labels=await in_chunks(database, _OLD_LABELS, {"before": kept_from}),
        n_processes=await in_chunks(database, _OLD_PROCESSES, {"before": kept_from}),
        n_policies=await in_chunks(database, _OLD_POLICIES, {"before": kept_from - _POLICY_LASTS}),
        n_contents=await in_chunks(database, _OLD_CONTENTS, {**superseded, "kept_from": kept_from}),
        n_detectors=await in_chunks(database, _OLD_DETECTORS, superseded),
        n_events=await in_chunks(database, _OLD_EVENTS, history),
        n_transitions=await in_chunks(database, _OLD_TRANSITIONS, history),
        n_alerts=await in_chunks(database, _OLD_ALERTS, history),
        n_incidents=await in_chunks(database, _OLD_INCIDENTS, history),
        n_noise_changes=await in_chunks(database, _OLD_NOISE_CHANGES, history),
        n_hours=await in_chunks(database, _OLD_ROLLUPS.format(table="rollup_hour", column="hour"), history),
        n_days=await in_chunks(database, _OLD_ROLLUPS.format(table="rollup_day", column="day"), history),
        n_reports=await in_chunks(database, _OLD_REPORTS, history),
        n_gates=await in_chunks(database, _OLD_GATES, history),
        n_baselines=await in_chunks(database, _OLD_BASELINES, history),
        n_changes=await in_chunks(
            database, _OLD_CHANGES.format(table="slice_change", column="slice_id"), history
        )
        + await in_chunks(
            database, _OLD_CHANGES.format(table="discovery_change", column="discovery_id"), history
        ),
        n_doubts=await in_chunks(database, _OLD_DOUBTS, history),
        n_shares=await in_chunks(database, _OLD_SHARES, history),
        n_discoveries=await in_chunks(database, _OLD_DISCOVERIES, history),
        n_slices=await in_chunks(database, _OLD_SLICES, history),
        n_versions=await in_chunks(database, _OLD_VERSIONS, history),
        n_condensed=await _condense(
            database, storage, now, [day for day in days if day not in due]
        ),  # last, since it may take long
    )


async def maintain_by_two_clocks(database: Database, storage: Storage, now: datetime) -> Maintenance:
    """Run one round by the clock of this process, `now`, and by that of Postgres, since one of them may be wrong.

    What is old by only one of them is kept, and each of them finds the partitions of its next days.

    Raises
    ------
    RetryError
        As `maintain`.
    """
    async with database.begin() as connection:
        of_server: datetime = (await connection.execute(text("select now()"))).scalar_one()
    earlier, later = sorted((now.astimezone(UTC), of_server.astimezone(UTC)))
    ahead_days = AHEAD_DAYS + (later.date() - earlier.date()).days
    return await maintain(database, storage, earlier, ahead_days=ahead_days)


async def thin_tallies(database: Database, since: datetime | None) -> int:
    """Keep of the tallies of a sidecar's start and stratum the last of every three minutes; return how many were deleted.

    Sums over hours stay exact. The tallies of the last 75 minutes stay all, by the time up to which the monitor has folded, and
    so does what it has not folded.

    Parameters
    ----------
    since
        Earlier tallies were thinned before; None: all are looked at.

    Raises
    ------
    RetryError
        As `maintain`.
    """
    return await in_chunks(database, _DENSE_TALLIES, {"since": since})


async def merge_blocks(database: Database, now: datetime) -> int:
    """Merge the blocks that workers stored, a thousand comparisons in each; return how many comparisons were moved.

    Blocks of the last hour stay as they are, by the time up to which the monitor has folded and by `now`, and so do those of a day that has
    fewer than a thousand, until it is over. Whatever was moved stays moved when a later transaction fails.

    Raises
    ------
    RetryError
        As `maintain`.
    """
    async with database.begin() as connection:
        folded_until = await connection.scalar(_FOLDED_UNTIL)
    n_merged = 0
    while folded_until is not None:
        values = {"before": min(now, folded_until) - _MERGED_AFTER, "most": _CONDENSED_AT_ONCE}
        async with database.begin() as connection:
            merged = int(await connection.scalar(_MERGED, values) or 0)
        if not merged:
            break
        n_merged += merged
    return n_merged


async def _condense(database: Database, storage: Storage, now: datetime, days: Iterable[date]) -> int:
    """Put the comparisons of old days into blocks, and give back the space of those that were condensed before; return how many."""
    if not storage.condense_after_days:
        return 0
    async with database.begin() as connection:
        folded_until = await connection.scalar(_FOLDED_UNTIL)
    if folded_until is None:
        return 0
    before = _midnight(min(now - timedelta(days=storage.condense_after_days), folded_until - _WAITS)).date()
    n_condensed = 0
    for day in days:
        if day >= before:
            continue
        with suppress(RetryError):  # somebody reads it: the next round tries again
            async with database.begin() as connection:
                await empty_partition(connection, day, lock_timeout_s=_DROP_TIMEOUT_S)
        since = _EARLIEST
        while True:
            async with database.begin() as connection:
                done = (
                    await connection.execute(
                        _CONDENSED, {"day": day, "since": since, "most": _CONDENSED_AT_ONCE}
                    )
                ).one()
            n_condensed += done.n
            if done.n < _CONDENSED_AT_ONCE:
                break
            since = done.last_at
    return n_condensed


def _midnight(at: datetime) -> datetime:
    """Return the begin of the UTC day of `at`."""
    return at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


async def _dropped(database: Database, day: date) -> bool:
    try:
        async with database.begin() as connection:
            await drop_partition(connection, day, lock_timeout_s=_DROP_TIMEOUT_S)
    except RetryError:
        return False
    return True


async def in_chunks(database: Database, statement: str, values: Mapping[str, Any]) -> int:
    """Run a statement in short transactions until it changes less than a chunk; return the number of changed rows.

    Parameters
    ----------
    statement
        Changes at most `:chunk` rows, and other rows the next time.
    values
        Its other parameters.

    Raises
    ------
    RetryError
        Postgres is unavailable or busy; what was done before stays done.
    """
    n_rows = 0
    while True:
        async with database.begin() as connection:
            result: CursorResult[Any] = await connection.execute(text(statement), {**values, "chunk": _CHUNK})
        n_rows += result.rowcount
        if result.rowcount < _CHUNK:
            return n_rows

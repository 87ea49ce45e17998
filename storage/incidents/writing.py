"""Incidents as the monitor writes them: in the transaction of a fold, after the alerts."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final

import msgspec
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.facts.incidents import (
    LEAST_SILENCE,
    Grouping,
    IncidentAlert,
    IncidentState,
    Mitigation,
    SliceTraffic,
    Standing,
    grouped,
    standing,
)

_LOOKED_EVERY: Final = timedelta(seconds=10)
"""In event time: how often it is asked whether slices are routed away."""
_MOST_ROWS: Final = 20_000
_SHARE_OF: Final = timedelta(days=1)
"""The share of a slice in its version's traffic is that of so long before its last answer."""
# The alerts of incidents that may change, and those that have none yet. Only lasting alerts explain each other.
_ALERTS: Final = text("""
    with wanted as (
        select id from incident where state = 'open' or mitigation in ('routed', 'reported')
        union
        select id from incident where model_version_id = any(:versions) and state = 'mitigated'
        union
        select incident_id from alert where model_version_id = any(:versions) and resolved_at is null and incident_id is not null
    )
    select a.id, a.incident_id as incident, a.model_version_id as version_id, a.slice_id, a.onset_at, a.opened_at,
        case when c.made_at is not null then 'closed' else coalesce(a.ended, '') end as ended,
        coalesce(a.resolved_at, c.made_at) as ended_at,
        (
            select max(b.id) from alert b
            where b.model_version_id = a.model_version_id and b.slice_id = cast(a.details ->> 'explained_by_id' as int)
                and (b.resolved_at is null or b.resolved_at >= a.opened_at)
        ) as explained_by,
        exists (
            select from slice s where s.id = cast(a.details ->> 'explained_by_id' as int) and s.name <> a.details ->> 'explained_by'
        ) as has_several_causes,
        case when own.predicate = 'true' then cast(array[] as text[]) else coalesce(nullif(array(
            select case when coalesce(e ->> 'equals', e ->> 'low', e ->> 'high') is null then own.predicate else cast(e as text) end
            from jsonb_array_elements(own.definition -> 'where') e
        ), cast(array[] as text[])), array[own.predicate]) end as "where", a.metric = 'latency' as is_slow,
        case when i.mitigation = 'reported' then greatest(
            (select max(t.at) from transition t where t.alert_id = a.id and t.from_verdict = 'warning' and t.to_verdict = 'firing'),
            (select max(e.made_at) from alert_action e where e.alert_id = a.id and e.action = 'escalate')
        ) end as worse_at
    from alert a
    join slice own on own.id = a.slice_id
    left join incident i on i.id = a.incident_id
    left join lateral (
        select action, made_at from alert_action where alert_id = a.id and action <> 'note' order by id desc limit 1
    ) last on true
    left join lateral (select last.made_at where last.action = 'close') c on true
    where (a.incident_id is null or a.incident_id in (select id from wanted))
        and (cast(:own as int[]) is null or a.model_version_id = any(cast(:own as int[])))
    order by a.id
""")
_KNOWN: Final = text("""
    select i.id, i.state, i.mitigation, i.began_at, i.opened_at, i.ended_at, c.id as change, c.fold_seq is not null as is_taken_over,
        coalesce(c.counts, '{}') as counts
    from incident i
    left join lateral (
        select id, fold_seq, counts from incident_change where incident_id = i.id order by id desc limit 1
    ) c on true
    where i.id = any(:ids)
""")
_BEFORE: Final = text("select event_time from fold")
_NEW: Final = text("""
    insert into incident (model_version_id, began_at, opened_at, state) values (:version, :began, :opened, 'open') returning id
""")
_JOIN: Final = text("update alert set incident_id = :incident where id = any(:alerts)")
# A person may have said something meanwhile: then the next fold looks again.
_SET: Final = text("""
    update incident set state = :state, mitigation = :mitigation, began_at = :began, opened_at = :opened, ended_at = :ended
    where id = :incident and state = :was and mitigation is not distinct from cast(:was_mitigation as text)
    returning id
""")
_MERGE: Final = text("""
    with merged as (
        update incident set state = 'merged', mitigation = null, ended_at = null, merged_into = :incident where id = any(:absorbed)
        returning id
    )
    insert into incident_change (incident_id, state, at, fold_seq) select id, 'merged', :at, :fold_seq from merged
""")
_MERGED_BEFORE: Final = text("update incident set merged_into = :incident where merged_into = any(:absorbed)")
_CHANGE: Final = text("""
    insert into incident_change (incident_id, state, mitigation, at, fold_seq, counts, identity, reason)
    select cast(:incident as bigint), cast(:state as text), cast(:mitigation as text), cast(:at as timestamptz), cast(:fold_seq as bigint), cast(:counts as jsonb), coalesce(c.person, ''), coalesce(c.reason, '')
    from (select) one left join lateral (
        select coalesce(nullif(c.identity, ''), c.made_by) as person, c.reason from alert_action c join alert a on a.id = c.alert_id
        where a.incident_id = cast(:incident as bigint) and c.action = 'close' order by c.id desc limit 1
    ) c on cast(:state as text) = 'closed'
    returning id
""")
_TAKE_OVER: Final = text("update incident_change set fold_seq = :fold_seq where id = :change")
_NUMBER_ALERTS: Final = text("""
    update alert set details = details || jsonb_build_object('incident', cast(incident_id as text))
    where id = any(:alerts) and incident_id is not null and details ->> 'incident' is distinct from cast(incident_id as text)
""")
_NUMBER_TRANSITIONS: Final = text("""
    update transition t set details = t.details || jsonb_build_object('incident', cast(a.incident_id as text))
    from alert a where a.id = t.alert_id and t.id = any(:transitions) and a.incident_id is not null
""")
_SEND: Final = text("""
    insert into outbox (transition_id, incident_change_id, sent_at, webhook_due_at)
    select max(t.id), :change, now(), now() from transition t where t.alert_id = any(:alerts) group by t.alert_id
""")
# Roll-ups are by hour. What came in the hour of the last answer after it is counted from the rows; of more of them than are looked at,
# the rest counts as if it had come before: the slice then seems to have a smaller share, and fewer answers are missed.
_TRAFFIC: Final = text("""
    select v.model_version_id as version_id, v.slice_id, v.last_at, w.last_at as now,
        coalesce((
            select sum(r.weight) filter (where r.slice_id = v.slice_id)
                / nullif(greatest(sum(r.weight) filter (where r.slice_id = w.slice_id) - later.weight, 0), 0)
            from rollup_hour r
            where r.model_version_id = v.model_version_id and r.slice_id in (v.slice_id, w.slice_id)
                and r.hour > v.last_at - cast(:span as interval) and r.hour <= v.last_at
        ), 0) as share,
        later.n + coalesce((
            select sum(r.n_groups) from rollup_hour r
            where r.model_version_id = v.model_version_id and r.slice_id = w.slice_id and r.hour > v.last_at
        ), 0) as n_since,
        (select coalesce(sum(r.n_groups), 0) from rollup_day r
            where r.model_version_id = v.model_version_id and r.slice_id = v.slice_id) as n_slice,
        (select coalesce(sum(r.n_groups), 0) from rollup_day r
            where r.model_version_id = v.model_version_id and r.slice_id = w.slice_id) as n_all
    from unnest(cast(:version_ids as int[]), cast(:slice_ids as int[])) as asked (version_id, slice_id)
    join verdict v on v.model_version_id = asked.version_id and v.slice_id = asked.slice_id
    join slice s on s.id = v.slice_id
    join slice own on own.model = s.model and own.predicate = 'true' and own.id <> s.id
    join verdict w on w.model_version_id = v.model_version_id and w.slice_id = own.id
    cross join lateral (
        select count(*) as n, coalesce(sum(weight), 0) as weight from (
            select 1 / (c.pi1 * c.pi2) as weight
            from comparisons(v.last_at, date_trunc('hour', v.last_at, 'UTC') + interval '1 hour') c
            where c.model_version_id = v.model_version_id and c.item = 0 and c.captured_at > v.last_at
                and c.captured_at <= w.last_at
            limit :most
        ) exchange
    ) later
    where w.last_at - v.last_at >= cast(:least as interval) or :with_all
""")


class _Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What had been compared of a slice and of its version when it was found to be routed away, and its share until then."""

    n_slice: int
    n_all: int
    share: float
    last_at: datetime


class _Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared of a slice now, and in all so far."""

    traffic: SliceTraffic
    n_slice: int
    n_all: int

    def counts(self) -> _Counts:
        return _Counts(
            n_slice=self.n_slice,
            n_all=self.n_all,
            share=self.traffic.share,
            last_at=self.traffic.last_at,
        )

    def is_still_away(self, then: _Counts) -> bool:
        since = msgspec.structs.replace(
            self.traffic, share=then.share, n_since=float(self.n_all - then.n_all)
        )
        return not since.has_returned(self.n_slice - then.n_slice)


async def write_incidents(
    connection: AsyncConnection,
    *,
    versions: Collection[int],
    transitions: Sequence[tuple[int, int]],
    now: datetime,
    fold_seq: int,
    webhook: bool,
    own: Collection[int] | None = None,
    before: datetime | None = None,
) -> None:
    """Give each alert its incident, and each incident its state.

    Parameters
    ----------
    versions
        Versions whose alerts the fold has changed.
    transitions
        Changes of verdict that the fold has written, each with its alert: they get the number of the incident.
    now
        The fold's time.
    webhook
        Put what no change of verdict reports into the outbox, for the webhook alone.
    own
        Versions that the fold has to do with; None: all.
    before
        The fold's time at its last outcome, if only `own` versions are its concern.
    """
    wanted = {"versions": sorted(versions), "own": None if own is None else sorted(own)}
    rows = (await connection.execute(_ALERTS, wanted)).mappings().all()
    if rows:
        if own is None:
            before = await connection.scalar(_BEFORE)
        is_due = before is None or _turn(before) != _turn(now)
        await _arrange(connection, rows, is_due=is_due, now=now, fold_seq=fold_seq, webhook=webhook)
    if transitions:
        await connection.execute(_NUMBER_ALERTS, {"alerts": [alert for _, alert in transitions]})
        await connection.execute(
            _NUMBER_TRANSITIONS, {"transitions": [transition for transition, _ in transitions]}
        )


async def _arrange(
    connection: AsyncConnection,
    rows: Sequence[RowMapping],
    *,
    is_due: bool,
    now: datetime,
    fold_seq: int,
    webhook: bool,
) -> None:
    ids = sorted({row["incident"] for row in rows if row["incident"] is not None})
    incidents = {row["id"]: row for row in (await connection.execute(_KNOWN, {"ids": ids})).mappings()}
    traffic = await _traffic(connection, rows, incidents) if is_due else None
    by_version: dict[int, list[IncidentAlert]] = {}
    slices: dict[int, tuple[int, int]] = {}
    for row in rows:
        slices[row["id"]] = row["version_id"], row["slice_id"]
        values = {name: row[name] for name in IncidentAlert.__struct_fields__}
        alert = IncidentAlert(**values | {"where": frozenset(row["where"])})
        by_version.setdefault(row["version_id"], []).append(alert)
    for version, alerts in by_version.items():
        for grouping in grouped(alerts):
            at_slices = (
                None
                if traffic is None
                else {alert.id: traffic.get(slices[alert.id]) for alert in grouping.alerts}
            )
            await _store(
                connection,
                grouping,
                version,
                incidents.get(grouping.incident or 0),
                at_slices,
                now=now,
                fold_seq=fold_seq,
                webhook=webhook,
            )


def _turn(at: datetime) -> int:
    return int(at.timestamp() // _LOOKED_EVERY.total_seconds())


async def _traffic(
    connection: AsyncConnection, rows: Sequence[RowMapping], known: Mapping[int, RowMapping]
) -> dict[tuple[int, int], _Traffic]:
    """Return the traffic of slices with a lasting alert that are silent while their version serves, or were before."""
    lasting = [row for row in rows if row["ended_at"] is None]
    away = {number for number, row in known.items() if row["mitigation"] == Mitigation.ROUTED}
    by_slice: dict[tuple[int, int], _Traffic] = {}
    for with_all in (False, True):
        some = [row for row in lasting if (row["incident"] in away) is with_all]
        if not some:
            continue
        asked = {
            "version_ids": [row["version_id"] for row in some],
            "slice_ids": [row["slice_id"] for row in some],
            "span": _SHARE_OF,
            "least": LEAST_SILENCE,
            "with_all": with_all,
            "most": _MOST_ROWS,
        }
        for row in (await connection.execute(_TRAFFIC, asked)).mappings():
            by_slice[row["version_id"], row["slice_id"]] = _Traffic(
                traffic=SliceTraffic(
                    last_at=row["last_at"],
                    now=row["now"],
                    share=row["share"],
                    n_since=float(row["n_since"]),
                ),
                n_slice=int(row["n_slice"]),
                n_all=int(row["n_all"]),
            )
    return by_slice


async def _store(
    connection: AsyncConnection,
    grouping: Grouping,
    version: int,
    known: RowMapping | None,
    traffic: Mapping[int, _Traffic | None] | None,
    *,
    now: datetime,
    fold_seq: int,
    webhook: bool,
) -> None:
    """Write what has changed of one incident."""
    began = min(alert.onset_at for alert in grouping.alerts)
    opened = min(alert.opened_at for alert in grouping.alerts)
    incident = grouping.incident
    if incident is None:
        incident = await connection.scalar(_NEW, {"version": version, "began": began, "opened": opened})
        assert incident is not None
    joined = [alert.id for alert in grouping.alerts if alert.incident != incident]
    if joined:
        await connection.execute(_JOIN, {"incident": incident, "alerts": joined})
        await connection.execute(_NUMBER_ALERTS, {"alerts": joined})
    if grouping.absorbed:
        absorbed = list(grouping.absorbed)
        await connection.execute(_MERGED_BEFORE, {"incident": incident, "absorbed": absorbed})
        await connection.execute(
            _MERGE, {"incident": incident, "absorbed": absorbed, "at": now, "fold_seq": fold_seq}
        )
    routed = _routed(grouping, known, traffic)
    is_reported = known is not None and known["mitigation"] == Mitigation.REPORTED
    after = standing(
        grouping.alerts,
        known["ended_at"] if known is not None and is_reported else None,
        {number: counts.last_at for number, counts in routed.items()},
    )
    before = Standing(state=IncidentState.OPEN)
    if known is None:
        await _change(connection, incident, before, opened, fold_seq=fold_seq)
    else:
        before = msgspec.convert({name: known[name] for name in Standing.__struct_fields__}, Standing)
    if known is None or after != before or (began, opened) != (known["began_at"], known["opened_at"]):
        values = {
            "incident": incident,
            "began": began,
            "opened": opened,
            "ended": after.ended_at,
            "state": after.state,
            "mitigation": after.mitigation,
            "was": before.state,
            "was_mitigation": before.mitigation,
        }
        if await connection.scalar(_SET, values) is None:
            return
    lasting = [alert.id for alert in grouping.alerts if alert.ended_at is None]
    if (after.state, after.mitigation) != (before.state, before.mitigation):
        change = await _change(
            connection,
            incident,
            after,
            after.ended_at or now,
            fold_seq=fold_seq,
            counts={str(number): counts for number, counts in routed.items()} if after.mitigation else {},
        )
        # What replaces a version, and recovery, are changes of the alerts, and reported as such.
        is_own = not {after.mitigation, before.mitigation}.isdisjoint(
            {Mitigation.ROUTED, Mitigation.REPORTED}
        )
    elif known is not None and not known["is_taken_over"]:
        change, is_own = known["change"], True
        await connection.execute(_TAKE_OVER, {"change": change, "fold_seq": fold_seq})
    else:
        return
    if webhook and is_own and lasting:
        await connection.execute(_SEND, {"change": change, "alerts": lasting})


def _routed(
    grouping: Grouping, known: RowMapping | None, traffic: Mapping[int, _Traffic | None] | None
) -> dict[int, _Counts]:
    """Return the lasting alerts whose slice was routed away, with what had been compared by then; as before where nothing is asked."""
    before = (
        msgspec.convert(known["counts"], dict[int, _Counts], strict=False)
        if known is not None and known["mitigation"] == Mitigation.ROUTED
        else {}
    )
    routed_away: dict[int, _Counts] = {}
    lasting = [alert.id for alert in grouping.alerts if alert.ended_at is None]
    if traffic is None:
        return {alert: counts for alert, counts in before.items() if alert in lasting}
    for alert in grouping.alerts:
        now = traffic.get(alert.id)
        if alert.ended_at is not None or now is None:
            continue
        then = before.get(alert.id)
        if then is not None and now.is_still_away(then):
            routed_away[alert.id] = then
        elif then is None and now.traffic.is_routed_away:
            routed_away[alert.id] = now.counts()
    return routed_away


async def _change(
    connection: AsyncConnection,
    incident: int,
    found: Standing,
    at: datetime,
    *,
    fold_seq: int,
    counts: Mapping[str, _Counts] = MappingProxyType({}),
) -> int:
    """Add a state to the log of an incident; return its number."""
    values: dict[str, Any] = {
        "incident": incident,
        "state": found.state,
        "mitigation": found.mitigation,
        "at": at,
        "fold_seq": fold_seq,
        "counts": msgspec.json.encode(counts).decode() if counts else None,
    }
    return int(await connection.scalar(_CHANGE, values) or 0)

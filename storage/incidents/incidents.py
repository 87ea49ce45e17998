"""Incidents as people read and handle them: lists, the story of one, and what a person says of its state."""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import Any, Final

import msgspec
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.config.schema import Config
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import UNVERIFIED
from quantdrift.facts import figures
from quantdrift.facts.cost import Prices, cost_figure
from quantdrift.facts.figures import Counted, Figure, FigureName, Scope, Subject, Window, WindowName
from quantdrift.facts.incidents import Incident, IncidentState, Mitigation, StoryEvent, StoryKind
from quantdrift.storage.alerts.alerts import check_reason, close_alerts
from quantdrift.storage.audit import Action, add
from quantdrift.storage.comparisons.point import of_labels
from quantdrift.storage.cost import mean_worth, prices_of
from quantdrift.storage.figures.estimates import hashed, statement, sums_of
from quantdrift.storage.snapshot import in_time

_SERVING: Final = f"""
    case when i.mitigation = 'replaced' then array(
        select n.candidate_version from serving v join model_version n on n.id = v.model_version_id
        where n.model = i.model and v.replaced_at is null and v.model_version_id <> i.model_version_id
            and v.last_at > (select own.last_at from serving own where own.model_version_id = i.model_version_id)
            and (right(n.candidate_version, length('{UNVERIFIED}')) <> '{UNVERIFIED}'
                or right(i.candidate_version, length('{UNVERIFIED}')) = '{UNVERIFIED}')
        group by n.candidate_version order by max(v.last_at) desc, 1
    ) else cast(array[] as text[]) end as serving
"""  # noqa: S608 - a constant
_LIST: Final = text(f"""
    select i.*, {_SERVING} from incidents i
    where (:model = '' or i.model = :model) and (:with_ended or i.state = 'open' or i.id in (select id from incident_now))
        and (cast(:ids as bigint[]) is null or i.id = any(cast(:ids as bigint[])))
        and i.began_at < coalesce(cast(:end as timestamptz), 'infinity') and coalesce(i.ended_at, 'infinity') >= coalesce(cast(:begin as timestamptz), '-infinity')
    order by i.state <> 'open', i.severity, coalesce(i.ended_at, i.opened_at) desc, i.id desc limit :most
""")  # noqa: S608 - a constant
_ONE: Final = text(f"select i.*, {_SERVING} from incidents i where i.id = :id")  # noqa: S608 - a constant
_MERGED: Final = text("select merged_into from incident where id = :id")
_STORY: Final = text("""
    with member as (
        select a.id, a.slice_id, a.onset_at, a.details from alert a where a.incident_id = :id
    )
    select m.onset_at as at, 'onset' as kind, '' as who, s.name as text, m.id as alert, 0 as rank
    from member m join slice s on s.id = m.slice_id
    union all
    select t.at, case when t.to_verdict = 'firing' then 'page' when t.to_verdict = 'warning' then 'ticket' else 'end' end, '',
        concat_ws(': ', s.name, nullif(t.details ->> 'reason', '')), m.id,
        case t.to_verdict when 'warning' then 1 when 'firing' then 2 else 3 end
    from member m join transition t on t.alert_id = m.id join slice s on s.id = m.slice_id
    union all
    select c.made_at, case
            when c.finding ->> 'kind' = 'cause' then 'diagnosis' when c.finding ->> 'kind' in ('repair', 'gate') then c.finding ->> 'kind'
            when c.action = 'ack' then 'acknowledged' when c.action = 'unack' then 'not acknowledged any more'
            when c.action = 'escalate' then 'worse' when c.action = 'close' then 'closed' else 'note' end,
        case when c.action = 'escalate' then '' else concat_ws(' through ', nullif(c.identity, ''), c.made_by) end, c.reason, m.id, 4
    from member m join alert_action c on c.alert_id = m.id
    union all
    select case when c.fold_seq is null or c.reason <> '' then c.made_at else c.at end, 'state',
        case when c.reason <> '' then concat_ws(' through ', nullif(c.identity, ''), c.made_by) else '' end,
        c.state || coalesce(' (' || c.mitigation || ')', '') || case when c.reason <> '' then ': ' || c.reason else '' end, null, 5
    from incident_change c join incident i on i.id = c.incident_id
    where (i.id = :id or i.merged_into = :id) and c.state <> 'merged'
        and c.id > (select min(f.id) from incident_change f where f.incident_id = i.id)
    union all
    select v.first_seen_at, 'release', '', v.candidate_version, null, 6
    from model_version v join incident i on i.id = :id join model_version own on own.id = i.model_version_id
    where v.model = own.model and v.first_seen_at > i.began_at - interval '1 day'
        and v.first_seen_at < coalesce(i.ended_at, (select event_time from fold)) + interval '1 hour'
    union all
    select coalesce(g.made_at, r.ended_at), 'gate', r.made_by, coalesce(g.verdict, r.verdict) || ': '
        || regexp_replace(r.candidate, '(sha256:[0-9a-f]{12})[0-9a-f]*', '\1', 'g') || coalesce(' for ' || nullif(g.slice, ''), ''), null, 7
    from gate_run r left join gate_verdict g on g.gate_id = r.id
    join incident i on i.id = :id join model_version own on own.id = i.model_version_id
    where r.model = own.model and r.ended_at is not null and r.begun_at > i.began_at
        and r.begun_at < coalesce(i.ended_at, (select event_time from fold)) + interval '1 hour'
        and not exists (
            select from member m join alert_action c on c.alert_id = m.id  -- its note says the same in words
            where c.finding ->> 'kind' = 'gate' and c.made_at between r.begun_at and coalesce(g.made_at, r.ended_at) + interval '1 minute'
        )
    order by 1, 6, 5
    limit 500
""")
_LOCK: Final = text("select id from incident where id = :id for update")
_SAY: Final = text("""
    insert into incident_change (incident_id, state, mitigation, at, identity, reason)
    values (:id, :state, :mitigation, coalesce((select event_time from fold), now()), :identity, :reason)
""")
_SET: Final = text("""
    update incident set state = :state, mitigation = :mitigation, ended_at = case when :state <> 'open' then
        coalesce(ended_at, (select event_time from fold), now()) end
    where id = :id
""")
_MITIGATED: Final = text("""
    select a.model_version_id, a.slice_id, i.mitigation from incident i join alert a on a.incident_id = i.id
    where i.mitigation in ('routed', 'reported') and i.state = 'mitigated' and a.resolved_at is null
""")
_DUE: Final = text("""
    select i.id, i.model, i.candidate_version, i.model_version_id as version_id, i.slices, i.slice_ids, i.began_at,
        least(coalesce(i.ended_at, f.event_time), f.event_time) as until
    from incidents i cross join (select event_time from fold) f
    where f.event_time is not null and i.began_at < f.event_time and (
        i.counted_until is null
        or i.counted_until < i.ended_at
        or i.ended_at is null and f.event_time - i.counted_until > greatest(interval '1 minute', (f.event_time - i.began_at) / 50)
        or i.ended_at is null and i.counted_until > f.event_time
    )
    order by i.counted_until nulls first, i.id desc limit 1
""")
_PEOPLE: Final = text("""
    select count(distinct group_key) filter (where flip) as affected, count(distinct group_key) as n_people
    from comparisons(:begin, cast(:end as timestamptz) + interval '1 microsecond', cast(:of as int[]))
    where model_version_id = :version and slice_ids && cast(:of as int[]) and group_key <> ''
""")
_ITEMS: Final = """
    from (
        select model_version_id, array[0] as slice_ids, group_key, n_items, exchange_id, pi1, pi2, divergence, flip
        from comparisons(:begin, cast(:end as timestamptz) + interval '1 microsecond', cast(:of as int[]))
        where model_version_id = :version and slice_ids && cast(:of as int[])
    ) c
"""
_FLIPS: Final = {"flip": "c.flip::int"}
_SUMS: Final = text(statement(_FLIPS, _ITEMS, at="cast(:begin as timestamptz)").replace("::", "\\:\\:"))
_HOURS: Final = text("""
    select max(flip) from (
        select sum(flip) as flip from rollup_hour
        where model_version_id = :version and slice_id = any(cast(:of as int[])) and hour > cast(:begin as timestamptz) - interval '1 hour'
            and hour <= :end
        group by slice_id
    ) s
""")
_COUNT: Final = text("""
    update incident set n_answers = :n, changed = :changed, changed_low = :low, changed_high = :high,
        n_people = case when cast(:people as bigint) is not null then greatest(n_people, :people) else n_people end,
        counted_until = :until
    where id = :id
""")
_LABELS: Final = text(f"""
    select exists (
        select from label l {of_labels(":begin", "'infinity'")}
        where l.model_version_id = :version and l.captured_at >= :begin and c.slice_ids && cast(:of as int[]) and c.flip
    )
""")  # noqa: S608 - constants
COST_S: Final = 5.0
"""Longest time in which is read what the answers of incidents are worth."""
COUNT_S: Final = 20.0
"""Longest time in which the answers of an incident are read one by one; those of a longer one are counted by the roll-ups."""


class Say(StrEnum):
    """What a person says of an incident."""

    MITIGATE = "mitigate"
    REOPEN = "reopen"
    CLOSE = "close"


_AUDITED: Final = {
    Say.MITIGATE: Action.INCIDENT_MITIGATE,
    Say.REOPEN: Action.INCIDENT_REOPEN,
    Say.CLOSE: Action.INCIDENT_CLOSE,
}
_AFTER: Final = {
    Say.MITIGATE: (IncidentState.MITIGATED, Mitigation.REPORTED),
    Say.REOPEN: (IncidentState.OPEN, None),
    Say.CLOSE: (IncidentState.CLOSED, None),
}


async def list_incidents(
    connection: AsyncConnection,
    *,
    model: str = "",
    ids: Sequence[int] | None = None,
    with_ended: bool = False,
    begin: datetime | None = None,
    end: datetime | None = None,
    most: int = 1_000,
) -> list[Incident]:
    """Return incidents: open ones first, pages before tickets, then those that ended last.

    Parameters
    ----------
    ids
        Only these; None: all.
    with_ended
        Also those that ended more than a day ago.
    begin, end
        Only incidents that overlap this time; aware.
    """
    asked = {
        "model": model,
        "ids": None if ids is None else list(ids),
        "with_ended": with_ended,
        "begin": begin,
        "end": end,
        "most": most,
    }
    return [_incident(row) for row in (await connection.execute(_LIST, asked)).mappings()]


async def find_incident(connection: AsyncConnection, number: int) -> Incident:
    """Return one incident; of a number whose alerts another incident has taken over, that one.

    Raises
    ------
    OperatorError
        There is no such incident.
    """
    merged = await connection.scalar(_MERGED, {"id": number})
    row = (await connection.execute(_ONE, {"id": merged or number})).mappings().one_or_none()
    if row is None:
        raise OperatorError(
            f"there is no incident {number}: `quantdrift incidents list --all` shows the numbers"
        )
    return _incident(row)


async def with_costs(
    connection: AsyncConnection, incidents: Sequence[Incident], config: Config
) -> list[Incident]:
    """Return incidents with the cost of their changed answers; without it where no request has a price.

    Where requests differ in worth, those with a changed answer are read, for `COST_S` in all; incidents behind that have no cost. The
    interval is that of the number of changed answers.
    """
    now_s, prices, costed = asyncio.get_running_loop().time, dict[str, Prices](), list[Incident]()
    until_s = now_s() + COST_S
    for incident in incidents:
        if incident.model not in prices:
            prices[incident.model] = prices_of(config, incident.model)
        of_model, changed, left_s = prices[incident.model], incident.changed, until_s - now_s()
        worth, cost = None, None
        if changed is not None and of_model.most and left_s > 0:
            times = [(changed.window.begin, changed.window.end)]
            read = partial(
                mean_worth,
                connection,
                of_model,
                times,
                version_id=incident.version_id,
                slice_ids=incident.slice_ids,
            )
            worth = await in_time(connection, read, left_s)
        if changed is not None and worth is not None:
            counted = msgspec.structs.replace(changed, weight=1.0)
            cost = cost_figure(counted, counted.estimate, of_model, worth)
        costed.append(msgspec.structs.replace(incident, cost=cost))
    return costed


async def story(connection: AsyncConnection, incident: Incident) -> list[StoryEvent]:
    """Return what happened in an incident, in order: the first 500."""
    rows = (await connection.execute(_STORY, {"id": incident.id})).mappings()
    return [
        StoryEvent(
            at=row["at"],
            kind=StoryKind(row["kind"]),
            who=row["who"],
            text=row["text"],
            alert=row["alert"],
        )
        for row in rows
    ]


async def say(
    connection: AsyncConnection, number: int, what: Say, reason: str, *, identity: str = ""
) -> Incident:
    """Mitigate, open again or close an incident, with an entry in the audit, in the transaction of `connection`; return it.

    Closing it closes its alerts: their detectors start from the beginning, and a drift that goes on alerts again, under new numbers.

    Parameters
    ----------
    reason
        The audit keeps it for ever.
    identity
        The person that the caller has authenticated. Empty: the database user acts. It must never be a text that a person typed.

    Raises
    ------
    OperatorError
        There is no such incident; its state does not allow it; or the reason is missing or too long. The database user lacks the
        right (role quantdrift_operator).
    """
    reason = check_reason(reason)
    number = (await find_incident(connection, number)).id
    await connection.execute(_LOCK, {"id": number})
    incident = await find_incident(connection, number)
    _check(incident, what)
    state, mitigation = _AFTER[what]
    values = {"id": incident.id, "state": state, "mitigation": mitigation}
    await connection.execute(_SAY, {**values, "identity": identity, "reason": reason})
    await connection.execute(_SET, values)
    closed = await close_alerts(connection, incident.alerts, reason, identity) if what is Say.CLOSE else []
    after: dict[str, Any] = {"state": state, **({"alerts": closed} if closed else {})}
    if identity:
        after["identity"] = identity
    await add(
        connection,
        _AUDITED[what],
        model=incident.model,
        subject=f"incident {incident.id}",
        before={"state": incident.state},
        after=after,
        note=reason,
    )
    return await find_incident(connection, incident.id)


def _check(incident: Incident, what: Say) -> None:
    """Refuse what the state of an incident does not allow."""
    name = f"incident {incident.id}"
    if incident.state in {IncidentState.RECOVERED, IncidentState.CLOSED}:
        by = f" by {incident.said_by}" if incident.said_by else ""
        raise OperatorError(
            f"{name} is {incident.state}{by} already: add a note to one of its alerts instead"
        )
    if what is Say.MITIGATE and incident.state is not IncidentState.OPEN:
        raise OperatorError(f"{name} is mitigated already ({incident.mitigation}): close it when it is over")
    if what is Say.REOPEN and incident.mitigation is not Mitigation.REPORTED:
        raise OperatorError(
            f"{name} is {incident.state}{f' ({incident.mitigation})' if incident.mitigation else ''}: only one that a person has"
            " mitigated can be opened again by a person"
        )


async def has_labels(connection: AsyncConnection, incident: Incident) -> bool:
    """Return whether a changed answer of an incident has a true label."""
    asked = {"version": incident.version_id, "of": list(incident.slice_ids), "begin": incident.began_at}
    return bool(await connection.scalar(_LABELS, asked))


async def mitigated_slices(connection: AsyncConnection) -> dict[tuple[int, int], Mitigation]:
    """Return the version and slice of each alert that lasts although its incident is mitigated, and why that is."""
    rows = await connection.execute(_MITIGATED)
    return {(row.model_version_id, row.slice_id): Mitigation(row.mitigation) for row in rows}


class IncidentCount(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted of an incident; fields as the columns of `incident`, None where that is not known."""

    id: int
    until: datetime
    n: int | None = None
    changed: float | None = None
    low: float | None = None
    high: float | None = None
    people: int | None = None


async def count_due(connection: AsyncConnection, patience_s: float = COUNT_S) -> IncidentCount | None:
    """Count the changed answers and the people of the incident that waits longest; None: none waits.

    Each answer counts once, from the incident's beginning until its end, or so far, in the slices that no other one explains. An
    incident that lasts is due again after a minute, or a fiftieth of its age.

    Parameters
    ----------
    patience_s
        Answers are read one by one for so long; then the roll-ups have to do, by whole hours, of the slice with the most changed
        answers, and without people.
    """
    row = (await connection.execute(_DUE)).mappings().one_or_none()
    if row is None:
        return None
    asked = {
        "version": row["version_id"],
        "of": row["slice_ids"],
        "begin": row["began_at"],
        "end": row["until"],
    }

    async def read() -> tuple[Sequence[RowMapping], RowMapping]:
        sums = await hashed(connection, _SUMS, {**asked, "slices": None})
        return sums, (await connection.execute(_PEOPLE, asked)).mappings().one()

    exact = await in_time(connection, read, patience_s)
    if exact is None:
        changed = await connection.scalar(_HOURS, asked)
        return IncidentCount(id=row["id"], until=row["until"], changed=changed or 0.0)
    return _counted(row, *exact)


async def store_count(connection: AsyncConnection, count: IncidentCount) -> None:
    """Store what was counted of an incident."""
    await connection.execute(_COUNT, {name: getattr(count, name) for name in count.__struct_fields__})


def _counted(row: RowMapping, found: Sequence[RowMapping], people: RowMapping) -> IncidentCount:
    """Return the figures of an incident whose answers were read one by one."""
    count = IncidentCount(
        id=row["id"],
        until=row["until"],
        n=0,
        changed=0.0,
        people=people["affected"] if people["n_people"] else None,
    )
    if not found:
        return count
    clusters = sums_of(found[0], _FLIPS)
    scope = Scope(window=_window(row["began_at"], row["until"]), of=_subject(row), as_of=row["until"])
    counted = Counted(n=clusters.n_items, requests=clusters.weight)
    changed = figures.changed(scope, counted, figures.changed_share(scope, counted, clusters.of["flip"]))
    if changed is None:
        return msgspec.structs.replace(count, n=clusters.n_items)
    return msgspec.structs.replace(
        count, n=clusters.n_items, changed=changed.value, low=changed.low, high=changed.high
    )


def _window(begin: datetime, end: datetime) -> Window:
    return Window(name=WindowName.INCIDENT, begin=begin, end=end)


def _subject(row: RowMapping) -> Subject:
    return Subject(model=row["model"], version=row["candidate_version"], slice=", ".join(row["slices"]))


def _incident(row: RowMapping) -> Incident:
    return Incident(
        id=row["id"],
        model=row["model"],
        version=row["candidate_version"],
        version_id=row["model_version_id"],
        severity=row["severity"],
        slices=tuple(row["slices"]),
        slice_ids=tuple(row["slice_ids"]),
        state=IncidentState(row["state"]),
        mitigation=None if row["mitigation"] is None else Mitigation(row["mitigation"]),
        said_by=row["said_by"],
        reason=row["reason"],
        began_at=row["began_at"],
        opened_at=row["opened_at"],
        ended_at=row["ended_at"],
        changed=_figure(row, FigureName.CHANGED, row["changed"], row["changed_low"], row["changed_high"]),
        people=_figure(row, FigureName.PEOPLE_AFFECTED, row["n_people"], row["n_people"], None),
        serving=tuple(row["serving"]),
        alerts=tuple(row["alerts"]),
    )


def _figure(
    row: RowMapping, name: FigureName, value: float | None, low: float | None, high: float | None
) -> Figure | None:
    if value is None:
        return None
    until = row["counted_until"]
    return Figure(
        name=name,
        value=float(value),
        low=None if low is None else float(low),
        high=high,
        n=row["n_answers"] or 0,
        n_people=row["n_people"],
        window=_window(row["began_at"], until),
        of=_subject(row),
        as_of=until,
    )

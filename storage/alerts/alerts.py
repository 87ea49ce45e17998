"""Alerts as people handle them: lists, acknowledgements, notes, and the escalation that ends an acknowledgement.

An acknowledgement lasts until its alert is resolved, a person takes it back, or the alert escalates:

- its severity rises from `warning` to `firing`, or
- it is clearly worse than when it was acknowledged: the lower end of the time-uniform 95 % interval of its metric over the
  recent window is above both the upper end at that time and the mean from the onset until the alert. The mean counts because
  the window still contains traffic from before the onset when an alert is young. Where no interval was known, only the severity
  counts.

The monitor applies this rule with each fold and writes the escalation as a row, so everybody who reads sees the same state.

A person may close an alert: that is a row, too, and the monitor takes it over with its next fold. An alert whose version another one
has replaced is over as well, and is open again if the version serves again.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

import msgspec
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.errors import OperatorError
from quantdrift.core.notation import moment
from quantdrift.core.records import UNVERIFIED
from quantdrift.facts.events import AlertEvent, Ending, event_of
from quantdrift.facts.status import said
from quantdrift.facts.words import ending
from quantdrift.facts.words.alert import text_of
from quantdrift.facts.words.happened import SINCE, began
from quantdrift.facts.words.text import AlertText, Line, Step
from quantdrift.storage.audit import Action, add

LONGEST_REASON: Final = 2_000
"""Characters of a reason or a note."""
RELATED: Final = ("explained_by", "explained_by_id", "incident", "explains", "explains_ids")
"""What `alert.details` has: how an alert is related to others. It changes after the event of the alert was written."""
LAST_EVENT: Final = """
    left join lateral (
        select details, text, at from transition where alert_id = a.id and to_verdict in ('warning', 'firing') order by id desc limit 1
    ) event on true
"""
"""Joins to `alert a` the event that says what it is about: the newest that opened it or made it worse."""
DETAILS: Final = f"coalesce(event.details - cast(array{list(RELATED)} as text[]), '{{}}') || a.details"
"""The event of an alert, flat, as its relations are now."""
_STATE: Final = f"""
    select a.id, w.id as version_id, w.model, w.candidate_version as version, s.name as slice, s.predicate, s.id as slice_id, a.severity, a.metric,
        a.onset_at, a.opened_at, a.resolved_at, {DETAILS} as details, event.text, coalesce(event.at, a.opened_at) as written_at, coalesce(a.ended, '') as ended,
        last.action, last.made_by, last.identity, last.made_at, last.reason,
        (select count(*) from alert_action e where e.alert_id = a.id and e.action = 'escalate') as escalations,
        a.incident_id as incident,
        case when i.state = 'mitigated' and a.resolved_at is null then i.mitigation end as mitigation,
        case when i.mitigation = 'reported' then (
            select coalesce(nullif(m.identity, ''), m.made_by) || ': ' || m.reason from incident_change m
            where m.incident_id = i.id order by m.id desc limit 1
        ) else '' end as mitigated_by,
        case when a.ended = 'replaced' then own.last_at end as last_seen_at,
        case when a.ended = 'replaced' then array(
            select n.candidate_version from serving v join model_version n on n.id = v.model_version_id
            where n.model = w.model and v.replaced_at is null and v.last_at > own.last_at and v.model_version_id <> w.id
                and (right(n.candidate_version, length('{UNVERIFIED}')) <> '{UNVERIFIED}'
                    or right(w.candidate_version, length('{UNVERIFIED}')) = '{UNVERIFIED}')
            group by n.candidate_version order by max(v.last_at) desc, 1
        ) else cast(array[] as text[]) end as serving,
        (
            select max(b.id) from alert b
            where b.model_version_id = a.model_version_id and b.slice_id = cast(a.details ->> 'explained_by_id' as int)
                and (b.resolved_at is null or b.resolved_at >= a.opened_at)
        ) as explained_by,
        array(
            select max(b.id) from alert b
            where b.model_version_id = a.model_version_id and (b.resolved_at is null or b.resolved_at >= a.opened_at)
                and cast(b.details ->> 'explained_by_id' as int) = a.slice_id
            group by b.slice_id order by 1
        ) as explains
    from alert a
    {LAST_EVENT}
    left join serving own on own.model_version_id = a.model_version_id
    join model_version w on w.id = a.model_version_id
    join slice s on s.id = a.slice_id
    left join incident i on i.id = a.incident_id
    left join lateral (
        select * from alert_action c where c.alert_id = a.id and c.action <> 'note' order by c.id desc limit 1
    ) last on true
"""  # noqa: S608 - a constant
_LIST: Final = text(
    f"""{_STATE}
    where (a.resolved_at is null and last.action is distinct from 'close' or :with_resolved) and (:model = '' or w.model = :model)
        and (:version = 0 or w.id = :version and s.id = :slice)
    order by a.resolved_at is not null or last.action is not distinct from 'close', (last.action is not distinct from 'ack'), a.severity, a.details ->> 'explained_by_id' is not null,
        a.opened_at desc, a.id desc
    limit :most"""
)
_LATELY_REPLACED: Final = text(f"""{_STATE}
    where a.ended = 'replaced' and last.action is distinct from 'close' and (:model = '' or w.model = :model)
        and a.resolved_at > (select event_time from fold) - cast(:span as interval)
    order by a.id limit :most""")  # noqa: S608 - a constant
_ONE: Final = text(f"{_STATE} where a.id = :id")
_ACTIONS: Final = text("""
    select id, action, made_by, identity, made_at, reason, finding is not null as is_finding
    from alert_action where alert_id = :id order by id
""")
_FINDINGS: Final = text("""
    select distinct on (alert_id, finding ->> 'kind') alert_id, coalesce(nullif(identity, ''), made_by) as by, made_at as at,
        reason as text, finding
    from alert_action where alert_id = any(:ids) and finding ->> 'kind' = any(:kinds)
    order by alert_id, finding ->> 'kind', id desc
""")
_ADD: Final = text(
    """
    insert into alert_action (alert_id, action, identity, reason, finding, severity, level)
    select a.id, cast(:action as text), cast(:identity as text), cast(:reason as text), cast(:finding as jsonb),
        case when cast(:acknowledges as boolean) then a.severity end,
        case when cast(:acknowledges as boolean) and v.estimate -> a.metric ->> 'high' is not null then greatest(
            (v.estimate -> a.metric ->> 'high')::float8, (event.details ->> 'after')::float8
        ) end
    from alert a left join verdict v on v.alert_id = a.id LAST_EVENT
    where a.id = :id
    returning id, alert_action.action, made_by, identity, made_at, reason, alert_action.finding is not null as is_finding
""".replace("::", "\\:\\:").replace("LAST_EVENT", LAST_EVENT)
)
_ESCALATE: Final = text(
    """
    insert into alert_action (alert_id, action, reason, severity)
    select a.id, 'escalate', case when a.severity = last.severity then cast(:worse as text) else cast(:risen as text) end, a.severity
    from alert a
    join verdict v on v.alert_id = a.id
    join lateral (
        select * from alert_action c where c.alert_id = a.id and c.action <> 'note' order by c.id desc limit 1
    ) last on last.action = 'ack'
    where a.resolved_at is null and (cast(:versions as int[]) is null or a.model_version_id = any(cast(:versions as int[]))) and (
        (a.severity = 'firing' and last.severity = 'warning')
        or (v.estimate -> a.metric ->> 'low')::float8 > last.level
    )
    returning id, alert_id, reason
""".replace("::", "\\:\\:")
)

_SEND: Final = text("""
    insert into outbox (transition_id, escalation_id, sent_at, webhook_due_at)
    select max(t.id), :escalation, now(), now() from transition t where t.alert_id = :alert having max(t.id) is not null
""")
_WORSE: Final = "clearly worse than when it was acknowledged"
_RISEN: Final = "from warning to firing"

# Of several numbers, since monitors that fold at the same time do not commit in the order of the numbers.
_MARK: Final = text("""
    select (select coalesce(sum(id), 0) from (select id from outbox order by id desc limit 64) newest),
        (select coalesce(sum(id), 0) from (select id from alert_action order by id desc limit 64) newest),
        (select coalesce(sum(id), 0) from (select id from incident_change order by id desc limit 64) newest)
""")
_OPEN: Final = text(
    f"{_STATE} where a.resolved_at is null and last.action is distinct from 'close' and i.state is distinct from 'mitigated' order by a.id"
)
_BETWEEN: Final = text(
    f"{_STATE} where w.id = any(:versions) and a.opened_at < :end and (a.resolved_at is null or a.resolved_at >= :begin)"
    " order by a.severity, a.opened_at, a.id"
)
_OF_IDS: Final = text(f"{_STATE} where a.id = any(:ids)")
_ENDED: Final = text("""
    select t.alert_id, case when t.to_verdict = 'firing' then 'warning' else a.severity end as severity,
        (
            select count(*) from alert_action e
            where e.alert_id = a.id and e.action = 'escalate' and (t.to_verdict <> 'firing' or e.made_at < o.created_at)
        ) as escalations,
        o.created_at as ended_at
    from outbox o join transition t on t.id = o.transition_id join alert a on a.id = t.alert_id
    where o.escalation_id is null and o.incident_change_id is null and o.created_at > now() - cast(:span as interval)
        and (
            t.from_verdict = 'warning' and t.to_verdict = 'firing'
            or t.to_verdict in ('ok', 'unknown') and a.resolved_at is not null
        )
    union all
    select a.id, a.severity,
        (select count(*) from alert_action e where e.alert_id = a.id and e.action = 'escalate'), c.made_at
    from alert a join alert_action c on c.alert_id = a.id
    where a.resolved_at is null and c.action = 'close' and c.fold_seq is null
    union all
    select a.id, a.severity,
        (select count(*) from alert_action e where e.alert_id = a.id and e.action = 'escalate'), c.made_at
    from incident i join alert a on a.incident_id = i.id
    cross join lateral (select made_at from incident_change where incident_id = i.id order by id desc limit 1) c
    where i.state = 'mitigated' and i.mitigation in ('routed', 'reported') and a.resolved_at is null
        and c.made_at > now() - cast(:span as interval)
    union all
    select c.alert_id, c.severity,
        (select count(*) from alert_action e where e.alert_id = c.alert_id and e.action = 'escalate' and e.id < c.id),
        c.made_at
    from alert_action c
    where c.action = 'escalate' and c.reason = :worse and c.made_at > now() - cast(:span as interval)
""")
_DUE: Final = text("""
    select o.id, o.webhook_attempts as attempts, o.escalation_id, t.alert_id, t.from_verdict, t.to_verdict, t.details, t.text,
        coalesce(c.made_at, i.made_at, t.at) as at, i.state as incident_state
    from outbox o join transition t on t.id = o.transition_id left join alert_action c on c.id = o.escalation_id
    left join incident_change i on i.id = o.incident_change_id
    where o.webhook_due_at <= now() and t.alert_id is not null
    order by o.webhook_due_at, o.id limit :most
""")
_DELIVERED: Final = text("update outbox set webhook_due_at = null, webhook_error = null where id = :id")
_DELAYED: Final = text("""
    update outbox set webhook_due_at = now() + cast(:pause as interval), webhook_attempts = webhook_attempts + 1,
        webhook_error = :error
    where id = :id
""")


class Act(StrEnum):
    """What happens to an alert after it was opened."""

    ACK = "ack"
    UNACK = "unack"
    NOTE = "note"
    CLOSE = "close"
    ESCALATE = "escalate"  # by the monitor


_AUDITED: Final[Mapping[Act, Action]] = {
    Act.ACK: Action.ALERT_ACK,
    Act.UNACK: Action.ALERT_UNACK,
    Act.NOTE: Action.ALERT_NOTE,
    Act.CLOSE: Action.ALERT_CLOSE,
}


class FindingKind(StrEnum):
    """What a command has found about an alert."""

    CAUSE = "cause"
    REPAIR = "repair"
    GATE = "gate"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a command has found about an alert.

    Parameters
    ----------
    by
        Who ran the command.
    text
        The result in words.
    details
        Figures of the command, for tables and pictures.
    """

    kind: FindingKind
    by: str
    at: datetime
    text: str
    details: dict[str, Any]


class ActionFact(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `alert_action`.

    Parameters
    ----------
    is_finding
        It is a note that a command wrote, with what it found.
    by
        The person: the identity that the web server has authenticated, else the database user.
    through
        The database user who wrote it for that identity; empty: the person is the database user.
    """

    act: Act
    by: str
    through: str
    at: datetime
    reason: str
    is_finding: bool = False

    @property
    def who(self) -> str:
        """The person, and the database user if it is another one."""
        return f"{self.by} through {self.through}" if self.through else self.by


class AlertFact(msgspec.Struct, frozen=True, kw_only=True):
    """An alert with its state.

    Parameters
    ----------
    written_at
        When its event was written: it paged then, or got worse.
    details, text
        The flat form of its event, see `quantdrift.facts.events`, and the words that were stored with it.
    acknowledged
        The acknowledgement in effect, or None.
    escalations
        How often it has escalated after an acknowledgement.
    ended
        Why it is over: `recovered`, `replaced`, `retired` or `closed`; empty while it lasts, and where that is not known.
    closed
        The person's decision that it is over, or None; the monitor takes it over with its next fold.
    last_seen_at, serving
        Of a version that was replaced: capture time of its newest exchange, and the versions that serve now.
    explained_by, explains
        Alerts of the same cause: the one that explains this one, or None, and those that this one explains.
    incident
        The incident that it belongs to; None: the monitor has not looked yet.
    mitigation, mitigated_by
        While it lasts: why nobody gets the answers of its incident any more, `routed` or `reported`, None: people do; and of `reported`
        who said so and why.
    """

    id: int
    version_id: int
    model: str
    version: str
    slice: str
    predicate: str = ""
    slice_id: int
    severity: str
    metric: str
    onset_at: datetime
    opened_at: datetime
    written_at: datetime
    resolved_at: datetime | None
    details: dict[str, Any]
    text: AlertText | None
    acknowledged: ActionFact | None
    escalations: int
    ended: str = ""
    closed: ActionFact | None = None
    last_seen_at: datetime | None = None
    serving: tuple[str, ...] = ()
    explained_by: int | None = None
    explains: tuple[int, ...] = ()
    incident: int | None = None
    mitigation: str | None = None
    mitigated_by: str = ""

    @property
    def event(self) -> AlertEvent | None:
        """Its event; None where the row has none that can be read."""
        return event_of(self.details)

    @property
    def words(self) -> AlertText:
        """What it says."""
        status = said(self.severity)
        return self.text or AlertText(
            headline=f"{self.model} {self.version}: {self.slice}: {status}.",
            lines=(Line(label=SINCE, text=began(moment(self.onset_at))),),
            do_now=(Step(text="Look at its examples."),),
        )

    def over(self) -> list[str]:
        """Return why it is over, in one line that stands before its text; empty while it lasts, or if it has recovered."""
        if self.closed is not None:
            return [ending.closed_by(self.closed.by, self.closed.at, self.closed.reason)]
        if self.ended == Ending.REPLACED:
            return [ending.over_with(self.version, self.last_seen_at, self.serving)]
        return [ending.RETIRED] if self.ended == Ending.RETIRED else []

    def related(self, where: Callable[[int], str]) -> list[str]:
        """Return a line for each alert of the same cause; `where` returns where an alert can be looked at."""
        lines = []
        if self.explained_by is not None:
            lines.append(
                f"Same cause: alert {self.explained_by} explains this one: {where(self.explained_by)}"
            )
        return lines + [
            f"Same cause: this one explains alert {other}: {where(other)}" for other in self.explains
        ]

    def plain(self, where: Callable[[int], str]) -> str:
        """Return its text as it stands: what became of it, what it said, and the alerts of the same cause."""
        return self.words.plain(first=self.over(), related=self.related(where))

    @property
    def ended_at(self) -> datetime | None:
        """When it ended, or a person closed it; None while it lasts."""
        return self.resolved_at or (self.closed.at if self.closed else None)

    @property
    def is_open(self) -> bool:
        """Whether it lasts, and nobody has closed it."""
        return self.resolved_at is None and self.closed is None

    @property
    def ending(self) -> str:
        """Why nobody has to do anything about it any more: `ended`, `closed`, or why its incident is mitigated; empty: somebody has."""
        return "closed" if self.closed is not None else self.ended or self.mitigation or ""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A state of an alert that has ended: it was resolved, or has escalated.

    Parameters
    ----------
    escalations
        How often it had escalated after an acknowledgement by then.
    ended_at
        By the database's clock.
    """

    alert_id: int
    severity: str
    escalations: int
    ended_at: datetime


class AlertDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """A change of an alert that waits for the webhook.

    Parameters
    ----------
    id
        The same at each attempt.
    attempts
        How often sending it failed.
    change
        `opened`, `escalated` (from warning to firing), `worse` (it was acknowledged), `ended` (resolved, or not watched any
        more), `mitigated` (its incident is) or `reopened` (its incident is open again).
    alert
        Its state now.
    details, text
        The flat form of the event, and its words.
    """

    id: int
    attempts: int
    change: str
    at: datetime
    alert: AlertFact
    details: dict[str, Any]
    text: AlertText | None


async def lately_replaced(
    connection: AsyncConnection, *, model: str = "", span: timedelta = timedelta(days=1), most: int = 1_000
) -> list[AlertFact]:
    """Return the alerts that ended within `span` because another version serves, and that come back if theirs does."""
    values = {"model": model, "span": span, "most": most}
    return [_fact(row) for row in (await connection.execute(_LATELY_REPLACED, values)).mappings()]


async def list_alerts(
    connection: AsyncConnection,
    *,
    model: str = "",
    of: tuple[int, int] = (0, 0),
    with_resolved: bool = False,
    most: int = 1_000,
) -> list[AlertFact]:
    """Return alerts: open ones first, of these the ones that are not acknowledged, pages before tickets, the newest first.

    What explains another alert stands before it. `of` is a version and a slice: those of it alone.
    """
    values = {"model": model, "version": of[0], "slice": of[1], "with_resolved": with_resolved, "most": most}
    return [_fact(row) for row in (await connection.execute(_LIST, values)).mappings()]


async def alerts_between(
    connection: AsyncConnection, begin: datetime, end: datetime, version_ids: Sequence[int]
) -> list[AlertFact]:
    """Return the alerts that were open in a time, pages first, as they were at its end."""
    values = {"begin": begin, "end": end, "versions": list(version_ids)}
    alerts = [_fact(row) for row in (await connection.execute(_BETWEEN, values)).mappings()]
    return [
        alert
        if alert.resolved_at is None or alert.resolved_at < end
        else msgspec.structs.replace(alert, resolved_at=None, ended="")
        for alert in alerts
    ]


async def find_alert(connection: AsyncConnection, alert_id: int) -> AlertFact:
    """Return one alert.

    Raises
    ------
    OperatorError
        There is no such alert.
    """
    row = (await connection.execute(_ONE, {"id": alert_id})).mappings().one_or_none()
    if row is None:
        raise OperatorError(f"there is no alert {alert_id}: `quantdrift alerts list --all` shows the numbers")
    return _fact(row)


async def actions_of(connection: AsyncConnection, alert_id: int) -> list[ActionFact]:
    """Return what was done about an alert, the oldest first."""
    return [_action(row) for row in (await connection.execute(_ACTIONS, {"id": alert_id})).mappings()]


async def findings_of(connection: AsyncConnection, alert_ids: Sequence[int]) -> dict[int, list[Finding]]:
    """Return the newest finding of each kind about alerts, cause first; alerts without one are left out."""
    kinds = list(FindingKind)
    findings: dict[int, list[Finding]] = {}
    for row in (await connection.execute(_FINDINGS, {"ids": list(alert_ids), "kinds": kinds})).mappings():
        details = dict(row["finding"])
        kind = FindingKind(details.pop("kind"))
        findings.setdefault(row["alert_id"], []).append(
            Finding(kind=kind, by=row["by"], at=row["at"], text=row["text"], details=details)
        )
    return {
        alert: sorted(some, key=lambda finding: kinds.index(finding.kind)) for alert, some in findings.items()
    }


async def add_finding(
    connection: AsyncConnection, alert_id: int, kind: FindingKind, said: str, details: Mapping[str, Any]
) -> None:
    """Write what a command has found about an alert as a note, in the transaction of `connection`.

    A cause that the alert has already, in the same words, is not written again: `repair` finds it once more.

    Raises
    ------
    OperatorError
        There is no such alert, or the database user lacks the right (role quantdrift_operator).
    """
    findings = (await findings_of(connection, [alert_id])).get(alert_id, [])
    if kind is FindingKind.CAUSE and said in {finding.text for finding in findings}:
        return
    await act(connection, alert_id, Act.NOTE, said[:LONGEST_REASON], finding={"kind": kind.value, **details})


async def act(
    connection: AsyncConnection,
    alert_id: int,
    what: Act,
    reason: str,
    *,
    identity: str = "",
    finding: Mapping[str, Any] | None = None,
) -> ActionFact:
    """Acknowledge an alert, take that back, close it, or add a note; with an entry in the audit, in the transaction of `connection`.

    Parameters
    ----------
    what
        Not `Act.ESCALATE`.
    reason
        Why, or the note. The audit keeps it for ever.
    identity
        The person that the caller has authenticated. Empty: the database user acts. It must never be a text that a person typed.
    finding
        Of a note: what a command has found.

    Raises
    ------
    OperatorError
        There is no such alert; it was resolved (a note is accepted then, and one whose version was replaced can be closed); it is
        not acknowledged; it is closed already; or the reason is missing or too long. The database user lacks the right (role quantdrift_operator).
    """
    reason = check_reason(reason, "the note" if what is Act.NOTE else "the reason")
    alert = await find_alert(connection, alert_id)
    if alert.closed is not None and what is not Act.NOTE:
        raise OperatorError(
            f"alert {alert_id} was closed by {alert.closed.by} already: add a note if others must know something"
        )
    returns = what is Act.CLOSE and alert.ended == Ending.REPLACED
    if alert.resolved_at is not None and what is not Act.NOTE and not returns:
        raise OperatorError(
            f"alert {alert_id} was resolved at {alert.resolved_at:%Y-%m-%d %H:%M} UTC, so it cannot be"
            f" {'acknowledged' if what is Act.ACK else 'changed'}: add a note if others must know something"
        )
    if what is Act.UNACK and alert.acknowledged is None:
        raise OperatorError(f"alert {alert_id} is not acknowledged: there is nothing to take back")
    values = {
        "id": alert_id,
        "acknowledges": what is Act.ACK,
        "action": what.value,
        "identity": identity,
        "reason": reason,
        "finding": None if finding is None else msgspec.json.encode(finding).decode(),
    }
    action = _action((await connection.execute(_ADD, values)).mappings().one())
    after: dict[str, Any] = {
        "acknowledged": what is Act.ACK or (what is Act.NOTE and alert.acknowledged is not None)
    }
    if identity:
        after["identity"] = identity
    await add(
        connection,
        _AUDITED[what],
        model=alert.model,
        subject=f"alert {alert_id}",
        before={"acknowledged": alert.acknowledged is not None},
        after=after,
        note=reason,
    )
    return action


def check_reason(reason: str, word: str = "the reason") -> str:
    """Return what a person wrote without spaces around it.

    Raises
    ------
    OperatorError
        It is missing or too long.
    """
    reason = reason.strip()
    if not reason:
        raise OperatorError(f"{word} is empty: say what the next person on call must know")
    if len(reason) > LONGEST_REASON:
        raise OperatorError(
            f"{word} has {len(reason):,} characters, and {LONGEST_REASON:,} are allowed: shorten it"
        )
    return reason


async def close_alerts(
    connection: AsyncConnection, alerts: Sequence[int], reason: str, identity: str
) -> list[int]:
    """Close those of some alerts that last, or that come back if their version does; return their numbers.

    The caller checks the reason, and writes the entry in the audit.
    """
    closed = []
    for alert in (await alerts_by_id(connection, set(alerts))).values():
        if alert.is_open or (alert.ended == Ending.REPLACED and alert.closed is None):
            values = {"id": alert.id, "acknowledges": False, "action": Act.CLOSE.value, "finding": None}
            await connection.execute(_ADD, {**values, "identity": identity, "reason": reason})
            closed.append(alert.id)
    return sorted(closed)


async def escalate(
    connection: AsyncConnection, *, webhook: bool, versions: Sequence[int] | None = None
) -> None:
    """End the acknowledgements of alerts that have become worse: of the monitor, in the transaction of a fold.

    Parameters
    ----------
    webhook
        Put those that no change of verdict reports into the outbox, for the webhook alone: the collector has their last event.
    versions
        Those whose alerts are meant; None: all.
    """
    wanted = {"worse": _WORSE, "risen": _RISEN, "versions": None if versions is None else list(versions)}
    escalated = (await connection.execute(_ESCALATE, wanted)).all()
    for row in escalated:
        if webhook and row.reason == _WORSE:
            await connection.execute(_SEND, {"escalation": row.id, "alert": row.alert_id})


async def alert_mark(connection: AsyncConnection) -> tuple[int, int, int]:
    """Return three numbers, one of which changes with every change of an alert or an incident."""
    outbox, action, change = (await connection.execute(_MARK)).one()
    return int(outbox), int(action), int(change)


async def current_alerts(
    connection: AsyncConnection, ended_for: timedelta
) -> tuple[list[AlertFact], list[tuple[AlertFact, Ended]]]:
    """Return the open alerts of incidents that are not mitigated, and the states that ended within `ended_for`, each with its alert."""
    current = [_fact(row) for row in (await connection.execute(_OPEN)).mappings()]
    values = {"span": ended_for, "worse": _WORSE}
    ended = [Ended(**row) for row in (await connection.execute(_ENDED, values)).mappings()]
    alerts = await alerts_by_id(connection, {end.alert_id for end in ended})
    return current, [(alerts[end.alert_id], end) for end in ended]


async def due_deliveries(connection: AsyncConnection, most: int) -> list[AlertDelivery]:
    """Return what the webhook should get now, what waits longest first."""
    rows = (await connection.execute(_DUE, {"most": most})).mappings().all()
    alerts = await alerts_by_id(connection, {row["alert_id"] for row in rows})
    return [
        AlertDelivery(
            id=row["id"],
            attempts=row["attempts"],
            change=_change(row),
            at=row["at"],
            alert=alerts[row["alert_id"]],
            details=row["details"],
            text=words_of(row["text"], row["details"]),
        )
        for row in rows
    ]


async def end_delivery(connection: AsyncConnection, event_id: int) -> None:
    """Note that the webhook has accepted an event."""
    await connection.execute(_DELIVERED, {"id": event_id})


async def delay_delivery(connection: AsyncConnection, event_id: int, pause_s: float, error: str) -> None:
    """Note that the webhook did not accept an event, and try it again after `pause_s`."""
    values = {"id": event_id, "pause": timedelta(seconds=pause_s), "error": error}
    await connection.execute(_DELAYED, values)


async def alerts_by_id(connection: AsyncConnection, ids: Collection[int]) -> dict[int, AlertFact]:
    """Return alerts by number; those that are not there are left out."""
    rows = (await connection.execute(_OF_IDS, {"ids": sorted(ids)})).mappings() if ids else ()
    return {row["id"]: _fact(row) for row in rows}


def words_of(stored: Any, details: Mapping[str, Any]) -> AlertText | None:
    """Return what an alert said when it was written; of one that was written without words, what its event says. None without one."""
    if stored is not None:
        return msgspec.convert(stored, AlertText)
    event = event_of(details)
    return None if event is None else text_of(event)


def _change(row: RowMapping) -> str:
    if row["escalation_id"] is not None:
        return "worse"
    if row["incident_state"] is not None:
        return "mitigated" if row["incident_state"] == "mitigated" else "reopened"
    if row["to_verdict"] not in {"warning", "firing"}:
        return "ended"
    return "escalated" if row["from_verdict"] == "warning" else "opened"


def _action(row: RowMapping) -> ActionFact:
    return ActionFact(
        act=Act(row["action"]),
        by=row["identity"] or row["made_by"],
        through=row["made_by"] if row["identity"] else "",
        at=row["made_at"],
        reason=row["reason"],
        is_finding=row.get("is_finding", False),
    )


def _fact(row: RowMapping) -> AlertFact:
    values = {
        name: row[name]
        for name in AlertFact.__struct_fields__
        if name not in {"acknowledged", "closed", "serving", "explains", "text"}
    }
    return AlertFact(
        **values,
        text=words_of(row["text"], row["details"]),
        serving=tuple(row["serving"]),
        explains=tuple(row["explains"]),
        acknowledged=_action(row) if row["action"] == Act.ACK else None,
        closed=_action(row) if row["action"] == Act.CLOSE else None,
    )

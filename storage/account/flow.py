"""How far exchanges came: per model, the counts and last times of each step that the database knows."""

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import RowMapping, TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.sampling.pause import Order
from quantdrift.facts.figures import Figure
from quantdrift.facts.status import Serving
from quantdrift.storage.account.account import Account, accounts
from quantdrift.storage.fold_rows import ShardState
from quantdrift.storage.newest_rows import newest
from quantdrift.storage.pauses import local_pauses
from quantdrift.storage.serving import servings
from quantdrift.storage.snapshot import KNOWN_STRATA, standby_age_s

MOST_PAUSES: Final = 5  # of single sidecars that are named: the command lists causes, not pods

# The newest tally of each sidecar start and stratum.
_TOTALS: Final = text(f"""
    {KNOWN_STRATA}
    select t.source, t.stratum, t.at, t.offered, t.taken, t.thinned, t.lost, t.models
    from known k cross join lateral (
        select * from tally t where t.source = k.source and t.boot = k.boot and t.stratum = k.stratum
        order by t.sequence desc limit 1
    ) t
""")  # noqa: S608 - constants
# Counts are cumulative: those since a time are the last ones less the last ones before it.
_RECENT: Final = text("""
    with edge as (
        select source, boot, stratum, min(sequence) as first, max(sequence) as last
        from tally where at >= :begin group by 1, 2, 3
    )
    select l.source, l.stratum, l.at, l.offered - coalesce(b.offered, 0) as offered,
        l.taken - coalesce(b.taken, 0) as taken, l.thinned - coalesce(b.thinned, 0) as thinned,
        l.lost, coalesce(b.lost, '{}') as lost_before, l.models, coalesce(b.models, '{}') as models_before
    from edge e
    join tally l on l.source = e.source and l.boot = e.boot and l.stratum = e.stratum and l.sequence = e.last
    left join lateral (
        select t.* from tally t
        where t.source = e.source and t.boot = e.boot and t.stratum = e.stratum and t.sequence < e.first
        order by t.sequence desc limit 1
    ) b on true
""")
# When a count last grew: the time of the tally that first had the newest value, within the period.
_GREW: Final = text("""
    with one as (
        select t.at, '' as model, t.offered, t.taken, t.thinned,
            (select coalesce(sum(n.value::bigint), 0) from jsonb_each_text(t.lost) n) as lost, 0::bigint as unknown,
            t.source, t.boot, t.stratum, t.sequence
        from tally t where t.at >= :begin
        union all
        select t.at, m.key, 0, (m.value ->> 'taken')::bigint, coalesce((m.value ->> 'thinned')::bigint, 0),
            (select coalesce(sum(n.value::bigint), 0) from jsonb_each_text(m.value -> 'lost') n),
            coalesce((m.value ->> 'unknown')::bigint, 0), t.source, t.boot, t.stratum, t.sequence
        from tally t cross join lateral jsonb_each(t.models) m where t.at >= :begin
    ), step as (
        select at, model, offered, taken, thinned, lost, unknown, lag(offered) over w as offered_before,
            lag(taken) over w as taken_before, lag(thinned) over w as thinned_before, lag(lost) over w as lost_before,
            lag(unknown) over w as unknown_before
        from one window w as (partition by source, boot, stratum, model order by sequence)
    )
    select model, max(at) filter (where offered > coalesce(offered_before, 0)) as offered,
        max(at) filter (where taken > coalesce(taken_before, 0)) as taken,
        max(at) filter (where thinned > coalesce(thinned_before, 0)) as thinned,
        max(at) filter (where lost > coalesce(lost_before, 0)) as lost,
        max(at) filter (where unknown > coalesce(unknown_before, 0)) as unknown
    from step group by model
""")
_COMPARED: Final = text("""
    select v.model, 'compared' as step, count(distinct c.exchange_id) as recent, null as total, max(c.stored_at) as at
    from comparisons(:begin, 'infinity') c join model_version v on v.id = c.model_version_id group by 1
""")
_UNFOLDED: Final = text("""
    with waiting as (
        select id, captured_from, captured_to, stored_at from batch where fold_seq is null and kind = 'comparison'
        union all
        select b.id, b.captured_from, b.captured_to, b.stored_at from model_fold f join batch b
            on b.compared_model = f.model and b.fold_seq > f.fold_seq and b.kind = 'comparison'
    )
    select v.model, 'unfolded' as step, count(distinct c.exchange_id) as total,
        count(distinct c.exchange_id) filter (where c.captured_at >= :begin) as recent, min(c.stored_at) as at
    from (
        select w.stored_at, c.model_version_id, c.exchange_id, c.captured_at from waiting w join comparison c on c.batch_id = w.id
            and c.captured_at between (select min(captured_from) from waiting) and (select max(captured_to) from waiting)
        union all
        select w.stored_at, b.model_version_id, c.exchange_id, c.captured_at from waiting w join condensed_block b on b.of_batch = w.id
        cross join lateral unnest(b.exchange_id, b.captured_at) as c (exchange_id, captured_at)
    ) c
    join model_version v on v.id = c.model_version_id group by 1
""")
_FOLDED: Final = text("""
    select v.model, 'folded' as step, null as recent, sum(r.n_groups)::bigint as total, (
            select max(one.last_at) from verdict one join model_version w on w.id = one.model_version_id
            where w.model = v.model
        ) as at
    from rollup_day r join model_version v on v.id = r.model_version_id join slice s on s.id = r.slice_id
    where s.predicate = 'true' group by 1
""")
# Whole hours, since hours are what is kept: a little more than the period.
_MEASURED: Final = text("""
    select v.model, sum(r.n_items)::bigint as n_items, sum(r.n_unmeasured)::bigint as n_unmeasured
    from rollup_hour r join model_version v on v.id = r.model_version_id join slice s on s.id = r.slice_id
    where s.predicate = 'true' and r.hour >= date_trunc('hour', cast(:begin as timestamptz)) group by 1
""")
_QUARANTINED: Final = text("""
    select model, reason, count(*) as total, count(*) filter (where quarantined_at >= :begin) as recent,
        max(quarantined_at) as at, (array_agg(detail order by quarantined_at desc))[1] as detail
    from quarantine group by 1, 2 order by 3 desc
""")
_EXPIRED: Final = text("""
    select e.model, 'expired' as step, sum(e.n)::bigint as total,
        coalesce(sum(e.n) filter (where b.stored_at >= :begin), 0)::bigint as recent, max(b.stored_at) as at
    from expiry e join batch b on b.id = e.batch_id group by 1
""")

# What a person dropped from the stream is counted as expired, too: it left the stream unread.
_DROPPED: Final = text("""
    select model, 'dropped' as step, sum((after ->> 'n')::bigint)::bigint as total, max(at) as at,
        coalesce(sum((after ->> 'n')::bigint) filter (where at >= :begin), 0)::bigint as recent
    from audit where action = 'stream drop' group by 1
""")
_STEPS: Final = (_COMPARED, _UNFOLDED, _FOLDED, _EXPIRED, _DROPPED)
_UNREFERENCED: Final = text("""
    select distinct v.model, v.candidate_version as version
    from batch b cross join lateral unnest(b.unreferenced) one join model_version v on v.id = one
    where b.stored_at >= :begin order by 1, 2
""")
# The lossy slices of a model have the same reason, of which the figures may differ.
_VERDICTS: Final = text("""
    select w.model, v.verdict, count(*) as n, max(v.reason) filter (where s.predicate = 'true') as reason,
        count(*) filter (where v.verdict = 'unknown' and v.reason ~ '^(loss|samples missing): ') as n_lossy,
        max(v.reason) filter (where v.verdict = 'unknown' and v.reason ~ '^(loss|samples missing): ') as loss
    from verdict v join model_version w on w.id = v.model_version_id join slice s on s.id = v.slice_id
    where v.last_at >= :begin group by 1, 2
""")
# What lacks exchanges for a verdict; the others may have enough, and another reason to be unknown.
_AWAITED: Final = text("""
    select w.model, w.candidate_version as version, s.name as slice, v.n_groups, a.n_groups as n_of_all
    from verdict v join model_version w on w.id = v.model_version_id join slice s on s.id = v.slice_id
    join slice e on e.model = w.model and e.predicate = 'true'
    join verdict a on a.model_version_id = v.model_version_id and a.slice_id = e.id
    where v.last_at >= :begin and v.verdict = 'unknown' and v.reason ~ '^needs ' and v.n_groups > 0
    order by v.n_groups desc, s.name
""")
_SESSIONS: Final = text("""
    select v.model, count(*) as n, extract(epoch from now() - min(s.opened_at))::float8 as oldest_s,
        extract(epoch from now() - max(s.opened_at))::float8 as newest_s,
        extract(epoch from now() - max(v.first_seen_at))::float8 as version_s
    from session s join model_version v on v.id = s.model_version_id group by v.model
""")
# Of the newest items of all models: a long period is not read whole.
_LATENCY: Final = text(f"""
    select model, count(*) as n, min(seconds) filter (where up_to >= 0.5 * total) as median_s,
        min(seconds) filter (where up_to >= 0.99 * total) as p99_s
    from (
        select model, seconds, sum(weight) over (partition by model order by seconds) as up_to,
            sum(weight) over (partition by model) as total
        from (
            select distinct on (n.captured_at, n.exchange_id) v.model, n.latency_s as seconds, 1 / (n.pi1 * n.pi2) as weight
            from {
    newest(
        "c.captured_at, c.exchange_id, c.item, c.model_version_id, c.latency_s, c.pi1, c.pi2",
        since="cast(:begin as timestamptz)",
        before="timestamptz 'infinity'",
        most="20000",
    )
} n join model_version v on v.id = n.model_version_id
            where n.latency_s is not null
        ) of_exchanges
    ) timed group by model
""")  # noqa: S608 - constants
# Of all traffic of the version that was first seen last.
_LEARNED_LATENCY: Final = text("""
    select distinct on (v.model) v.model, cast(b.content ->> 'learned_s' as float) as learned_s
    from baseline b join model_version v on v.id = b.model_version_id join slice s on s.id = b.slice_id
    where b.metric = 'latency' and b.kind = 'growth' and b.content is not null and b.fold_seq is not null
        and s.predicate = 'true'
    order by v.model, v.first_seen_at desc, b.id desc
""")
# How many exchanges a second come into the stream: the counts of each start of a sidecar grow between two tallies.
_COMING: Final = text("""
    with seen as (
        select m.key as model, (m.value ->> 'published')::bigint as published, t.at, t.source, t.boot, t.stratum
        from tally t cross join lateral jsonb_each(t.models) m where t.at > :since
    ), grown as (
        select model, max(published) - min(published) as n, extract(epoch from max(at) - min(at)) as s
        from seen group by model, source, boot, stratum
    )
    select model, sum(n / s)::float as per_s from grown where s > 0 group by model
""")
# How many a second leave it: they were compared or quarantined since the first batch of the time.
_LEAVING: Final = text("""
    with stored as (
        select id, captured_from, captured_to, stored_at from batch where stored_at > :since and kind = 'comparison'
    ), finished as (
        select v.model, count(distinct c.exchange_id) as n, min(c.stored_at) as first
        from (
            select w.stored_at, c.model_version_id, c.exchange_id from stored w join comparison c on c.batch_id = w.id
                and c.captured_at between (select min(captured_from) from stored) and (select max(captured_to) from stored)
            union all
            select w.stored_at, b.model_version_id, c.exchange_id from stored w join condensed_block b on b.of_batch = w.id
            cross join lateral unnest(b.exchange_id) as c (exchange_id)
        ) c
        join model_version v on v.id = c.model_version_id group by 1
        union all
        select model, count(*), min(quarantined_at) from quarantine where quarantined_at > :since group by 1
    )
    select model, (sum(n) / greatest(extract(epoch from now() - min(first)), 1))::float as per_s from finished group by 1
""")
# What a reference's outputs contradict, of the references that versions of the period have.
_CONTRADICTIONS: Final = text("""
    select d.model, array_agg(distinct d.doubt order by d.doubt) as doubts from doubt d
    where d.doubt <> '' and exists (
        select from model_version v where v.model = d.model and v.reference_digest = d.reference_digest
            and (v.first_seen_at >= :begin or exists (
                select from verdict one where one.model_version_id = v.id and one.last_at >= :begin
            ))
    ) group by 1
""")
# A standby does not have the locks of the primary: there a monitor leads that folded shortly before the standby's last change.
_LED: Final = text("""
    select exists (
        select from pg_locks where relation = to_regclass('leader_lock') and granted
            and mode in ('ShareUpdateExclusiveLock', 'ExclusiveLock')
            and database = (select oid from pg_database where datname = current_database())
    ) or pg_is_in_recovery() and exists (
        select from fold where folded_at > pg_last_xact_replay_timestamp() - interval '1 minute'
    )
""")
RATE_TIME: Final = timedelta(minutes=2)
"""Time over which it is measured how many exchanges come and leave."""
_FOLD: Final = text("select folded_at, fold_seq, lag_factor from fold where fold_seq > 0")
_OUTBOX: Final = text("""
    select count(*) as n, min(created_at) as since, (array_agg(last_error order by id))[1] as error
    from outbox where sent_at is null
""")


class FlowStep(msgspec.Struct, frozen=True, kw_only=True):
    """Exchanges that came to one step.

    Parameters
    ----------
    recent, total
        Since the begin of the period, and as far back as the database reaches.
    last
        When the last one came; None: not in the period, or never.
    """

    recent: int = 0
    total: int = 0
    last: datetime | None = None

    def __add__(self, other: "FlowStep") -> "FlowStep":
        """Return the exchanges of both."""
        last = max((at for at in (self.last, other.last) if at is not None), default=None)
        return FlowStep(recent=self.recent + other.recent, total=self.total + other.total, last=last)


class TrafficLatency(msgspec.Struct, frozen=True, kw_only=True):
    """How long the candidate takes for an exchange, as the relay saw it; estimates of the traffic.

    Parameters
    ----------
    n
        Exchanges of the period with a time, of the newest 20,000 items of all models.
    median_s, p99_s
        What half of the traffic, and 99 % of it, do not exceed.
    learned_s
        What 99 % did not exceed when it was learned, of all traffic of the newest version that has learned it; None: of none.
    """

    n: int
    median_s: float
    p99_s: float
    learned_s: float | None = None


class FlowRates(msgspec.Struct, frozen=True, kw_only=True):
    """Exchanges a second that came into the stream in the last two minutes, and that were compared or quarantined."""

    coming: float = 0.0
    leaving: float = 0.0


class OpenSessions(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions that are not over: how many, and how long ago the first and the last of them, and the newest of their versions, began."""

    n: int
    oldest_s: float
    newest_s: float
    version_s: float = math.inf


class AwaitedSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A slice of a version that lacks exchanges for a verdict: how many it has, and how many all traffic of its version has."""

    version: str
    slice: str
    n_groups: int
    n_of_all: int

    @property
    def share(self) -> float:
        """Its share of what is compared."""
        return min(1.0, self.n_groups / max(self.n_of_all, 1))


class ModelFlow(msgspec.Struct, frozen=True, kw_only=True):
    """The exchanges of one model, step by step.

    Parameters
    ----------
    offered
        Inference requests. A sidecar counts them before it knows their model, so this is an estimate: the requests of
        each header stratum, times the model's share of those that were sampled.
    captured
        Sampled by the first phase.
    thinned
        Of these, left out by the second phase on purpose.
    lost, quarantined
        By reason. A request that got no answer to compare has its reason in `lost`, and counts for no verdict.
    nameless
        Lost without a model, by reason: these count for each model that their sidecar captures.
    expired
        Left in the stream for too long.
    dropped
        Dropped from the stream by a person before they were read.
    compared
        Replayed, compared and stored.
    unfolded
        Of these, not folded yet; `last` is the time of the oldest.
    folded
        Read by the monitor.
    n_items, n_unmeasured
        Answers that were folded in the hours of the period, and those of them that nothing was measured of.
    unknown
        Requests that named this model at a sidecar whose configuration did not have it.
    details
        The last detail of each reason in `quarantined`.
    unreferenced
        Candidate versions of the period that have no reference.
    verdicts
        Number of slices by verdict.
    awaited
        Those of them that lack exchanges for a verdict, the ones with the most first.
    reason
        Why the verdict on all its traffic is `unknown`, else empty.
    n_lossy, loss
        Slices that are `unknown` because too much was lost, and the reason of one of them.
    rates
        How fast its exchanges come and leave.
    sessions
        Its open sessions; None: there are none, or `sampling.sticky_header` names none.
    contradictions
        What the outputs of its references contradict in the configuration, and what to set.
    latency
        None: no exchange of the period has a time.
    """

    model: str
    offered: FlowStep = FlowStep()
    captured: FlowStep = FlowStep()
    thinned: FlowStep = FlowStep()
    lost: dict[str, FlowStep] = {}
    nameless: dict[str, FlowStep] = {}
    expired: FlowStep = FlowStep()
    dropped: FlowStep = FlowStep()
    compared: FlowStep = FlowStep()
    quarantined: dict[str, FlowStep] = {}
    unfolded: FlowStep = FlowStep()
    folded: FlowStep = FlowStep()
    n_items: int = 0
    n_unmeasured: int = 0
    unknown: FlowStep = FlowStep()
    details: dict[str, str] = {}
    unreferenced: tuple[str, ...] = ()
    verdicts: dict[str, int] = {}
    awaited: tuple[AwaitedSlice, ...] = ()
    reason: str = ""
    n_lossy: int = 0
    loss: str = ""
    latency: TrafficLatency | None = None
    rates: FlowRates = FlowRates()
    sessions: OpenSessions | None = None
    contradictions: tuple[str, ...] = ()


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """All models, and what concerns no single one.

    Parameters
    ----------
    models
        By name. Under the empty name are losses of requests whose model was not known yet.
    offered, captured
        Of all sidecars together, exact.
    n_sidecars, tallied_at
        Sidecars that ever sent counts, and when the newest counts were read; None: none were stored.
    folded_at, is_led
        When the monitor last folded, None: never; and whether a monitor leads now.
    standby_s
        Age of the last change that reached the standby that this was read from; None: it is no standby, or that is not known.
    lag_factor
        By what the leading monitor multiplies every sampling rate because the shadow does not keep up; 1: it does.
    shards
        The parts of the models that several monitors fold, and what waits for each; empty where one monitor folds all.
    n_unsent, unsent_since, unsent_error
        Events that wait for the collector.
    accounts
        What became of the sampled requests, by model and header stratum.
    paused_here
        Sidecars that are paused by themselves, each with one of its orders.
    serving
        By model and version: whether it serves and is paused.
    costs
        What replays cost since the beginning, by model; empty without a price, and where that takes too long to count.
    """

    models: dict[str, ModelFlow]
    offered: FlowStep = FlowStep()
    captured: FlowStep = FlowStep()
    n_sidecars: int = 0
    tallied_at: datetime | None = None
    folded_at: datetime | None = None
    is_led: bool = False
    standby_s: float | None = None
    lag_factor: float = 1.0
    shards: tuple[ShardState, ...] = ()
    n_unsent: int = 0
    unsent_since: datetime | None = None
    unsent_error: str = ""
    accounts: dict[str, dict[str, Account]] = {}
    paused_here: tuple[tuple[str, Order], ...] = ()
    serving: dict[str, dict[str, Serving]] = {}
    costs: dict[str, Figure] = {}


async def flow(connection: AsyncConnection, begin: datetime, *, max_share: float = 1.0) -> Flow:
    """Return how far exchanges came since `begin`, and in total; `max_share` is as of `quantdrift.storage.serving.servings`.

    Raises
    ------
    RetryError
        Postgres is not available.
    """
    await connection.execute(text("set transaction isolation level repeatable read, read only"))
    figures = _FlowFigures()
    totals = await _read_tallies(connection, figures, begin)
    for statement in _STEPS:
        for row in await _rows(connection, statement, begin=begin):
            figures.put(row["model"], row["step"], recent=row["recent"], total=row["total"], last=row["at"])
    for row in await _rows(connection, _QUARANTINED, begin=begin):
        step = f"quarantined {row['reason']}"
        figures.put(row["model"], step, recent=row["recent"], total=row["total"], last=row["at"])
        figures.details.setdefault(row["model"], {})[row["reason"]] = row["detail"]
    for row in await _rows(connection, _MEASURED, begin=begin):
        figures.measured[row["model"]] = row["n_items"], row["n_unmeasured"]
    for row in await _rows(connection, _UNREFERENCED, begin=begin):
        figures.unreferenced.setdefault(row["model"], []).append(row["version"])
    await _read_verdicts(connection, figures, begin)
    await _read_rates(connection, figures)
    for row in await _rows(connection, _SESSIONS):
        figures.sessions[row["model"]] = OpenSessions(
            n=row["n"], oldest_s=row["oldest_s"], newest_s=row["newest_s"], version_s=row["version_s"]
        )
    learned_s = {row["model"]: row["learned_s"] for row in await _rows(connection, _LEARNED_LATENCY)}
    for row in await _rows(connection, _LATENCY, begin=begin):
        figures.latencies[row["model"]] = TrafficLatency(
            n=row["n"], median_s=row["median_s"], p99_s=row["p99_s"], learned_s=learned_s.get(row["model"])
        )
    fold = next(iter(await _rows(connection, _FOLD)), None)
    (outbox,) = await _rows(connection, _OUTBOX)
    is_led = bool(await connection.scalar(_LED))
    serving: dict[str, dict[str, Serving]] = {}
    for (model, version), beside in (await servings(connection, max_share)).items():
        serving.setdefault(model, {})[version] = beside
    return Flow(
        models=figures.models(),
        offered=figures.step("", "offered"),
        captured=figures.step("", "taken"),
        n_sidecars=len({row["source"] for row in totals}),
        tallied_at=max((row["at"] for row in totals), default=None),
        folded_at=fold["folded_at"] if fold else None,
        is_led=is_led,
        standby_s=await standby_age_s(connection),
        lag_factor=fold["lag_factor"] if fold and is_led else 1.0,
        n_unsent=outbox["n"],
        unsent_since=outbox["since"],
        unsent_error=outbox["error"] or "",
        accounts=await accounts(connection),
        paused_here=tuple(
            (local.source, order)
            for local in (await local_pauses(connection))[:MOST_PAUSES]
            for order in [local.pause.everything or next(iter(local.pause.models.values()))]
        ),
        serving=serving,
    )


async def _read_tallies(
    connection: AsyncConnection, found: "_FlowFigures", begin: datetime
) -> list[RowMapping]:
    """Add the counts of the sidecars, and return the newest tally of each of their starts and strata."""
    totals = await _rows(connection, _TOTALS)
    for row in totals:
        found.tally(row, "total", {}, {})
    for row in await _rows(connection, _RECENT, begin=begin):
        found.tally(row, "recent", row["lost_before"], row["models_before"])
    for row in await _rows(connection, _GREW, begin=begin):
        for step in ("offered", "taken", "thinned", "lost", "unknown"):
            found.put(row["model"], step, last=row[step])
    return totals


async def _read_verdicts(connection: AsyncConnection, found: "_FlowFigures", begin: datetime) -> None:
    """Add the verdicts, and what makes them doubtful."""
    for row in await _rows(connection, _VERDICTS, begin=begin):
        found.verdicts.setdefault(row["model"], {})[row["verdict"]] = row["n"]
        if row["verdict"] == "unknown" and row["reason"]:
            found.reasons[row["model"]] = row["reason"]
        if row["n_lossy"]:
            found.losses[row["model"]] = (row["n_lossy"], row["loss"])
    for row in await _rows(connection, _AWAITED, begin=begin):
        of_slice = {name: row[name] for name in ("version", "slice", "n_groups", "n_of_all")}
        found.awaited.setdefault(row["model"], []).append(AwaitedSlice(**of_slice))
    for row in await _rows(connection, _CONTRADICTIONS, begin=begin):
        found.contradictions[row["model"]] = tuple(row["doubts"])


async def _read_rates(connection: AsyncConnection, found: "_FlowFigures") -> None:
    """Add how fast exchanges come and leave at present."""
    now = await connection.scalar(text("select now()"))
    coming, leaving = [
        {row["model"]: row["per_s"] for row in await _rows(connection, statement, since=now - RATE_TIME)}
        for statement in (_COMING, _LEAVING)
    ]
    for model in {*coming, *leaving}:
        found.rates[model] = FlowRates(coming=coming.get(model, 0.0), leaving=leaving.get(model, 0.0))


class _FlowFigures:
    """The figures that were read, by model and step."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, str], dict[str, Any]] = {}
        self.details: dict[str, dict[str, str]] = {}
        self.unreferenced: dict[str, list[str]] = {}
        self.verdicts: dict[str, dict[str, int]] = {}
        self.awaited: dict[str, list[AwaitedSlice]] = {}
        self.reasons: dict[str, str] = {}
        self.losses: dict[str, tuple[int, str]] = {}
        self.contradictions: dict[str, tuple[str, ...]] = {}
        self.rates: dict[str, FlowRates] = {}
        self.sessions: dict[str, OpenSessions] = {}
        self.latencies: dict[str, TrafficLatency] = {}
        self.measured: dict[str, tuple[int, int]] = {}

    def put(self, model: str, step: str, **values: Any) -> None:
        """Set the values that are not null."""
        non_null = {name: value for name, value in values.items() if value is not None}
        if non_null:
            self._steps.setdefault((model, step), {}).update(non_null)

    def add(self, model: str, step: str, period: str, n: float) -> None:
        if n:
            values = self._steps.setdefault((model, step), {})
            values[period] = values.get(period, 0) + n

    def tally(
        self, row: RowMapping, period: str, lost_before: dict[str, int], models_before: dict[str, Any]
    ) -> None:
        """Add the counts of a sidecar start and stratum, less those before the period."""
        self.add("", "offered", period, row["offered"])
        self.add("", "taken", period, row["taken"])
        named: dict[str, int] = {}
        rest = {reason: n - lost_before.get(reason, 0) for reason, n in row["lost"].items()}
        for name, of in row["models"].items():
            before = models_before.get(name, {})
            lost_then = before.get("lost", {})
            n_taken = of["taken"] - before.get("taken", 0)
            self.add(name, "taken", period, n_taken)
            self.add(name, "thinned", period, of.get("thinned", 0) - before.get("thinned", 0))
            now, then = of.get("unknown", 0), before.get("unknown", 0)
            unknown = now - then if now >= then else now  # the capture process started again
            self.add(name, "unknown", period, unknown)
            named[name] = n_taken + unknown
            for reason, n in of["lost"].items():
                self.add(name, f"lost {reason}", period, n - lost_then.get(reason, 0))
                rest[reason] = rest.get(reason, 0) - n + lost_then.get(reason, 0)
            rest["unknown_model"] = rest.get("unknown_model", 0) - unknown
        captured = [name for name, of in row["models"].items() if _is_captured(of)]
        for reason, n in rest.items():
            self.add("", f"lost {reason}", period, max(n, 0))
            for name in captured:
                self.add(name, f"nameless {reason}", period, max(n, 0))
            if not captured:
                self.add("", f"nameless {reason}", period, max(n, 0))
        n_named = sum(named.values())
        for name, n in named.items():
            if n > 0:
                self.add(name, "offered", period, row["offered"] * n / n_named)

    def step(self, model: str, name: str) -> FlowStep:
        values = self._steps.get((model, name), {})
        return FlowStep(
            recent=round(values.get("recent", 0)),
            total=round(values.get("total", 0)),
            last=values.get("last"),
        )

    def models(self) -> dict[str, ModelFlow]:
        names = {model for model, _ in self._steps} | {*self.unreferenced, *self.verdicts, *self.latencies}
        return {name: self._model(name) for name in sorted(names)}

    def _model(self, name: str) -> ModelFlow:
        compared, folded, unfolded = (
            self.step(name, step_name) for step_name in ("compared", "folded", "unfolded")
        )
        last_lost = self.step(name, "lost").last
        last_nameless = self.step("", "lost").last
        # Roll-ups have fewer: exchanges of a folded batch wait for others that were captured before them.
        recent = max(0, compared.recent - unfolded.recent)
        folded = msgspec.structs.replace(folded, recent=recent, total=max(recent, folded.total))
        compared = msgspec.structs.replace(
            compared, total=max(compared.recent, folded.total + unfolded.total)
        )
        captured = _at_least(self.step(name, "taken"), compared)
        n_items, n_unmeasured = self.measured.get(name, (0, 0))
        n_lossy, loss = self.losses.get(name, (0, ""))
        return ModelFlow(
            model=name,
            offered=msgspec.structs.replace(
                _at_least(self.step(name, "offered"), captured), last=captured.last
            ),
            captured=captured,
            thinned=self.step(name, "thinned"),
            lost={
                reason: msgspec.structs.replace(step, last=last_lost if step.recent else None)
                for reason, step in self._by_reason(name, "lost ").items()
            },
            nameless={
                reason: msgspec.structs.replace(step, last=last_nameless if step.recent else None)
                for reason, step in self._by_reason(name, "nameless ").items()
            },
            expired=self._expired(name),
            dropped=self.step(name, "dropped"),
            compared=compared,
            quarantined=self._by_reason(name, "quarantined "),
            unfolded=unfolded,
            folded=folded,
            n_items=n_items,
            n_unmeasured=n_unmeasured,
            unknown=self.step(name, "unknown"),
            details=self.details.get(name, {}),
            unreferenced=tuple(self.unreferenced.get(name, ())),
            verdicts=self.verdicts.get(name, {}),
            awaited=tuple(self.awaited.get(name, ())),
            reason=self.reasons.get(name, ""),
            n_lossy=n_lossy,
            loss=loss,
            rates=self.rates.get(name, FlowRates()),
            sessions=self.sessions.get(name),
            contradictions=self.contradictions.get(name, ()),
            latency=self.latencies.get(name),
        )

    def _expired(self, name: str) -> FlowStep:
        """Return what expired: all that left the stream unread, without what a person dropped."""
        unread, dropped = self.step(name, "expired"), self.step(name, "dropped")
        recent, total = max(0, unread.recent - dropped.recent), max(0, unread.total - dropped.total)
        return FlowStep(recent=recent, total=total, last=unread.last if total else None)

    def _by_reason(self, model: str, prefix: str) -> dict[str, FlowStep]:
        names = [step for of_model, step in self._steps if of_model == model and step.startswith(prefix)]
        by_reason = {name.removeprefix(prefix): self.step(model, name) for name in names}
        ordered = sorted(by_reason.items(), key=lambda item: (-item[1].recent, -item[1].total, item[0]))
        return {reason: step for reason, step in ordered if step.total or step.recent}


def _at_least(step: FlowStep, later: FlowStep) -> FlowStep:
    """Return a step of which sidecars have told something: what came to a later one came to it, too, and their counts are some seconds older."""
    if not step.total:
        return step
    return msgspec.structs.replace(
        step, recent=max(step.recent, later.recent), total=max(step.total, later.total)
    )


def _is_captured(model: Mapping[str, Any]) -> bool:
    """Return whether a sidecar captures a model of its tally: what it lost without a model counts for each of these."""
    return bool(model["taken"] or model["lost"] or model.get("configured"))


async def _rows(connection: AsyncConnection, statement: TextClause, **parameters: Any) -> list[RowMapping]:
    return list((await connection.execute(statement, parameters)).mappings().all())

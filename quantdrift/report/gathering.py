"""Reading of the facts of a report, in one snapshot, with as few rows of `comparison` as possible."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from quantdrift.core.config.schema import Config
from quantdrift.core.records import UNVERIFIED
from quantdrift.core.signals import SignalForm, signal_of
from quantdrift.core.token_histogram import TokenBins
from quantdrift.facts import figures
from quantdrift.facts.figures import Figure, Served
from quantdrift.facts.incidents import Incident
from quantdrift.facts.speed import Times
from quantdrift.facts.status import Serves, Serving
from quantdrift.facts.words.happened import happened, released
from quantdrift.report.compare import DAYS, Sides, compare_pair
from quantdrift.report.figures import (
    CoverageFigures,
    Gap,
    LabelFigures,
    Mark,
    UnreferencedVersion,
    VersionComparison,
)
from quantdrift.report.finding import (
    EpisodeFacts,
    Key,
    PeriodFacts,
    bins_by_key,
    by_key,
    gaps,
    ranked,
)
from quantdrift.report.labels import worst_first
from quantdrift.report.period import MOST_ITEMS, Period, Resolution, resolution
from quantdrift.storage.account.coverage import Coverage
from quantdrift.storage.alerts.alerts import AlertFact, Finding, alerts_between, findings_of
from quantdrift.storage.alerts.timeline import AlertCounts, alert_counts
from quantdrift.storage.audit import SET_UP, latest
from quantdrift.storage.baselines import baselines_now
from quantdrift.storage.cost import changed_cost, prices_of, replay_costs, replay_times
from quantdrift.storage.exchanges import directions, examples_of, times
from quantdrift.storage.figures.divergence import Divergence
from quantdrift.storage.figures.figures import SeenVersion, of_alert, people_affected
from quantdrift.storage.figures.figures import versions as versions_until
from quantdrift.storage.figures.periods import Extent, Grain, SliceSums, SumWindow
from quantdrift.storage.figures.spans import VersionReader
from quantdrift.storage.figures.tokens import token_bins
from quantdrift.storage.incidents.incidents import list_incidents, with_costs
from quantdrift.storage.labels import outcomes
from quantdrift.storage.serving import servings
from quantdrift.storage.slices.verdicts import slice_names, verdicts_at
from quantdrift.storage.snapshot import Connection, judged_until
from quantdrift.storage.speed import item_times
from quantdrift.storage.versions import Version, candidate_versions, measure_of_text

MOST_TABLE = 25  # slices in a version's table
MOST_PLOTS = 12  # slices of a version that are drawn, and whose tail is shown
MOST_EPISODES = 20  # alerts shown in full
MOST_EXAMPLES = 5
_SPEED_SPAN = timedelta(days=1)  # a whole week would be read for a version whose exchanges have no time
MOST_DIRECTIONS = 6
MOST_COMPARISONS = 5  # releases of the period that are compared with the version before

_MOST_DECISIONS = 200
_MOST_EPISODE_ITEMS = 200_000  # of a longer time, directions are those of its newest hour
_EXAMPLE_SPAN = timedelta(hours=1)


class Gathered(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a report, as read.

    Parameters
    ----------
    extent, resolution
        How much data there is, and how finely it is summed; None without data.
    drawn
        Per version the slices to draw, worst first.
    series
        Buckets of the drawn slices and the aggregates; those in which alerts began in two parts, before and since the onset.
    n_episodes_left_out
        Alerts beyond `MOST_EPISODES`.
    incidents
        Those that overlap the period.
    marks, comparisons
        Releases and decisions, and each release compared with the version before it.
    labels
        What true labels say of each version that has some.
    costs
        What changed answers and replays cost; empty without prices.
    """

    extent: Extent
    resolution: Resolution | None
    facts: PeriodFacts
    drawn: dict[int, tuple[int, ...]]
    series: tuple[SliceSums, ...]
    changes: AlertCounts
    n_episodes_left_out: int
    coverage: CoverageFigures
    incidents: tuple[Incident, ...]
    marks: tuple[Mark, ...]
    comparisons: tuple[VersionComparison, ...]
    labels: tuple[LabelFigures, ...]
    costs: tuple[Figure, ...]


async def gather(
    connection: Connection,
    config: Config,
    period: Period,
    *,
    model: str,
    now: datetime,
    progress: Callable[[str], None],
) -> Gathered:
    """Read the facts of a report.

    Parameters
    ----------
    connection
        Reads in one snapshot.
    model
        Only this model; empty: all.
    now
        Gaps are looked for up to this time.
    progress
        Called with one readable line per step.
    """
    progress("reading slices and verdicts")
    versions = tuple(await candidate_versions(connection, model))
    slices = {name.id: name for name in await slice_names(connection, model)}
    caps = {version.id: config.budget(version.model).cap for version in versions}
    extent = await Divergence(connection).extent(period.begin, period.end, MOST_ITEMS + 1)
    how = resolution(period, extent)
    verdicts = {
        (fact.version_id, fact.slice_id): fact
        for fact in await verdicts_at(connection, period.end, list(caps))
    }
    open_then = await alerts_between(connection, period.begin, period.end, list(caps))

    progress("summing divergence")
    totals = {}
    if how is not None:
        whole = _whole(period, extent, how)
        totals = by_key(await Divergence(connection).sums(whole, whole.end - whole.begin, caps, list(slices)))
    seen = await versions_until(connection, list(caps), period.end)
    version_ids = {version for version, _ in totals} | {episode.version_id for episode in open_then}
    facts = PeriodFacts(
        begin=period.begin,
        end=period.end,
        versions=versions,
        slices=slices,
        totals=totals,
        bins={},
        verdicts={key: fact for key, fact in verdicts.items() if key[0] in version_ids},
        episodes=(),
        serving=await servings(connection, config.monitor.max_loss_ratio, model=model),
    )
    shown, drawn = _choose(config, facts, open_then)

    series: list[SliceSums] = []
    if how is not None:
        bins = bins_by_key(await Divergence(connection).bins(how.window, caps, sorted(shown)))
        wanted = sorted({slice_id for chosen in drawn.values() for slice_id in chosen} | facts.everything())
        series = await Divergence(connection).sums(how.window, how.width, caps, wanted)
        facts = msgspec.structs.replace(
            facts,
            bins=bins,
            served=_served(facts, seen, series, how),
            people=await _people(connection, facts, seen, period),
            served_last=_served_last(facts, series),
            divergences={
                version.id: (
                    await measure_of_text(connection, version.id, config.measure(version.model), period.end)
                ).name
                for version in versions
                if version.id in version_ids and config.measure(version.model).measured_by_divergence
            },
        )

        facts = msgspec.structs.replace(facts, tokens=await _tokens(connection, config, facts, drawn, period))

    progress("reading how long answers took")
    took, learned_s = await _speeds(connection, config, facts, period)
    items = tuple(await item_times(connection, period.end - _SPEED_SPAN, period.end))
    facts = msgspec.structs.replace(facts, times=took, learned_s=learned_s, items=items)

    progress("reading alerts")
    alerts = open_then[:MOST_EPISODES]
    findings = await findings_of(connection, [alert.id for alert in alerts])
    episodes = [
        await _read_episode(
            connection,
            config,
            period,
            alert,
            version=seen.get(alert.version_id),
            findings=findings.get(alert.id, ()),
        )
        for alert in alerts
    ]

    progress("counting coverage and losses")
    return Gathered(
        extent=extent,
        resolution=how,
        facts=msgspec.structs.replace(facts, episodes=tuple(episodes)),
        drawn=drawn,
        series=tuple(await _divided(connection, alerts, how, series, caps) if how else ()),
        changes=await alert_counts(connection, period.begin, period.end, list(caps)),
        n_episodes_left_out=max(0, len(open_then) - MOST_EPISODES),
        incidents=tuple(
            await with_costs(
                connection,
                await list_incidents(
                    connection, model=model, with_ended=True, begin=period.begin, end=period.end
                ),
                config,
            )
        ),
        marks=await _marks(connection, period, versions, model),
        comparisons=await _comparisons(connection, config, period, versions),
        labels=await _labels(connection, period, versions),
        costs=await _costs(connection, config, facts, period, now),
        coverage=await _coverage(
            connection,
            period,
            model,
            by_stratum=extent.n_items <= MOST_ITEMS,
            versions=versions,
            gaps=_gaps(facts, how, series, min(period.end, now)),
        ),
    )


async def _divided(
    connection: Connection,
    alerts: Sequence[AlertFact],
    how: Resolution,
    series: Sequence[SliceSums],
    caps: dict[int, float],
) -> list[SliceSums]:
    """Return the buckets of all slices, those in which alerts began in two parts."""
    buckets: dict[Key, list[SliceSums]] = {}
    for bucket in series:
        buckets.setdefault((bucket.version_id, bucket.slice_id), []).append(bucket)
    for alert in alerts:
        key, cap = (alert.version_id, alert.slice_id), caps[alert.version_id]
        if key in buckets:
            buckets[key] = await Divergence(connection).divided(
                buckets[key], how.window, how.width, alert.onset_at, cap
            )
    return [bucket for of_slice in buckets.values() for bucket in of_slice]


async def _tokens(
    connection: Connection,
    config: Config,
    facts: PeriodFacts,
    drawn: Mapping[int, Sequence[int]],
    period: Period,
) -> dict[Key, TokenBins]:
    """Return the divergence of the newest tokens of generated text, of all traffic and of the drawn slices of each version."""
    keys = [
        (version.id, slice_id)
        for version in facts.versions
        if config.measure(version.model).measured_by_divergence
        for slice_id in (*drawn.get(version.id, ()), *facts.everything())
        if (version.id, slice_id) in facts.totals
    ]
    found = {key: await token_bins(connection, *key, period.begin, period.end) for key in keys}
    return {key: bins for key, bins in found.items() if bins.tokens}


async def _speeds(
    connection: Connection, config: Config, facts: PeriodFacts, period: Period
) -> tuple[dict[int, Times], dict[int, float]]:
    """Return, per version with data, how long its answers took at the end of the period, and what 99 % did not exceed.

    The latter as it was learned, where the model asks for it.
    """
    took: dict[int, Times] = {}
    learned_s: dict[int, float] = {}
    models = {version.id: version.model for version in facts.versions}
    last = max(period.begin, period.end - _SPEED_SPAN), period.end
    everything = facts.everything()
    for key in facts.totals:
        version_id, slice_id = key
        if slice_id not in everything:
            continue
        budget = config.budget(models[version_id])
        parts = await times(connection, *key, last, latency_budget_s=budget.latency_p99_s)
        of_answer = next((part for part in parts if part.part == "answer"), None)
        if of_answer is not None:
            took[version_id] = of_answer
        if budget.latency_growth:
            learned = (await baselines_now(connection, *key)).get("latency")
            if learned is not None and learned.learned_s:
                learned_s[version_id] = learned.learned_s
    return took, learned_s


def _served(
    facts: PeriodFacts, seen: Mapping[int, SeenVersion], series: Sequence[SliceSums], how: Resolution
) -> dict[int, Served]:
    """Return, per version, the time in which there is data of it."""
    first: dict[int, datetime] = {}
    everything = facts.everything()
    for point in series:
        if point.slice_id in everything:
            first[point.version_id] = min(first.get(point.version_id, point.at), point.at)
    return {
        version: seen[version].served(begin, facts.end, how.width)
        for version, begin in first.items()
        if version in seen
    }


async def _people(
    connection: Connection, facts: PeriodFacts, seen: Mapping[int, SeenVersion], period: Period
) -> dict[Key, Figure]:
    """Return how many people got a changed answer on the last day of each version with data, by version and slice."""
    affected: dict[Key, Figure] = {}
    for version_id in {version_id for version_id, _ in facts.totals}:
        if version_id in seen:
            of_slices = await people_affected(connection, seen[version_id], period.end)
            affected |= {(version_id, slice_id): people for slice_id, people in (of_slices or {}).items()}
    return affected


def _whole(period: Period, extent: Extent, how: Resolution) -> SumWindow:
    """Return the window of the sums over the whole period: of the comparisons, which know people, where that is possible."""
    if extent.n_items > MOST_ITEMS or not extent.is_whole or extent.first is None:
        return how.window
    return SumWindow(begin=max(period.begin, extent.first), end=period.end, grain=Grain.ITEM)


def _served_last(facts: PeriodFacts, series: Sequence[SliceSums]) -> frozenset[int]:
    """Return the versions that served at the end of the period, of a model of which none is known to, that with the newest comparison."""
    everything, versions = facts.everything(), {version.id: version for version in facts.versions}
    newest: dict[tuple[str, str], tuple[datetime, int]] = {}
    for point in series:
        version = versions[point.version_id]
        # Exchanges of unverified senders are a version of their own, which no one released.
        if point.slice_id in everything and not version.candidate_version.endswith(UNVERIFIED):
            # A version may have had several references: the one that was seen last counts.
            name = version.model, version.candidate_version
            newest[name] = max(newest.get(name, (point.at, 0)), (point.at, version.id))
    served: set[int] = set()
    for model in {model for model, _ in newest}:
        names = [name for name in newest if name[0] == model]
        states = {name: facts.serving.get(name, Serving()) for name in names}
        # What serves no more did at the end of the period, if it was seen after it.
        serving = [
            name
            for name, state in states.items()
            if state.serves is Serves.SERVING or (state.seen_at is not None and state.seen_at >= facts.end)
        ]
        served |= {newest[name][1] for name in serving or [max(names, key=newest.__getitem__)]}
    return frozenset(served)


async def _marks(
    connection: Connection, period: Period, versions: Sequence[Version], model: str
) -> tuple[Mark, ...]:
    releases = [
        Mark(
            at=version.first_seen_at,
            kind="release",
            model=version.model,
            what=released(version.candidate_version),
        )
        for version in versions
        if period.begin <= version.first_seen_at < period.end
        and not version.candidate_version.endswith(UNVERIFIED)
    ]
    decisions = [
        Mark(
            at=decision.at,
            kind="decision",
            model=decision.model,
            what=happened(decision.action, decision.subject),
            who=decision.actor,
            why=decision.note,
        )
        for decision in await latest(
            connection, _MOST_DECISIONS, begin=period.begin, end=period.end, model=model, without=SET_UP
        )
    ]
    return tuple(sorted([*releases, *decisions], key=lambda mark: (mark.at, mark.model, mark.what)))


async def _comparisons(
    connection: Connection, config: Config, period: Period, versions: Sequence[Version]
) -> tuple[VersionComparison, ...]:
    """Compare each version that was released in the period with the newest one before it that was compared."""
    versions = [version for version in versions if not version.candidate_version.endswith(UNVERIFIED)]
    released = [
        version
        for version in versions
        if version.reference_digest and period.begin <= version.first_seen_at < period.end
    ]
    comparisons = []
    for new in released[-MOST_COMPARISONS:]:
        before = [
            old
            for old in versions
            if old.model == new.model and old.id < new.id and old.candidate_version != new.candidate_version
        ]
        if not before:
            continue
        length = timedelta(days=DAYS)
        ids = [version.id for version in (*before, new)]
        spans = await VersionReader(connection).spans(ids, length, period.end)
        old = next((version for version in reversed(before) if version.id in spans), None)
        if old is not None and new.id in spans:
            comparisons.append(
                await compare_pair(connection, config, old, new, spans=spans, within=Sides(end=period.end))
            )
    return tuple(comparisons)


async def _labels(
    connection: Connection, period: Period, versions: Sequence[Version]
) -> tuple[LabelFigures, ...]:
    """Read what true labels say of each version, the newest version first."""
    ids = [version.id for version in versions]
    label_outcomes = await outcomes(connection, ids, period.begin, period.end)
    return tuple(
        LabelFigures(model=version.model, version=version.candidate_version, slices=slices)
        for version in reversed(versions)
        if (
            slices := worst_first(
                [outcome for outcome in label_outcomes if outcome.model_version_id == version.id]
            )
        )
    )


async def _costs(
    connection: Connection, config: Config, facts: PeriodFacts, period: Period, now: datetime
) -> tuple[Figure, ...]:
    """Return what the changed answers of each version cost in the period, and the replays of each model; empty without prices."""
    window, costs = figures.period(period.begin, period.end), list[Figure]()
    for version in facts.versions:
        prices = prices_of(config, version.model)
        for slice_id in facts.everything():
            share = facts.figures_of(version, slice_id, "").changed_share
            if share is None:
                continue
            cost = await changed_cost(connection, prices, share, version_id=version.id, slice_id=slice_id)
            costs += [] if cost is None else [cost]
    if config.cost.device_hour:
        times = await replay_times(connection, period.begin, period.end)
        costs += replay_costs(times, config, window, now).values()
    return tuple(costs)


def _choose(
    config: Config, facts: PeriodFacts, episodes: Sequence[AlertFact]
) -> tuple[set[int], dict[int, tuple[int, ...]]]:
    """Return the slices whose histogram is needed, and per version those to draw: alerted first, then worst."""
    everything = facts.everything()
    shown, drawn = set(everything), {}
    for version in facts.versions:
        alerted = [episode.slice_id for episode in episodes if episode.version_id == version.id]
        order = list(dict.fromkeys([*alerted, *ranked(config, facts, version)]))
        shown.update(order[:MOST_TABLE])
        with_data = [
            slice_id
            for slice_id in order
            if (version.id, slice_id) in facts.totals and slice_id not in everything
        ]
        drawn[version.id] = tuple(with_data[:MOST_PLOTS])
    return shown, drawn


async def _read_episode(
    connection: Connection,
    config: Config,
    period: Period,
    alert: AlertFact,
    *,
    version: SeenVersion | None,
    findings: Sequence[Finding],
) -> EpisodeFacts:
    until = min(alert.resolved_at or period.end, period.end)
    # The examples are exchanges whose outputs are far from the reference's: of a slow candidate they show nothing.
    most = 0 if signal_of(alert.metric).is_about_speed else MOST_EXAMPLES
    examples = await examples_of(
        connection,
        max(alert.onset_at, alert.opened_at - _EXAMPLE_SPAN),
        alert.opened_at + timedelta(seconds=1),
        version=alert.version_id,
        slice_id=alert.slice_id,
        flips=signal_of(alert.metric).form is SignalForm.CHANGED,
        most=most,
    )
    # A large window would be read row by row: its newest hour says the same.
    n = await Divergence(connection).count(alert.onset_at, until, _MOST_EPISODE_ITEMS + 1)
    begin = alert.onset_at if n <= _MOST_EPISODE_ITEMS else max(alert.onset_at, until - _EXAMPLE_SPAN)
    model = config.model(alert.model)
    changed = await directions(
        connection,
        alert.version_id,
        alert.slice_id,
        (begin, until),
        labels=model.labels if model else (),
        most=MOST_DIRECTIONS,
    )
    unit = config.measure(alert.model).unit
    return EpisodeFacts(
        alert=alert,
        findings=tuple(finding.text for finding in findings if finding.at < period.end),
        figures=await of_alert(connection, alert, version, period.end, unit=unit),
        examples=tuple(examples),
        directions=tuple(changed),
    )


def _gaps(
    facts: PeriodFacts, how: Resolution | None, series: Sequence[SliceSums], until: datetime
) -> tuple[Gap, ...]:
    if how is None:
        return ()
    everything = facts.everything()
    totals = [point for point in series if point.slice_id in everything]
    return gaps(totals, how.window.begin, until, how.width)


async def _coverage(
    connection: Connection,
    period: Period,
    model: str,
    *,
    by_stratum: bool,
    versions: Sequence[Version],
    gaps: tuple[Gap, ...],
) -> CoverageFigures:
    strata, fleet = await Coverage(connection).strata(period.begin, period.end, by_stratum=by_stratum)
    return CoverageFigures(
        strata=tuple(strata),
        skipped=tuple(await Coverage(connection).skipped(period.begin, period.end)),
        quarantined=tuple(await Coverage(connection).quarantined(period.begin, period.end, model)),
        unreferenced=tuple(
            UnreferencedVersion(
                model=version.model, version=version.candidate_version, first_seen_at=version.first_seen_at
            )
            for version in versions
            if not version.reference_digest
        ),
        gaps=gaps,
        fleet=fleet,
        judged_until=await judged_until(connection),
    )

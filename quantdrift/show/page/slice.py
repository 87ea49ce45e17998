"""The page of a slice, and its notebook."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

import msgspec
from aiohttp import web
from markupsafe import Markup

from quantdrift.core.config.schema import Budget
from quantdrift.core.records import ExemplarKind, Metric
from quantdrift.core.signals import DetectorKind, Signal, named_signals, signal_of
from quantdrift.core.text import plain
from quantdrift.core.token_histogram import TokenBins
from quantdrift.facts.words.cluster import sets_apart
from quantdrift.facts.words.ending import serves_no_more
from quantdrift.facts.words.happened import happened
from quantdrift.facts.words.tokens import of_tokens
from quantdrift.report.labels import labelled
from quantdrift.show import charts
from quantdrift.show.page.exemplars import ShownExemplars
from quantdrift.show.page.notebook import Chosen, notebook
from quantdrift.show.page.rendering import render
from quantdrift.show.page.request import CONFIG, DATABASE, EXEMPLARS, address, query_text, serving_of
from quantdrift.show.page.slice_history import ShownPeriod, history, history_sql, named_history
from quantdrift.show.trends import Plot, plot
from quantdrift.storage import queries
from quantdrift.storage.alerts.alerts import AlertFact, list_alerts
from quantdrift.storage.alerts.timeline import SliceEvent, events_of
from quantdrift.storage.baselines import baselines_now
from quantdrift.storage.described_clusters import described
from quantdrift.storage.exchanges import MOST_DIRECTIONS, MarginBar, affected, single_exchanges
from quantdrift.storage.figures.divergence import divided_bins
from quantdrift.storage.figures.periods import Grain, SliceSums
from quantdrift.storage.figures.tokens import token_bins
from quantdrift.storage.labels import outcome_of_slice
from quantdrift.storage.slices.verdicts import SliceNow, slices_now
from quantdrift.storage.snapshot import PATIENCE_S, Connection, in_time, reading
from quantdrift.storage.versions import VersionNow, measure_of_text, traffic_now, versions_now

_DAY: Final = timedelta(days=1)
_MOST_ID: Final = 2**31 - 1
_SPANS: Final = {"1d": _DAY, "7d": 7 * _DAY, "30d": 30 * _DAY, "90d": 90 * _DAY}
_WIDTHS: Final = {"1d": timedelta(hours=1), "7d": timedelta(hours=6), "30d": _DAY, "90d": _DAY}
_FEWEST_POINTS: Final = 3
_MOST_ALERTS: Final = 20
_MARGIN_BARS: Final = 20  # as in the query


class ChosenSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A slice of a version, among all versions, and the time that is shown with its buckets.

    Parameters
    ----------
    alerts
        Of the slice, open ones first.
    onset
        Of the alert that is open, else of the first one.
    buckets, others
        Of the slice, and of all traffic where that is another slice.
    """

    versions: list[VersionNow]
    version: VersionNow
    entry: SliceNow
    alerts: list[AlertFact]
    onset: datetime | None
    period: ShownPeriod
    buckets: list[SliceSums]
    others: list[SliceSums]


class NamedPlot(msgspec.Struct, frozen=True, kw_only=True):
    """The plot of the signal of a plug-in, empty without data, and its query."""

    signal: Signal
    drawing: Markup | str
    query: str


class TokenSides(msgspec.Struct, frozen=True, kw_only=True):
    """The divergence of the tokens before and since an onset, or in the halves of the time; None: it takes too long, or the model says no text."""

    before: TokenBins | None = None
    since: TokenBins | None = None

    @property
    def words(self) -> list[tuple[str, str]]:
        """Which side, and its quantiles."""
        sides = (("before", self.before), ("since", self.since))
        return [(name, of_tokens(found)) for name, side in sides if side and (found := side.quantiles)]

    @property
    def drawing(self) -> Markup | str:
        """The share of the tokens beyond each divergence; empty without tokens."""
        before, since = (side.above if side else [] for side in (self.before, self.since))
        if not self.words:
            return ""
        return charts.beyond(since, before, title="Share of the tokens that moved at least so far")


async def _tokens(
    connection: Connection, ids: tuple[int, int], begin: datetime, end: datetime
) -> TokenBins | None:
    """Return the divergence of the newest tokens of a time; None: that takes too long."""
    return await in_time(connection, partial(token_bins, connection, *ids, begin, end), PATIENCE_S)


async def _chosen_slice(request: web.Request, connection: Connection) -> ChosenSlice:
    """Return the slice and the time that a request names."""
    version_id, slice_id = int(request.match_info["version"]), int(request.match_info["slice"])
    if max(version_id, slice_id) > _MOST_ID:
        raise web.HTTPNotFound(reason="There is no such slice.")
    versions = await versions_now(connection)
    version = next((version for version in versions if version.id == version_id), None)
    entries = await slices_now(connection, version_id, most=5000) if version else []
    entry = next((entry for entry in entries if entry.slice_id == slice_id), None)
    if version is None or entry is None:
        raise web.HTTPNotFound(reason="There is no such slice, or no exchange of it was compared yet.")
    alerts = await list_alerts(connection, of=(version_id, slice_id), with_resolved=True, most=_MOST_ALERTS)
    onset = entry.onset_at or (alerts[0].onset_at if alerts else None)
    cap = request.app[CONFIG].budget(version.model).cap
    for period in _periods(query_text(request, "span"), version.first_at, entry.last_at):
        buckets = await history(connection, version_id, slice_id, period, cap=cap, onset=onset)
        if len(buckets) >= (_FEWEST_POINTS if period.window.grain is not Grain.ITEM else 1):
            break  # else it is young, or its exchanges are deleted: another time shows it better
    is_part = version.all_id is not None and version.all_id != slice_id
    return ChosenSlice(
        versions=versions,
        version=version,
        entry=entry,
        alerts=alerts,
        onset=onset,
        period=period,
        buckets=buckets,
        others=await history(connection, version_id, version.all_id or 0, period, cap=cap) if is_part else [],
    )


def _periods(asked: str, first: datetime, last: datetime | None) -> list[ShownPeriod]:
    """Return the times to show, the best one first: that which was asked for, else a week, or a day of what is young."""
    last = last or datetime.now(UTC)
    end = last + timedelta(hours=1)
    spans = [asked] if asked in _SPANS else ["7d", "1d"]
    rolled_up = [ShownPeriod.rolled_up(end - _SPANS[span], end, _WIDTHS[span], span) for span in spans]
    fine = ShownPeriod.fine(first, last) if asked in {"", "1d"} else None
    return [fine, *rolled_up] if fine else rolled_up


async def slice_page(request: web.Request) -> web.Response:
    """Show one slice of one version."""
    config, now = request.app[CONFIG], datetime.now(UTC)
    async with reading(request.app[DATABASE]) as connection:
        chosen = await _chosen_slice(request, connection)
        version, entry, period = chosen.version, chosen.entry, chosen.period
        serving = await serving_of(request, connection, version)
        ids, begin, end = (version.id, entry.slice_id), period.begin, period.end
        model, budget = config.model(version.model), config.budget(version.model)
        labels = tuple(model.labels) if model else ()
        split = chosen.onset or begin + (end - begin) / 2
        of_bars = (min(begin, split - 7 * _DAY), split, end)
        before, after = await divided_bins(connection, *ids, of_bars)
        traffic = await traffic_now(connection, version, now, [entry.slice_id])
        people, _ = await affected(connection, version, now, [entry.slice_id])
        singles = await single_exchanges(
            connection, *ids, begin, end, latency_budget_s=budget.latency_p99_s, labels=labels
        )
        cluster = (await described(connection, *ids[:1], [entry.slice_id])).get(entry.slice_id)
        happenings = await events_of(connection, *ids, begin, end)
        baselines = await baselines_now(connection, *ids)
        tokens = TokenSides()
        if config.measure(version.model).measured_by_divergence:
            tokens = TokenSides(
                before=await _tokens(connection, ids, of_bars[0], split),
                since=await _tokens(connection, ids, split, end),
            )
        truth = await outcome_of_slice(connection, *ids, begin, end) if singles.begin else None
        measure = await measure_of_text(connection, version.id, config.measure(version.model), end)
        named = [signal for signal in named_signals() if signal.is_asked(DetectorKind.BUDGET, budget)]
        buckets = await named_history(connection, ids, period, named) if named else []
    kept, reader = ShownExemplars(), request.app.get(EXEMPLARS)
    if cluster and reader is not None:
        kept = await reader.shown(version.model, [entry.slice], version.version, ExemplarKind.RANDOM)
    events = [*happenings, *_of_alerts(chosen.alerts, begin, end)]
    name = "all traffic" if entry.predicate == "true" else entry.slice
    levels = {metric: baseline.level for metric, baseline in baselines.items()}
    divergence_level = levels.get("divergence")
    plots = {
        metric: plot(
            metric,
            chosen.buckets,
            period.grid(chosen.buckets, version.first_at, entry.last_at),
            name=plain(name),
            others=chosen.others,
            budget=accepted,
            baseline=baseline,
            marks=[_mark(event) for event in events],
            alerts=[(alert.onset_at, alert.ended_at) for alert in chosen.alerts],
        )
        for metric, accepted, baseline in (
            (Metric.FLIP, entry.flip_budget, levels.get("flip")),
            (
                Metric.DIVERGENCE,
                entry.divergence_budget,
                None if divergence_level is None else budget.cap * divergence_level,
            ),
        )
    }
    named_plots = []
    for signal in named:
        drawn = plot(
            signal.metric,
            buckets or [],
            period.grid(buckets or [], version.first_at, entry.last_at),
            name=plain(name),
            budget=signal.budget(budget),
            baseline=levels.get(signal.metric.value),
            marks=[_mark(event) for event in events],
            alerts=[(alert.onset_at, alert.ended_at) for alert in chosen.alerts],
        )
        query = history_sql(signal, period, drawn.trend, None, 1.0, version=version.id, slice=entry.slice_id)
        named_plots.append(NamedPlot(signal=signal, drawing=drawn.drawing if buckets else "", query=query))
    return render(
        request,
        "slice.html",
        version=version,
        serving=serving,
        replaced=_replaced(version, chosen.versions),
        entry=entry,
        name=name,
        inputs=sets_apart(cluster) if cluster else "",
        typical=cluster["medoids"] if cluster else [],
        pictures=kept.pictures,
        span=period.span,
        spans=_SPANS,
        traffic=traffic.get(entry.slice_id),
        people=(people or {}).get(entry.slice_id),
        flips=plots[Metric.FLIP].drawing if chosen.buckets else "",
        divergences=plots[Metric.DIVERGENCE].drawing if chosen.buckets else "",
        named_plots=named_plots,
        too_slow=buckets is None,
        has_others=bool(chosen.others),
        bars=charts.bars(before, after, title="Divergence of the exchanges before and after")
        if before or after
        else "",
        margins=_margins(singles.margins or ()),
        tokens=tokens,
        split=split,
        is_onset=chosen.onset is not None,
        events=sorted(events, key=lambda event: event.at),
        baselines=baselines,
        cap=budget.cap,
        alerts=chosen.alerts,
        singles=singles,
        looked=None if singles.begin is None else end - singles.begin,
        truth=labelled(truth) if truth else None,
        labels=labels,
        trace_url=config.telemetry.trace_url,
        measure=measure,
        latency_budget_s=budget.latency_p99_s,
        latency_growth=budget.latency_growth,
        now=now,
        sql=_sql(chosen, plots, of_bars, singles.begin or end - timedelta(hours=2), budget),
        notebook=address(f"{request.path}/notebook", {"span": period.span}),
        link=lambda **more: address(request.path, {"span": period.span} | more),
    )


def _replaced(version: VersionNow, versions: Sequence[VersionNow]) -> str:
    """Return that a version serves no more, and what serves now; empty while it serves."""
    if version.replaced_at is None:
        return ""
    after = version.seen_at or version.replaced_at
    serving = [
        other.version
        for other in versions
        if other.model == version.model
        and other.replaced_at is None
        and other.seen_at
        and other.seen_at > after
    ]
    return plain(serves_no_more(version.version, version.seen_at, list(dict.fromkeys(serving))))


async def slice_notebook(request: web.Request) -> web.Response:
    """Send the notebook of a slice as a file."""
    async with reading(request.app[DATABASE]) as connection:
        chosen = await _chosen_slice(request, connection)
    version, entry, period = chosen.version, chosen.entry, chosen.period
    written = notebook(
        Chosen(
            model=version.model,
            version=version.version,
            slice=entry.slice,
            begin=period.begin,
            end=period.end,
            step="hour" if period.width < _DAY else "day",
            margins=queries.filled(
                queries.MARGINS,
                version=version.id,
                slice=entry.slice_id,
                begin=period.begin,
                end=period.end,
            ),
        )
    )
    name = f"quantdrift-slice-{version.id}-{entry.slice_id}.ipynb"
    return web.Response(
        body=written,
        content_type="application/x-ipynb+json",
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )


def _of_alerts(alerts: Sequence[AlertFact], begin: datetime, end: datetime) -> list[SliceEvent]:
    """Return the onsets and the openings of alerts in a time."""
    return [
        SliceEvent(at=at, kind=kind, subject=f"alert {alert.id}", who="monitor")
        for alert in alerts
        for kind, at in (("onset", alert.onset_at), ("alert", alert.opened_at))
        if begin <= at < end
    ]


def _mark(event: SliceEvent) -> charts.VerticalLine:
    kind = event.kind if event.kind in {"release", "onset", "alert"} else "decision"
    return charts.VerticalLine(
        at=event.at,
        kind=kind,
        text=plain(happened(event.kind, event.subject, event.old_value, event.new_value)),
    )


def _margins(bars: Iterable[MarginBar]) -> Markup | str:
    """Return the plot of the margins, empty where no item has one."""
    sums = {False: [0.0] * _MARGIN_BARS, True: [0.0] * _MARGIN_BARS}
    for bar in bars:
        sums[bar.flip][min(max(bar.bar, 1), _MARGIN_BARS) - 1] += bar.weight
    if not any(map(any, sums.values())):
        return ""
    return charts.margin_bars(
        sums[False],
        sums[True],
        title="Margins of the unquantised model: of answers that stayed, and of answers that changed",
    )


def _sql(
    chosen: ChosenSlice,
    plots: Mapping[Metric, Plot],
    of_bars: tuple[datetime, datetime, datetime],
    looked_from: datetime,
    budget: Budget,
) -> dict[str, str]:
    """Return, by the name of each plot and table, the query that gives its rows.

    Parameters
    ----------
    of_bars
        Begin, split and end of the two histograms.
    looked_from
        From when single exchanges are shown.
    """
    period, filled = chosen.period, queries.filled
    ids = {"version": chosen.version.id, "slice": chosen.entry.slice_id}
    single: dict[str, int | datetime] = {**ids, "begin": looked_from, "end": period.end}
    begin, split, end = of_bars
    flips, divergence = (
        history_sql(signal_of(metric), period, plots[metric].trend, chosen.onset, budget.cap, **ids)
        for metric in (Metric.FLIP, Metric.DIVERGENCE)
    )
    return {
        "state": filled(queries.STATE, **ids),
        "flips": flips,
        "divergence": divergence,
        "events": filled(queries.EVENTS, **ids, begin=period.begin, end=period.end),
        "baselines": filled(queries.BASELINES, **ids),
        "spread": filled(queries.SPREAD, split=split, **ids, begin=begin, end=end),
        "tokens": filled(queries.TOKENS, **ids, begin=split, end=end),
        "directions": filled(queries.DIRECTIONS, most=MOST_DIRECTIONS, **single),
        "margins": filled(queries.MARGINS, **single),
        "worst": filled(queries.WORST, **single),
        "times": filled(queries.TIMES, budget=round(1e6 * budget.latency_p99_s), **single),
    }

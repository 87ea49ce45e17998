"""The page of a slice, and its notebook."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
from aiohttp import web
from markupsafe import Markup

from quantdrift.core.text import plain
from quantdrift.facts.words.ending import serves_no_more
from quantdrift.facts.words.happened import happened
from quantdrift.report.labels import labelled
from quantdrift.show import charts
from quantdrift.show.page.notebook import Chosen, notebook
from quantdrift.show.page.rendering import render
from quantdrift.show.page.request import CONFIG, DATABASE, address, query_text, serving_of
from quantdrift.show.page.slice_history import Period, history_of, history_sql, points, young_history
from quantdrift.storage.page import history as past
from quantdrift.storage.page import now as present
from quantdrift.storage.page import queries

_DAY: Final = timedelta(days=1)
_MOST_ID: Final = 2**31 - 1
_SPANS: Final = {"1d": _DAY, "7d": 7 * _DAY, "30d": 30 * _DAY, "90d": 90 * _DAY}
_WIDTHS: Final = {"1d": timedelta(hours=1), "7d": timedelta(hours=6), "30d": _DAY, "90d": _DAY}
_FEWEST_POINTS: Final = 3
_MARGIN_BARS: Final = 20  # as in the query


class ChosenSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A slice of a version, among all versions, and the time that is shown with its points."""

    versions: list[present.VersionNow]
    version: present.VersionNow
    entry: present.SliceNow
    period: Period
    history: list[past.Sums]


async def _chosen_slice(request: web.Request, connection: present.Connection) -> ChosenSlice:
    """Return the slice and the time that a request names."""
    version_id, slice_id = int(request.match_info["version"]), int(request.match_info["slice"])
    if max(version_id, slice_id) > _MOST_ID:
        raise web.HTTPNotFound(reason="There is no such slice.")
    asked = query_text(request, "span")
    versions = await present.versions(connection)
    version = next((one for one in versions if one.id == version_id), None)
    every = await present.slices(connection, version_id, most=5000) if version else []
    entry = next((one for one in every if one.slice_id == slice_id), None)
    if version is None or entry is None:
        raise web.HTTPNotFound(reason="There is no such slice, or no exchange of it was compared yet.")
    last_at = entry.last_at or datetime.now(UTC)
    cap = request.app[CONFIG].budget(version.model).cap
    if asked in {"", "1d"} and timedelta() <= last_at - version.first_at < _DAY:
        young = await young_history(
            connection, (version_id, slice_id), (version.first_at, entry.onset_at, last_at), cap
        )
        if young is not None:
            return ChosenSlice(
                versions=versions, version=version, entry=entry, period=young[0], history=young[1]
            )
    end = last_at + timedelta(hours=1)
    for span in (asked if asked in _SPANS else "7d", "1d"):
        period = Period(span=span, begin=end - _SPANS[span], end=end, width=_WIDTHS[span])
        history = await past.history(connection, version_id, slice_id, period.begin, end, width=period.width)
        if asked or len(history) >= _FEWEST_POINTS:  # else it is young: a day shows it better
            break
    return ChosenSlice(versions=versions, version=version, entry=entry, period=period, history=history)


async def slice_page(request: web.Request) -> web.Response:
    """Show one slice of one version."""
    async with present.reading(request.app[DATABASE]) as connection:
        chosen = await _chosen_slice(request, connection)
        version, entry, period = chosen.version, chosen.entry, chosen.period
        serving = await serving_of(request, connection, version)
        ids, begin, end = (version.id, entry.slice_id), period.begin, period.end
        config = request.app[CONFIG]
        others = (
            await history_of(
                connection,
                (version.id, version.all_id),
                period,
                entry.onset_at,
                config.budget(version.model).cap,
            )
            if version.all_id and version.all_id != entry.slice_id
            else []
        )
        episodes = await past.alerts(connection, version_id=version.id, slice_id=entry.slice_id, most=20)
        onset = entry.onset_at or (episodes[0].onset_at if episodes else None)
        split = onset or begin + (end - begin) / 2
        of_bars = (min(begin, split - 7 * _DAY), split, end)
        before, after = await past.bins(connection, *ids, of_bars)
        traffic = (await present.traffic(connection, version, datetime.now(UTC), [entry.slice_id])).get(
            entry.slice_id
        )
        people, _ = await present.affected(connection, version, datetime.now(UTC), [entry.slice_id])
        budget = config.budget(version.model)
        singles = await past.singles(connection, *ids, begin, end, latency_budget_s=budget.latency_p99_s)
        happened = await past.happenings(connection, *ids, begin, end)
        baselines = await past.baselines(connection, *ids)
        truth = await past.truth(connection, *ids, begin, end) if singles.begin else None
    events = [*happened, *_of_alerts(episodes, begin, end)]
    model = config.model(version.model)
    labels = tuple(model.labels) if model else ()
    name = "all traffic" if entry.predicate == "true" else entry.slice
    levels = {metric: one.level for metric, one in baselines.items()}
    cap = budget.cap
    divergence_level = levels.get("divergence")
    return render(
        request,
        "slice.html",
        version=version,
        serving=serving,
        replaced=_replaced(version, chosen.versions),
        entry=entry,
        name=name,
        span=period.span,
        spans=_SPANS,
        traffic=traffic,
        people=(people or {}).get(entry.slice_id),
        flips=charts.line(
            points(chosen.history, "flip", period.width, (version.first_at, entry.last_at)),
            begin,
            end,
            title=f"Changed answers in {plain(name)} over time",
            width=period.width,
            alerts=[(one.onset_at, one.resolved_at or end) for one in episodes],
            others=points(others, "flip", period.width, (version.first_at, entry.last_at)),
            budget=entry.flip_budget,
            baseline=levels.get("flip"),
            marks=[_mark(one) for one in events],
        ),
        divergences=charts.line(
            points(chosen.history, "divergence", period.width, (version.first_at, entry.last_at)),
            begin,
            end,
            title=f"Mean divergence in {plain(name)} over time",
            width=period.width,
            alerts=[(one.onset_at, one.resolved_at or end) for one in episodes],
            others=points(others, "divergence", period.width, (version.first_at, entry.last_at)),
            budget=entry.divergence_budget,
            baseline=None if divergence_level is None else cap * divergence_level,
            marks=[_mark(one) for one in events],
            is_share=False,
        ),
        bars=charts.bars(before, after, title="Divergence of the exchanges before and after")
        if before or after
        else "",
        margins=_margins(singles.margins or ()),
        split=split,
        is_onset=onset is not None,
        history=chosen.history,
        events=sorted(events, key=lambda one: one.at),
        baselines=baselines,
        cap=cap,
        episodes=episodes,
        singles=singles,
        looked=None if singles.begin is None else end - singles.begin,
        truth=labelled(truth) if truth else None,
        label=lambda index: (
            labels[index] if 0 <= index < len(labels) else f"class {index}" if index >= 0 else "no class"
        ),
        trace_url=config.telemetry.trace_url,
        measure=config.measure(version.model),
        latency_budget_s=budget.latency_p99_s,
        latency_growth=budget.latency_growth,
        now=datetime.now(UTC),
        sql=_sql(
            chosen,
            of_bars,
            singles.begin or end - timedelta(hours=2),
            cap=cap,
            latency_budget_s=budget.latency_p99_s,
        ),
        notebook=address(f"{request.path}/notebook", {"span": period.span}),
        link=lambda **more: address(request.path, {"span": period.span} | more),
    )


def _replaced(version: present.VersionNow, versions: Sequence[present.VersionNow]) -> str:
    """Return that a version serves no more, and what serves now; empty while it serves."""
    if version.replaced_at is None:
        return ""
    after = version.seen_at or version.replaced_at
    serving = [
        one.version
        for one in versions
        if one.model == version.model and one.replaced_at is None and one.seen_at and one.seen_at > after
    ]
    return plain(serves_no_more(version.version, version.seen_at, list(dict.fromkeys(serving))))


async def slice_notebook(request: web.Request) -> web.Response:
    """Send the notebook of a slice as a file."""
    async with present.reading(request.app[DATABASE]) as connection:
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
            margins=_sql(chosen, (period.begin, period.begin, period.end), period.begin, cap=1.0)["margins"],
        )
    )
    name = f"quantdrift-slice-{version.id}-{entry.slice_id}.ipynb"
    return web.Response(
        body=written,
        content_type="application/x-ipynb+json",
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )


def _of_alerts(episodes: list[past.AlertRow], begin: datetime, end: datetime) -> list[past.Event]:
    """Return the onsets and the openings of alerts in a time."""
    found = [
        past.Event(
            at=at,
            kind=kind,
            subject=f"alert {one.id}",
            who="monitor",
            why="",
            old_value=None,
            new_value=None,
        )
        for one in episodes
        for kind, at in (("onset", one.onset_at), ("alert", one.opened_at))
    ]
    return [one for one in found if begin <= one.at < end]


def _mark(event: past.Event) -> charts.Mark:
    kind = event.kind if event.kind in {"release", "onset", "alert"} else "decision"
    return charts.Mark(
        at=event.at,
        kind=kind,
        text=plain(happened(event.kind, event.subject, event.old_value, event.new_value)),
    )


def _margins(found: Iterable[past.MarginBar]) -> Markup | str:
    """Return the plot of the margins, empty where no item has one."""
    sums = {False: [0.0] * _MARGIN_BARS, True: [0.0] * _MARGIN_BARS}
    for one in found:
        sums[one.flip][min(max(one.bar, 1), _MARGIN_BARS) - 1] += one.weight
    if not any(map(any, sums.values())):
        return ""
    return charts.margin_bars(
        sums[False],
        sums[True],
        title="Margins of the unquantised model: of answers that stayed, and of answers that changed",
    )


def _sql(
    chosen: ChosenSlice,
    of_bars: tuple[datetime, datetime, datetime],
    looked_from: datetime,
    *,
    cap: float,
    latency_budget_s: float = 0.0,
) -> dict[str, str]:
    """Return, by the name of each plot and table, the query that gives its rows.

    Parameters
    ----------
    of_bars
        Begin, split and end of the two histograms.
    looked_from
        From when single exchanges are shown.
    """
    period = chosen.period
    ids = {"version": chosen.version.id, "slice": chosen.entry.slice_id}
    shown: dict[str, int | datetime] = {**ids, "begin": period.begin, "end": period.end}
    single: dict[str, int | datetime] = {**ids, "begin": looked_from, "end": period.end}
    begin, split, end = of_bars
    history = history_sql(period, cap, chosen.entry.onset_at, **ids)
    return {
        "state": queries.filled(queries.STATE, **ids),
        "history": history,
        "events": queries.filled(queries.EVENTS, **shown),
        "baselines": queries.filled(queries.BASELINES, **ids),
        "spread": queries.filled(queries.SPREAD, split=split, **ids, begin=begin, end=end),
        "directions": queries.filled(queries.DIRECTIONS, **single),
        "margins": queries.filled(queries.MARGINS, **single),
        "worst": queries.filled(queries.WORST, **single),
        "times": queries.filled(queries.TIMES, budget=round(1e6 * latency_budget_s), **single),
    }

"""The pages: each reads what it shows in one read-only transaction, and hands it to its template."""

import asyncio
import contextlib
import shlex
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import zip_longest
from typing import Any, Final
from urllib.parse import quote

import msgspec
from aiohttp import web
from markupsafe import Markup

from quantdrift.core.config.schema import Config
from quantdrift.core.errors import OperatorError, QuantdriftError
from quantdrift.core.records import Verdict
from quantdrift.core.text import plain, plain_lines
from quantdrift.facts import status
from quantdrift.facts.figures import Figure, Window, WindowName
from quantdrift.facts.incidents import (
    changes_of,
    commands_of_incident,
    headline,
    labels_wanted,
    mitigated_sentence,
    standing_sentence,
    story_text,
    unknown_sentence,
)
from quantdrift.facts.status import Serving
from quantdrift.facts.words import first_screen
from quantdrift.facts.words.ending import serves_no_more
from quantdrift.facts.words.happened import ONSET, happened
from quantdrift.report.compare import compare as compare_versions
from quantdrift.report.labels import LabelledSlice, labelled
from quantdrift.show import charts
from quantdrift.show.page.access import FORM_MARK, PERSON, Person
from quantdrift.show.page.guard import form_problem
from quantdrift.show.page.notebook import Chosen, notebook
from quantdrift.show.page.rendering import render
from quantdrift.storage.commands.flow import flow
from quantdrift.storage.commands.slice_list import where_of
from quantdrift.storage.cost import replay_costs
from quantdrift.storage.database import Database
from quantdrift.storage.figures import SliceFigures, frozen, of_alert
from quantdrift.storage.incidents import (
    Say,
    find_incident,
    has_labels,
    incidents_of,
    list_incidents,
    say,
    story,
    with_cost,
)
from quantdrift.storage.monitor.alerts import (
    LONGEST_REASON,
    Act,
    Finding,
    FindingKind,
    act,
    actions_of,
    find_alert,
    findings_of,
)
from quantdrift.storage.page import history as past
from quantdrift.storage.page import now as present
from quantdrift.storage.page import queries
from quantdrift.storage.report.reading import Reader
from quantdrift.storage.serving import servings

CONFIG: Final = web.AppKey("config", Config)
DATABASE: Final = web.AppKey("database", Database)
OPERATOR: Final = web.AppKey("operator", Database)
"""With the rights of an operator; missing where the page only reads."""
_DAY: Final = timedelta(days=1)
_HISTORY: Final = timedelta(days=90)
_ROWS: Final = 100
_MOST_COMPARED: Final = 300_000
"""Answers of a version that are read one by one while a person waits; of more, the roll-ups are."""
_COMPARING_S: Final = 5.0
_MOST_ID: Final = 2**31 - 1
_SPANS: Final = {"1d": _DAY, "7d": 7 * _DAY, "30d": 30 * _DAY, "90d": 90 * _DAY}
_WIDTHS: Final = {"1d": timedelta(hours=1), "7d": timedelta(hours=6), "30d": _DAY, "90d": _DAY}
_FEWEST_POINTS: Final = 3
_MOST_POINTS: Final = 60
_FINE: Final = tuple(timedelta(seconds=seconds) for seconds in (10, 30, 60, 120, 300, 600, 900, 1800))
"""Widths of the points of less than a day."""
_MARGIN_BARS: Final = 20  # as in the query
_MOST_FOLLOWERS: Final = 64
_POLL_S: Final = 2.0
_ALIVE_S: Final = 20.0
_BY_PEOPLE: Final = (Act.ACK, Act.UNACK, Act.NOTE, Act.CLOSE)


def routes() -> Iterable[web.AbstractRouteDef]:
    """Return the routes of the pages."""
    return [
        web.get("/", overview),
        web.get("/slice/{version:\\d{1,10}}/{slice:\\d{1,10}}", slice_page),
        web.get("/slice/{version:\\d{1,10}}/{slice:\\d{1,10}}/notebook", slice_notebook),
        web.get("/incidents", incidents),
        web.get("/incident/{incident:\\d{1,18}}", incident_page),
        web.get("/alerts", alerts),
        web.get("/alert/{alert:\\d{1,18}}", alert_page),
        web.post("/alert/{alert:\\d{1,18}}", act_on_alert),
        web.post("/incident/{incident:\\d{1,18}}", act_on_incident),
        web.get("/compare", compare),
        web.get("/system", system),
        web.get("/events", events),
    ]


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """A model on the overview: its line, and what stands behind it.

    Parameters
    ----------
    verdict
        Of the version that serves now.
    worst
        The slices that fire or warn, worst first.
    explaining
        By alert, the one that explains it.
    incidents
        By alert, its incident.
    serving
        Whether it serves, and is paused.
    """

    now: present.VersionNow
    others: tuple[present.VersionNow, ...]
    verdict: str
    worst: tuple[present.SliceNow, ...]
    traffic: dict[int, SliceFigures] = {}
    unknowns: tuple[present.Unknown, ...]
    explaining: dict[int, int] = {}
    incidents: dict[int, int] = {}
    facts: present.SingleFacts = present.SingleFacts()
    serving: Serving = Serving()

    def people(self, slice_id: int) -> Figure | None:
        """Return how many people got a changed answer in a slice on the last day; None: nobody is known to."""
        return (self.facts.people or {}).get(slice_id)

    @property
    def truth(self) -> LabelledSlice | None:
        """What true labels say of all traffic; None: nothing."""
        return self.truth_of(self.now.all_id or 0)

    def truth_of(self, slice_id: int) -> LabelledSlice | None:
        """Return what true labels say of a slice, None: nothing."""
        found = self.facts.outcomes.get(slice_id)
        return labelled(found) if found else None

    @property
    def whole(self) -> SliceFigures | None:
        """The traffic of all slices together."""
        return self.traffic.get(self.now.all_id or 0)

    @property
    def alert_id(self) -> int | None:
        """The alert to open first: that of the worst slice, or the one that explains it; None: no alert is open."""
        first = next((one.alert_id for one in self.worst if one.alert_id is not None), None)
        return None if first is None else self.explaining.get(first, first)

    @property
    def incident_id(self) -> int | None:
        """The incident of the alert to open first; None: there is none."""
        found = (self.incidents.get(one.alert_id or 0) for one in self.worst)
        return next((incident for incident in found if incident is not None), None)

    @property
    def serving_too(self) -> list[present.VersionNow]:
        """The other versions that serve."""
        return [one for one in self.others if one.seen_at is not None and one.replaced_at is None]

    @property
    def replaced(self) -> list[present.VersionNow]:
        """The versions that serve no more."""
        return [one for one in self.others if one not in self.serving_too]

    @property
    def since(self) -> datetime | None:
        """Since when the verdict stands."""
        return (self.now.firing_since if self.verdict == "firing" else None) or self.now.since

    @property
    def excess(self) -> Figure | None:
        """Changed answers in the slice that has most of them, among those that fire or warn."""
        found = [self.traffic[bad.slice_id].changed for bad in self.worst if bad.slice_id in self.traffic]
        return max((changed for changed in found if changed), key=lambda changed: changed.value, default=None)

    @property
    def headline(self) -> str:
        """The first line: is it good enough."""
        bad = [one for one in self.worst if one.verdict == self.verdict]
        return first_screen.answer(
            Verdict(self.verdict),
            f"{self.now.model} {self.now.version}",
            [first_screen.name_of(one.slice, one.predicate) for one in bad],
            n_unknown=self.now.n_unknown,
            why=self.now.reason or first_screen.NOTHING_COMPARED,
        )

    @property
    def first_step(self) -> str:
        """What to do first."""
        return first_screen.first_step(Verdict(self.verdict))


async def overview(request: web.Request) -> web.Response:
    """Show every model in one line, and the slices of one."""
    chosen, verdict, query = _asked(request, "model"), _asked(request, "verdict"), _asked(request, "q")
    verdict = verdict if verdict in status.RANK else ""
    page = max(1, _number(request, "page", 1))
    now = datetime.now(UTC)
    models: list[ModelView] = []
    async with present.reading(request.app[DATABASE]) as connection:
        found = await present.versions(connection)
        serving = await servings(connection, request.app[CONFIG].monitor.max_loss_ratio)
        by_model: dict[str, list[present.VersionNow]] = {}
        for one in found:
            by_model.setdefault(one.model, []).append(one)
        for versions in by_model.values():
            newest = versions[0]
            n_bad = newest.n_firing + newest.n_warning
            worst = await present.slices(connection, newest.id, most=n_bad and min(n_bad, 8)) if n_bad else []
            alert_ids = [one.alert_id for one in worst if one.alert_id is not None]
            models.append(
                ModelView(
                    now=newest,
                    others=tuple(versions[1:]),
                    verdict=newest.verdict,
                    worst=tuple(one for one in worst if one.verdict in status.ALERTS),
                    unknowns=tuple(await present.unknowns(connection, newest.id)) if newest.n_unknown else (),
                    explaining=await past.explaining(connection, alert_ids) if alert_ids else {},
                    incidents=await incidents_of(connection, alert_ids) if alert_ids else {},
                    serving=serving.get((newest.model, newest.version), Serving()),
                )
            )
        models.sort(key=lambda one: (status.RANK[one.verdict], one.now.model))
        shown = next((one for one in models if one.now.model == chosen), models[0] if models else None)
        slices: list[present.SliceNow] = []
        strips = {}
        end = now
        if shown:
            end = shown.now.last_at or now
            slices = await present.slices(
                connection, shown.now.id, words=query, verdict=verdict, most=_ROWS, first=_ROWS * (page - 1)
            )
            ids = [one.slice_id for one in slices]
            changes = await present.changes(connection, shown.now.id, ids, end - _HISTORY) if ids else {}
            for each in slices:
                steps = [
                    (change.at, change.before, change.after) for change in changes.get(each.slice_id, [])
                ]
                known_from = max(end - _HISTORY, shown.now.first_at)
                strips[each.slice_id] = charts.strip(steps, each.verdict, known_from, (end - _HISTORY, end))
        models = [
            await _with_facts(
                connection, one, [each.slice_id for each in slices] if one is shown else [], now
            )
            for one in models
        ]
        shown = next((one for one in models if shown and one.now.id == shown.now.id), None)
    return render(
        request,
        "overview.html",
        models=models,
        shown=shown,
        slices=slices,
        strips=strips,
        slices_sql=queries.filled(queries.SLICES, version=shown.now.id) if shown else "",
        n_found=slices[0].n_found if slices else 0,
        first=_ROWS * (page - 1),
        most=_ROWS,
        page=page,
        query=query,
        verdict=verdict,
        now=now,
        link=lambda **more: _link("/", {"model": chosen, "verdict": verdict, "q": query} | more),
    )


async def _with_facts(
    connection: present.Connection, model: ModelView, slice_ids: list[int], now: datetime
) -> ModelView:
    """Return a model with what single exchanges say of its traffic and of some of its slices, whose intervals count people."""
    bad = [slice_now.slice_id for slice_now in model.worst]
    ids = list(dict.fromkeys([*([model.now.all_id] if model.now.all_id else []), *bad, *slice_ids]))
    traffic = await present.traffic(connection, model.now, now, ids)
    facts = await present.single_facts(connection, model.now, now, ids)
    return msgspec.structs.replace(model, facts=facts, traffic=traffic)


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """The time that the page of a slice shows: its name in the address, and the width of the points of its plots."""

    span: str
    begin: datetime
    end: datetime
    width: timedelta


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
    asked = _asked(request, "span")
    versions = await present.versions(connection)
    version = next((one for one in versions if one.id == version_id), None)
    every = await present.slices(connection, version_id, most=5000) if version else []
    entry = next((one for one in every if one.slice_id == slice_id), None)
    if version is None or entry is None:
        raise web.HTTPNotFound(reason="There is no such slice, or no exchange of it was compared yet.")
    last_at = entry.last_at or datetime.now(UTC)
    cap = request.app[CONFIG].budget(version.model).cap
    if asked in {"", "1d"} and timedelta() <= last_at - version.first_at < _DAY:
        young = await _young(
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


async def _young(
    connection: present.Connection,
    ids: tuple[int, int],
    times: tuple[datetime, datetime | None, datetime],
    cap: float,
) -> tuple[Period, list[past.Sums]] | None:
    """Return less than a day in points of minutes or seconds, which the onset divides; None: too many exchanges, or deleted ones.

    Parameters
    ----------
    ids
        Version and slice.
    times
        First exchange, onset if there is one, and last exchange.
    """
    first, onset, last = times
    width = next((width for width in _FINE if (last - first) / width <= _MOST_POINTS), _FINE[-1])
    period = Period(span="1d", begin=first - width, end=last + width, width=width)
    base = onset or period.begin
    history = await past.minutes(connection, *ids, (period.begin, base, period.end), width=width, cap=cap)
    return (period, history) if history else None


async def slice_page(request: web.Request) -> web.Response:
    """Show one slice of one version."""
    async with present.reading(request.app[DATABASE]) as connection:
        chosen = await _chosen_slice(request, connection)
        version, entry, period = chosen.version, chosen.entry, chosen.period
        serving = await _serving(request, connection, version)
        ids, begin, end = (version.id, entry.slice_id), period.begin, period.end
        config = request.app[CONFIG]
        others = (
            await _history(
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
            _points(chosen.history, "flip", period.width, (version.first_at, entry.last_at)),
            begin,
            end,
            title=f"Changed answers in {plain(name)} over time",
            width=period.width,
            alerts=[(one.onset_at, one.resolved_at or end) for one in episodes],
            others=_points(others, "flip", period.width, (version.first_at, entry.last_at)),
            budget=entry.flip_budget,
            baseline=levels.get("flip"),
            marks=[_mark(one) for one in events],
        ),
        divergences=charts.line(
            _points(chosen.history, "divergence", period.width, (version.first_at, entry.last_at)),
            begin,
            end,
            title=f"Mean divergence in {plain(name)} over time",
            width=period.width,
            alerts=[(one.onset_at, one.resolved_at or end) for one in episodes],
            others=_points(others, "divergence", period.width, (version.first_at, entry.last_at)),
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
        notebook=_link(f"{request.path}/notebook", {"span": period.span}),
        link=lambda **more: _link(request.path, {"span": period.span} | more),
    )


async def _serving(
    request: web.Request, connection: present.Connection, version: present.VersionNow
) -> Serving:
    """Return whether a version serves, and is paused."""
    found = await servings(connection, request.app[CONFIG].monitor.max_loss_ratio, model=version.model)
    return found.get((version.model, version.version), Serving())


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


async def incidents(request: web.Request) -> web.Response:
    """Show the incidents, open ones first."""
    async with present.reading(request.app[DATABASE]) as connection:
        config = request.app[CONFIG]
        found = [
            with_cost(one, config) for one in await list_incidents(connection, with_ended=True, most=_ROWS)
        ]
    return render(
        request,
        "incidents.html",
        incidents=found,
        headlines={one.id: headline(one) for one in found},
        now=datetime.now(UTC),
        sql=queries.INCIDENTS.strip(),
    )


async def incident_page(request: web.Request) -> web.Response:
    """Show one incident: its state, whom it hit, what is not known, and its story."""
    return await _incident(request)


async def act_on_incident(request: web.Request) -> web.Response:
    """Mitigate, open again or close an incident, in the name of the person who has logged in."""
    form = await request.post()
    person = _acting(request, form, "Incidents")
    if isinstance(person, web.Response):
        return person
    what = next((change for change in Say if change.value == form.get("action")), None)
    if what is None:
        return render(request, "error.html", status=400, text="This form names no change of an incident.")
    number, reason = int(request.match_info["incident"]), plain_lines(str(form.get("reason", "")))
    try:
        async with request.app[OPERATOR].begin() as connection:
            await say(connection, number, what, reason, identity=person)
    except QuantdriftError as error:
        return await _incident(request, problem=str(error), typed=reason)
    return web.Response(status=303, headers={"Location": f"/incident/{number}"})


def _acting(request: web.Request, form: Mapping[str, Any], what: str) -> str | web.Response:
    """Return the name of the person who has sent a form, or the answer that says why the form changes nothing."""
    if problem := form_problem(request, str(form.get(FORM_MARK, ""))):
        return render(request, "error.html", status=403, text=problem)
    name = _who_may_act(request)
    return name or render(request, "error.html", status=403, text=f"{what} cannot be changed on this page.")


def _who_may_act(request: web.Request) -> str:
    """Return the name of the person who has logged in; empty: nobody has, or the page has no operator's role."""
    person: Person | None = request.get(PERSON)
    return person.name if person is not None and OPERATOR in request.app else ""


async def _incident(request: web.Request, *, problem: str = "", typed: str = "") -> web.Response:
    """Return the page of an incident; `problem` and `typed` are as in `_alert`."""
    number = int(request.match_info["incident"])
    async with present.reading(request.app[DATABASE]) as connection:
        try:
            found = await find_incident(connection, number)
        except OperatorError as error:
            raise web.HTTPNotFound(
                reason="There is no incident with this number; it may have been deleted."
            ) from error
        if found.id != number:
            raise web.HTTPFound(f"/incident/{found.id}")
        found = with_cost(found, request.app[CONFIG])
        events = await story(connection, found)
        is_labelled = await has_labels(connection, found)
    unknown = "" if is_labelled else unknown_sentence(found)
    return render(
        request,
        "incident.html",
        status=409 if problem else 200,
        incident=found,
        standing=standing_sentence(found),
        story=[(event, story_text(event)) for event in events],
        unknown=unknown,
        wanted=labels_wanted(found) if unknown else "",
        commands=commands_of_incident(found),
        changes=changes_of(found) if _who_may_act(request) else (),
        longest_reason=LONGEST_REASON,
        problem=problem,
        typed=typed,
        now=datetime.now(UTC),
    )


async def alerts(request: web.Request) -> web.Response:
    """Show the alerts, open ones first."""
    async with present.reading(request.app[DATABASE]) as connection:
        found = await past.alerts(connection)
    return render(request, "alerts.html", alerts=found, now=datetime.now(UTC), sql=queries.ALERTS.strip())


async def alert_page(request: web.Request) -> web.Response:
    """Show one alert as the person on call needs it."""
    return await _alert(request)


async def act_on_alert(request: web.Request) -> web.Response:
    """Acknowledge an alert, take that back, close it or add a note, in the name of the person who has logged in."""
    form = await request.post()
    person = _acting(request, form, "Alerts")
    if isinstance(person, web.Response):
        return person
    reason = plain_lines(str(form.get("reason", "")))
    what = next((one for one in _BY_PEOPLE if one.value == form.get("action")), None)
    if what is None:
        return render(request, "error.html", status=400, text="This form names no action of an alert.")
    alert_id = int(request.match_info["alert"])
    try:
        async with request.app[OPERATOR].begin() as connection:
            await act(connection, alert_id, what, reason, identity=person)
    except QuantdriftError as error:
        return await _alert(request, problem=str(error), typed=reason)
    return web.Response(status=303, headers={"Location": f"/alert/{alert_id}"})


async def _alert(request: web.Request, *, problem: str = "", typed: str = "") -> web.Response:
    """Return the page of an alert.

    Parameters
    ----------
    problem
        Why the person's action was not done; empty: there was none, or it was.
    typed
        What the person has typed.
    """
    from quantdrift.monitor.explain.ways import commands_of  # noqa: PLC0415 - what it imports is not needed before

    async with present.reading(request.app[DATABASE]) as connection:
        found = await past.alert(connection, int(request.match_info["alert"]))
        if found is None:
            raise web.HTTPNotFound(reason="There is no alert with this number; it may have been deleted.")
        steps = await past.steps(connection, found.id)
        state = await find_alert(connection, found.id)
        actions = await actions_of(connection, found.id)
        where = await where_of(connection, found.slice_id)
        findings = (await findings_of(connection, [found.id])).get(found.id, [])
        version = next(one for one in await present.versions(connection) if one.id == found.version_id)
        last_at = found.resolved_at or version.last_at or datetime.now(UTC)
        end = last_at + timedelta(hours=1)
        begin = found.onset_at - max(timedelta(hours=6), (end - found.onset_at) / 2)
        serving = await _serving(request, connection, version)
        ids, config = (found.version_id, found.slice_id), request.app[CONFIG]
        cap = config.budget(found.model).cap
        period = Period(
            span="", begin=begin, end=end, width=timedelta(hours=1) if end - begin <= 4 * _DAY else _DAY
        )
        first = max(version.first_at, begin) if version.first_at <= found.onset_at else begin
        young = (
            await _young(connection, ids, (first, found.onset_at, last_at), cap)
            if timedelta() <= last_at - first < _DAY
            else None
        )
        period, history = young or (period, await _history(connection, ids, period, found.onset_at, cap))
        begin, end = period.begin, period.end
        measured = await present.in_time(
            connection,
            partial(
                of_alert,
                connection,
                state,
                present.seen(version),
                datetime.now(UTC),
                unit=config.measure(found.model).unit,
                with_people=True,
            ),
            present.PATIENCE_S,
        )
        truth = await past.truth(connection, found.version_id, found.slice_id, found.onset_at, end)
    event = state.event
    ends = state.over()
    if state.mitigation:
        ends = [mitigated_sentence(state.version, state.slice, state.mitigation, state.mitigated_by)]
    marks = [
        charts.Mark(at=found.onset_at, kind="onset", text=ONSET),
        charts.Mark(at=found.opened_at, kind="alert", text="alert"),
    ]
    return render(
        request,
        "alert.html",
        status=409 if problem else 200,
        alert=found,
        serving=serving,
        over=ends,
        text=state.text,
        incident=state.incident,
        explained_by=state.explained_by,
        explains=state.explains,
        may_close=state.is_open or (state.ended == "replaced" and state.closed is None),
        commands=commands_of(config, state, where, [one.kind for one in findings]),
        acknowledged=state.acknowledged,
        has_escalated=state.escalations > 0,
        actions=[one for one in actions if not one.is_finding],
        findings=findings,
        sites=_sites(findings),
        repairs=_repairs(findings),
        may_act=bool(_who_may_act(request)),
        problem=problem,
        typed=typed,
        truth=labelled(truth) if truth else None,
        wanted=_wanted(found.model, found.slice, found.slice_id),
        runbook=config.notify.runbook_url,
        longest_reason=LONGEST_REASON,
        name="all traffic" if found.predicate == "true" else found.slice,
        steps=steps,
        figures=measured or frozen(event, state.written_at),
        budget=event.evidence.budget if event and event.evidence.metric == "flip" else None,
        chart=charts.line(
            _points(history, "flip", period.width, (version.first_at, last_at)),
            begin,
            end,
            title="Changed answers before and since the alert",
            width=period.width,
            alerts=[(found.onset_at, found.resolved_at or end)],
            budget=event.evidence.budget if event and event.evidence.metric == "flip" else None,
            marks=marks,
        ),
        sql=_history_sql(period, cap, found.onset_at, version=found.version_id, slice=found.slice_id),
        event=event,
        trace_url=config.telemetry.trace_url,
        now=datetime.now(UTC),
    )


class NotedRepair(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table that `quantdrift repair` has written to an alert; all texts."""

    repair: str
    changed: str
    all: str
    time: str
    files: str
    gate: str


def _repairs(findings: Sequence[Finding]) -> list[NotedRepair]:
    """Return the table of the newest repair; empty: there is none that can be read."""
    details = next((one.details for one in findings if one.kind is FindingKind.REPAIR), {})
    try:
        return msgspec.convert(details.get("repairs", []), list[NotedRepair])
    except msgspec.ValidationError:
        return []


class NotedSite(msgspec.Struct, frozen=True, kw_only=True):
    """A place of the model that damages the slice, as `quantdrift diagnose` has written it to an alert.

    Parameters
    ----------
    restores, placebo
        Shares of the damage that it restores, and that a random change restores at most.
    used, elsewhere_used
        Shares of its range that the slice and other slices use; None: it is a weight, or there were no others.
    """

    site: str
    restores: float
    placebo: float
    used: float | None = None
    elsewhere_used: float | None = None


def _wanted(model: str, name: str, slice_id: int) -> str:
    """Return the command that draws answers of a slice to label; names that a terminal would not show as they are stay out of it."""
    of = ["--model", model] if plain(model) == model else []
    return shlex.join(
        ["quantdrift", "labels", "wanted", *of, "--slice", name if plain(name) == name else str(slice_id)]
    )


def _sites(findings: Sequence[Finding]) -> list[NotedSite]:
    """Return the sites of the newest cause; empty: there are none that can be read."""
    details = next((one.details for one in findings if one.kind is FindingKind.CAUSE), {})
    try:
        return msgspec.convert(details.get("sites", []), list[NotedSite])
    except msgspec.ValidationError:
        return []


async def compare(request: web.Request) -> web.Response:
    """Show two versions of a model, slice by slice, as `quantdrift compare` does."""
    asked, new_id, old_id = _asked(request, "model"), _number(request, "new"), _number(request, "old")
    comparison, problem = None, ""
    async with present.reading(request.app[DATABASE]) as connection:
        found = await present.versions(connection)
        models = list(dict.fromkeys(one.model for one in found))
        counted = {model: sum(one.model == model for one in found) for model in models}
        best = next((model for model in models if counted[model] > 1), models[0] if models else "")
        model = asked if asked in models else best
        versions = [one for one in found if one.model == model]
        new = next((one for one in versions if one.id == new_id), versions[0] if versions else None)
        rest = [one for one in versions if new is not None and one.id != new.id]
        old = next((one for one in rest if one.id == old_id), rest[0] if rest else None)
        if new and old:
            read = partial(
                compare_versions,
                Reader(connection),
                request.app[CONFIG],
                old=old.version,
                new=new.version,
                model=model,
            )
            try:
                comparison = await present.in_time(
                    connection, partial(read, most=_MOST_COMPARED), _COMPARING_S
                ) or await present.in_time(connection, partial(read, most=0), _COMPARING_S)
            except OperatorError as error:
                problem = str(error)
    return render(
        request,
        "compare.html",
        models=models,
        model=model,
        versions=versions,
        old=old,
        new=new,
        comparison=comparison,
        problem=problem,
        command=shlex.join(
            ["quantdrift", "compare", "--model", model, "--from", old.version, "--to", new.version]
        )
        if new and old
        else "",
    )


async def system(request: web.Request) -> web.Response:
    """Show how far exchanges come, what is lost, and who changed what."""
    now = datetime.now(UTC)
    hour = Window(name=WindowName.PERIOD, begin=now - timedelta(hours=1), end=now)
    config = request.app[CONFIG]
    async with present.reading(request.app[DATABASE]) as connection:
        found = await flow(connection, hour.begin)
    async with present.reading(request.app[DATABASE]) as connection:
        changes = await past.audit(connection, 50)
        replays = await present.replays(connection, hour.begin)
        timed = await present.item_times_quickly(connection, hour.begin, now)
        times = await present.replay_times(connection, hour.begin, now)
        relays = await present.relays(connection, hour.begin)
    return render(
        request,
        "system.html",
        flow=found,
        changes=changes,
        replays=replays,
        times=times,
        has_price=bool(config.cost.device_hour),
        costs=replay_costs(times, config, hour, now),
        relays=relays,
        replays_sql=queries.REPLAYS.strip(),
        timed=timed,
        timed_sql=queries.filled(queries.ITEM_TIMES, begin=hour.begin, end=now),
        changes_sql=queries.CHANGES.strip(),
        now=now,
    )


class Feed:
    """The one reader of the database's state, whose changes all open pages follow."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._state = ""
        self._changed = asyncio.Condition()
        self.n_followers = 0
        self._task: asyncio.Task[None] | None = None

    async def follow(self) -> AsyncGenerator[str, None]:
        """Return the present state and each later one; an empty text where nothing has changed for a while."""
        if self._task is None:
            self._task = asyncio.create_task(self._read())
        self.n_followers += 1
        try:
            known = ""
            while True:
                state = await self._next(known)
                yield state
                known = state or known
        finally:
            self.n_followers -= 1
            if not self.n_followers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _next(self, known: str) -> str:
        """Return the state once it is another one, an empty text if it stays for a while."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ALIVE_S):
                    await self._changed.wait_for(lambda: self._state not in {"", known})
            return self._state if self._state != known else ""

    async def _read(self) -> None:
        while True:
            with contextlib.suppress(QuantdriftError):
                async with self._database.begin() as connection:
                    state = await present.state(connection)
                if state != self._state:
                    async with self._changed:
                        self._state = state
                        self._changed.notify_all()
            await asyncio.sleep(_POLL_S)


async def events(request: web.Request) -> web.StreamResponse:
    """Send a server-sent event whenever something that the pages show has changed."""
    feed = request.app[FEED]
    if feed.n_followers >= _MOST_FOLLOWERS:
        raise web.HTTPServiceUnavailable(reason="Too many pages are open: this one is not updated by itself.")
    answer = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )
    await answer.prepare(request)
    await answer.write(b"retry: 5000\n\n")
    with contextlib.suppress(ConnectionError):
        async with contextlib.aclosing(feed.follow()) as states:
            async for state in states:
                await answer.write(f"event: changed\ndata: {state}\n\n".encode() if state else b": alive\n\n")
    return answer


FEED: Final = web.AppKey("feed", Feed)


async def _history(
    connection: present.Connection,
    ids: tuple[int, int],
    period: Period,
    onset: datetime | None,
    cap: float,
) -> list[past.Sums]:
    """Return a slice over a period, in points of its width, of which the onset divides one."""
    begin, width, end = period.begin, period.width, period.end
    if width < timedelta(hours=1):
        return await past.minutes(connection, *ids, (begin, onset or begin, end), width=width, cap=cap) or []
    history = await past.history(connection, *ids, begin, end, width=width)
    around = next((sums for sums in history if onset and sums.at < onset < sums.at + width), None)
    if around is None or onset is None:
        return history
    times = around.at, onset, around.at + width
    # Of exchanges that were deleted only the roll-up is left, which nothing divides.
    parts = await past.minutes(connection, *ids, times, width=width, cap=cap) or []
    if not parts or sum(part.weight for part in parts) < 0.99 * around.weight:
        return history
    parts = [msgspec.structs.replace(part, at=max(part.at, around.at)) for part in parts]
    return sorted([*(sums for sums in history if sums is not around), *parts], key=lambda sums: sums.at)


def _points(
    history: Sequence[past.Sums], metric: str, width: timedelta, ends: tuple[datetime, datetime | None]
) -> list[charts.Point]:
    """Return the means with their intervals, each in the middle of the part of its time in which there is data.

    Parameters
    ----------
    ends
        Times of the first and last exchange.
    """
    points = []
    for sums, after in zip_longest(history, history[1:]):
        estimate = sums.estimate(metric)
        if estimate is None:
            continue
        until = min(sums.at + width, after.at if after else sums.at + width, ends[1] or sums.at + width)
        begin = ends[0] if sums.at < ends[0] < until else sums.at
        at = begin + max(until - begin, timedelta()) / 2
        points.append(charts.Point(at, estimate.mean, estimate.low, estimate.high))
    return points


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


def _history_sql(period: Period, cap: float, base: datetime | None, **ids: int) -> str:
    """Return the query of a slice over a period, in points of its width."""
    values: dict[str, float | datetime] = {**ids, "begin": period.begin, "end": period.end}
    width = period.width
    if width >= _DAY:
        return queries.filled(queries.DAYS, **values)
    if width < timedelta(hours=1):
        values |= {"cap": cap, "base": base or period.begin, "width": width.total_seconds()}
        return queries.filled(queries.MINUTES, **values)
    return queries.filled(queries.HOURS, width=int(width / timedelta(hours=1)), **values)


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
    history = _history_sql(period, cap, chosen.entry.onset_at, **ids)
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


def _asked(request: web.Request, name: str) -> str:
    return plain(request.query.get(name, "").strip(), 200)


def _number(request: web.Request, name: str, otherwise: int = 0) -> int:
    given = request.query.get(name, "")
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 9 else otherwise


def _link(path: str, query: dict[str, object]) -> str:
    given = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in query.items() if value)
    return f"{path}?{given}" if given else path

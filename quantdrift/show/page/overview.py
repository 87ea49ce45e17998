"""The overview: every model in one line, and the slices of one."""

from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
from aiohttp import web

from quantdrift.core.records import Verdict
from quantdrift.facts import status
from quantdrift.facts.figures import Figure
from quantdrift.facts.status import Serving
from quantdrift.facts.words import first_screen
from quantdrift.report.labels import LabelledSlice, labelled
from quantdrift.show import charts
from quantdrift.show.page.rendering import render
from quantdrift.show.page.request import CONFIG, DATABASE, address, query_number, query_text
from quantdrift.storage.figures import SliceFigures
from quantdrift.storage.incidents import incidents_of
from quantdrift.storage.page import history as past
from quantdrift.storage.page import now as present
from quantdrift.storage.page import queries
from quantdrift.storage.serving import servings

_DAY: Final = timedelta(days=1)
_HISTORY: Final = timedelta(days=90)
_ROWS: Final = 100


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
    chosen, verdict, query = (
        query_text(request, "model"),
        query_text(request, "verdict"),
        query_text(request, "q"),
    )
    verdict = verdict if verdict in status.RANK else ""
    page = max(1, query_number(request, "page", 1))
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
        link=lambda **more: address("/", {"model": chosen, "verdict": verdict, "q": query} | more),
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

"""The overview: every model in one line, and the slices of one."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

import msgspec
from aiohttp import web

from quantdrift.core.records import UNVERIFIED, Verdict
from quantdrift.facts import status
from quantdrift.facts.figures import Figure
from quantdrift.facts.status import Serves, Serving
from quantdrift.facts.words import first_screen
from quantdrift.report.labels import LabelledSlice, labelled
from quantdrift.show import charts
from quantdrift.show.page.rendering import render
from quantdrift.show.page.request import CONFIG, DATABASE, address, query_number, query_text
from quantdrift.storage import queries
from quantdrift.storage.alerts.alerts import AlertFact, alerts_by_id
from quantdrift.storage.exchanges import SingleFacts, single_facts
from quantdrift.storage.figures.figures import SliceFigures
from quantdrift.storage.serving import servings
from quantdrift.storage.slices.verdicts import SliceNow, Unknown, slices_now, unknown_reasons, verdict_changes
from quantdrift.storage.snapshot import Connection, reading, standby_age_s
from quantdrift.storage.versions import VersionNow, traffic_now, versions_now

_DAY: Final = timedelta(days=1)
_HISTORY: Final = timedelta(days=90)
_ROWS: Final = 100


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """A model on the overview: its line, and what stands behind it.

    Parameters
    ----------
    now, verdict
        The worst version of those that serve, and its worst slice's.
    others
        The other versions, and whether they serve.
    worst
        The slices that fire or warn, worst first.
    alerts
        Of these slices, by number.
    serving
        Whether it serves, and is paused.
    """

    now: VersionNow
    others: tuple[tuple[VersionNow, Serving], ...] = ()
    verdict: str
    worst: tuple[SliceNow, ...]
    traffic: dict[int, SliceFigures] = {}
    unknowns: tuple[Unknown, ...]
    alerts: dict[int, AlertFact] = {}
    facts: SingleFacts = SingleFacts()
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
        outcome = self.facts.outcomes.get(slice_id)
        return labelled(outcome) if outcome else None

    @property
    def whole(self) -> SliceFigures | None:
        """The traffic of all slices together."""
        return self.traffic.get(self.now.all_id or 0)

    @property
    def alert(self) -> AlertFact | None:
        """The alert of the worst slice that has one; None: no alert is open."""
        return next((self.alerts[bad.alert_id] for bad in self.worst if bad.alert_id in self.alerts), None)

    @property
    def since(self) -> datetime | None:
        """Since when the verdict stands."""
        return (self.now.firing_since if self.verdict == "firing" else None) or self.now.since

    @property
    def excess(self) -> Figure | None:
        """Changed answers in the slice that has most of them, among those that fire or warn."""
        changed = [self.traffic[bad.slice_id].changed for bad in self.worst if bad.slice_id in self.traffic]
        return max(filter(None, changed), key=lambda figure: figure.value, default=None)

    @property
    def headline(self) -> str:
        """The first line: is it good enough."""
        worst = [bad for bad in self.worst if bad.verdict == self.verdict]
        return first_screen.answer(
            Verdict(self.verdict),
            f"{self.now.model} {self.now.version}",
            [first_screen.name_of(bad.slice, bad.predicate) for bad in worst],
            n_unknown=self.now.n_unknown,
            why=self.now.reason or first_screen.NOTHING_COMPARED,
        )

    @property
    def first_step(self) -> str:
        """What to do first."""
        return first_screen.first_step(Verdict(self.verdict))


async def overview(request: web.Request) -> web.Response:
    """Show every model in one line, and the slices of one."""
    chosen, verdict, query = (query_text(request, name) for name in ("model", "verdict", "q"))
    verdict = verdict if verdict in status.RANK else ""
    page = max(1, query_number(request, "page", 1))
    now = datetime.now(UTC)
    models: list[ModelView] = []
    async with reading(request.app[DATABASE]) as connection:
        serving = await servings(connection, request.app[CONFIG].monitor.max_loss_ratio)
        by_model: dict[str, list[VersionNow]] = {}
        for version in await versions_now(connection):
            by_model.setdefault(version.model, []).append(version)
        for versions in by_model.values():
            states = {
                version.id: serving.get((version.model, version.version), Serving()) for version in versions
            }
            current = status.answering(
                versions, lambda version: version.verdict, serves=partial(_serves, states)
            )
            others = sorted(
                (version for version in versions if version is not current),
                key=lambda version: not _serves(states, version),
            )
            n_bad = current.n_firing + current.n_warning
            worst = await slices_now(connection, current.id, most=n_bad and min(n_bad, 8)) if n_bad else []
            alert_ids = [bad.alert_id for bad in worst if bad.alert_id is not None]
            models.append(
                ModelView(
                    now=current,
                    others=tuple((version, states[version.id]) for version in others),
                    verdict=current.verdict,
                    worst=tuple(bad for bad in worst if bad.verdict in status.ALERTS),
                    unknowns=tuple(await unknown_reasons(connection, current.id))
                    if current.n_unknown
                    else (),
                    alerts=await alerts_by_id(connection, alert_ids),
                    serving=states[current.id],
                )
            )
        models.sort(key=lambda model: (status.RANK[model.verdict], model.now.model))
        shown = next((model for model in models if model.now.model == chosen), next(iter(models), None))
        slices: list[SliceNow] = []
        strips = {}
        end = now
        if shown:
            end = shown.now.last_at or now
            slices = await slices_now(
                connection, shown.now.id, words=query, verdict=verdict, most=_ROWS, first=_ROWS * (page - 1)
            )
            ids = [entry.slice_id for entry in slices]
            changes = await verdict_changes(connection, shown.now.id, ids, end - _HISTORY) if ids else {}
            for entry in slices:
                steps = [
                    (change.at, change.before, change.after) for change in changes.get(entry.slice_id, [])
                ]
                known_from = max(end - _HISTORY, shown.now.first_at)
                strips[entry.slice_id] = charts.strip(steps, entry.verdict, known_from, (end - _HISTORY, end))
        models = [
            await _with_facts(
                connection, model, [entry.slice_id for entry in slices] if model is shown else [], now
            )
            for model in models
        ]
        shown = next((model for model in models if shown and model.now.id == shown.now.id), None)
        standby_s = await standby_age_s(connection)
    return render(
        request,
        "overview.html",
        models=models,
        shown_model=shown,
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
        standby_s=standby_s,
        link=lambda **more: address("/", {"model": chosen, "verdict": verdict, "q": query} | more),
    )


def _serves(states: Mapping[int, Serving], version: VersionNow) -> bool:
    # Exchanges of unverified senders are a version of their own, which no one released; of a version with several references the one
    # that was seen last serves.
    return (
        states[version.id].serves is Serves.SERVING
        and version.replaced_at is None
        and not version.version.endswith(UNVERIFIED)
    )


async def _with_facts(
    connection: Connection, model: ModelView, slice_ids: list[int], now: datetime
) -> ModelView:
    """Return a model with what single exchanges say of its traffic and of some of its slices, whose intervals count people."""
    bad = [slice_now.slice_id for slice_now in model.worst]
    ids = list(dict.fromkeys([*([model.now.all_id] if model.now.all_id else []), *bad, *slice_ids]))
    traffic = await traffic_now(connection, model.now, now, ids)
    facts = await single_facts(connection, model.now, now, ids)
    return msgspec.structs.replace(model, facts=facts, traffic=traffic)

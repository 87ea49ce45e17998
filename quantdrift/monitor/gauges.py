"""The monitor's gauges of slices and noise; other threads read them at any time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Final

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.telemetry import (
    DIVERGENCE,
    EVIDENCE,
    LEADER,
    MITIGATED,
    NOISE,
    NOISY,
    OUTBOX,
    OUTBOX_AGE,
    PROGRESS_AGE,
    SERVING,
    SHARD_HELD,
    SLICES_LEFT_OUT,
    UNFOLDED,
    UNFOLDED_AGE,
    VERDICT,
    VERSION_PAUSED,
    Labels,
    Telemetry,
)
from quantdrift.facts.incidents import Mitigation
from quantdrift.facts.status import ALERTS, LEVEL, SERVES, Serving
from quantdrift.storage.fold_rows import Catalog, FloorRow, ShardState, VerdictRow

_MITIGATIONS: Final[Mapping[Mitigation | None, float]] = MappingProxyType(
    {Mitigation.ROUTED: 1.0, Mitigation.REPORTED: 2.0}
)
Readings = tuple[tuple[float, Labels], ...]


class _Shown(msgspec.Struct, frozen=True, kw_only=True):
    verdicts: Readings = ()
    mitigated: Readings = ()
    serving: Readings = ()
    paused: Readings = ()
    evidence: Readings = ()
    divergence: Readings = ()
    noise: Readings = ()
    noisy: Readings = ()
    left_out: int | None = None
    last_us: dict[str, int] = {}


class SliceGauges:
    """The current readings. `show` replaces all of them at once, so a reader on another thread never sees a mixture.

    Parameters
    ----------
    clock
        For the age of progress.
    max_slices
        Largest number of exported slices: alerting ones first, then by evidence.
    hangs
        Whether this process makes no progress. Its readings are old then, and another monitor may lead, so it shows none:
        Prometheus takes the largest verdict of all monitors, and an old one would keep an alert open.
    """

    def __init__(self, clock: Clock, max_slices: int, hangs: Callable[[], bool] = lambda: False) -> None:
        self._clock = clock
        self._max_slices = max_slices
        self._hangs = hangs
        self._shown = _Shown()
        self.leads = False
        self.n_waiting = 0
        self.oldest_waiting: datetime | None = None
        self.shards: Sequence[ShardState] = ()

    def register(self, telemetry: Telemetry) -> None:
        """Register the gauges with `telemetry`."""
        telemetry.observe(VERDICT, lambda: self._readings().verdicts)
        telemetry.observe(MITIGATED, lambda: self._readings().mitigated)
        telemetry.observe(SERVING, lambda: self._readings().serving)
        telemetry.observe(VERSION_PAUSED, lambda: self._readings().paused)
        telemetry.observe(EVIDENCE, lambda: self._readings().evidence)
        telemetry.observe(DIVERGENCE, lambda: self._readings().divergence)
        telemetry.observe(NOISE, lambda: self._readings().noise)
        telemetry.observe(NOISY, lambda: self._readings().noisy)
        telemetry.observe(SLICES_LEFT_OUT, self._left_out)
        telemetry.observe(OUTBOX, lambda: self._leading(self.n_waiting))
        telemetry.observe(OUTBOX_AGE, lambda: self._leading(self._age_of(self.oldest_waiting)))
        telemetry.observe(UNFOLDED, lambda: self._by_shard(lambda shard: shard.n_unfolded))
        telemetry.observe(UNFOLDED_AGE, lambda: self._by_shard(lambda shard: self._age_of(shard.oldest)))
        telemetry.observe(SHARD_HELD, lambda: self._by_shard(lambda shard: float(bool(shard.holder))))
        telemetry.observe(LEADER, lambda: [(float(self.leads and not self._hangs()), {})])
        telemetry.observe(PROGRESS_AGE, self._ages)

    def show(
        self,
        verdicts: Iterable[VerdictRow],
        catalog: Catalog,
        floors: Iterable[FloorRow] = (),
        mitigated: Mapping[tuple[int, int], Mitigation] = MappingProxyType({}),
        servings: Mapping[tuple[str, str], Serving] = MappingProxyType({}),
    ) -> None:
        """Replace the readings by the leader's verdicts and noise floors, by what is mitigated, by version and slice, and by which serve."""
        rows = list(verdicts)
        rows.sort(key=lambda row: (-max(LEVEL[row.verdict], 1), -row.evidence, row.slice_id))
        # A version compared with two references is one series: it shows the worse of the two.
        by_labels: dict[tuple[str, ...], VerdictRow] = {}
        for row in rows:
            by_labels.setdefault(tuple(_labels(row, catalog).values()), row)
        shown = list(by_labels.values())
        labelled = [(row, _labels(row, catalog)) for row in shown[: self._max_slices]]
        last_us: dict[str, int] = {}
        for row in rows:
            if row.n_groups:
                model = catalog.versions[row.model_version_id].model
                last_us[model] = max(last_us.get(model, 0), row.last_us)
        shown_versions = {row.model_version_id for row in rows}
        noise = [(row, _of_floor(row, catalog)) for row in floors if row.model_version_id in shown_versions]
        of_versions = sorted(
            {(labels["model"], labels["version"]) for labels in (_labels(row, catalog) for row in rows)}
            & servings.keys()
        )
        beside = [(servings[key], {"model": key[0], "version": key[1]}) for key in of_versions]
        self._shown = _Shown(
            serving=tuple(
                (
                    SERVES[each.serves],
                    {**labels, "replaced_by": each.replaced_by} if each.replaced_by else labels,
                )
                for each, labels in beside
                if each.serves is not None
            ),
            paused=tuple((float(bool(each.paused)), labels) for each, labels in beside),
            noise=tuple((row.high / row.budget, labels) for row, labels in noise),
            noisy=tuple((float(row.exceeds), labels) for row, labels in noise),
            verdicts=tuple((LEVEL[row.verdict], labels) for row, labels in labelled),
            mitigated=tuple(
                (_MITIGATIONS.get(mitigated.get((row.model_version_id, row.slice_id)), 0.0), labels)
                for row, labels in labelled
                if row.verdict in ALERTS
            ),
            evidence=tuple((row.evidence / row.threshold, labels) for row, labels in labelled),
            divergence=tuple(
                (estimate["mean"], {**labels, "metric": metric})
                for row, labels in labelled
                for metric, estimate in row.estimate.items()
                if "mean" in estimate
            ),
            left_out=len(shown) - len(labelled),
            last_us=last_us,
        )

    def clear(self) -> None:
        """Show nothing: a standby has no verdicts."""
        self._shown = _Shown()

    def _age_of(self, at: datetime | None) -> float:
        return 0.0 if at is None else max(0.0, (self._clock.now() - at).total_seconds())

    def _readings(self) -> _Shown:
        return _Shown() if self._hangs() else self._shown

    def _leading(self, value: float) -> Readings:
        return ((value, {}),) if self.leads and not self._hangs() else ()

    def _left_out(self) -> Readings:
        left_out = self._readings().left_out
        return () if left_out is None else ((left_out, {}),)

    def _by_shard(self, reading: Callable[[ShardState], float]) -> Readings:
        if not self.leads or self._hangs():
            return ()
        return tuple((reading(shard), {"shard": str(shard.number)}) for shard in self.shards)

    def _ages(self) -> Iterator[tuple[float, Labels]]:
        now_us = self._clock.now().timestamp() * 1e6
        for model, last_us in self._readings().last_us.items():
            yield max(0.0, (now_us - last_us) / 1e6), {"model": model}


def _labels(row: VerdictRow, catalog: Catalog) -> Labels:
    version = catalog.versions[row.model_version_id]
    return {
        "model": version.model,
        "version": version.candidate_version,
        "slice": catalog.slices[row.slice_id].name,
    }


def _of_floor(row: FloorRow, catalog: Catalog) -> Labels:
    version = catalog.versions[row.model_version_id]
    return {
        "model": version.model,
        "version": version.candidate_version,
        "side": row.side.value,
        "metric": row.metric,
    }

"""The items of a window as arrays, and the comparison of two windows around an onset. Pure."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np

from quantdrift.core.records import Metric
from quantdrift.core.signals import signal_of
from quantdrift.drift.detectors.protocol import BUDGET, GROWTH, TAIL
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray
from quantdrift.drift.explain.damage import Damage, DamageWindow, damage
from quantdrift.drift.explain.mix import LEAST, MixItems, MixSplit, split
from quantdrift.facts import arrays
from quantdrift.facts.arrays import cluster_sums
from quantdrift.facts.estimate import ClusterSums
from quantdrift.facts.events import AlertEvidence
from quantdrift.storage.alerts.evidence import EvidenceItem
from quantdrift.storage.fold_rows import Catalog, TransitionRow, VersionRow, from_us

MOST_CELLS = 64  # of the partition of all traffic; the rarest share one cell
_LEAST_KNOWN = 20  # items without a sidecar or an engine, after which it counts as new
_NEW_SHARE = 0.05
_AROUND_US = 3_600_000_000  # an onset is an estimate: a change up to an hour earlier may be the cause
_ENGINE = {
    "runtime": "engine",
    "version": "engine version",
    "provider": "provider",
    "device": "device",
    "driver": "driver",
    "copy": "copy of the candidate",
    "copy_runtime": "engine of that copy",
}


class ComparedValue(msgspec.Struct, frozen=True, kw_only=True):
    """The value that is compared of an item: that of the detector that decided.

    Parameters
    ----------
    metric, kind
        Metric and kind of detector.
    cap
        Values above it count as this much, in the metric's unit: one infinite value must not outweigh all others.
    above
        Compare whether the value is above this level, instead of the value: for tails, whose mean may never move, and for
        latencies, whose level is the budget or follows from the baseline.
    """

    metric: Metric
    kind: str
    cap: float
    above: float | None = None

    def of(self, item: EvidenceItem) -> float:
        """Return the value of an item; nan where it has none."""
        signal = signal_of(self.metric)
        value = getattr(item, signal.column) if signal.column else item.signals.get(self.metric.value)
        if value is None or math.isnan(value):
            return math.nan
        return min(value, self.cap) if self.above is None else float(value > self.above)


def measure_of(evidence: AlertEvidence, cap: float) -> ComparedValue:
    """Return the measure that decided an alert; for a tail without a level, the mean."""
    metric, kind = evidence.metric, evidence.detector
    above = evidence.tail_level if kind == TAIL.kind else evidence.latency_budget_s
    return ComparedValue(
        metric=metric, kind=kind, cap=1.0 if signal_of(metric).is_share else cap, above=above
    )


def level_of(evidence: AlertEvidence, tolerance: float) -> float:
    """Return the level that the measure of an alert exceeds: its budget, or its baseline with the tolerance."""
    before = evidence.tail_before if evidence.detector == TAIL.kind else evidence.before
    if evidence.detector in {BUDGET.kind, GROWTH.kind} or before is None:
        return evidence.budget
    return (1.0 + tolerance) * before


class WindowSample:
    """The items of a slice in one window.

    Parameters
    ----------
    items
        In the order in which they were read.

    Attributes
    ----------
    weight
        (n,) 1 / pi, shared by the items of an exchange.
    cluster
        (n,) number of the session or exchange.
    """

    def __init__(self, items: Sequence[EvidenceItem]) -> None:
        self.items = items
        parts = Counter(item.exchange for item in items)
        numbers: dict[str, int] = {}
        self.weight: FloatArray = np.array([1.0 / (item.pi * parts[item.exchange]) for item in items])
        self.cluster: IntArray = np.array(
            [numbers.setdefault(item.group, len(numbers)) for item in items], dtype=np.int64
        )
        self.n_exchanges = len(parts)

    @property
    def has_margins(self) -> bool:
        """Whether any item has a margin: only classification has."""
        return any(item.margin is not None for item in self.items)

    def not_finite(self) -> float:
        """Return the share of the items, by weight, whose output was not a number, infinite or empty; 0 of none."""
        spoilt = np.array([item.not_finite for item in self.items], dtype=bool)
        return float(self.weight[spoilt].sum() / self.weight.sum()) if self.items else 0.0

    def flips(self) -> ClusterSums:
        """Return the sums of changed decisions over people or exchanges, of the items that have a decision."""
        values = np.array([np.nan if item.flip is None else float(item.flip) for item in self.items])
        numbers: dict[str, int] = {}
        exchange = np.array(
            [numbers.setdefault(item.exchange, len(numbers)) for item in self.items], dtype=np.int64
        )
        finite = np.isfinite(values)
        return cluster_sums(
            arrays.Sample(values[finite], self.weight[finite], self.cluster[finite], exchange[finite])
        )

    def share_slow(self, limit_s: float, *, without: int) -> tuple[float | None, int]:
        """Return the share of the exchanges outside a slice, by weight, that took longer than `limit_s`, and their number.

        None where no exchange outside has a time.
        """
        took: dict[str, tuple[float, float]] = {}
        for item in self.items:
            if item.latency_s is not None and without not in item.slice_ids:
                took[item.exchange] = item.latency_s, 1.0 / item.pi
        total = sum(weight for _, weight in took.values())
        slow = sum(weight for latency_s, weight in took.values() if latency_s > limit_s)
        return (slow / total if total else None), len(took)

    def mean_items(self) -> float | None:
        """Return the mean number of items of an exchange, by weight; None without exchanges."""
        sizes = {item.exchange: (item.n_items, 1.0 / item.pi) for item in self.items}
        total = sum(weight for _, weight in sizes.values())
        return sum(n * weight for n, weight in sizes.values()) / total if total else None

    def values(self, measure: ComparedValue) -> FloatArray:
        """Return the value of each item, (n,); nan where it has none."""
        return np.array([measure.of(item) for item in self.items], dtype=np.float64)

    def inside(self, slice_id: int) -> BoolArray:
        """Return whether each item lies in a slice, (n,)."""
        return np.array([slice_id in item.slice_ids for item in self.items], dtype=bool)

    def sizes(self) -> dict[int, float]:
        """Return the weight of each slice that occurs, by slice id."""
        sizes: dict[int, float] = {}
        for item, weight in zip(self.items, self.weight, strict=True):
            for slice_id in item.slice_ids:
                sizes[slice_id] = sizes.get(slice_id, 0.0) + float(weight)
        return sizes

    def window(self, measure: ComparedValue) -> DamageWindow:
        """Return the items as the input of the split by margin."""
        margin = [np.nan if item.margin is None else item.margin for item in self.items]
        return DamageWindow(
            x=self.values(measure),
            margin=np.array(margin, dtype=np.float64),
            weight=self.weight,
            cluster=self.cluster,
        )


def damage_between(before: WindowSample, after: WindowSample, measure: ComparedValue) -> Damage | None:
    """Return the split of a slice's move by margin, or None where a window has no item with margin and value."""
    return damage(before.window(measure), after.window(measure))


def mix_between(before: WindowSample, after: WindowSample, measure: ComparedValue) -> MixSplit | None:
    """Return the split of the move of all traffic: within its slices, by their mix, or by new slices.

    Slices overlap, so the cells of the partition are the sets of slices that an item lies in. Rare sets share one cell.
    """
    earlier, now = (Counter(item.slice_ids for item in window.items) for window in (before, after))
    often = sorted(
        cell
        for cell in earlier | now
        if earlier[cell] >= LEAST or now[cell] >= max(LEAST, _NEW_SHARE * len(after.items))
    )
    often.sort(key=lambda cell: -(earlier[cell] + now[cell]))
    cells = {cell: number for number, cell in enumerate(often[: MOST_CELLS - 1], start=1)}
    samples = []
    for window in (before, after):
        x = window.values(measure)
        finite = np.isfinite(x)
        cell = np.array([cells.get(item.slice_ids, 0) for item in window.items], dtype=np.int64)
        samples.append(
            MixItems(
                x=x[finite], weight=window.weight[finite], cell=cell[finite], cluster=window.cluster[finite]
            )
        )
    return split(samples[0], samples[1], len(cells) + 1)


class _Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A sidecar or engine that is new around the onset: when first seen, its share since, and those seen before it."""

    at_us: int
    share: float
    before: tuple[str, ...]

    @property
    def since(self) -> str:
        return f"first seen {from_us(self.at_us):%Y-%m-%d %H:%M} UTC"


def new_sidecars(before: WindowSample, after: WindowSample, onset_us: int) -> list[str]:
    """Return texts on the sidecars that are new around the onset and have a share of the slice."""
    sightings = _new(before, after, onset_us, lambda item: item.source)
    return [
        f"sidecar {source}, {sighting.since}, {100 * sighting.share:.0f} % of the slice since"
        for source, sighting in sightings.items()
        if sighting.share >= _NEW_SHARE
    ]


def new_engines(
    before: WindowSample, after: WindowSample, onset_us: int, provenance: Mapping[int, Mapping[str, str]]
) -> list[str]:
    """Return texts on the replay's runtimes, providers and devices that are new around the onset.

    Parameters
    ----------
    provenance
        Per batch, the engine's properties by name.
    """
    texts = []
    for name, word in _ENGINE.items():
        of_batch = {batch: engine.get(name, "") for batch, engine in provenance.items()}
        sightings = _new(before, after, onset_us, partial(_engine_of, of_batch))
        texts += [
            f"{word} of the replay: {value}, {sighting.since} (before: {', '.join(sighting.before)})"
            for value, sighting in sightings.items()
        ]
    return texts


def _engine_of(of_batch: Mapping[int, str], item: EvidenceItem) -> str:
    return of_batch.get(item.batch_id, "")


def _new(
    before: WindowSample, after: WindowSample, onset_us: int, what: Callable[[EvidenceItem], str]
) -> dict[str, _Sighting]:
    """Return the values first seen up to an hour before the onset or later, after enough items without them."""
    weight: dict[str, float] = {}
    for item, item_weight in zip(after.items, after.weight, strict=True):
        weight[what(item)] = weight.get(what(item), 0.0) + float(item_weight)
    total = sum(weight.values()) or 1.0
    first: dict[str, tuple[int, int, tuple[str, ...]]] = {}
    # They were read newest first.
    for number, item in enumerate(reversed([*after.items, *before.items])):
        if (value := what(item)) and value not in first:
            first[value] = (item.captured_us, number, tuple(sorted(first)))
    return {
        value: _Sighting(at_us=at_us, share=weight.get(value, 0.0) / total, before=earlier)
        for value, (at_us, number, earlier) in first.items()
        if earlier and number >= _LEAST_KNOWN and at_us >= onset_us - _AROUND_US
    }


def versions_around(catalog: Catalog, row: TransitionRow, stored_us: int | None) -> list[VersionRow]:
    """Return the candidate versions of the model that are new around the onset, oldest first.

    A model's first version is never among them: there is no version before it that it could differ from.

    Parameters
    ----------
    stored_us
        When the batch of the change was stored: later versions were not known then.
    """
    model = catalog.versions[row.model_version_id].model
    first = min(
        (candidate for candidate in catalog.versions.values() if candidate.model == model),
        key=lambda candidate: (candidate.first_seen_us, candidate.id),
    )
    until_us = row.at_us if stored_us is None else stored_us
    return [
        version
        for version in sorted(
            catalog.versions.values(), key=lambda candidate: (candidate.first_seen_us, candidate.id)
        )
        if version.model == model
        and version is not first
        and row.onset_us - _AROUND_US <= version.first_seen_us <= until_us
    ]


def new_versions(versions: Sequence[VersionRow], own_id: int) -> list[str]:
    """Return texts on candidate versions that are new around the onset; `own_id` is the alert's version."""
    return [
        f"candidate version {version.candidate_version}{' (this one)' if version.id == own_id else ''}, "
        f"first seen {from_us(version.first_seen_us):%Y-%m-%d %H:%M} UTC"
        for version in versions
    ]

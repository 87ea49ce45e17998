"""The back-test: stored history folded again under another configuration, and the alerts that it would have raised."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from quantdrift.core.config.schema import Config
from quantdrift.core.records import Metric
from quantdrift.core.signals import WATCHED, signal_of
from quantdrift.drift.delay import divergence
from quantdrift.monitor.fold.models import ModelFolds
from quantdrift.monitor.fold.slice_state import Key
from quantdrift.monitor.planning.alerts import Alert, Pairing, alerts, pair
from quantdrift.storage.fold.history import HistoryExtent, StoredTransition
from quantdrift.storage.fold_rows import BatchRows, Catalog, Position, RollupRow, Snapshot

ALPHA = 0.05  # over all slices and metrics together


class HourSums(msgspec.Struct, kw_only=True):
    """Sums over the exchanges of a slice in an hour of capture; names as in `rollup_hour`."""

    weight: float = 0.0
    weight_sq: float = 0.0
    flip: float = 0.0
    flip_weight: float = 0.0
    divergence: float = 0.0
    divergence_weight: float = 0.0

    def add(self, row: "RollupRow | HourSums") -> None:
        """Add to each sum, in place."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(row, name))

    def mean(self, metric: Metric) -> float | None:
        """Return the weighted mean of flips, or of the capped divergence; None where nothing has that metric."""
        column = signal_of(metric).column
        weight = float(getattr(self, f"{column}_weight"))
        return float(getattr(self, column)) / weight if weight > 0 else None


class Breach(msgspec.Struct, frozen=True, kw_only=True):
    """A slice whose mean over the whole period is above its budget beyond chance, and that never alerted.

    If an allowance for noise is added to the budget, the mean is above both together.

    Parameters
    ----------
    key, metric
        Candidate version and slice; flip or divergence.
    mean, low, budget
        Weighted mean, its lower confidence bound, and the accepted mean, in the metric's own unit.
    n_effective
        Kish's effective number of exchanges.
    recorded
        Whether the database has an alert of it.
    """

    key: Key
    metric: Metric
    mean: float
    low: float
    budget: float
    n_effective: float
    recorded: bool


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a back-test.

    Parameters
    ----------
    pairings
        Every alert of either side.
    breaches
        Slices above their budget that the policy under test did not alert on.
    identical
        Whether it made exactly the recorded changes of verdict.
    n_items
        Comparisons folded.
    n_missing
        Comparisons that were stored with these batches and have been deleted since.
    """

    pairings: tuple[Pairing, ...]
    breaches: tuple[Breach, ...]
    identical: bool
    n_items: int
    n_missing: int


class Backtest:
    """A fold of stored batches under another configuration, from an empty state.

    Parameters
    ----------
    config
        The configuration under test.
    catalog
        Versions, slices and policies in the database.
    extent
        The batches that will be folded.
    spans
        From when until when each model shares the allowance: `History.spans`.

    Attributes
    ----------
    hours
        Per candidate version and slice the sums of each hour, by its begin in microseconds since 1970.
    """

    def __init__(
        self,
        config: Config,
        catalog: Catalog,
        extent: HistoryExtent,
        spans: Mapping[str, list[tuple[int, int]]] | None = None,
    ) -> None:
        self.hours: dict[Key, dict[int, HourSums]] = {}
        self._config = config
        self._catalog = catalog
        self._extent = extent
        self._folds = ModelFolds(config)
        nothing = Snapshot(position=Position(fold_seq=extent.first - 1))
        for name in sorted({version.model for version in catalog.versions.values()}):
            self._folds.begin(name, nothing)
        self._folds.learn(catalog, spans or {})
        self._changes: list[StoredTransition] = []
        self._n_items = 0

    def fold(self, batches: Sequence[BatchRows]) -> None:
        """Fold the next batches."""
        for rows in batches:
            self._n_items += len(rows.comparisons)
            self._folds.batch(rows)
        outcomes = [outcome for _, outcome in self._folds.take()]
        changes = [
            msgspec.convert(row, StoredTransition, from_attributes=True)
            for outcome in outcomes
            for row in outcome.transitions
        ]
        self._changes += sorted(changes, key=lambda change: change.fold_seq)
        for outcome in outcomes:
            for row in outcome.rollups:
                hours = self.hours.setdefault((row.model_version_id, row.slice_id), {})
                hours.setdefault(row.hour_us, HourSums()).add(row)

    def findings(self, stored: Sequence[StoredTransition], model: str = "") -> Findings:
        """Compare with the recorded changes of verdict.

        Parameters
        ----------
        stored
            The recorded changes of verdict.
        model
            Compare this model alone; empty: all.
        """
        keys = {id_ for id_, version in self._catalog.versions.items() if model in {"", version.model}}
        before = [transition for transition in stored if transition.model_version_id in keys]
        after = [transition for transition in self._changes if transition.model_version_id in keys]
        recorded, tested = alerts(before), alerts(after)
        return Findings(
            pairings=tuple(pair(recorded, tested)),
            breaches=tuple(self._breaches(keys, recorded, tested)),
            identical=_essence(before, self._extent.first) == _essence(after, self._extent.first),
            n_items=self._n_items,
            n_missing=max(0, self._extent.n_items - self._n_items),
        )

    def _breaches(
        self, versions: set[int], recorded: Sequence[Alert], tested: Sequence[Alert]
    ) -> list[Breach]:
        alerted = {alert.key for alert in tested}
        totals: dict[Key, HourSums] = {}
        for key, hours in sorted(self.hours.items()):
            if key[0] in versions:
                total = totals[key] = HourSums()
                for sums in hours.values():
                    total.add(sums)
        breaches = []
        for key, total in totals.items():
            for metric in WATCHED:
                breach = self._breach(key, metric, total, ALPHA / (2 * len(totals)))
                if breach and key not in alerted:
                    in_record = any(alert.key == key for alert in recorded)
                    breaches.append(msgspec.structs.replace(breach, recorded=in_record))
        return breaches

    def _breach(self, key: Key, metric: Metric, total: HourSums, delta: float) -> Breach | None:
        mean = total.mean(metric)
        if mean is None:
            return None
        budget, cap = accepted(self._config, self._catalog.versions[key[0]].model, metric)
        n = total.weight**2 / total.weight_sq
        low = cap * lower_bound(mean / cap, n, delta)
        if low <= budget + self._folds.noise_allowance(key, metric):
            return None
        return Breach(
            key=key, metric=metric, mean=mean, low=low, budget=budget, n_effective=n, recorded=False
        )


def accepted(config: Config, model: str, metric: Metric) -> tuple[float, float]:
    """Return the accepted mean of a metric and the cap of its single values, in its own unit."""
    budget, signal = config.budget(model), signal_of(metric)
    return signal.budget(budget), signal.cap(budget)


def lower_bound(mean: float, n: float, delta: float) -> float:
    """Return a lower confidence bound, at level 1 - delta, of the mean of n independent values in [0, 1].

    Chernoff's bound, `n KL(mean || low) = log(1 / delta)`: it holds for any values in [0, 1], and is wide for
    those that vary less than flips (Hoeffding, JASA 58, 1963, theorem 1). With n an effective number it is
    approximate.
    """
    low, high = 0.0, mean
    if mean <= 0:
        return 0.0
    wanted = math.log(1 / delta)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if n * divergence(mean, middle) > wanted else (low, middle)
    return low


def _essence(transitions: Sequence[StoredTransition], first: int) -> list[tuple[object, ...]]:
    # Of two models at the same batch neither is the first.
    in_order = sorted(transitions, key=lambda one: (one.fold_seq, one.model_version_id, one.slice_id))
    return [
        (
            transition.fold_seq,
            transition.model_version_id,
            transition.slice_id,
            transition.from_verdict,
            transition.to_verdict,
            transition.at_us,
        )
        for transition in in_order
        if transition.fold_seq >= first
    ]

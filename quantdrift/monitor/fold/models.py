"""The folds of models, each by itself: what comes of a model does not depend on what is folded beside it.

Each model has a fold of its own, with its own clock. It is given the batches of its own comparisons and those of no model, which have the
tallies of sidecars; all of them come in one order, which the database keeps. So a model's result is the same bit for bit in any process
and in any shard.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from quantdrift.core.config.schema import Config
from quantdrift.core.records import Metric
from quantdrift.drift.evidence.clock import WatchedModels
from quantdrift.monitor.fold.fold import Fold
from quantdrift.monitor.fold.slice_state import Key
from quantdrift.storage.fold_rows import (
    BatchRows,
    Catalog,
    Circumstances,
    FloorRow,
    FoldResult,
    Position,
    Snapshot,
    VerdictRow,
)

_NOTHING: Final = Catalog(versions={}, slices={}, policies={})


class ModelFolds:
    """A fold for each of some models. After an error it must not be used any more, as a `Fold`.

    Parameters
    ----------
    config
        Budgets and limits.

    Attributes
    ----------
    catalog
        Versions and slices of these models, and policies.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._folds: dict[str, Fold] = {}
        self._stored: dict[str, int] = {}
        self._parts_of_catalog: dict[str, Catalog] = {}
        self.catalog = _NOTHING

    def keep(self, positions: Mapping[str, Position]) -> list[str]:
        """Forget the folds of models that are stored elsewhere than they were; return the models that have to begin.

        A fold that another process has taken further, or that is not this process's concern any more, begins from what is stored.
        """
        self._folds = {
            model: fold
            for model, fold in self._folds.items()
            if model in positions and self._stored[model] == positions[model].fold_seq
        }
        return [model for model in positions if model not in self._folds]

    def begin(self, model: str, snapshot: Snapshot) -> None:
        """Begin or continue with a model from what is stored."""
        self._folds[model] = Fold(self._config, snapshot)
        self._stored[model] = snapshot.position.fold_seq

    def stored(self) -> None:
        """Note that all that `take` returned is stored."""
        self._stored = {model: fold.position.fold_seq for model, fold in self._folds.items()}

    @property
    def models(self) -> list[str]:
        """The models that have begun."""
        return list(self._folds)

    @property
    def after(self) -> int:
        """The last batch that all of them have folded."""
        return min(fold.position.fold_seq for fold in self._folds.values())

    @property
    def has_news(self) -> bool:
        """Whether `take` would return what is sent: an alert that opens, changes or ends, or a change of noise."""
        return any(fold.has_news for fold in self._folds.values())

    @property
    def n_sums(self) -> int:
        """How many sums of a slice and hour `take` would return."""
        return sum(fold.state.rollup.n_rows for fold in self._folds.values())

    def policies(self) -> set[int]:
        """Return the policies that any of them needs."""
        return set[int]().union(*(fold.policies() for fold in self._folds.values()))

    def learn(self, catalog: Catalog, spans: Mapping[str, list[tuple[int, int]]]) -> None:
        """Take over versions, slices and policies, and when each model of the fleet shares the allowance."""
        if catalog is not self.catalog or self._parts_of_catalog.keys() != self._folds.keys():
            self._parts_of_catalog = _by_model(catalog, self._folds)
        self.catalog = catalog
        watched = WatchedModels(span for of_model in spans.values() for span in of_model)
        for model, own in self._parts_of_catalog.items():
            fold = self._folds[model]
            # What came before there were spans, and what names no model, is of a model that is alone.
            fold.state.watched = watched.of(spans[model]) if model in spans else WatchedModels()
            fold.learn(own)

    def note(self, circumstances: Circumstances) -> None:
        """Take over what is so now."""
        for fold in self._folds.values():
            fold.note(circumstances)

    def folds(self) -> list[Fold]:
        """Return the folds themselves."""
        return list(self._folds.values())

    def batch(self, rows: BatchRows) -> None:
        """Give a batch to the models that it concerns and that have not folded it yet."""
        of_model = self._parts(rows)
        for model, fold in self._folds.items():
            if fold.position.fold_seq >= rows.fold_seq:
                continue
            fold.skip(rows.fold_seq - 1)
            own = of_model(model)
            if own is None:
                fold.skip(rows.fold_seq)
            else:
                fold.batch(own)

    def skip(self, fold_seq: int) -> None:
        """Note that all is folded up to a batch."""
        for fold in self._folds.values():
            fold.skip(fold_seq)

    def take(self) -> Iterator[tuple[str, FoldResult]]:
        """Yield by model what is to be written since the last call, and forget it."""
        for model, fold in self._folds.items():
            yield model, fold.take()

    def current(self) -> list[VerdictRow]:
        """Return the verdicts that gauges show."""
        return [row for fold in self._folds.values() for row in fold.current()]

    def floors(self) -> list[FloorRow]:
        """Return what is known of the noise of every version."""
        return [row for fold in self._folds.values() for row in fold.floors()]

    def noise_allowance(self, key: Key, metric: Metric) -> float:
        """Return the allowance for noise in the budget of a slice, in the metric's own unit."""
        return self._folds[self.catalog.versions[key[0]].model].noise_allowance(key, metric)

    def _parts(self, rows: BatchRows) -> "_Parts":
        return _Parts(rows, self.catalog)


class _Parts:
    """A batch by model: what a model is given of it; None: it does not concern the model."""

    def __init__(self, rows: BatchRows, catalog: Catalog) -> None:
        self._versions, self._slices = catalog.versions, catalog.slices
        # Workers of the release before store noise of any model with a batch. Who folds the other model does not read it.
        if rows.model and any(not self._is_of(row.model_version_id, rows.model) for row in rows.noise):
            own = tuple(row for row in rows.noise if self._is_of(row.model_version_id, rows.model))
            rows = msgspec.structs.replace(rows, noise=own)
        self._rows = rows
        # Nearly all batches have one model, and no decision.
        self._is_whole = bool(rows.model) and not (rows.decisions or rows.slices or rows.closes)
        self._has_counts = bool(rows.tallies or rows.expiries) or not (rows.compares or rows.model)

    def __call__(self, model: str) -> BatchRows | None:
        rows = self._rows
        if self._is_whole:
            return rows if rows.model == model else None
        own = rows.model == model
        part = msgspec.structs.replace(
            rows,
            comparisons=tuple(row for row in rows.comparisons if self._is_of(row.model_version_id, model)),
            decisions=tuple(row for row in rows.decisions if self._is_of(row.model_version_id, model)),
            slices=tuple(
                row
                for row in rows.slices
                if row.slice_id in self._slices and self._slices[row.slice_id].model == model
            ),
            closes=tuple(row for row in rows.closes if self._is_of(row.model_version_id, model)),
            unreferenced=tuple(number for number in rows.unreferenced if self._is_of(number, model)),
            noise=tuple(row for row in rows.noise if self._is_of(row.model_version_id, model)),
        )
        compares = rows.compares and (own or bool(part.comparisons or part.unreferenced or part.noise))
        decided = part.decisions or part.slices or part.closes
        if not (own or compares or decided or self._has_counts):
            return None
        return msgspec.structs.replace(part, compares=compares)

    def _is_of(self, version_id: int, model: str) -> bool:
        version = self._versions.get(version_id)
        return version is not None and version.model == model


def _by_model(catalog: Catalog, models: Iterable[str]) -> dict[str, Catalog]:
    """Return the part of a catalog for each model, with all policies."""
    parts = {model: Catalog(versions={}, slices={}, policies=catalog.policies) for model in models}
    for version in catalog.versions.values():
        if version.model in parts:
            parts[version.model].versions[version.id] = version
    for row in catalog.slices.values():
        if row.model in parts:
            parts[row.model].slices[row.id] = row
    for key, attribute in catalog.undeclared_sessions.items():
        if (of := catalog.versions.get(key[0])) is not None and of.model in parts:
            parts[of.model].undeclared_sessions[key] = attribute
    return parts

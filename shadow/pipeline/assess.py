"""The assessment of a batch: from classified messages to the rows to store, with divergences, features and slices per item."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from zoneinfo import ZoneInfo

import msgspec
import numpy as np

from quantdrift.core.clock import SystemClock
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import QuarantineError
from quantdrift.core.records import Exchange, Metric
from quantdrift.core.signals import signal_of
from quantdrift.core.slices import SliceAssigner, SliceKey, time_attributes
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.runtimes.protocol import replayed_by
from quantdrift.models.tensors.features import describing_features, features_of
from quantdrift.shadow.pipeline.classify import Case, quarantine
from quantdrift.shadow.replay.config_warnings import ConfigWarnings
from quantdrift.shadow.replay.exchange import Answer, PreparedExchange
from quantdrift.shadow.replay.noise import NoiseReplays
from quantdrift.shadow.replay.noise_items import versions_of
from quantdrift.shadow.replay.replay import AssembledBatch, Outcome, ReplayResult, assemble, compare, replay
from quantdrift.shadow.replay.rows import items_of
from quantdrift.shadow.slices.clusters import ClusterSlices
from quantdrift.shadow.slices.refresh import ByModel
from quantdrift.storage.comparisons.rows import (
    ComparedExchange,
    ComparedItem,
    Quarantined,
    StoreBatch,
    Unreferenced,
    VectorRow,
)

_Assign = Callable[[Exchange, Sequence[Mapping[str, float]]], list[tuple[SliceKey, ...]]]


class BatchInProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A batch between two steps of the assessment.

    Parameters
    ----------
    cases
        All messages of the batch, classified.
    assembled
        The exchanges to replay; None if the batch has none.
    features
        The features of each item of `assembled`, in order.
    """

    cases: tuple[Case, ...]
    assembled: AssembledBatch | None
    features: tuple[dict[str, float], ...]

    @property
    def prepared(self) -> tuple[PreparedExchange, ...]:
        """The exchanges that are to be replayed."""
        return () if self.assembled is None else self.assembled.batch


class _SlicedExchange(msgspec.Struct, frozen=True, kw_only=True):
    """A compared exchange with the slices and features of its items."""

    case: PreparedExchange
    outcome: ReplayResult
    slices: Sequence[tuple[SliceKey, ...]]
    features: Sequence[dict[str, float]]
    clustering: int


class Assessor:
    """Assesses batches.

    Not thread-safe: one thread calls it. Only `replay` may run in a second thread, and `begin` where `has_features` says no.

    Parameters
    ----------
    worker
        Name of this worker in the database.
    noise
        Measures the noise of references and candidates; None: noise is not measured.
    at_start
        As of `ConfigWarnings`.

    Attributes
    ----------
    learned
        Assigns items to learned slices.
    noise
        The noise measurement.
    config_warnings
        Options that do not fit the references' outputs.
    """

    def __init__(
        self,
        config: Config,
        worker: str,
        noise: NoiseReplays | None = None,
        at_start: Mapping[tuple[str, str], str] = MappingProxyType({}),
    ) -> None:
        self.learned = ClusterSlices(config)
        self.noise = noise or NoiseReplays(0.0, SystemClock())
        self.config_warnings = ConfigWarnings(at_start)
        self._config = config
        self._time_zone = ZoneInfo(config.capture.time_zone)
        self._worker = worker
        self._assigners: dict[str, SliceAssigner] = {}
        self._discovered: ByModel = {}

    def watch_discovered(self, slices: ByModel) -> None:
        """Use these discovered slices from the next exchange on. Any thread may call it."""
        self._discovered = slices

    def overflow(self) -> dict[str, int]:
        """Return how many items of each model were counted in the cluster `other`, since the start."""
        return dict(self.learned.overflow)

    def assess(self, batch: Sequence[Case], at: datetime) -> StoreBatch:
        """Run all steps on a batch, and return everything to store.

        Parameters
        ----------
        batch
            Classified messages; those to replay share one signature.
        at
            When they were read.

        Raises
        ------
        BrokenRuntimeError
            The reference no longer computes anything.
        RetryError
            The reference's server is unreachable.
        """
        in_progress = self.begin(batch)
        outputs = self.replay(in_progress)
        return self.record(in_progress, outputs, self.compare(in_progress, outputs), at)

    def has_features(self, batch: Sequence[Case]) -> bool:
        """Return whether `begin` computes features of this batch, by functions that may be a plug-in's and take any time."""
        models = {case.exchange.model for case in batch if isinstance(case, PreparedExchange)}
        return any(rule.feature and (not rule.model or rule.model in models) for rule in self._config.slices)

    def begin(self, batch: Sequence[Case]) -> BatchInProgress:
        """Return the batch, ready to replay, with the features of its items."""
        prepared = tuple(case for case in batch if isinstance(case, PreparedExchange))
        if not prepared:
            return BatchInProgress(cases=tuple(batch), assembled=None, features=())
        assembled = assemble(prepared)
        return BatchInProgress(
            cases=tuple(batch), assembled=assembled, features=tuple(self._features(assembled))
        )

    def replay(self, in_progress: BatchInProgress) -> list[Answer]:
        """Return the reference's answer to each exchange. It may run at the same time as all other steps.

        Raises
        ------
        BrokenRuntimeError
            The reference no longer computes anything.
        RetryError
            The reference's server is unreachable.
        """
        if in_progress.assembled is None:
            return []
        with self.noise.timed():
            return replay(in_progress.assembled, most_items=self._config.shadow.batch_items)

    def compare(self, in_progress: BatchInProgress, outputs: Sequence[Answer]) -> list[Outcome]:
        """Return the result of each replayed exchange: divergences, or why the exchange is quarantined."""
        outcomes = compare(in_progress.prepared, outputs)
        self.config_warnings.check(in_progress.prepared, outputs)
        return outcomes

    def record(
        self,
        in_progress: BatchInProgress,
        outputs: Sequence[Answer],
        outcomes: Sequence[Outcome],
        at: datetime,
    ) -> StoreBatch:
        """Assign items to slices, choose exchanges for the measurement of noise, and return everything to store.

        Parameters
        ----------
        in_progress, outputs, outcomes
            The batch, and the reference's answer and the result of each of its replayed exchanges.
        at
            When it was read.
        """
        quarantined = [case for case in in_progress.cases if isinstance(case, Quarantined)]
        sliced: list[_SlicedExchange] = []
        vectors: list[VectorRow] = []
        slices: list[Sequence[tuple[SliceKey, ...]]] = []
        assembled, first = in_progress.assembled, 0
        assign = self._assign_of(in_progress.prepared)
        for case, outcome in zip(in_progress.prepared, outcomes, strict=True):
            begin, first = first, first + case.n_items
            of_items = in_progress.features[begin:first]
            if isinstance(outcome, QuarantineError):
                quarantined.append(quarantine(case.stream_sequence, case.payload, case.exchange, outcome))
                slices.append(())
                continue
            sliced_exchange, vector_rows = self._put_into_slices(case, outcome, of_items, assign, at)
            sliced.append(sliced_exchange)
            slices.append(sliced_exchange.slices)
            vectors += vector_rows
            for row in vector_rows:
                if row.space == case.version_reference.model.embedding and assembled is not None:
                    of_items[row.item].update(describing_features(assembled.inputs, begin + row.item))
        self.noise.choose(in_progress.prepared, outputs, outcomes, slices)
        runtimes = {
            case.version_reference.runtime.artefact.digest: case.version_reference.runtime
            for case in in_progress.prepared
        }
        return StoreBatch(
            worker=self._worker,
            at=at,
            compared=tuple(_compared(sliced)),
            quarantined=tuple(quarantined),
            unreferenced=tuple(case for case in in_progress.cases if isinstance(case, Unreferenced)),
            references={digest: _json(runtime.artefact) for digest, runtime in runtimes.items()},
            provenance=next((_json(replayed_by(runtime)) for runtime in runtimes.values()), "{}"),
            vectors=tuple(vectors),
            noise=self.noise.take(in_progress.prepared[0].exchange.model) if in_progress.prepared else (),
            doubts=self.config_warnings.take(),
        )

    def _features(self, assembled: AssembledBatch) -> list[dict[str, float]]:
        """Return the features of every item of the batch, in order."""
        model = assembled.batch[0].exchange.model
        rules = [rule for rule in self._config.slices if rule.feature and rule.model in ("", model)]
        if not rules:
            return [{} for _ in range(assembled.n_items)]
        return features_of(rules, assembled.inputs)

    def _assign_of(self, batch: Sequence[PreparedExchange]) -> _Assign:
        """Return what assigns the items of an exchange of this batch to slices by rules, from its features."""
        model = batch[0].exchange.model if batch else ""
        assigner = self._assigners.get(model)
        if assigner is None:
            assigner = self._assigners[model] = SliceAssigner(self._config, model)
        assigner.extra = self._discovered.get(model, ())
        reads_time = assigner.reads_time

        def assign(exchange: Exchange, features: Sequence[Mapping[str, float]]) -> list[tuple[SliceKey, ...]]:
            attributes = exchange.attributes
            if reads_time:
                attributes = {**attributes, **time_attributes(exchange.captured_at, self._time_zone)}
            return [assigner.assign(attributes, of_item) for of_item in features]

        return assign

    def _put_into_slices(
        self,
        case: PreparedExchange,
        outcome: ReplayResult,
        features: Sequence[dict[str, float]],
        assign: _Assign,
        at: datetime,
    ) -> tuple[_SlicedExchange, tuple[VectorRow, ...]]:
        """Return the exchange with its slices, and the vectors to store."""
        exchange = case.exchange
        learned = self.learned.assign(
            model=case.version_reference.model,
            exchange=exchange,
            digest=case.version_reference.runtime.artefact.digest,
            embedding=outcome.embedding,
            features=features,
            at=at,
        )
        slices = assign(exchange, features)
        if any(learned.slices):
            slices = [
                (*of_item, *of_learned) for of_item, of_learned in zip(slices, learned.slices, strict=True)
            ]
        sliced = _SlicedExchange(
            case=case, outcome=outcome, slices=slices, features=features, clustering=learned.version
        )
        return sliced, learned.vectors


def _compared(sliced: Sequence[_SlicedExchange]) -> Iterator[ComparedExchange]:
    """Return the rows of each exchange; exchanges that were compared together become rows together."""
    by_batch: dict[int, list[_SlicedExchange]] = {}
    for sliced_exchange in sliced:
        by_batch.setdefault(id(sliced_exchange.outcome.batch_divergences), []).append(sliced_exchange)
    items: dict[int, tuple[ComparedItem, ...]] = {}
    for key, sharing in by_batch.items():
        items[key] = items_of(
            _with_slowness(sharing[0].outcome.batch_divergences, sharing),
            slices=[of_item for exchange in sharing for of_item in exchange.slices],
            features=[of_item for exchange in sharing for of_item in exchange.features],
            clusterings=[exchange.clustering for exchange in sharing for _ in exchange.features],
        )
    versions = versions_of([sliced_exchange.case for sliced_exchange in sliced])
    for sliced_exchange, version in zip(sliced, versions, strict=True):
        exchange, rows = sliced_exchange.case.exchange, sliced_exchange.outcome.rows
        yield ComparedExchange(
            stream_sequence=sliced_exchange.case.stream_sequence,
            payload=sliced_exchange.case.payload,
            exchange=_with_time_per_token(exchange, sliced_exchange.outcome),
            version=version,
            items=items[id(sliced_exchange.outcome.batch_divergences)][rows.start : rows.stop],
        )


def _with_slowness(divergences: Divergences, sharing: Sequence[_SlicedExchange]) -> Divergences:
    """Return the divergences of a batch with what says that a stream was slow: 0 or 1, NaN of an answer in one piece."""
    budget = sharing[0].case.version_reference.model.budget
    limits = {
        Metric.SLOW_START: budget.first_token_p99_s,
        Metric.SLOW_TOKENS: budget.per_token_p99_s,
    }
    if not any(limits.values()):
        return divergences
    columns = {
        signal_of(metric).detail: np.full(len(divergences.flip), np.nan)
        for metric, limit_s in limits.items()
        if limit_s
    }
    for sliced in sharing:
        took = _with_time_per_token(sliced.case.exchange, sliced.outcome).latency
        if took is None:
            continue
        for metric, seconds in (
            (Metric.SLOW_START, took.first_token_s),
            (Metric.SLOW_TOKENS, took.per_token_s),
        ):
            if limits[metric] and seconds is not None:
                rows = slice(sliced.outcome.rows.start, sliced.outcome.rows.stop)
                columns[signal_of(metric).detail][rows] = float(seconds > limits[metric])
    return msgspec.structs.replace(divergences, detail={**divergences.detail, **columns})


def _with_time_per_token(exchange: Exchange, outcome: ReplayResult) -> Exchange:
    """Return an exchange with the time per token by the reference's count, where the server said nothing of its tokens."""
    took = exchange.latency
    counts = outcome.batch_divergences.detail.get("n_scored")
    if took is None or took.first_token_s is None or took.per_token_s is not None or counts is None:
        return exchange
    of_items = counts[outcome.rows.start : outcome.rows.stop].tolist()
    if len(of_items) != 1 or not of_items[0] > 1:
        return exchange
    per_token_s = (took.last_byte_s - took.first_token_s) / (of_items[0] - 1)
    return msgspec.structs.replace(exchange, latency=msgspec.structs.replace(took, per_token_s=per_token_s))


def _json(record: msgspec.Struct) -> str:
    return msgspec.json.encode(record).decode()

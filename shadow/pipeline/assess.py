"""From a batch of cases to what is stored of it: divergences, features and slices per item."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

import msgspec

from quantdrift.core.clock import SystemClock
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import QuarantineError
from quantdrift.core.slices import SliceAssigner, SliceKey
from quantdrift.shadow.pipeline.classify import Case, set_aside
from quantdrift.shadow.replay.config_warnings import ConfigWarnings
from quantdrift.shadow.replay.exchange import Answer, PreparedExchange
from quantdrift.shadow.replay.noise import Noise
from quantdrift.shadow.replay.replay import AssembledBatch, Outcome, ReplayResult, assemble, compare, replay
from quantdrift.shadow.replay.rows import items_of
from quantdrift.shadow.runtimes.protocol import replayed_by
from quantdrift.shadow.slices.clusters import ClusterSlices
from quantdrift.shadow.slices.discovered import ByModel
from quantdrift.shadow.tensors.features import features_of
from quantdrift.storage.shadow.rows import (
    ComparedExchange,
    ComparedItem,
    Quarantined,
    StoreBatch,
    Unreferenced,
    VectorRow,
    VersionKey,
)


class BatchInProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A batch on its way through the steps.

    Parameters
    ----------
    cases
        All of it.
    assembled
        What is to be replayed, or None where nothing is.
    features
        Of each item of that, in order.
    """

    cases: tuple[Case, ...]
    assembled: AssembledBatch | None
    features: tuple[dict[str, float], ...]

    @property
    def prepared(self) -> tuple[PreparedExchange, ...]:
        """The exchanges that are to be replayed."""
        return () if self.assembled is None else self.assembled.batch


class _Placed(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange that was compared, with the slices and features of its items."""

    case: PreparedExchange
    outcome: ReplayResult
    slices: Sequence[tuple[SliceKey, ...]]
    features: Sequence[dict[str, float]]
    clustering: int


class Assessor:
    """Assesses batches. It remembers which slices were met, so one thread uses it; only `replay` may have another.

    Parameters
    ----------
    config
        Models and slices.
    worker
        Name of this worker in the record.
    known
        Slices met before, from the record.
    noise
        Measures the noise of references and candidates; without it nobody does.

    Attributes
    ----------
    learned
        Puts items into learned slices.
    noise
        As given.
    doubts
        What the references' outputs say against the configuration.
    """

    def __init__(
        self, config: Config, worker: str, known: Iterable[SliceKey], noise: Noise | None = None
    ) -> None:
        self.learned = ClusterSlices(config)
        self.noise = noise or Noise(0.0, SystemClock())
        self.doubts = ConfigWarnings()
        self._config = config
        self._worker = worker
        self._known = tuple(known)
        self._assigners: dict[str, SliceAssigner] = {}
        self._discovered: ByModel = {}

    def watch_discovered(self, slices: ByModel) -> None:
        """Put items into these discovered slices from the next exchange on; called from any thread."""
        self._discovered = slices

    def overflow(self) -> dict[str, int]:
        """Return, per model, how many items went to `other` so far."""
        return {
            model: assigner.overflow + self.learned.overflow.get(model, 0)
            for model, assigner in self._assigners.items()
        }

    def assess(self, batch: Sequence[Case], at: datetime) -> StoreBatch:
        """Replay and compare what can be, and return everything that is to be stored: all steps below.

        Parameters
        ----------
        batch
            Cases; those to be replayed share one signature.
        at
            When they were read.

        Raises
        ------
        BrokenRuntimeError
            A reference computes nothing any more.
        RetryError
            It is away.
        """
        begun = self.begin(batch)
        return self.record(begun, self.compare(begun, self.replay(begun)), at)

    def begin(self, batch: Sequence[Case]) -> BatchInProgress:
        """Return a batch that is ready to be replayed, with the features of its items."""
        prepared = tuple(case for case in batch if isinstance(case, PreparedExchange))
        if not prepared:
            return BatchInProgress(cases=tuple(batch), assembled=None, features=())
        assembled = assemble(prepared)
        return BatchInProgress(
            cases=tuple(batch), assembled=assembled, features=tuple(self._features(assembled))
        )

    def replay(self, begun: BatchInProgress) -> list[Answer]:
        """Return what the reference gives for each exchange. It may run beside all other steps.

        Raises
        ------
        BrokenRuntimeError
            The reference computes nothing any more.
        RetryError
            It is away.
        """
        if begun.assembled is None:
            return []
        with self.noise.timed():
            return replay(begun.assembled, most_items=self._config.shadow.batch_items)

    def compare(self, begun: BatchInProgress, outputs: Sequence[Answer]) -> list[Outcome]:
        """Return what came of each exchange that was replayed."""
        outcomes = compare(begun.prepared, outputs)
        self.noise.choose(begun.prepared, outputs, outcomes)
        self.doubts.look(begun.prepared, outputs)
        return outcomes

    def record(self, begun: BatchInProgress, outcomes: Sequence[Outcome], at: datetime) -> StoreBatch:
        """Put items into slices, and return everything that is to be stored.

        Parameters
        ----------
        begun, outcomes
            The batch, and what came of it.
        at
            When it was read.
        """
        quarantined = [case for case in begun.cases if isinstance(case, Quarantined)]
        placed: list[_Placed] = []
        vectors: list[VectorRow] = []
        features = iter(begun.features)
        for case, outcome in zip(begun.prepared, outcomes, strict=True):
            of_items = [next(features) for _ in range(case.n_items)]
            if isinstance(outcome, QuarantineError):
                quarantined.append(set_aside(case.stream_sequence, case.payload, case.exchange, outcome))
                continue
            one, kept = self._placed(case, outcome, of_items, at)
            placed.append(one)
            vectors += kept
        runtimes = {case.judge.runtime.artefact.digest: case.judge.runtime for case in begun.prepared}
        return StoreBatch(
            worker=self._worker,
            at=at,
            compared=tuple(_compared(placed)),
            quarantined=tuple(quarantined),
            unreferenced=tuple(case for case in begun.cases if isinstance(case, Unreferenced)),
            references={digest: _json(runtime.artefact) for digest, runtime in runtimes.items()},
            provenance=next((_json(replayed_by(runtime)) for runtime in runtimes.values()), "{}"),
            vectors=tuple(vectors),
            noise=self.noise.take(),
            doubts=self.doubts.take(),
        )

    def _features(self, assembled: AssembledBatch) -> list[dict[str, float]]:
        """Return the features of every item of the batch, in order."""
        model = assembled.batch[0].exchange.model
        rules = [rule for rule in self._config.slices if rule.feature and rule.model in ("", model)]
        if not rules:
            return [{} for _ in range(assembled.n_items)]
        return features_of(rules, assembled.inputs)

    def _placed(
        self,
        case: PreparedExchange,
        outcome: ReplayResult,
        features: Sequence[dict[str, float]],
        at: datetime,
    ) -> tuple[_Placed, tuple[VectorRow, ...]]:
        """Return an exchange in its slices, and which of its vectors are kept."""
        exchange = case.exchange
        learned = self.learned.learn(
            model=case.judge.model,
            exchange=exchange,
            digest=case.judge.runtime.artefact.digest,
            embedding=outcome.embedding,
            features=features,
            at=at,
        )
        assigner = self._assigners.get(exchange.model)
        if assigner is None:
            known = tuple(key for key in self._known if key.model == exchange.model)
            assigner = self._assigners[exchange.model] = SliceAssigner(self._config, exchange.model, known)
        assigner.extra = self._discovered.get(exchange.model, ())
        slices = [
            (*assigner.assign(exchange.attributes, of_item), *of_learned)
            for of_item, of_learned in zip(features, learned.slices, strict=True)
        ]
        placed = _Placed(
            case=case, outcome=outcome, slices=slices, features=features, clustering=learned.version
        )
        return placed, learned.vectors


def _compared(placed: Sequence[_Placed]) -> Iterator[ComparedExchange]:
    """Return what is stored of exchanges; those that were compared together are made into rows together."""
    together: dict[int, list[_Placed]] = {}
    for one in placed:
        together.setdefault(id(one.outcome.everything), []).append(one)
    items: dict[int, tuple[ComparedItem, ...]] = {}
    for key, ones in together.items():
        items[key] = items_of(
            ones[0].outcome.everything,
            slices=[of_item for one in ones for of_item in one.slices],
            features=[of_item for one in ones for of_item in one.features],
            clusterings=[one.clustering for one in ones for _ in one.features],
        )
    for one in placed:
        exchange, rows = one.case.exchange, one.outcome.rows
        yield ComparedExchange(
            stream_sequence=one.case.stream_sequence,
            payload=one.case.payload,
            exchange=exchange,
            version=VersionKey(
                model=exchange.model,
                candidate_version=exchange.version,
                reference_digest=one.case.judge.runtime.artefact.digest,
            ),
            items=items[id(one.outcome.everything)][rows.start : rows.stop],
        )


def _json(record: msgspec.Struct) -> str:
    return msgspec.json.encode(record).decode()

"""From a batch of cases to what is stored of it: divergences, features and slices per item."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

import msgspec
import numpy as np

from quantdrift.core.config.schema import Config
from quantdrift.core.errors import QuarantineError
from quantdrift.core.slices import SliceAssigner, SliceKey
from shadow.discovered import ByModel
from shadow.features import features_of
from shadow.items import items_of
from shadow.learned import LearnedSlices
from shadow.replay import Compared, Prepared, compare_batch
from shadow.runtime import replayed_by
from shadow.triage import Case, set_aside
from storage.rows import (
    ComparedExchange,
    Quarantined,
    StoreBatch,
    Unreferenced,
    VectorRow,
    VersionKey,
)


class Assessor:
    """Assesses batches. It remembers which slices were met, so one thread uses it.

    Parameters
    ----------
    config
        Models and slices.
    worker
        Name of this worker in the record.
    known
        Slices met before, from the record.

    Attributes
    ----------
    learned
        Puts items into learned slices.
    """

    def __init__(self, config: Config, worker: str, known: Iterable[SliceKey]) -> None:
        self.learned = LearnedSlices(config)
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
        """Replay and compare what can be, and return everything that is to be stored.

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
        """
        prepared = [case for case in batch if isinstance(case, Prepared)]
        quarantined = [case for case in batch if isinstance(case, Quarantined)]
        compared: list[ComparedExchange] = []
        vectors: list[VectorRow] = []
        features = self._features(prepared)
        outcomes = compare_batch(prepared, most_items=self._config.shadow.batch_items)
        for case, outcome in zip(prepared, outcomes, strict=True):
            of_items = [next(features) for _ in range(case.n_items)]
            if isinstance(outcome, QuarantineError):
                quarantined.append(set_aside(case.stream_sequence, case.payload, case.exchange, outcome))
            else:
                exchange, kept = self._compared(case, outcome, of_items, at)
                compared.append(exchange)
                vectors += kept
        runtimes = {case.judge.runtime.artefact.digest: case.judge.runtime for case in prepared}
        return StoreBatch(
            worker=self._worker,
            at=at,
            compared=tuple(compared),
            quarantined=tuple(quarantined),
            unreferenced=tuple(case for case in batch if isinstance(case, Unreferenced)),
            references={digest: _json(runtime.artefact) for digest, runtime in runtimes.items()},
            provenance=next((_json(replayed_by(runtime)) for runtime in runtimes.values()), "{}"),
            vectors=tuple(vectors),
        )

    def _features(self, prepared: Sequence[Prepared]) -> Iterator[dict[str, float]]:
        """Return the features of every item of the batch, in order."""
        if not prepared:
            return iter(())
        model = prepared[0].exchange.model
        rules = [rule for rule in self._config.slices if rule.feature and rule.model in ("", model)]
        if not rules:
            return iter([{} for case in prepared for _ in range(case.n_items)])
        names = prepared[0].inputs
        joined = {name: np.concatenate([case.inputs[name] for case in prepared]) for name in names}
        return iter(features_of(rules, joined))

    def _compared(
        self, case: Prepared, outcome: Compared, features: Sequence[dict[str, float]], at: datetime
    ) -> tuple[ComparedExchange, tuple[VectorRow, ...]]:
        exchange = case.exchange
        digest = case.judge.runtime.artefact.digest
        learned = self.learned.learn(
            model=case.judge.model,
            exchange=exchange,
            digest=digest,
            embedding=outcome.embedding,
            features=features,
            at=at,
        )
        assigner = self._assigners.get(exchange.model)
        if assigner is None:
            known = tuple(key for key in self._known if key.model == exchange.model)
            assigner = self._assigners[exchange.model] = SliceAssigner(self._config, exchange.model, known)
        assigner.extra = self._discovered.get(exchange.model, ())
        compared = ComparedExchange(
            stream_sequence=case.stream_sequence,
            payload=case.payload,
            exchange=exchange,
            version=VersionKey(
                model=exchange.model,
                candidate_version=exchange.version,
                reference_digest=digest,
            ),
            items=items_of(
                outcome.divergences,
                slices=[
                    (*assigner.assign(exchange.attributes, of_item), *learned.slices[index])
                    for index, of_item in enumerate(features)
                ],
                features=features,
                clustering=learned.version,
            ),
        )
        return compared, learned.vectors


def _json(record: msgspec.Struct) -> str:
    return msgspec.json.encode(record).decode()

"""The metrics of a shadow worker, and its readiness."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final

from quantdrift.core import telemetry
from quantdrift.core.clock import Clock
from quantdrift.core.process.processor_time import ProcessorTime
from quantdrift.core.records import Exchange, Latency, Side
from quantdrift.core.slices import OTHER
from quantdrift.core.telemetry import Telemetry
from quantdrift.models.runtimes.canaries.check import CanaryOutcome
from quantdrift.shadow.pipeline.genai import genai_attributes
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.replay import AssembledBatch, Outcome, ReplayResult
from quantdrift.storage.account.expiries import Expired
from quantdrift.storage.comparisons.rows import StoreBatch, VectorRow, Written

READY_S = 30.0
MOST_VERSIONS = 100
"""Versions of all models with histograms of their own; those that come later share `(other)`."""


STALENESS_OF: Final = 8
"""Of so many stored exchanges of a model one enters the histogram of staleness: to record a number costs a twentieth of a small exchange."""


class BatchStep(StrEnum):
    """The steps of a batch, in this order; the values are labels of the step-time metric."""

    PULL = "pull"  # the fetch from the stream, including the wait for messages
    DECODE = "decode"
    WAIT = "wait"  # from the first message until the batch is full and scheduled
    ASSEMBLE = "assemble"  # concatenate inputs, compute features
    REPLAY = "replay"
    NOISE = "noise"  # replay parts of earlier batches again
    COMPARE = "compare"
    SLICES = "slices"  # assign slices, build the rows to store
    STORE = "store"
    ACKNOWLEDGE = "acknowledge"


# Not the replay: what a reference computes is what it is there for, and its threads are its own.
_HINTS: Final = {
    BatchStep.DECODE.value: "sample less of large requests, or send them as binary tensors",
    BatchStep.ASSEMBLE.value: "slices by a feature of large inputs are computed here",
    BatchStep.COMPARE.value: "of an embedding the neighbours are, of a text its tokens; see the task options of the model",
    BatchStep.SLICES.value: "slices are assigned and learned ones computed here: use fewer, or no `embedding`",
}


class ShadowMetrics:
    """Updates the shadow's metrics, and warns where an answer costs too much processor time beside its replay.

    Parameters
    ----------
    clock
        Dates an exchange when it is stored, for its staleness.
    """

    def __init__(self, meter: Telemetry, clock: Clock) -> None:
        self._clock = clock
        self._compared = meter.counter(telemetry.COMPARED)
        self._skipped = meter.counter(telemetry.SKIPPED)
        self._attributes_dropped = meter.counter(telemetry.ATTRIBUTES_DROPPED)
        self._expired = meter.counter(telemetry.EXPIRED)
        self._expired_so_far: Counter[tuple[str, str]] = Counter()
        self._expired_most: Counter[tuple[str, str]] = Counter()
        self._replay_time = meter.histogram(telemetry.REPLAY_TIME)
        self._steps = meter.histogram(telemetry.STEP_TIME)
        self._batch_items = meter.histogram(telemetry.BATCH_ITEMS)
        self._staleness = meter.histogram(telemetry.STALENESS)
        self._n_stored: Counter[str] = Counter()
        self._latency = meter.histogram(telemetry.LATENCY)
        self._first_token = meter.histogram(telemetry.FIRST_TOKEN)
        self._per_token = meter.histogram(telemetry.PER_TOKEN)
        self._genai_first_token = meter.histogram(telemetry.GENAI_FIRST_TOKEN)
        self._genai_per_token = meter.histogram(telemetry.GENAI_PER_TOKEN)
        self._answered_versions: set[tuple[str, str]] = set()
        self._store_errors = meter.counter(telemetry.STORE_ERRORS)
        self._overflow = meter.counter(telemetry.SLICE_OVERFLOW)
        self._canaries = meter.counter(telemetry.CANARIES)
        self._vectors = meter.counter(telemetry.VECTORS)
        self._overflown: dict[str, int] = {}
        self._over_cap: dict[str, int] = {}
        self._exemplars = meter.counter(telemetry.EXEMPLARS)
        self._own = meter.counter(telemetry.OWN_ANSWERS)
        self._noise_items = meter.counter(telemetry.NOISE_ITEMS)
        self._measured: Mapping[tuple[str, Side, str], int] = {}
        self._doubts = meter.counter(telemetry.DOUBTS)
        self._config_warned: set[tuple[str, str]] = set()
        self._stages: dict[int, tuple[BatchStep, float]] = {}
        self._reads: set[str] = set()
        self.processor_time = ProcessorTime(_HINTS)
        meter.observe(telemetry.MODELS_READ, lambda: [(len(self._reads), {})])
        meter.observe(telemetry.STAGE_AGE, self._stage_ages)

    def reads(self, model: str, *, does: bool) -> None:
        """Note whether this worker reads a model, or another one does."""
        (self._reads.add if does else self._reads.discard)(model)

    def entered(self, batch: int, stage: BatchStep) -> None:
        """Note that a batch, named by any number of its own, is in a stage from now on."""
        self._stages[batch] = stage, self._clock.monotonic_s()

    def left(self, batch: int) -> None:
        """Note that a batch is finished, whether it was stored or not."""
        self._stages.pop(batch, None)

    def _stage_ages(self) -> Iterable[tuple[float, telemetry.Labels]]:
        now_s = self._clock.monotonic_s()
        oldest_s = dict.fromkeys(
            (BatchStep.ASSEMBLE, BatchStep.REPLAY, BatchStep.COMPARE, BatchStep.STORE), now_s
        )
        for stage, since_s in list(self._stages.values()):
            oldest_s[stage] = min(oldest_s[stage], since_s)
        return [(now_s - since_s, {"stage": stage.value}) for stage, since_s in oldest_s.items()]

    def record_step(self, step: BatchStep, duration_s: float) -> None:
        """Record how long a step of a batch, or a fetch, took."""
        self._steps.record(duration_s, {"step": step.value})

    def replayed(self, assembled: AssembledBatch, duration_s: float) -> None:
        """Record a replay."""
        labels = {"model": assembled.batch[0].exchange.model}
        self._replay_time.record(duration_s, labels)
        self._batch_items.record(assembled.n_items, labels)
        self.processor_time.answered(assembled.n_items)

    def assessed(self, overflow: dict[str, int], over_cap: dict[str, int]) -> None:
        """Record items and vectors beyond a limit.

        Parameters
        ----------
        overflow
            Per model, items in the cluster `other`, counted since the start.
        over_cap
            Per model, vectors that were not sampled because of `MOST_VECTORS`, counted since the start.
        """
        for model, count in overflow.items():
            if more := count - self._overflown.get(model, 0):
                self._overflow.add(more, {"model": model})
        self._overflown = overflow
        for model, count in over_cap.items():
            if more := count - self._over_cap.get(model, 0):
                self._vectors.add(more, {"model": model, "outcome": "over_cap"})
        self._over_cap = dict(over_cap)

    def compared(self, batch: Sequence[PreparedExchange], outcomes: Sequence[Outcome]) -> None:
        """Record the outcomes of the references' free-running answers."""
        answers: Counter[tuple[str, str]] = Counter()
        for entry, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, ReplayResult) and "own" in outcome.batch_divergences.detail:
                of_items = outcome.batch_divergences.detail["own"][outcome.rows.start : outcome.rows.stop]
                answers.update((entry.exchange.model, outcome) for outcome in of_items.tolist() if outcome)
        for (model, own), count in answers.items():
            self._own.add(count, {"model": model, "outcome": own})

    def stored(self, batch: StoreBatch, written: Written) -> None:
        """Record a committed transaction."""
        now = self._clock.now()
        stored: Counter[str] = Counter()
        skipped: Counter[tuple[str, str]] = Counter()
        for index, compared in enumerate(batch.compared):
            exchange = compared.exchange
            if (unplaced := written.unplaced.get(index)) is not None:
                skipped[exchange.model, unplaced.value] += 1
                continue
            stored[exchange.model] += 1
            if self._n_stored[exchange.model] % STALENESS_OF == 0:
                self._staleness.record(
                    max((now - exchange.captured_at).total_seconds(), 0.0), {"model": exchange.model}
                )
            self._n_stored[exchange.model] += 1
            if exchange.latency is not None:
                self._answered(exchange.latency, exchange)
        for model, count in stored.items():
            self._compared.add(count, {"model": model})
        for model, count in written.n_other.items():
            self._overflow.add(count, {"model": model})
        skipped.update((case.model, case.reason.value) for case in batch.quarantined)
        skipped.update((case.version.model, "no_reference") for case in batch.unreferenced)
        for (model, reason), count in skipped.items():
            self._skipped.add(count, {"model": model, "reason": reason})

    def _answered(self, took: Latency, exchange: Exchange) -> None:
        """Record how long the candidate took for an exchange."""
        model, version = exchange.model, exchange.stored_version
        # A client may choose the version: the series of a histogram must not grow with what clients send.
        if (model, version) not in self._answered_versions:
            if len(self._answered_versions) < MOST_VERSIONS:
                self._answered_versions.add((model, version))
            else:
                version = OTHER
        labels = {"model": model, "version": version}
        self._latency.record(took.last_byte_s, labels)
        in_genai = genai_attributes(exchange)
        if took.first_token_s is not None:
            self._first_token.record(took.first_token_s, labels)
            if in_genai:
                self._genai_first_token.record(took.first_token_s, in_genai)
        if took.per_token_s is not None:
            self._per_token.record(took.per_token_s, labels)
            if in_genai:
                self._genai_per_token.record(took.per_token_s, in_genai)

    def attributes_dropped(self, model: str, number: int) -> None:
        """Count attributes that the configuration does not let in."""
        self._attributes_dropped.add(number, {"model": model})

    def expired(self, counts: Iterable[Expired]) -> None:
        """Record samples that expired in the stream.

        A negative count corrects an earlier one (a worker had finished the sample). The counter cannot fall, so it stays
        until new expiries exceed the correction.
        """
        for count in counts:
            key = count.model, count.stratum
            self._expired_so_far[key] += count.n
            if (more := self._expired_so_far[key] - self._expired_most[key]) > 0:
                self._expired.add(more, {"model": count.model, "stratum": count.stratum})
                self._expired_most[key] = self._expired_so_far[key]

    def sampled(self, vectors: Sequence[VectorRow], *, stored: bool) -> None:
        """Record vectors that were stored, or that could not be stored."""
        for model, count in Counter(row.model for row in vectors).items():
            self._vectors.add(count, {"model": model, "outcome": "stored" if stored else "failed"})

    def exemplar(self, model: str, outcome: str, number: int = 1) -> None:
        """Count exemplars that were stored, or were not."""
        self._exemplars.add(number, {"model": model, "outcome": outcome})

    def canaries_checked(self, model: str, outcome: CanaryOutcome) -> None:
        """Record a check of a reference against its canaries. Any thread may call it."""
        self._canaries.add(1, {"model": model, "outcome": outcome.value})

    def measured(self, counts: Mapping[tuple[str, Side, str], int]) -> None:
        """Record items chosen for noise measurement, by model, side and outcome; `counts` run from the start."""
        now = dict(counts)
        if now == self._measured:
            return
        for (model, side, outcome), count in now.items():
            if more := count - self._measured.get((model, side, outcome), 0):
                self._noise_items.add(more, {"model": model, "side": side.value, "outcome": outcome})
        self._measured = now

    def config_warned(self, warnings: Iterable[tuple[str, str]]) -> None:
        """Record options that seem to be set wrongly, as (model, option); `warnings` has all since the start."""
        for model, option in set(warnings) - self._config_warned:
            self._doubts.add(1, {"model": model, "option": option})
            self._config_warned.add((model, option))

    def store_failed(self) -> None:
        """Record a failed transaction; it will be tried again."""
        self._store_errors.add(1)


class Health:
    """The readiness of the worker: whether stream and database have answered lately, and the last batch was stored."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stream_s: float | None = None
        self._database_s: float | None = None
        self._stores = True

    def stream_answered(self) -> None:
        """Note that the stream has answered."""
        self._stream_s = self._clock.monotonic_s()

    def database_answered(self) -> None:
        """Note that Postgres has answered."""
        self._database_s = self._clock.monotonic_s()

    def database_failed(self) -> None:
        """Note that Postgres has not answered."""
        self._database_s = None

    def stored(self) -> None:
        """Note that Postgres has stored a batch."""
        self._stores = True
        self.database_answered()

    def store_failed(self) -> None:
        """Note that Postgres has not stored a batch; with a full disk it answers all the same."""
        self._stores = False

    def ready(self) -> bool:
        """Return whether both have answered within the last `READY_S` seconds, and no batch waits for a store that fails."""
        now_s = self._clock.monotonic_s()
        answers = (self._stream_s, self._database_s)
        return self._stores and all(at is not None and now_s - at <= READY_S for at in answers)

"""The gate on live traffic, end to end: record the candidate, follow the exchanges, record the verdict."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.errors import OperatorError, QuarantineError, QuarantineReason, RetryError
from quantdrift.core.keys import KeyFile
from quantdrift.core.sealing import is_sealed, unseal
from quantdrift.core.stream.connection import Copies, Queue
from quantdrift.drift.gate import Decision, Outcome, Question, decision
from quantdrift.shadow.gate.live import LiveGate, is_judged
from quantdrift.shadow.gate.offline import Route, route_slice
from quantdrift.shadow.pipeline.classify import classify
from quantdrift.shadow.pipeline.validate import AttributeRules, Envelope
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import References
from quantdrift.shadow.runtimes.protocol import ReferenceRuntime
from quantdrift.storage import gate as stored
from quantdrift.storage.database import Database
from quantdrift.storage.shadow.rows import Quarantined

_LOOK_S: Final = 5.0
_LONGEST_FETCH_S: Final = 0.5


class Followed(msgspec.Struct, frozen=True, kw_only=True):
    """What a gate on live traffic knows.

    Parameters
    ----------
    id
        Number of the gate.
    decision
        The decision so far.
    seen, refused, unusable, problem
        As of `LiveGate`.
    elapsed_s
        Time since it began.
    """

    id: int
    decision: Decision
    seen: int
    refused: int
    unusable: int
    problem: str
    elapsed_s: float


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is judged, and how.

    Parameters
    ----------
    config, model
        The configuration, and the model.
    references
        Open, with those of the model.
    candidate
        The candidate.
    routes
        Names of slices, each with the model that serves it.
    questions
        To each slice.
    alpha
        Probability of a false pass, and of a false failure, at most.
    wait
        Longest time to follow the traffic.
    """

    config: Config
    model: Model
    references: References
    candidate: ReferenceRuntime
    routes: tuple[tuple[str, ReferenceRuntime], ...]
    questions: tuple[Question, ...]
    alpha: float
    wait: timedelta


async def follow(
    job: Job, *, database: Database, queue: Queue, clock: Clock, look: Callable[[Followed], None]
) -> Followed:
    """Judge a candidate on the traffic from now on, until it passes or fails, or the time is over.

    Parameters
    ----------
    job
        What is judged.
    database, queue
        Where it is recorded, and where the exchanges come from, with the rights of a shadow.
    clock
        Measures the wait.
    look
        Called every few seconds with what is known.

    Raises
    ------
    OperatorError
        No slice of the model had traffic, or a route's slice is unknown.
    RetryError
        Postgres or NATS is unavailable. What was recorded before stays.
    """
    watched = await stored.watched_slices(database, job.model.name)
    slices = [key for key in watched if is_judged(job.config, key)]
    if not slices:
        raise OperatorError(
            f"no slice of model `{job.model.name}` had traffic within the last day: the gate judges the slices that are watched."
            " Check `quantdrift status`, or judge recorded inputs with --inputs"
        )
    for runtime in (job.candidate, *(runtime for _, runtime in job.routes)):
        _check_names(job, runtime)
    routes = tuple(Route(slice=route_slice(slices, name), runtime=runtime) for name, runtime in job.routes)
    digests = [f"sha256:{job.candidate.artefact.digest}"]
    digests += [f"{route.slice.name}=sha256:{route.runtime.artefact.digest}" for route in routes]
    candidate = " ".join(digests)
    async with queue.copies(job.model.name) as copies:
        begun = await stored.begin(database, model=job.model.name, candidate=candidate, alpha=job.alpha)
        gate = LiveGate(
            job.config,
            job.model,
            slices=slices,
            questions=job.questions,
            candidate=job.candidate,
            routes=routes,
            begun_at=begun.at,
            alpha=job.alpha,
        )
        follower = _Follower(job, gate, number=begun.id, candidate=candidate, database=database, clock=clock)
        return await follower.run(copies, look)


def _check_names(job: Job, runtime: ReferenceRuntime) -> None:
    """Check that requests have the inputs of a candidate: those that a reference is given."""
    known = set[str]()
    for version_reference in job.references.of(job.model.name):
        mapped = {entry.name: entry.captured or entry.name for entry in version_reference.reference.inputs}
        known |= {mapped.get(spec.name, spec.name) for spec in version_reference.runtime.inputs}
    if absent := sorted({spec.name for spec in runtime.inputs} - known):
        raise OperatorError(
            f"the candidate {runtime.artefact.path} takes `{absent[0]}`, but requests have {sorted(known)}, as the reference takes"
            " them: export it with these names"
        )


class _Follower:
    """One gate that follows the traffic."""

    def __init__(
        self, job: Job, gate: LiveGate, *, number: int, candidate: str, database: Database, clock: Clock
    ) -> None:
        self._job, self._gate, self._number, self._candidate = job, gate, number, candidate
        self._database, self._clock = database, clock
        self._began_s = clock.monotonic_s()
        self._keys = KeyFile.of(job.config.stream.payload_key_file, "stream.payload_key_file", clock)
        self._classify = partial(
            classify,
            sequence=0,
            n_delivered=1,
            max_deliveries=1,
            references=job.references,
            opened=self._opened,
            rules=AttributeRules.of(job.config.capture, job.config.slices),
        )

    async def run(self, copies: Copies, look: Callable[[Followed], None]) -> Followed:
        """Follow until there is a verdict, or the time is over."""
        ends_s = self._began_s + self._job.wait.total_seconds()
        looks_s = self._began_s + _LOOK_S
        while (now_s := self._clock.monotonic_s()) < ends_s and self._gate.outcome is Outcome.INSUFFICIENT:
            if (data := await copies.next(min(_LONGEST_FETCH_S, ends_s - now_s))) is not None:
                await asyncio.to_thread(self._see, data)
            if self._clock.monotonic_s() >= looks_s:
                found = self._found()
                await self._record(found, ended=False)
                look(found)
                looks_s = self._clock.monotonic_s() + _LOOK_S
        self._gate.finish()
        found = self._found()
        await self._record(found, ended=True)
        return found

    def _see(self, data: bytes) -> None:
        envelope = Envelope(model=self._job.model.name, streamed_at=datetime.now(UTC))
        case = self._classify(data, envelope=envelope)
        if isinstance(case, PreparedExchange):
            self._gate.see(case)
        elif isinstance(case, Quarantined):
            self._gate.skip(f"{case.reason.value}: {case.detail}")

    def _opened(self, payload: bytes) -> bytes:
        if not is_sealed(payload):
            return payload
        ring = None if self._keys is None else self._keys.ring
        if ring is None:
            raise QuarantineError(QuarantineReason.ENCRYPTED, "it is encrypted: set stream.payload_key_file")
        return unseal(payload, ring, self._job.model.name)

    def _found(self) -> Followed:
        made = decision(
            self._gate.trials,
            model=self._job.model.name,
            candidate=self._candidate,
            at=datetime.now(UTC),
        )
        return Followed(
            id=self._number,
            decision=made,
            seen=self._gate.seen,
            refused=self._gate.refused,
            unusable=self._gate.unusable,
            problem=self._gate.problem,
            elapsed_s=self._clock.monotonic_s() - self._began_s,
        )

    async def _record(self, found: Followed, *, ended: bool) -> None:
        made = found.decision
        try:
            await stored.record(
                self._database,
                found.id,
                verdict=made.verdict.value,
                more=made.more,
                answers=msgspec.json.encode(made.slices),
                ended=ended,
            )
        except RetryError:
            if ended:
                raise  # a verdict that nobody can read is none; before the end the next look records it

"""The gate on live traffic, end to end: record the candidate, follow the exchanges, record the verdict."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import MIB, Config, Model
from quantdrift.core.config.state import judged_by
from quantdrift.core.diagnosable import is_told
from quantdrift.core.errors import OperatorError, QuarantineError, QuarantineReason, RetryError
from quantdrift.core.keys import KeyFile
from quantdrift.core.process.run import Stop
from quantdrift.core.sealing import is_sealed, unseal
from quantdrift.core.slices import ALL
from quantdrift.core.stream.connection import Copies, Queue
from quantdrift.drift.gate import decision, outcome_of
from quantdrift.facts.gate import Followed, LoadRun, Outcome
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.release.gate.found import clusterings_of, is_learned, is_novel, left_out_live
from quantdrift.release.gate.judge import Asked
from quantdrift.release.gate.live import LiveGate
from quantdrift.release.gate.offline import SliceRoute, route_slice
from quantdrift.shadow.pipeline.classify import classify
from quantdrift.shadow.pipeline.validate import AttributeRules, StreamedMessage
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import References
from quantdrift.storage import gate as stored
from quantdrift.storage.comparisons.rows import Quarantined
from quantdrift.storage.database import Database

_LOOK_S: Final = 5.0
_LONGEST_FETCH_S: Final = 0.5
_HOURS: Final = 24
_MOST_BYTES: Final = 16 * MIB  # of exchanges that are replayed together


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is judged, and how.

    Parameters
    ----------
    config, model
        The configuration, and the model.
    only
        Name of the slice that is judged beside all traffic; empty: every slice.
    references
        Open, with those of the model.
    routes
        Names of slices, each with the model that serves it.
    asked
        The questions.
    alpha
        Probability of a false pass, and of a false failure, at most.
    wait
        Longest time to follow the traffic.
    run
        A finished load run with its answers; None: not asked for.
    every_hour
        Whether a pass waits until the traffic of each hour of the day was seen.
    """

    config: Config
    model: Model
    references: References
    candidate: ReferenceRuntime
    routes: tuple[tuple[str, ReferenceRuntime], ...]
    asked: Asked
    alpha: float
    wait: timedelta
    only: str = ""
    run: LoadRun | None = None
    every_hour: bool = True


async def follow(
    job: Job, *, database: Database, queue: Queue, clock: Clock, look: Callable[[Followed], None], stop: Stop
) -> Followed:
    """Judge a candidate on the traffic from now on, until it passes or fails, the time is over, or somebody stops it.

    However it ends, with an error too, the time of the end is recorded: who asks for the verdict need not wait any longer.

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
    stop
        The request to end it before its time.

    Raises
    ------
    OperatorError
        No slice of the model had traffic, a route's slice is unknown, or a clustering is damaged.
    RetryError
        Postgres or NATS is unavailable. What was recorded before stays.
    """
    watched = await stored.watched_slices(database, job.model.name)
    references = {
        version_reference.runtime.artefact.digest for version_reference in job.references.of(job.model.name)
    }
    clusterings = await clusterings_of(database, job.config, job.model, references)
    slices = [key for key in watched if is_told(job.config, key.where) or is_learned(clusterings, key)]
    if not slices:
        raise OperatorError(
            f"no slice of model `{job.model.name}` had traffic within the last day: the gate judges the slices that are watched."
            " Check `quantdrift status`, or judge recorded inputs with --inputs"
        )
    if job.asked.all and all(key.name != ALL for key in slices):
        raise OperatorError(
            f"--mlperf asks all traffic of model `{job.model.name}`, of which nothing was compared within the last day: check"
            " `quantdrift status`"
        )
    if job.only:
        if all(key.name != job.only for key in slices):
            raise OperatorError(
                f"the slice `{job.only}` cannot be judged on live traffic: it had no traffic within the last day, or the newest clustering"
                " does not have it."
                " Leave --alert out to judge the other slices"
            )
        slices = [key for key in slices if key.name in (ALL, job.only)]
        left_out: tuple[str, ...] = ()
    else:  # what is novel is hardly ever there, and would keep every verdict waiting
        routed = {name for name, _ in job.routes}
        left_out = left_out_live(watched, slices, routed)
        slices = [key for key in slices if not is_novel(key) or key.name in routed]
    for runtime in (job.candidate, *(runtime for _, runtime in job.routes)):
        _check_names(job, runtime)
    routes = tuple(
        SliceRoute(slice=route_slice(slices, name), runtime=runtime) for name, runtime in job.routes
    )
    digests = [f"sha256:{job.candidate.artefact.digest}"]
    digests += [f"{route.slice.name}=sha256:{route.runtime.artefact.digest}" for route in routes]
    candidate = " ".join(digests)
    async with queue.copies(job.model.name) as copies:
        begun = await stored.begin(database, model=job.model.name, candidate=candidate, alpha=job.alpha)
        gate = LiveGate(
            job.config,
            job.model,
            slices=slices,
            asked=job.asked,
            candidate=job.candidate,
            routes=routes,
            begun_at=begun.at,
            alpha=job.alpha,
            clusterings=clusterings,
        )
        follower = _Follower(
            job, gate, begun, candidate=candidate, left_out=left_out, database=database, clock=clock
        )
        return await follower.run(copies, look, stop)


def _check_names(job: Job, runtime: ReferenceRuntime) -> None:
    """Check that requests have the inputs of a candidate: those that a reference is given."""
    input_names = set[str]()
    for version_reference in job.references.of(job.model.name):
        mapped = {entry.name: entry.captured or entry.name for entry in version_reference.reference.inputs}
        input_names |= {mapped.get(spec.name, spec.name) for spec in version_reference.runtime.inputs}
    if absent := sorted({spec.name for spec in runtime.inputs} - input_names):
        raise OperatorError(
            f"the candidate {runtime.artefact.path} takes `{absent[0]}`, but requests have {sorted(input_names)}, as the reference takes"
            " them: export it with these names"
        )


class _Follower:
    """One gate that follows the traffic."""

    def __init__(
        self,
        job: Job,
        gate: LiveGate,
        begun: stored.Begun,
        *,
        candidate: str,
        left_out: tuple[str, ...],
        database: Database,
        clock: Clock,
    ) -> None:
        self._job, self._gate, self._begun, self._candidate = job, gate, begun, candidate
        self._left_out = left_out
        self._labels_since = begun.at
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

    async def run(self, copies: Copies, look: Callable[[Followed], None], stop: Stop) -> Followed:
        """Follow until there is a verdict, the time is over, or `stop`."""
        try:
            await self._follow(copies, look, stop)
            interrupted = stop.is_set() and self._outcome() is Outcome.INSUFFICIENT
            if not interrupted:
                await self._take_labels(is_end=True)
                self._gate.finish()
            followed = msgspec.structs.replace(self._found(), interrupted=interrupted)
            await self._end(followed, followed.decision.verdict)
        except BaseException:
            with contextlib.suppress(OperatorError, RetryError):  # the first error is the one to tell
                await self._end(self._found(), Outcome.INSUFFICIENT)  # an error is no verdict
            raise
        return followed

    async def _follow(self, copies: Copies, look: Callable[[Followed], None], stop: Stop) -> None:
        ends_s = self._began_s + self._job.wait.total_seconds()
        looks_s = self._began_s + _LOOK_S
        while (
            (now_s := self._clock.monotonic_s()) < ends_s
            and self._outcome() is Outcome.INSUFFICIENT
            and not stop.is_set()
        ):
            arrived = await copies.batch(
                min(_LONGEST_FETCH_S, ends_s - now_s),
                most=self._job.config.shadow.batch_items,
                most_bytes=_MOST_BYTES,
            )
            if arrived:
                await asyncio.to_thread(self._see, arrived)
            if self._clock.monotonic_s() >= looks_s:
                await self._take_labels()
                followed = self._found()
                await self._record(followed)
                look(followed)
                looks_s = self._clock.monotonic_s() + _LOOK_S

    def _outcome(self) -> Outcome:
        run = self._job.run
        outcome = outcome_of(
            [self._gate.outcome, *(answer.verdict for answer in (run.answers if run else ()))]
        )
        return Outcome.INSUFFICIENT if outcome is Outcome.PASS and self._missing_hours() else outcome

    def _missing_hours(self) -> set[int]:
        """Return the hours of the day that a pass waits for."""
        return set(range(_HOURS)) - self._gate.hours if self._job.every_hour else set()

    def _see(self, arrived: Sequence[bytes]) -> None:
        envelope = StreamedMessage(model=self._job.model.name, streamed_at=datetime.now(UTC))
        prepared = []
        for data in arrived:
            case = self._classify(data, envelope=envelope)
            if isinstance(case, PreparedExchange):
                prepared.append(case)
            elif isinstance(case, Quarantined):
                self._gate.skip(f"{case.reason.value}: {case.detail}")
        self._gate.see(prepared)

    async def _take_labels(self, *, is_end: bool = False) -> None:
        """Count the exchanges that were labelled meanwhile."""
        if not any(question.is_labelled for question in self._job.asked.all):
            return
        try:
            labels, self._labels_since = await stored.labels_of(
                self._database, self._job.model.name, begun_at=self._begun.at, since=self._labels_since
            )
        except RetryError:
            if is_end:
                raise
            return  # the next look reads them
        await asyncio.to_thread(self._gate.take_labels, labels, is_end=is_end)

    def _opened(self, payload: bytes) -> bytes:
        if not is_sealed(payload):
            return payload
        ring = None if self._keys is None else self._keys.ring
        if ring is None:
            raise QuarantineError(QuarantineReason.ENCRYPTED, "it is encrypted: set stream.payload_key_file")
        return unseal(payload, ring, self._job.model.name)

    def _found(self) -> Followed:
        decided = decision(
            self._gate.trials,
            model=self._job.model.name,
            candidate=self._candidate,
            at=datetime.now(UTC),
            run=self._job.run,
        ).without_hours(self._missing_hours())
        decided = msgspec.structs.replace(decided, not_judged=self._left_out)
        bursts = self._gate.bursts
        if bursts:
            decided = msgspec.structs.replace(decided, burst=bursts.length, burst_of=bursts.attribute)
        return Followed(
            id=self._begun.id,
            decision=decided,
            seen=self._gate.seen,
            refused=self._gate.refused,
            unusable=self._gate.unusable,
            problem=self._gate.problem,
            elapsed_s=self._clock.monotonic_s() - self._began_s,
            unlabelled=len(self._gate.expected),
            forgotten=self._gate.expected.forgotten,
            hours=tuple(sorted(self._gate.hours)),
            in_bursts=bursts.n_exchanges if bursts else 0,
            observations=bursts.n_observations if bursts else 0,
        )

    async def _record(self, found: Followed) -> None:
        decided = found.decision
        with contextlib.suppress(RetryError):  # the next look records it
            await stored.progress(
                self._database, found.id, more=decided.more, answers=msgspec.json.encode(decided.slices)
            )

    async def _end(self, found: Followed, verdict: Outcome) -> None:
        decided, job = found.decision, self._job
        await stored.end(
            self._database,
            found.id,
            verdict=verdict.value,
            more=decided.more,
            answers=msgspec.json.encode(decided.slices),
            configuration=judged_by(job.config, job.model),
            only=job.only,
        )

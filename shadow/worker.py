"""The shadow worker: stream, replay, record, acknowledge. Nothing is acknowledged before it is stored.

Reading, replaying, comparing and storing go on at once. Of each model one batch fills and one waits for its turn; five
are in the stages. That and `FETCH_BYTES` bound the memory whatever is down: with Postgres away the stages fill up, the
messages in hand are kept alive on the stream, and the rest waits there.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec

from quantdrift.core.clock import Clock, SystemClock
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import MIB, Config, Model, Reference, Shadow
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.admin import Admin
from quantdrift.core.process.run import Stop, supervise
from quantdrift.core.stream.connection import Queue
from quantdrift.core.telemetry import Telemetry
from quantdrift.shadow.pipeline.assess import Assessor
from quantdrift.shadow.pipeline.expired import ExpiredCount
from quantdrift.shadow.pipeline.fair_share import FairShare, terms_of
from quantdrift.shadow.pipeline.in_flight import InFlight
from quantdrift.shadow.pipeline.metrics import Health, ShadowMetrics
from quantdrift.shadow.pipeline.queues import BatchQueues
from quantdrift.shadow.pipeline.reader import FETCH_BYTES, ModelReaders, Reader
from quantdrift.shadow.pipeline.stages import Stages, TakenMessage
from quantdrift.shadow.pipeline.tallies import TallyStore
from quantdrift.shadow.pipeline.tracing import NoSpans, OtlpSpans, Spans
from quantdrift.shadow.replay.candidate_noise import Rechecks
from quantdrift.shadow.replay.noise import Noise
from quantdrift.shadow.replay.references import Load, References, at_a_server
from quantdrift.shadow.runtimes import malloc
from quantdrift.shadow.runtimes.cache import CachedRuntime, RuntimeCache, files_bytes
from quantdrift.shadow.runtimes.canaries.check import held
from quantdrift.shadow.runtimes.protocol import ReferenceRuntime
from quantdrift.shadow.runtimes.registry import opening_of
from quantdrift.shadow.runtimes.text.candidate_replica import opened_with_copy
from quantdrift.shadow.slices.discovered import DiscoveredSlices
from quantdrift.shadow.slices.refresh import SliceRefresh
from quantdrift.storage.database import Database
from quantdrift.storage.shadow.writer import Writer
from quantdrift.storage.slices.clusters import keep_vectors

_LOG = logging.getLogger(__name__)
_CONNECT_PAUSE_S = 1.0
_PING_S = 10.0
_BEATS_PER_WAIT = 3
_WAITS_PER_REPLAY = 10
_ASKED_PER_EXCHANGE = (
    4  # fewer than two tries in halves for each, and after each try what the server could compute before
)
_MOST_IN_HAND = 5  # one laid out, one replayed and one next, one compared, one stored

Found = TypeVar("Found")


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """Stages with the lanes that feed them; what holds one track up holds up no other."""

    lanes: BatchQueues[list[TakenMessage]]
    stages: Stages

    @property
    def steps(self) -> tuple[tuple[str, Callable[[], Awaitable[None]]], ...]:
        """Return what is called again and again, with what it is called."""
        stages = self.stages
        return (
            ("assembling", stages.assemble_one),
            ("replaying", stages.replay_one),
            ("replaying the next", stages.replay_one),
            ("comparing", stages.compare_one),
            ("storing", stages.store_one),
        )


async def serve(config: Config, secrets: Secrets, stop: Stop) -> int:
    """Replay exchanges until `stop`; return the exit code.

    Parameters
    ----------
    config
        The whole configuration.
    secrets
        The address of Postgres.
    stop
        Set by SIGTERM: the batches in hand are finished, or given back where Postgres is away.

    Raises
    ------
    OperatorError
        A reference is missing or is itself quantised, the device is not there, the database has no schema, or a
        server refuses the configuration. A server that is away is waited for; one of a reference holds up its model alone.
    """
    os.nice(config.shadow.nice)  # before any thread: each inherits it
    malloc.settle()
    clock = SystemClock()
    name = f"{socket.gethostname()}:{os.getpid()}"
    health = Health(clock)
    telemetry = Telemetry("quantdrift-shadow", config.telemetry.resource)
    spans: Spans = NoSpans()
    if config.telemetry.otlp_endpoint:
        spans = OtlpSpans.to(config.telemetry, secrets, telemetry.resource)
    meters = ShadowMetrics(telemetry, clock)
    admin = Admin("shadow.admin", config.shadow.admin, health.ready)
    await admin.start()
    try:
        hold = partial(held, clock=clock, told=meters.canaries_checked)
        shelf = RuntimeCache(config.shadow.reference_memory_bytes)
        load = _loader(config, secrets.reference_token, shelf, hold)
        here = [model for model in config.models if not at_a_server(model)]
        references = await asyncio.to_thread(References, here, load)
        away = [model for model in config.models if at_a_server(model)]
        await asyncio.gather(*(asyncio.to_thread(_open_if_there, references, model) for model in away))
        for model in config.models:
            if not model.references:
                _LOG.warning("model %s has no reference: its versions stay unknown", model.name)
        async with Database(secrets.dsn, config.storage) as database:
            known = await _when_there(Writer(database, clock).slices, stop)
            queue = await _when_there(lambda: Queue.connect(config.stream, client_name=name), stop)
            if known is None or queue is None:
                return 0
            health.record_answered()
            rechecks = Rechecks(config.models, clock)
            try:
                await _work(
                    config=config,
                    references=references,
                    assessor=Assessor(config, name, known, Noise(config.shadow.noise_share, clock, rechecks)),
                    database=database,
                    queue=queue,
                    meters=meters,
                    spans=spans,
                    health=health,
                    clock=clock,
                    stop=stop,
                    name=name,
                )
            finally:
                rechecks.close()
                await queue.close()
                await asyncio.to_thread(references.close)
    finally:
        await admin.stop()
        await asyncio.to_thread(spans.close)
        telemetry.close()
    return 0


async def _work(
    *,
    config: Config,
    references: References,
    assessor: Assessor,
    database: Database,
    queue: Queue,
    meters: ShadowMetrics,
    spans: Spans,
    health: Health,
    clock: Clock,
    stop: Stop,
    name: str,
) -> None:
    shadow = config.shadow
    # A transaction holds a handful of statements, each bounded by the server itself.
    store_limit_s = 2 * config.storage.statement_timeout_s + 10
    tallies = await _when_there(lambda: queue.consumer("tally", ack_wait_s=shadow.ack_wait_s), stop)
    if tallies is None:
        return
    holding = InFlight()
    end = Stop()  # set when the stages are empty

    expired = ExpiredCount(queue=queue, database=database, worker=name, meters=meters, stop=end)

    async def beat() -> None:
        await holding.beat()
        await end.wait(shadow.ack_wait_s / _BEATS_PER_WAIT)

    clusterings = SliceRefresh(database, assessor.learned, end)
    await clusterings.look()
    discovered = DiscoveredSlices(database, assessor.watch_discovered, end, most=config.discovery.most_slices)
    await discovered.look()

    async def ping() -> None:
        with contextlib.suppress(RetryError):
            await database.ping()
            health.record_answered()
        await end.wait(_PING_S)

    writer = Writer(database, clock)  # one: its allowance is for the process

    with contextlib.ExitStack() as threads:
        beside = threads.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="beside"))

        def track_of(models: Sequence[Model]) -> Track:
            lanes: BatchQueues[list[TakenMessage]] = BatchQueues(
                FairShare(terms_of(models)), clock, stop, most_in_hand=_MOST_IN_HAND
            )
            stages = Stages(
                lanes=lanes,
                assessor=assessor,
                thread=threads.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="replay")),
                beside=beside,
                writer=writer,
                keep=partial(keep_vectors, database),
                holding=holding,
                meters=meters,
                spans=spans,
                health=health,
                clock=clock,
                stop=stop,
                store_limit_s=store_limit_s,
                replay_limit_s=longest_replay_s(shadow, models),
                broken=_end,
            )
            return Track(lanes=lanes, stages=stages)

        # A server that is away, or hangs, holds up its own model alone.
        apart = {model.name: track_of([model]) for model in config.models if at_a_server(model)}
        here = track_of([model for model in config.models if model.name not in apart])
        tracks = [here, *apart.values()]
        # All of them together hold as much as one would.
        fetch_bytes = max(FETCH_BYTES // max(len(config.models), 1), MIB)

        configured = {model.name: model for model in config.models}

        async def reader_of(name: str) -> Reader:
            # Before the references: who looks at the stream sees what waits for them.
            consumer = await queue.consumer("exchange", ack_wait_s=shadow.ack_wait_s, model=name)
            if (model := configured.get(name)) is not None and name not in references:
                try:
                    await asyncio.to_thread(references.add, model)
                except OperatorError as error:
                    _end(str(error))
            return Reader(
                shadow=shadow,
                fetch_bytes=fetch_bytes,
                lane=name,
                consumer=consumer,
                references=references,
                lanes=apart.get(name, here).lanes,
                holding=holding,
                meters=meters,
                health=health,
                clock=clock,
                stop=stop,
            )

        readers = ModelReaders(
            models=(model.name for model in config.models),
            found=queue.models,
            make=reader_of,
            health=health,
            stop=stop,
        )
        intake = TallyStore(
            consumer=tallies,
            writer=writer,
            worker=name,
            meters=meters,
            stop=stop,
            max_deliveries=shadow.max_deliveries,
            fetch_bytes=FETCH_BYTES,
            store_limit_s=store_limit_s,
        )
        behind = [
            asyncio.create_task(supervise(title, work, end))
            for title, work in (
                *(step for track in tracks for step in track.steps),
                ("keeping alive", beat),
                ("asking Postgres", ping),
                ("counting what has expired", expired.turn),
                ("reading clusterings", clusterings.turn),
                ("reading discovered slices", discovered.turn),
            )
        ]
        try:
            await asyncio.gather(
                readers.run(),
                supervise("reading tallies", intake.take_once, stop),
            )
            for track in tracks:
                await track.lanes.drained()
        finally:
            end.set()
            for task in behind:
                task.cancel()
            await asyncio.gather(*behind, return_exceptions=True)


def longest_replay_s(shadow: Shadow, models: Iterable[Model]) -> float:
    """Return after how long the replay of a batch of these models is taken for a hang.

    A server that is too slow for its inputs, each of which is bounded by `timeout_s`, is none: it must not end the worker,
    which has other models.
    """
    timeout_s = max((one.timeout_s for model in models for one in model.references if one.url), default=0.0)
    return max(_WAITS_PER_REPLAY * shadow.ack_wait_s, _ASKED_PER_EXCHANGE * shadow.batch_items * timeout_s)


def _loader(
    config: Config,
    token: str,
    shelf: RuntimeCache,
    hold: Callable[[Model, Reference, ReferenceRuntime], ReferenceRuntime],
) -> Load:
    def open_one(model: Model, reference: Reference) -> ReferenceRuntime:
        runtime = opened_with_copy(opening_of(config, model, reference, token))
        try:
            return hold(model, reference, runtime)
        except BaseException:
            runtime.close()
            raise

    def load(model: Model, reference: Reference) -> ReferenceRuntime:
        if at_a_server(model):  # in a thread of its own: another one must not close it
            return open_one(model, reference)
        return CachedRuntime(
            shelf,
            partial(open_one, model, reference),
            files_bytes(reference.path) + files_bytes(reference.copy.path),
        )

    return load


def _open_if_there(references: References, model: Model) -> None:
    """Open the references of a model; where a server is away its reader tries again, and other models do not wait."""
    try:
        references.add(model)
    except RetryError as error:
        _LOG.warning("%s: exchanges of %s wait in the stream", error, model.name)


def _end(why: str) -> None:
    """End the process at once: what it has in hand was not acknowledged, and comes again after `ack_wait_s`."""
    _LOG.error("%s. Ending with exit code 1; samples wait in the stream", why)
    os._exit(1)  # a thread that hangs could not be waited for


async def _when_there(connect: Callable[[], Awaitable[Found]], stop: Stop) -> Found | None:
    """Call `connect` until the server is there; return None where the end was asked for first."""
    while not stop.is_set():
        try:
            return await connect()
        except RetryError as error:
            _LOG.warning("%s: again in %g s", error, _CONNECT_PAUSE_S)
            await stop.wait(_CONNECT_PAUSE_S)
    return None

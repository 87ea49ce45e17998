"""The shadow worker: reads exchanges from the stream, replays, compares and stores them, then acknowledges them.

Nothing is acknowledged before it is stored. Reading, replaying, comparing and storing run at the same time. Each model
has one batch that fills and one that waits; five batches are in the stages. That and `FETCH_BYTES` bound the memory in
any outage: while Postgres is unreachable the stages fill up, the messages in flight are kept alive on the stream, and
the others wait there.
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
from quantdrift.core.keys import KeyFile
from quantdrift.core.logs import of_model
from quantdrift.core.process.admin import Admin
from quantdrift.core.process.backoff import Backoff
from quantdrift.core.process.run import Stop, exit_at_once, spare_collector, supervise
from quantdrift.core.process_state import StateReports
from quantdrift.core.slices import ValueRules
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.lag import StreamLag
from quantdrift.core.stream.rights import NatsRole
from quantdrift.core.telemetry import Telemetry
from quantdrift.core.tls import Tls
from quantdrift.models.runtimes import malloc
from quantdrift.models.runtimes.cache import CachedRuntime, RuntimeCache, files_bytes
from quantdrift.models.runtimes.canaries.check import with_canary_checks
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.registry import runtime_request
from quantdrift.models.runtimes.text.candidate_replica import open_with_replica
from quantdrift.models.runtimes.text.same_tokens import doubt_of
from quantdrift.models.runtimes.text.scoring_runtime import ScoringRuntime
from quantdrift.shadow.pipeline.assess import Assessor
from quantdrift.shadow.pipeline.exemplars import ExemplarKeeper
from quantdrift.shadow.pipeline.fair_share import FairShare, terms_of
from quantdrift.shadow.pipeline.in_flight import InFlight
from quantdrift.shadow.pipeline.metrics import Health, ShadowMetrics
from quantdrift.shadow.pipeline.queues import BatchQueues
from quantdrift.shadow.pipeline.reader import FETCH_BYTES, ModelReaders, Reader
from quantdrift.shadow.pipeline.stages import Stages, TakenMessage
from quantdrift.shadow.pipeline.tallies import ExpiredCount, TallyStore
from quantdrift.shadow.pipeline.tracing import NoSpans, OtlpSpans, Spans
from quantdrift.shadow.pipeline.validate import AttributeRules
from quantdrift.shadow.replay.candidate_noise import Rechecks
from quantdrift.shadow.replay.noise import NoiseReplays
from quantdrift.shadow.replay.references import Load, References, is_remote
from quantdrift.shadow.slices.refresh import DiscoveredSlices, LearnedSlices, NoiseSuspects
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import STATEMENT_TIMEOUT_S, Database
from quantdrift.storage.process_reports import SHADOW, store_reports
from quantdrift.storage.schema.revision import check_schema
from quantdrift.storage.slices.clusters import keep_vectors

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_PING_S = 10.0
_SHARES_S = 60.0
_REPORT_S = 600.0
_BEATS_PER_WAIT = 3
_WAITS_PER_REPLAY = 10
# Requests to the server for each exchange: bisection takes fewer than two, and each is followed by one of the self-test.
_REQUESTS_PER_EXCHANGE = 4
# A transaction holds a handful of statements, each bounded by the server itself.
_STORE_LIMIT_S = 2 * STATEMENT_TIMEOUT_S + 10
_MAX_IN_FLIGHT = 5  # one being assembled, one replayed and one next, one compared, one stored

Connection = TypeVar("Connection")


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """Queues with the stages that they feed. Pipelines do not delay each other."""

    queues: BatchQueues[list[TakenMessage]]
    stages: Stages

    @property
    def steps(self) -> tuple[tuple[str, Callable[[], Awaitable[None]]], ...]:
        """The steps to call in a loop, with a title for each."""
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
    secrets
        The address of Postgres, and the token of the references' servers.
    stop
        Set by SIGTERM: batches in flight are finished, or returned to the stream if Postgres is unreachable.

    Raises
    ------
    OperatorError
        A reference is missing or is itself quantised, the device does not exist, the Postgres address cannot be read, or
        NATS refuses the stream's limits. A server that is unreachable, or refuses the password or the schema, is waited
        for; that of a reference delays its model alone.
    """
    malloc.configure()
    clock = SystemClock()
    name = f"{socket.gethostname()}:{os.getpid()}"
    health = Health(clock)
    telemetry = Telemetry("quantdrift-shadow")
    telemetry.observe_config("shadow", lambda: config)
    telemetry.observe_exports()
    spans: Spans = NoSpans()
    if config.telemetry.otlp_endpoint:
        spans = OtlpSpans.to(config.telemetry, secrets, telemetry.resource)
    meters = ShadowMetrics(telemetry, clock)
    lag = StreamLag(config, telemetry, clock)
    admin = Admin("shadow.admin", config.shadow.admin, health.ready)
    await admin.start()
    try:
        with_canaries = partial(with_canary_checks, clock=clock, on_check=meters.canaries_checked)
        cache = RuntimeCache(config.shadow.reference_memory_bytes)
        at_start: dict[tuple[str, str], str] = {}
        look = partial(_compare_tokenizers, at_start, config.sidecar.backend)
        load = _loader(config, secrets.reference_token, cache, with_canaries, look)
        local = [model for model in config.models if not is_remote(model)]
        references = await asyncio.to_thread(References, local, load)
        remote = [model for model in config.models if is_remote(model)]
        await asyncio.gather(*(asyncio.to_thread(_open_if_reachable, references, model) for model in remote))
        for model in config.models:
            if not model.references:
                _LOG.warning(
                    "model %s has no reference, its versions stay `unknown`: add an entry to `models.references`",
                    model.name,
                    extra=of_model(model.name),
                )
        async with Database(secrets.current_dsn) as database:
            # A password, a right, a certificate or the schema may change while this process runs; an option may not.
            any_refusal = (RetryError, OperatorError)
            has_schema = await _connected(partial(_checked_schema, database), stop, waits_out=any_refusal)
            queue = await _connected(
                lambda: Queue.connect(config.stream, client_name=name, role=NatsRole.SHADOW),
                stop,
                waits_out=any_refusal,
            )
            if has_schema is None or queue is None:
                return 0
            health.database_answered()
            rechecks = Rechecks(config.models, clock, secrets.salt, tls=Tls.of_shadow(config.shadow))
            try:
                await _work(
                    config=config,
                    references=references,
                    assessor=Assessor(
                        config, name, NoiseReplays(config.shadow.noise_share, clock, rechecks), at_start
                    ),
                    database=database,
                    queue=queue,
                    meters=meters,
                    lag=lag,
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


async def _checked_schema(database: Database) -> bool:
    await check_schema(database)
    return True


async def _work(
    *,
    config: Config,
    references: References,
    assessor: Assessor,
    database: Database,
    queue: Queue,
    meters: ShadowMetrics,
    lag: StreamLag,
    spans: Spans,
    health: Health,
    clock: Clock,
    stop: Stop,
    name: str,
) -> None:
    shadow = config.shadow
    tallies = await _connected(lambda: queue.consumer("tally", ack_wait_s=shadow.ack_wait_s), stop)
    if tallies is None:
        return
    in_flight = InFlight()
    drained = Stop()  # set when the stages are empty

    expired = ExpiredCount(queue=queue, database=database, worker=name, meters=meters, stop=drained)

    async def keep_alive() -> None:
        await in_flight.keep_alive()
        await drained.wait(shadow.ack_wait_s / _BEATS_PER_WAIT)

    clusterings = LearnedSlices(database, assessor.learned, drained)
    await clusterings.refresh()
    discovered = DiscoveredSlices(database, assessor.watch_discovered, drained)
    await discovered.refresh()

    keys = KeyFile.of(config.stream.payload_key_file, "stream.payload_key_file", clock)
    # A single one: its hourly allowance is for the process, and it counts the shares of values.
    writer = Writer(database, clock, ValueRules(config), keys, as_blocks=config.storage.write_blocks)
    exemplars = ExemplarKeeper.of(config, queue, clock, keys=keys, count=meters.exemplar)

    with contextlib.ExitStack() as threads:
        compare_thread = threads.enter_context(
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="compare")
        )

        def pipeline_of(models: Sequence[Model]) -> Pipeline:
            queues: BatchQueues[list[TakenMessage]] = BatchQueues(
                FairShare(terms_of(models)), clock, stop, max_in_flight=_MAX_IN_FLIGHT
            )
            stages = Stages(
                queues=queues,
                assessor=assessor,
                replay_thread=threads.enter_context(
                    ThreadPoolExecutor(max_workers=1, thread_name_prefix="replay")
                ),
                compare_thread=compare_thread,
                writer=writer,
                store_vectors=partial(keep_vectors, database),
                in_flight=in_flight,
                meters=meters,
                spans=spans,
                health=health,
                clock=clock,
                stop=stop,
                store_limit_s=_STORE_LIMIT_S,
                replay_limit_s=longest_replay_s(shadow, models),
                on_broken=_exit,
                exemplars=exemplars,
            )
            return Pipeline(queues=queues, stages=stages)

        # One pipeline for each model at a server: a server that is unreachable, or hangs, delays its own model alone.
        remote = {model.name: pipeline_of([model]) for model in config.models if is_remote(model)}
        local = pipeline_of([model for model in config.models if model.name not in remote])
        pipelines = [local, *remote.values()]
        # The readers share `FETCH_BYTES`.
        fetch_bytes = max(FETCH_BYTES // max(len(config.models), 1), MIB)

        configured = {model.name: model for model in config.models}

        async def reader_of(name: str) -> Reader:
            # Made before the references are opened, so that the backlog that waits for them can be seen.
            consumer = await queue.consumer("exchange", ack_wait_s=shadow.ack_wait_s, model=name)
            if (model := configured.get(name)) is not None and name not in references:
                try:
                    await asyncio.to_thread(references.add, model)
                except OperatorError as error:
                    _exit(str(error))
            return Reader(
                shadow=shadow,
                fetch_bytes=fetch_bytes,
                model=name,
                rules=rules,
                consumer=consumer,
                references=references,
                queues=remote.get(name, local).queues,
                in_flight=in_flight,
                meters=meters,
                health=health,
                clock=clock,
                stop=stop,
                keys=keys,
            )

        rules = AttributeRules.of(config.capture, config.slices)
        readers = ModelReaders(
            models=(model.name for model in config.models),
            list_models=queue.models,
            make_reader=reader_of,
            health=health,
            stop=stop,
        )
        tally_store = TallyStore(
            consumer=tallies,
            writer=writer,
            worker=name,
            meters=meters,
            stop=stop,
            max_deliveries=shadow.max_deliveries,
            fetch_bytes=FETCH_BYTES,
            store_limit_s=_STORE_LIMIT_S,
        )
        background = [
            asyncio.create_task(supervise(title, work, drained))
            for title, work in (
                *(step for pipeline in pipelines for step in pipeline.steps),
                ("keeping messages alive", keep_alive),
                ("pinging Postgres", lambda: _ping(database, health, drained)),
                ("counting expired samples", expired.count_and_wait),
                ("watching the stream", lambda: lag.look_and_wait(queue, drained)),
                ("reading clusterings", clusterings.refresh_and_wait),
                ("reading discovered slices", discovered.refresh_and_wait),
                (
                    "reading suspect slices",
                    NoiseSuspects(database, assessor.noise.suspect, drained).refresh_and_wait,
                ),
                ("storing the shares of values", lambda: _store_shares(writer, drained)),
                *(() if exemplars is None else (("keeping exemplars", exemplars.keep_one),)),
                ("reporting the configuration", lambda: _report(database, config, clock, drained)),
            )
        ]
        spare_collector()
        try:
            await asyncio.gather(
                readers.run(),
                supervise("reading tallies", tally_store.take_once, stop),
            )
            for pipeline in pipelines:
                await pipeline.queues.wait_drained()
        finally:
            drained.set()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)


async def _ping(database: Database, health: Health, stop: Stop) -> None:
    """Note whether Postgres answers, then wait."""
    try:
        await database.ping()
    except (RetryError, OperatorError):  # what stores says why
        health.database_failed()
    else:
        health.database_answered()
    await stop.wait(_PING_S)


async def _store_shares(writer: Writer, stop: Stop) -> None:
    """Store the shares of values, then wait."""
    try:
        await writer.store_shares()
    except (RetryError, OperatorError) as error:
        _LOG.warning("could not store the shares of values, trying again in %g s: %s", _SHARES_S, error)
    await stop.wait(_SHARES_S)


async def _report(database: Database, config: Config, clock: Clock, stop: Stop) -> None:
    """Store the configuration of this worker for the audit, then wait."""
    try:
        await store_reports(
            database, SHADOW, [(socket.gethostname(), StateReports(lambda: config).take(), clock.now())]
        )
    except (RetryError, OperatorError) as error:
        _LOG.warning(
            "could not store the configuration for the audit, trying again in %g s: %s", _REPORT_S, error
        )
    await stop.wait(_REPORT_S)


def longest_replay_s(shadow: Shadow, models: Iterable[Model]) -> float:
    """Return the time after which the replay of a batch of these models counts as a hang.

    The limit covers a slow server that takes `timeout_s` for each request: it must not end the worker, which has other
    models.
    """
    timeout_s = max(
        (reference.timeout_s for model in models for reference in model.references if reference.url),
        default=0.0,
    )
    return max(_WAITS_PER_REPLAY * shadow.ack_wait_s, _REQUESTS_PER_EXCHANGE * shadow.batch_items * timeout_s)


def _loader(
    config: Config,
    token: str,
    cache: RuntimeCache,
    with_canaries: Callable[[Model, Reference, ReferenceRuntime], ReferenceRuntime],
    look: Callable[[Model, ReferenceRuntime], None],
) -> Load:
    def open_one(model: Model, reference: Reference) -> ReferenceRuntime:
        runtime = open_with_replica(runtime_request(config, model, reference, token), partial(look, model))
        try:
            return with_canaries(model, reference, runtime)
        except BaseException:
            runtime.close()
            raise

    def load(model: Model, reference: Reference) -> ReferenceRuntime:
        if is_remote(
            model
        ):  # not cached: it runs in its own pipeline's thread, and another one must not close it
            return open_one(model, reference)
        return CachedRuntime(
            cache,
            partial(open_one, model, reference),
            files_bytes(reference.path) + files_bytes(reference.copy.path),
        )

    return load


def _compare_tokenizers(
    at_start: dict[tuple[str, str], str], backend: str, model: Model, runtime: ReferenceRuntime
) -> None:
    """Note what the candidate's server tokenises otherwise than a reference, once for each; a server that is not there says nothing."""
    key = model.name, runtime.artefact.digest
    if isinstance(runtime, ScoringRuntime) and key not in at_start:
        doubt = at_start[key] = doubt_of(runtime.language, backend, model.name)
        if doubt:
            _LOG.warning("model %s: %s", model.name, doubt, extra=of_model(model.name))


def _open_if_reachable(references: References, model: Model) -> None:
    """Open the references of a model. If a server is unreachable the model's reader tries again; other models go on."""
    try:
        references.add(model)
    except RetryError as error:
        _LOG.warning(
            "exchanges of model %s wait in the stream until its reference opens: %s",
            model.name,
            error,
            extra=of_model(model.name),
        )


def _exit(reason: str) -> None:
    """End the process at once: its messages in flight were not acknowledged, and are delivered again."""
    _LOG.error("%s. The shadow worker ends with exit code 1; samples wait in the stream", reason)
    exit_at_once(1)  # a thread that hangs could not be waited for


async def _connected(
    connect: Callable[[], Awaitable[Connection]],
    stop: Stop,
    *,
    waits_out: tuple[type[Exception], ...] = (RetryError,),
) -> Connection | None:
    """Call `connect` until it succeeds; return None if `stop` is set first.

    Parameters
    ----------
    waits_out
        Errors after which it is called again.
    """
    backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while not stop.is_set():
        try:
            return await connect()
        except waits_out as error:
            pause_s = backoff.next_s()
            _LOG.warning("%s; trying again in %.1f s", error, pause_s)
            await stop.wait(pause_s)
    return None

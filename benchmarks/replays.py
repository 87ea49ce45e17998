"""A real shadow worker on real servers, the bare runtime beside it, and traffic for both."""

import asyncio
import itertools
import math
import multiprocessing
import os
import signal
import socket
import time
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import msgspec
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.references import Array, Sort
from quantdrift.cli.run.serve import NICE
from quantdrift.core.codec import encode
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import (
    Config,
    Model,
    Provider,
    Shadow,
    Slice,
    Stream,
)
from quantdrift.core.keys import Key
from quantdrift.core.process.nats_server import NatsServer
from quantdrift.core.process.run import GRACE_S, run
from quantdrift.core.records import Exchange, ModelCount, Sampling, StratumCount, Tally, Tensor
from quantdrift.core.sampling.rates import policy_of
from quantdrift.core.sealing import seal
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.numbering import Numbered
from quantdrift.models.runtimes import malloc
from quantdrift.models.runtimes.registry import open_reference, runtime_request
from quantdrift.shadow.pipeline import reader
from quantdrift.shadow.worker import serve
from quantdrift.storage.admin.migrate import upgrade
from quantdrift.storage.server.postgres import PostgresServer

READY_S: Final = 120.0
# After it the server has forgotten what a worker that is stopped had asked for, and sends it nothing that is lost.
_LAPSED_S: Final = 2.0
_LONGEST_S: Final = 600.0
_POLL_S: Final = 0.02
_FAR_S: Final = 0.5
_HZ: Final = os.sysconf("SC_CLK_TCK")
SPAWN: Final = multiprocessing.get_context("spawn")
_SITES: Final = ("north", "east", "south", "west")
_SLICES: Final = (
    Slice(name="site", header="x-site"),
    Slice(name="contrast", feature="contrast", edges=(0.5, 1.0)),
)
_AT_ONCE: Final = 128
_TALLY_S: Final = 10.0
_UNSENT_BYTES: Final = 4 << 20


class Servers(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker needs.

    Parameters
    ----------
    nats_url, nats_pid
        The stream.
    dsn, postgres_pid
        The record.
    """

    nats_url: str
    nats_pid: int
    dsn: str
    postgres_pid: int

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time that each server took so far."""
        return {"nats": cpu_s(self.nats_pid), "postgres": cpu_s(self.postgres_pid, with_children=True)}


@contextmanager
def servers_in(directory: Path) -> Iterator[Servers]:
    """Run a stream and a database whose files are in a directory."""
    directory.chmod(0o755)  # as root the database server runs as somebody else
    with (
        NatsServer(directory / "nats", store_bytes=1 << 40) as nats,
        PostgresServer(directory / "postgres") as postgres,
    ):
        asyncio.run(upgrade(postgres.dsn, progress=lambda _: None))
        assert nats.pid is not None
        assert postgres.pid is not None
        yield Servers(nats_url=nats.url, nats_pid=nats.pid, dsn=postgres.dsn, postgres_pid=postgres.pid)


def config_of(
    models: Iterable[Model], servers: Servers, *, provider: Provider, keys: Path | None = None, **shadow: Any
) -> Config:
    """Return the configuration of a worker: defaults, but for where things are and `shadow`.

    Parameters
    ----------
    models
        With their references.
    servers
        Stream and record.
    provider
        Where references run.
    keys
        File of the keys that seal exchanges.
    shadow
        Options of `[shadow]`.
    """
    return Config(
        stream=Stream(
            url=servers.nats_url, name=f"b{uuid4().hex[:8]}", payload_key_file=str(keys) if keys else ""
        ),
        shadow=Shadow(provider=provider, **shadow),
        models=tuple(models),
        slices=_SLICES,
    )


class Worker:
    """One shadow worker, or several that share the work, each in a process of its own. Use `running`.

    Parameters
    ----------
    config, servers
        What it works with.
    processes
        Where it runs, by address of the admin port.
    """

    def __init__(self, config: Config, servers: Servers, processes: Mapping[str, psutil.Process]) -> None:
        self.config = config
        self._servers = servers
        self._processes = processes

    def pause(self) -> None:
        """Stop it where it stands."""
        for process in self._processes.values():
            process.send_signal(signal.SIGSTOP)
        time.sleep(_LAPSED_S)

    def go_on(self) -> None:
        """Let it go on."""
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)

    def rss_mb(self) -> float:
        """Return its resident memory, in MB."""
        return math.fsum(process.memory_info().rss for process in self._processes.values()) / 1e6

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time of its event loop, of its other threads, and of the servers."""
        loop_s = all_s = 0.0
        for process in self._processes.values():
            threads = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
            loop_s += threads.get(process.pid, 0.0)
            all_s += cpu_s(process.pid)
        return {"loop": loop_s, "replay": all_s - loop_s, **self._servers.cpu_s()}

    def steps_s(self) -> dict[str, float]:
        """Return the time that batches spent in each step so far, as its own telemetry has it."""
        steps: defaultdict[str, float] = defaultdict(float)
        for labels, value in self._told("step_duration_seconds_sum"):
            steps[labels["step"]] += value
        return dict(steps)

    def replays(self) -> dict[str, float]:
        """Return how many batches were replayed so far, of how many items, and for how many seconds."""
        names = {
            "batches": "replay_duration_seconds_count",
            "seconds": "replay_duration_seconds_sum",
            "items": "batch_items_sum",
        }
        return {key: math.fsum(value for _, value in self._told(name)) for key, name in names.items()}

    def _told(self, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        for admin in self._processes:
            for family in text_string_to_metric_families(_get(f"http://{admin}/metrics")):
                for sample in family.samples:
                    if sample.name == f"quantdrift_shadow_{name}":
                        yield sample.labels, sample.value


@asynccontextmanager
async def running(
    config: Config, servers: Servers, n: int = 1, most_items: int = reader.MOST_ITEMS
) -> AsyncIterator[Worker]:
    """Run a worker, or `n` of them, until they have opened their references, and end them afterwards.

    Parameters
    ----------
    most_items
        Of a batch where the reference is quick, and `shadow.batch_items` is not more.
    """
    processes = {}
    try:
        for _ in range(n):
            admin = f"127.0.0.1:{_free_port()}"
            own = msgspec.structs.replace(config, shadow=msgspec.structs.replace(config.shadow, admin=admin))
            processes[admin] = SPAWN.Process(target=_work, args=(own, servers.dsn, most_items), daemon=True)
            processes[admin].start()
        for admin, process in processes.items():
            await _until_ready(admin, process)
        yield Worker(
            config, servers, {admin: psutil.Process(process.pid) for admin, process in processes.items()}
        )
    finally:
        for process in processes.values():
            if process.pid is not None:
                os.kill(process.pid, signal.SIGCONT)
            process.terminate()
        for process in processes.values():
            await asyncio.to_thread(process.join, READY_S)
            if process.is_alive():
                process.kill()


async def until_left(queue: Queue, n_left: int, n_near: int) -> int:
    """Wait until no more than `n_left` are not acknowledged, looking seldom until `n_near` more are; return how many are."""
    until = time.monotonic() + _LONGEST_S
    while (n := (await read_backlog(queue)).n_messages) > n_left:
        if time.monotonic() > until:
            raise TimeoutError(f"the worker has not finished within {_LONGEST_S:g} s")
        # Asking costs time that the worker could have had.
        await asyncio.sleep(_POLL_S if n <= n_left + n_near else _FAR_S)
    return n


class Bare:
    """The runtime alone, with the same options, in a process of its own. Use `bare`.

    Parameters
    ----------
    pipe
        To that process.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def compute(self, batches: Sequence[Array]) -> list[Array]:
        """Return the outputs of each batch."""
        self._pipe.send(("compute", batches))
        outputs: list[Array] = self._answer()
        return outputs

    def per_s(self, batch: Array, n: int) -> tuple[float, float]:
        """Return items per second over `n` batches, and processor time for each item."""
        self._pipe.send(("time", (batch, n)))
        per_s, cpu_s = self._answer()
        return per_s, cpu_s

    def _answer(self) -> Any:
        if not self._pipe.poll(10 * READY_S):
            raise TimeoutError("the bare runtime does not answer")
        return self._pipe.recv()


@contextmanager
def bare(config: Config) -> Iterator[Bare]:
    """Open the first model's reference as the worker does, niced as the worker is."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_bare, args=(config, theirs), daemon=True)
    process.start()
    try:
        yield Bare(ours)
    finally:
        process.terminate()
        process.join(READY_S)


class Traffic:
    """Exchanges of one item each, made from a few items and the reference's own outputs with noise.

    They come from as many pods as wanted, each of which numbers its own exchanges and, in `steady`, sends its counts every ten seconds.

    Parameters
    ----------
    queue
        Where they go.
    models
        Names of the models, in turn those of the pods.
    sort
        Their kind.
    items, logits
        Of the reference : (items, ...).
    key
        Seals each exchange; None: they are published as they are.
    attributes
        Returns the attributes of an exchange, by its number; without it one of four sites.
    n_pods
        How many sidecars they come from.
    sampled
        Share of the requests of a pod that are exchanges.
    noise
        Of the candidate's logits.
    """

    def __init__(
        self,
        queue: Queue,
        models: Sequence[str],
        sort: Sort,
        items: Array,
        logits: Array,
        *,
        key: Key | None = None,
        attributes: Callable[[int], dict[str, str]] | None = None,
        n_pods: int = 1,
        sampled: float = 1.0,
        noise: float = 0.1,
    ) -> None:
        self._queue = queue
        self._key = key
        self._attributes = attributes or (lambda index: {"header.x-site": _SITES[index % len(_SITES)]})
        self._sampled = sampled
        self._captured_at = datetime.now(UTC) - timedelta(hours=1)
        self._pods = [
            _Pod(name=f"pod-{number}", boot=uuid4().hex, model=models[number % len(models)])
            for number in range(max(n_pods, len(models)))
        ]
        noisy = logits + noise * np.random.default_rng(1).standard_normal(logits.shape)
        self._pairs = [
            (_tensor(sort.input, sort.datatype, item), _tensor("logits", "FP32", one))
            for item, one in zip(items, noisy.astype(np.float32), strict=True)
        ]
        self._at_once = max(1, min(_AT_ONCE, _UNSENT_BYTES // items[0].nbytes))
        self._sampling = Sampling(
            policy=policy_of(Config().sampling, "benchmark"),
            header_stratum="default",
            body_stratum="default",
            pi1=1.0,
            pi2=1.0,
            u1=0.0,
            u2=0.0,
        )

    async def publish(self, n: int, *, captured_per_s: float | None = None) -> None:
        """Put `n` exchanges into the stream.

        Parameters
        ----------
        captured_per_s
            They were captured at this rate, one after the other, since an hour ago; None: each when it is made.
        """
        for begin in range(0, n, self._at_once):
            indices = range(begin, min(begin + self._at_once, n))
            if captured_per_s is None:
                await asyncio.gather(*(self._put(index) for index in indices))
                continue
            step = timedelta(seconds=1 / captured_per_s)
            await asyncio.gather(
                *(
                    self._put(index, self._captured_at + place * step)
                    for place, index in enumerate(indices, start=1)
                )
            )
            self._captured_at += len(indices) * step

    async def steady(self, per_s: float, seconds: float) -> None:
        """Put exchanges into the stream at a constant rate, and the counts of their pods, whatever becomes of them."""
        began, n, sent = time.monotonic(), max(1, round(per_s * seconds)), 0
        async with asyncio.TaskGroup() as tasks:
            counting = tasks.create_task(self._count()) if len(self._pods) > 1 else None
            while sent < n:
                await asyncio.sleep(max(began + sent / per_s - time.monotonic(), 0.0))
                due = min(n, sent + self._at_once, max(sent, int((time.monotonic() - began) * per_s)) + 1)
                await asyncio.gather(*(self._put(index) for index in range(sent, due)))
                sent = due
            if counting is not None:
                counting.cancel()

    async def _count(self) -> None:
        """Send the counts of one pod after the other, each every ten seconds."""
        began = time.monotonic()
        for number in itertools.count():
            await asyncio.sleep(max(began + number * _TALLY_S / len(self._pods) - time.monotonic(), 0.0))
            pod = self._pods[number % len(self._pods)]
            pod.n_tallies += 1
            counts = ModelCount(taken=pod.n, row=0, numbered=pod.n, published=pod.n)
            stratum = StratumCount(
                stratum="default",
                offered=round(pod.n / self._sampled),
                taken=pod.n,
                thinned=0,
                published=pod.n,
                models={pod.model: counts},
            )
            tally = Tally(
                source=pod.name,
                boot=pod.boot,
                sequence=pod.n_tallies,
                at=datetime.now(UTC),
                strata=(stratum,),
                blind_connections=0,
            )
            await self._queue.publish_tally(pod.name, pod.boot, pod.n_tallies, encode(tally))

    async def _put(self, index: int, captured_at: datetime | None = None) -> None:
        given, answered = self._pairs[index % len(self._pairs)]
        pod = self._pods[index % len(self._pods)]
        exchange = Exchange(
            id=uuid4().hex,
            captured_at=captured_at or datetime.now(UTC),
            source=pod.name,
            model=pod.model,
            version="int8",
            protocol="oip-v2-rest",
            inputs=(given,),
            outputs=(answered,),
            attributes=self._attributes(index),
            sampling=self._sampling,
        )
        wire = encode(exchange)
        if self._key is not None:
            wire = seal(wire, self._key, model=pod.model, exchange_id=exchange.id)
        pod.n += 1
        number = Numbered(boot=pod.boot, row=0, number=pod.n)
        await self._queue.publish_exchange(pod.model, exchange.id, wire, number)


class _Pod(msgspec.Struct, kw_only=True):
    """A sidecar of which there are only the records that it sends."""

    name: str
    boot: str
    model: str
    n: int = 0
    n_tallies: int = 0


def _tensor(name: str, datatype: str, item: Array) -> Tensor:
    return Tensor(name=name, datatype=datatype, shape=(1, *item.shape), data=item.tobytes())


def _work(config: Config, dsn: str, most_items: int) -> None:
    reader.MOST_ITEMS = most_items
    raise SystemExit(run(lambda stop: serve(config, Secrets(dsn=dsn), stop), grace_s=GRACE_S))


def _bare(config: Config, pipe: Connection) -> None:
    os.nice(NICE)
    malloc.configure()  # the worker's own advantage would pass for its efficiency
    model = config.models[0]
    runtime = open_reference(runtime_request(config, model, model.references[0]))
    name = runtime.inputs[0].name
    while True:
        what, given = pipe.recv()
        if what == "compute":
            pipe.send([runtime.run({name: batch})["logits"] for batch in given])
            continue
        batch, n = given
        runtime.run({name: batch})
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(n):
            runtime.run({name: batch})
        n_items = n * len(batch)
        pipe.send((n_items / (time.perf_counter() - began_s), (time.process_time() - began_cpu_s) / n_items))


async def _until_ready(admin: str, process: Any) -> None:
    until = time.monotonic() + READY_S
    while True:
        try:
            await asyncio.to_thread(_get, f"http://{admin}/readyz")
        except OSError:
            if not process.is_alive() or time.monotonic() > until:
                raise SystemExit("the shadow worker does not start") from None
            await asyncio.sleep(0.1)
        else:
            return


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=READY_S) as answer:  # noqa: S310 - our own port
        text: str = answer.read().decode()
        return text


def cpu_s(pid: int, *, with_children: bool = False) -> float:
    """Return the processor time of a process so far, with that of children that live and that are gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        children = psutil.Process(pid).children() if with_children else []
    except (OSError, psutil.NoSuchProcess):
        return 0.0
    own = sum(int(field) for field in fields[11 : 15 if with_children else 13]) / _HZ
    return own + math.fsum(cpu_s(child.pid, with_children=True) for child in children)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])

"""Every port of a sidecar is flooded: what its processes take, whether they live, and what the relay's clients notice.

    python -m benchmarks.flood [--quick]

A whole sidecar with every way in runs between a client and a backend, all on this host; nothing leaves the loopback
interface. The client asks alone before and after; in between a second process floods every port, within a bounded number of connections
and a bounded time: heads and bodies without end on the relay, the intake and the admin port; messages of 17 MB without
their last byte and streams without a message on Envoy's port; unfinished frames on the socket of the taps; and requests
of two million 1e308, which cost processor time. The flood sends at most `_MB_PER_S` and has the lowest priority, so that the figures
are those of the sidecar and not of a busy machine.

Memory is the proportional set size (PSS) of all processes of the sidecar, four times a second, against the figure that
`quantdrift config check` prints for the same configuration. The latency is that of 4 connections which ask in turn.

Before the flood of the sidecar the same flood goes for as long to a process of the lowest priority that reads and drops it
(the control), while the client asks the relay as before. What the relay's clients notice then is the cost of so much
traffic on this host; what they notice beyond that comes from the sidecar and the backend. For each phase the benchmark also
prints which share of it the client, the backend and the relay worker ran, and waited for a processor while others had it.

`--quick`: 1,000 connections for a minute. In full: 5,000 for ten minutes.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import resource
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

import msgspec
import psutil

from benchmarks.relay import make_stream
from benchmarks.result import Goal, finish
from benchmarks.ways import free_port
from quantdrift.cli.config_summary import memory_bytes
from quantdrift.core.config.load import load
from quantdrift.core.process.nats_server import NatsServer

_TOKEN: Final = "t0ken"  # noqa: S105 - of this run's own sidecar
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_MESSAGE_BYTES: Final = 17_000_000
_COSTLY_BYTES: Final = 11_400_000
_PIECE: Final = bytes(16_384)
_MB_PER_S: Final = 20.0
_CONNECTIONS: Final = 4
_READY_S: Final = 60.0
_LOOK_S: Final = 0.25
_ANSWER: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
_BODY: Final = b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[0.5]}]}'
_ASK: Final = (
    b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    % (len(_BODY), _BODY)
)


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How much of it.

    Parameters
    ----------
    connections
        Of the flood, over all ports.
    quiet_s, flood_s
        How long the client asks alone, before and after together, and during the flood.
    """

    connections: int = 5_000
    quiet_s: float = 60.0
    flood_s: float = 600.0


QUICK = Scale(connections=1_000, quiet_s=15.0, flood_s=60.0)


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """Where the sidecar listens on this host."""

    relay: int
    admin: int
    intake: int
    logger: int
    ext_proc: int
    tap: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.flood", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1,000 connections for a minute")
    scale = QUICK if parser.parse_args(arguments).quick else Scale()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="qd-") as temporary, contextlib.ExitStack() as stack:
        directory = Path(temporary)
        backend = free_port()
        serving = spawn.Process(target=_serve, args=(backend,), daemon=True)
        serving.start()
        stack.callback(serving.terminate)
        server = stack.enter_context(NatsServer(directory / "nats"))
        asyncio.run(make_stream(server.url))
        ports = Ports(
            relay=free_port(),
            admin=free_port(),
            intake=free_port(),
            logger=free_port(),
            ext_proc=free_port(),
            tap=str(directory / "tap"),
        )
        allowed, root = stack.enter_context(_sidecar(directory, ports, backend, server.url))
        watch = stack.enter_context(_Watch(root))
        asyncio.run(_ask(ports.relay, 2.0))
        quiet = asyncio.run(_ask(ports.relay, scale.quiet_s / 2))
        idle = dict(watch.most)
        pids = {"client": os.getpid(), "backend": serving.pid or 0, "relay": watch.pid_of("relay")}
        dropped = Ports(
            relay=free_port(),
            admin=free_port(),
            intake=free_port(),
            logger=free_port(),
            ext_proc=free_port(),
            tap=str(directory / "dropped"),
        )
        dropping = spawn.Process(target=_drop, args=(dropped,), daemon=True)
        dropping.start()
        stack.callback(dropping.terminate)
        _wait_for(dropped.relay)
        phases: dict[str, tuple[Asked, dict[str, float]]] = {}
        for phase, flooded_ports in (("control", dropped), ("flood", ports)):
            flood = spawn.Process(
                target=_flood, args=(flooded_ports, scale.connections, scale.flood_s), daemon=True
            )
            flood.start()
            stack.callback(flood.terminate)
            before = _processor_times(pids)
            asked = asyncio.run(_ask(ports.relay, scale.flood_s))
            used = {
                name: round((value - before[name]) / scale.flood_s, 3)
                for name, value in _processor_times(pids).items()
            }
            phases[phase] = asked, used
            flood.join(30.0)
            if phase == "control":
                dropping.terminate()
        control, flooded = phases["control"][0], phases["flood"][0]
        after = asyncio.run(_ask(ports.relay, scale.quiet_s / 2))
        quiet.times_s += after.times_s  # before and after, because other work of this machine comes and goes
    figures: dict[str, float | int | str | None] = {
        "connections": scale.connections,
        "flood_s": scale.flood_s,
        "allowed_mib": round(allowed / 2**20),
        **{f"{role}_quiet_mib": _mib(n_bytes) for role, n_bytes in idle.items()},
        **{f"{role}_flood_mib": _mib(n_bytes) for role, n_bytes in watch.most.items()},
        "deaths": watch.n_deaths,
        "requests_quiet": len(quiet.times_s),
        "requests_flood": len(flooded.times_s),
        "failed_flood": flooded.n_failed,
        "failed_after": after.n_failed,
        "p50_quiet_ms": _ms(quiet, 50),
        "p50_flood_ms": _ms(flooded, 50),
        "p99_quiet_ms": _ms(quiet, 99),
        "p99_flood_ms": _ms(flooded, 99),
        "p50_control_ms": _ms(control, 50),
        "p99_control_ms": _ms(control, 99),
        "p99_ratio_to_control": round(_ms(flooded, 99) / _ms(control, 99), 3),
        **{
            f"{name}_{phase}_share": share
            for phase, (_, used) in phases.items()
            for name, share in used.items()
        },
    }
    for name, value in figures.items():
        print(f"{name:24} {value}")
    goals = [
        Goal(name="memory_ratio", value=watch.most["together"] / allowed, bound=1.0, unit="ratio"),
        Goal(name="deaths", value=float(watch.n_deaths), bound=0.0, unit="processes"),
        Goal(name="failed_requests", value=float(flooded.n_failed), bound=0.0, unit="requests"),
        Goal(name="p99_ratio", value=_ms(flooded, 99) / _ms(quiet, 99), bound=1.1, unit="ratio"),
    ]
    finish("flood", figures, goals)
    return 0


class Asked(msgspec.Struct, kw_only=True):
    """What the client saw."""

    times_s: list[float]
    n_failed: int = 0


async def _ask(port: int, seconds: float) -> Asked:
    """Ask on a few connections in turn until the time is over."""
    asked = Asked(times_s=[])
    until = time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < until:
            writer = None
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                while time.monotonic() < until:
                    begun = time.perf_counter()
                    writer.write(_ASK)
                    await asyncio.wait_for(reader.readexactly(len(_ANSWER)), 30)
                    asked.times_s.append(time.perf_counter() - begun)
                    await asyncio.sleep(0.005)
            except (OSError, asyncio.IncompleteReadError, TimeoutError):
                asked.n_failed += 1
                await asyncio.sleep(0.1)
            finally:
                if writer is not None:
                    writer.close()

    await asyncio.gather(*(one() for _ in range(_CONNECTIONS)))
    return asked


def _serve(port: int) -> None:
    """Answer each request that arrives whole."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                left = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
                while left:
                    left -= len(await reader.read(min(left, 1 << 16))) or left
                writer.write(_ANSWER)
                await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", port, backlog=4096)
        await server.serve_forever()

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    asyncio.run(serve())


def _drop(ports: Ports) -> None:
    """Read what comes and drop it, at the lowest priority; answer a request as long as that of `_costly` once."""
    os.nice(19)
    buffer = bytearray(1 << 18)

    class Drop(asyncio.BufferedProtocol):
        transport: asyncio.Transport
        n_bytes = 0

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self.transport = transport

        def get_buffer(self, sizehint: int) -> bytearray:
            del sizehint
            return buffer

        def buffer_updated(self, nbytes: int) -> None:
            short = self.n_bytes < _COSTLY_BYTES
            self.n_bytes += nbytes
            if short and self.n_bytes >= _COSTLY_BYTES:
                self.transport.write(_ANSWER)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        await loop.create_unix_server(Drop, ports.tap)
        for port in (ports.admin, ports.intake, ports.ext_proc):
            await loop.create_server(Drop, "127.0.0.1", port, backlog=4096)
        server = await loop.create_server(Drop, "127.0.0.1", ports.relay, backlog=4096)
        await server.serve_forever()

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    asyncio.run(serve())


def _wait_for(port: int) -> None:
    """Wait until somebody listens on the port."""
    until = time.monotonic() + _READY_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return


def _processor_times(pids: dict[str, int]) -> dict[str, float]:
    """Return how long the main thread of each process ran, and waited for a processor, seconds."""
    times: dict[str, float] = {}
    for name, pid in pids.items():
        ran_ns, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
        times |= {f"{name}_ran": int(ran_ns) / 1e9, f"{name}_waited": int(waited_ns) / 1e9}
    return times


@contextlib.contextmanager
def _sidecar(
    directory: Path, ports: Ports, backend: int, nats_url: str
) -> Iterator[tuple[int, psutil.Process]]:
    """Run a sidecar with every way in; yield what memory it may take, and its first process."""
    (directory / "token").write_text(_TOKEN, encoding="utf-8")
    path = directory / "config.toml"
    path.write_text(
        f"""[sidecar]
listen = "127.0.0.1:{ports.relay}"
backend = "127.0.0.1:{backend}"
admin = "127.0.0.1:{ports.admin}"
drain_delay_s = 0.0
[intake]
listen = "127.0.0.1:{ports.intake}"
ext_proc = "127.0.0.1:{ports.ext_proc}"
tap = "{ports.tap}"
token_file = "{directory / "token"}"
kserve_logger = "127.0.0.1:{ports.logger}"
[stream]
url = "{nats_url}"
[sampling]
rate = 1.0
[[models]]
name = "m"
""",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "quantdrift", "sidecar", "-c", str(path)]
    with (
        (directory / "log").open("wb") as log,
        subprocess.Popen(command, cwd=directory, stderr=log) as process,
    ):
        try:
            until = time.monotonic() + _READY_S
            while not asyncio.run(_is_ready(ports.admin)):
                if process.poll() is not None or time.monotonic() > until:
                    raise TimeoutError("the sidecar does not become ready")
                time.sleep(0.05)
            yield memory_bytes(load(path)), psutil.Process(process.pid)
        finally:
            process.terminate()


async def _is_ready(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        line = await asyncio.wait_for(reader.readline(), 5)
        writer.close()
    except (OSError, TimeoutError):
        return False
    return b" 200 " in line


class _Watch:
    """Looks at the processes of the sidecar: the most memory of each, and how many died."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self._processes = {"supervisor": root} | {self._role(child): child for child in root.children()}
        self._pids = {process.pid for process in self._processes.values()}
        self.most = dict.fromkeys([*self._processes, "together"], 0)
        self.n_deaths = 0  # known at the end
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def pid_of(self, role: str) -> int:
        """Return the process id of the child with the role."""
        return self._processes[role].pid

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.n_deaths = sum(not process.is_running() for process in self._processes.values())
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(_LOOK_S):
            together = 0
            for role, process in self._processes.items():
                with contextlib.suppress(psutil.NoSuchProcess):
                    memory = process.memory_full_info()
                    self.most[role] = max(self.most[role], memory.rss)
                    together += memory.pss
            self.most["together"] = max(self.most["together"], together)

    @staticmethod
    def _role(process: psutil.Process) -> str:
        modules = [word for word in process.cmdline() if word.startswith("quantdrift.sidecar.")]
        return modules[0].split(".")[2] if modules else str(process.pid)


def _flood(ports: Ports, n_connections: int, seconds: float) -> None:
    """Flood every port until the time is over."""
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    asyncio.run(_Flood(ports, n_connections, seconds).run())


class _Flood:
    """Connections that send much and finish nothing, at a bounded rate together."""

    def __init__(self, ports: Ports, n_connections: int, seconds: float) -> None:
        self._ports = ports
        self._n = n_connections
        self._until = time.monotonic() + seconds
        self._n_bytes = 0
        self._begun = time.monotonic()

    async def run(self) -> None:
        head = f"Host: a\r\nAuthorization: Bearer {_TOKEN}\r\nContent-Type: application/json\r\n".encode()
        long = b"Content-Length: %d\r\n\r\n" % _MESSAGE_BYTES
        relay, intake = (
            b"POST /v2/models/m/infer HTTP/1.1\r\n" + head,
            b"POST /v1/exchanges HTTP/1.1\r\n" + head,
        )
        data_frame = struct.pack("!IBI", len(_PIECE) << 8, 0, 1) + _PIECE
        message = b"\0" + _MESSAGE_BYTES.to_bytes(4, "big")
        first = struct.pack("!IBI", len(message) << 8, 0, 1) + message
        tap = struct.pack("!IB", 16_000_000, 1)
        envoy = _PREFACE + struct.pack("!IBI", 4, 0, 0) + first
        # What each kind of connection sends at first, again and again, and its share of the connections.
        kinds: list[tuple[int | str, bytes, bytes, float]] = [
            (self._ports.relay, relay, b"x-a: b\r\n", 0.25),
            (self._ports.relay, relay + long, _PIECE, 0.05),
            (self._ports.intake, intake, b"x-a: b\r\n", 0.2),
            (self._ports.intake, intake + long, _PIECE, 0.1),
            (self._ports.ext_proc, envoy, data_frame, 0.2),
            (self._ports.ext_proc, b"", b"", 0.05),
            (self._ports.admin, b"GET /metrics HTTP/1.1\r\n", b"x-a: b\r\n", 0.1),
            (self._ports.tap, tap, _PIECE, 0.05),
        ]
        numbers = b",".join([b"1e308"] * 1_900_000)
        request = b'{"inputs":[{"name":"x","shape":[1900000],"datatype":"FP32","data":[%b]}]}' % numbers
        costly = relay + b"Content-Length: %d\r\n\r\n" % len(request) + request
        tasks = [
            self._one(where, start, piece)
            for where, start, piece, share in kinds
            for _ in range(int(self._n * share))
        ]
        await asyncio.gather(*tasks, self._costly(costly))

    async def _one(self, where: int | str, start: bytes, piece: bytes) -> None:
        while time.monotonic() < self._until:
            writer = None
            try:
                _, writer = await asyncio.wait_for(_connect(where), 10)
                await self._send(writer, start)
                while time.monotonic() < self._until and not writer.is_closing():
                    await self._send(writer, piece)
                    await asyncio.sleep(0.5 if len(piece) > 100 else 2.0)
            except (OSError, TimeoutError):
                await asyncio.sleep(1.0)
            finally:
                if writer is not None:
                    writer.close()

    async def _costly(self, request: bytes) -> None:
        while time.monotonic() < self._until:
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await asyncio.wait_for(_connect(self._ports.relay), 10)
                await self._send(writer, request)
                await asyncio.wait_for(reader.readline(), 10)
                writer.close()
            await asyncio.sleep(2.0)

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        while self._n_bytes > (time.monotonic() - self._begun) * _MB_PER_S * 1e6:
            await asyncio.sleep(0.05)
            if time.monotonic() > self._until:
                return
        self._n_bytes += len(data)
        writer.write(data)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(writer.drain(), 5)


async def _connect(where: int | str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(where, str):
        return await asyncio.open_unix_connection(where)
    return await asyncio.open_connection("127.0.0.1", where)


def _mib(n_bytes: int) -> float:
    return round(n_bytes / 2**20, 1)


def _ms(asked: Asked, percentile: int) -> float:
    return round(statistics.quantiles(asked.times_s, n=100)[percentile - 1] * 1000, 3)


if __name__ == "__main__":
    sys.exit(main())

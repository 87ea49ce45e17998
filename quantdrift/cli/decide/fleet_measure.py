"""What one exchange costs on this machine: real processes, servers and traffic for a minute or two, thrown away afterwards."""

import asyncio
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import asyncpg
import msgspec
import numpy as np
from numpy.typing import NDArray

from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.passed_secrets import variables
from quantdrift.monitor.planning.fleet import COSTS, Costs

_LIMIT_S: Final = 120.0
_LEAD: Final = 500  # until everything is loaded and compiled
_N: Final = 6_000
_SLOW_PER_S: Final = 30.0
_SLOW_S: Final = 20.0
_CLIENTS: Final = 8
_INPUTS: Final = 64
_CLASSES: Final = 10
_MOST_SLICES: Final = 200
_HEADERS: Final = 7  # of which each exchange has one value, so that it lies in so many slices and in `all`
_LEAST_COMPARED: Final = 0.9  # of the requests: a busy machine loses samples
_POLL_S: Final = 1.0  # each look costs Postgres a connection
_TOLD_APART: Final = 0.5
"""Share by which the phases must differ in the slices that they touch, for these to be told apart."""
_STOP_S: Final = 30.0
_MODEL: Final = "measured"
PARTS: Final = ("worker", "leader", "nats", "postgres")
_COUNTS: Final = """
select (select count(*) from comparison), (select count(*) from batch),
       (select count(*) from batch where fold_seq is null),
       (select coalesce(sum(n_tup_ins + n_tup_upd), 0)::bigint from pg_stat_user_tables where relname = 'rollup_day'),
       (select sum(pg_total_relation_size(inhrelid)) from pg_inherits where inhparent = 'comparison'::regclass)
"""
"""A slice that a turn of the fold touches has one row of `rollup_day` written."""
_CONFIG: Final = """
[sidecar]
listen = "127.0.0.1:{relay}"
backend = "127.0.0.1:{backend}"
admin = "127.0.0.1:{sidecar}"
drain_delay_s = 0.0
[shadow]
admin = "127.0.0.1:{shadow}"
[monitor]
admin = "127.0.0.1:{monitor}"
[capture]
headers = {headers}
[sampling]
rate = 1.0
max_exchanges_per_s = 1_000_000
[[models]]
name = "measured"
[[models.references]]
path = "reference.onnx"
"""
_SLICES: Final = """
[[slices]]
name = "{name}"
header = "{name}"
max_values = {n_values}
"""


class _Seen(msgspec.Struct, frozen=True):
    """Rows and processor time so far."""

    at_s: float
    n: int
    n_batches: int
    n_unfolded: int
    n_slices: int
    n_bytes: int
    cpu_s: dict[str, float]


def measure(n_slices: int, say: Callable[[str], None]) -> Costs:
    """Return the costs of small exchanges on this machine; takes two minutes at most.

    It runs `quantdrift up` in a directory that it removes, with a sidecar, a shadow worker, a monitor, NATS and Postgres, and sends some
    thousand requests: first as fast as it can, so that many exchanges share the slices of a turn, then few in a second, which hardly do. So
    a slice is told apart from an exchange. Costs that depend on weeks of data stay those of `COSTS`.

    Parameters
    ----------
    n_slices
        Slices of the model; more than 200 are not tried.

    Raises
    ------
    OperatorError
        This is not Linux, or the processes do not start.
    RetryError
        Two minutes were not enough.
    """
    if not Path("/proc/self/stat").exists():
        raise OperatorError("--measure reads processor time in /proc, which only Linux has")
    with tempfile.TemporaryDirectory(prefix="qd-") as folder, _answering() as backend:
        directory = Path(folder)
        _write_reference(directory / "reference.onnx")
        ports = {name: _free_port() for name in ("relay", "sidecar", "shadow", "monitor")}
        config = directory / "config.toml"
        shared, more = divmod(max(min(n_slices, _MOST_SLICES) - 1, 1), _HEADERS)
        values = {
            f"x-h{number}": shared + (number < more) for number in range(_HEADERS) if shared + (number < more)
        }
        text = _CONFIG.format(backend=backend, headers=json.dumps(list(values)), **ports)
        text += "".join(_SLICES.format(name=name, n_values=n) for name, n in values.items())
        config.write_text(text, encoding="utf-8")
        with _up(config, directory / "data", directory / "log") as root:
            return _measured(_Run(root, directory), ports["relay"], values, say)


def _measured(run: "_Run", port: int, values: Mapping[str, int], say: Callable[[str], None]) -> Costs:
    say("starting everything")
    run.wait(lambda: _accepts(port) and run.look() is not None, "the processes did not start")
    say(f"sending {_LEAD} requests, so that everything is loaded")
    _send(port, _LEAD, values)
    seen = [run.settle(_LEAD, "the first exchanges were not compared and folded")]
    sent = _LEAD
    for n, per_s, how in (
        (_N, 0.0, "as fast as possible"),
        (round(_SLOW_S * _SLOW_PER_S), _SLOW_PER_S, f"{_SLOW_PER_S:g} a second"),
    ):
        say(f"sending {n:,} requests, {how}")
        _send(port, n, values, per_s)
        sent += n
        seen.append(run.settle(sent, "the exchanges were not compared and folded"))
    phases = [Phase.between(before, after) for before, after in pairwise(seen)]
    for phase in phases:
        say(
            f"measured {phase.n:,} exchanges in batches of {phase.batch:.0f}, {phase.slices:.1f} slices touched for each"
        )
    return measured_costs(phases, comparison_bytes=(seen[1].n_bytes - seen[0].n_bytes) / phases[0].n)


class _Run:
    """A running `quantdrift up`, for two minutes at most.

    Parameters
    ----------
    root, directory
        Its process, and the folder with its data and its log.
    """

    def __init__(self, root: subprocess.Popen[bytes], directory: Path) -> None:
        self._root, self._directory = root, directory
        self._until_s = time.monotonic() + _LIMIT_S

    def look(self) -> "_Seen | None":
        """Return rows and processor time; None: Postgres, or its schema, is not there yet."""
        return _look(self._root.pid, self._directory / "data")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; `what` says what did not come."""
        while not condition():
            if self._root.poll() is not None:
                log = (self._directory / "log").read_text("utf-8", "replace")
                raise OperatorError(f"`quantdrift up` ended: {' / '.join(log.strip().splitlines()[-3:])}")
            if time.monotonic() > self._until_s:
                raise RetryError(
                    f"{_LIMIT_S:g} s were not enough: {what}; try again when the machine has less to do"
                )
            time.sleep(_POLL_S)

    def settle(self, n_sent: int, what: str) -> "_Seen":
        """Wait until so many exchanges are compared and folded, and return what there is then."""
        last: list[_Seen] = []

        def settled() -> bool:
            seen = self.look()
            if seen is None:
                return False
            is_quiet = bool(last) and seen.n == last[-1].n
            last.append(seen)
            return is_quiet and seen.n >= n_sent * _LEAST_COMPARED and not seen.n_unfolded

        self.wait(settled, what)
        return last[-1]


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Exchanges that were sent alike, and what they took.

    Parameters
    ----------
    n, batch, slices, seconds
        How many; how many were stored in one transaction; slices that turns of the fold touched, and time that passed, for each.
    us
        Processor time of each part, for each.
    """

    n: int
    batch: float
    slices: float
    seconds: float
    us: dict[str, float]

    @classmethod
    def between(cls, before: "_Seen", after: "_Seen") -> "Phase":
        """Return what was done between two looks."""
        n = max(after.n - before.n, 1)
        return cls(
            n=n,
            batch=n / max(after.n_batches - before.n_batches, 1),
            slices=(after.n_slices - before.n_slices) / n,
            seconds=(after.at_s - before.at_s) / n,
            us={part: 1e6 * (after.cpu_s[part] - before.cpu_s[part]) / n for part in PARTS},
        )


def measured_costs(phases: Sequence[Phase], comparison_bytes: float) -> Costs:
    """Return the costs that fit best to what was measured.

    A slice is told apart from an exchange by phases that touch more and fewer of them. What is of an exchange, of a batch and of a second keeps the
    shipped proportion.
    """
    shipped = msgspec.structs.asdict(COSTS)
    found: dict[str, float] = {}
    for part in PARTS:
        us = np.array([phase.us[part] for phase in phases])
        of_one, of_slice = f"{part}_us", f"{part}_slice_us"
        usual = np.array(
            [
                shipped[of_one]
                + shipped[f"{part}_batch_us"] / phase.batch
                + shipped[f"{part}_second_us"] * phase.seconds
                for phase in phases
            ]
        )
        touched = np.array([phase.slices for phase in phases])
        of_slices = shipped.get(of_slice, 0.0)
        (scale,) = _least_off((usual + of_slices * touched)[:, None], us)
        of_slices *= scale
        if of_slice in shipped and np.ptp(touched) > _TOLD_APART * touched.max():
            apart, of_one_slice = _least_off(np.column_stack([usual, touched]), us)
            if apart > 0 and of_one_slice >= 0:
                scale, of_slices = apart, of_one_slice
        found |= {name: scale * shipped[name] for name in (of_one, f"{part}_batch_us", f"{part}_second_us")}
        if of_slice in shipped:
            found[of_slice] = of_slices
    return msgspec.structs.replace(COSTS, **found, comparison_bytes=comparison_bytes)


def _least_off(terms: NDArray[np.float64], us: NDArray[np.float64]) -> list[float]:
    """Return the factors of terms whose sums are least off by their shares."""
    factors: list[float] = np.linalg.lstsq(terms / us[:, None], np.ones(len(us)), rcond=None)[0].tolist()
    return factors


def _look(root: int, data: Path) -> _Seen | None:
    """Return rows and processor time; None: Postgres, or its schema, is not there yet."""
    try:
        dsn = (data / "dsn").read_text(encoding="utf-8").strip()
        n, n_batches, n_unfolded, n_slices, n_bytes = asyncio.run(_counts(dsn))
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return None
    return _Seen(time.monotonic(), n, n_batches, n_unfolded, n_slices, int(n_bytes or 0), _cpu_s(root, data))


async def _counts(dsn: str) -> Any:
    connection = await asyncpg.connect(dsn, timeout=5)
    try:
        return tuple(await connection.fetchrow(_COUNTS))
    finally:
        await connection.close()


def _cpu_s(root: int, data: Path) -> dict[str, float]:
    """Return the processor time of each part: of its processes that live, and of their children that are gone."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    spent_s: dict[int, float] = {}
    ticks = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            pid = int(entry.name)
            commands[pid] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            parents[pid] = int(fields[1])
            spent_s[pid] = sum(map(int, fields[11:15])) / ticks
    parts: defaultdict[str, float] = defaultdict(float)
    for pid in parents:
        if part := _part(pid, root, data, parents, commands):
            parts[part] += spent_s[pid]
    return {part: parts[part] for part in PARTS}


def _part(pid: int, root: int, data: Path, parents: dict[int, int], commands: dict[int, str]) -> str:
    """Return the part that a process belongs to, by its command or that of the nearest process above it; empty: none."""
    while pid > 1 and pid != root:
        command = commands.get(pid, "")
        if " -m quantdrift shadow " in command:
            return "worker"
        if " -m quantdrift monitor " in command:
            return "leader"
        if str(data) in command and "nats-server" in command:
            return "nats"
        if str(data) in command and "postgres" in command:
            return "postgres"
        pid = parents.get(pid, 0)
    return ""


@contextlib.contextmanager
def _up(config: Path, data: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "quantdrift", "up", "--config", str(config), "--data", str(data)]
    command += [option for part in ("sidecar", "shadow", "monitor") for option in ("--only", part)]
    environment = {name: value for name, value in variables().items() if not name.startswith("QUANTDRIFT")}
    with (
        log.open("wb") as output,
        subprocess.Popen(  # noqa: S603 - this program itself
            command, stdout=output, stderr=output, env=environment
        ) as root,
    ):
        try:
            yield root
        finally:
            root.terminate()
            try:
                root.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                root.kill()


@contextlib.contextmanager
def _answering() -> Iterator[int]:
    """Serve a model that answers each request alike, in threads of this process; return the port."""
    output = {
        "name": "logits",
        "datatype": "FP32",
        "shape": [1, _CLASSES],
        "data": [0.1 * k for k in range(_CLASSES)],
    }
    answer = json.dumps({"model_name": _MODEL, "model_version": "1", "outputs": [output]}).encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the library names it
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _send(port: int, n: int, values: Mapping[str, int], per_s: float = 0.0) -> None:
    """Send so many requests on a few connections, each with an image and values of headers of its own; 0 in a second: as fast as possible."""
    began = time.monotonic()

    def client(number: int) -> None:
        rng = np.random.default_rng(number)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_STOP_S)
        with contextlib.closing(connection):
            for index in range(number, n, _CLIENTS):
                data = rng.normal(size=_INPUTS).round(3).tolist()
                tensor = {"name": "x", "datatype": "FP32", "shape": [1, _INPUTS], "data": data}
                headers = {name: f"v{rng.integers(n_values)}" for name, n_values in values.items()}
                if per_s:
                    time.sleep(max(0.0, began + index / per_s - time.monotonic()))
                connection.request(
                    "POST",
                    f"/v2/models/{_MODEL}/infer",
                    json.dumps({"inputs": [tensor]}),
                    {"Content-Type": "application/json", **headers},
                )
                connection.getresponse().read()

    clients = [threading.Thread(target=client, args=(number,)) for number in range(_CLIENTS)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()


def _write_reference(path: Path) -> None:
    """Write a network of one layer, so that what is measured is everything but the reference."""
    try:
        import onnx
        from onnx import TensorProto, helper, numpy_helper
    except ModuleNotFoundError as error:
        raise OperatorError(
            f"--measure needs {error.name}: pip install 'quantdrift[shadow,monitor,embedded]'"
        ) from error

    weight = np.random.default_rng(1).normal(size=(_INPUTS, _CLASSES)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["logits"])],
        "measured",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", _INPUTS])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", _CLASSES])],
        [numpy_helper.from_array(weight, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return int(unused.getsockname()[1])

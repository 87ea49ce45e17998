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
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import asyncpg
import msgspec
import numpy as np

from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.passed_secrets import variables
from quantdrift.monitor.planning.fleet import COSTS, Costs

_LIMIT_S: Final = 120.0
_LEAD: Final = 500  # until everything is loaded and compiled
_N: Final = 8_000
_CLIENTS: Final = 8
_INPUTS: Final = 64
_CLASSES: Final = 10
_MOST_SLICES: Final = 200
_LEAST_COMPARED: Final = 0.9  # of the requests: a busy machine loses samples
_POLL_S: Final = 1.0  # each look costs Postgres a connection
_STOP_S: Final = 30.0
_MODEL: Final = "measured"
_PARTS: Final = ("worker", "leader", "nats", "postgres")
_COUNTS: Final = """
select (select count(*) from comparison), (select count(*) from batch),
       (select count(*) from batch where fold_seq is null),
       (select sum(pg_total_relation_size(inhrelid)) from pg_inherits where inhparent = 'comparison'::regclass)
"""
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
headers = ["x-site"]
[sampling]
rate = 1.0
max_exchanges_per_s = 1_000_000
[[models]]
name = "measured"
[[models.references]]
path = "reference.onnx"
[[slices]]
name = "site"
header = "x-site"
max_values = {n_values}
"""


class _Seen(msgspec.Struct, frozen=True):
    """Rows and processor time so far."""

    n: int
    n_batches: int
    n_unfolded: int
    n_bytes: int
    cpu_s: dict[str, float]


def measure(n_slices: int, say: Callable[[str], None]) -> Costs:
    """Return the costs of small exchanges on this machine; takes two minutes at most.

    It runs `quantdrift up` in a directory that it removes, with a sidecar, a shadow worker, a monitor, NATS and Postgres, and sends some
    thousand requests. Costs that depend on weeks of data stay those of `COSTS`.

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
        n_values = min(n_slices, _MOST_SLICES)
        config.write_text(_CONFIG.format(backend=backend, n_values=n_values, **ports), encoding="utf-8")
        with _up(config, directory / "data", directory / "log") as root:
            return _measured(root, directory, ports["relay"], n_values, say)


def _measured(
    root: subprocess.Popen[bytes], directory: Path, port: int, n_values: int, say: Callable[[str], None]
) -> Costs:
    until_s = time.monotonic() + _LIMIT_S

    def wait(condition: Callable[[], bool], what: str) -> None:
        while not condition():
            if root.poll() is not None:
                last = (directory / "log").read_text("utf-8", "replace").strip().splitlines()[-3:]
                raise OperatorError(f"`quantdrift up` ended: {' / '.join(last)}")
            if time.monotonic() > until_s:
                raise RetryError(
                    f"{_LIMIT_S:g} s were not enough: {what}; try again when the machine has less to do"
                )
            time.sleep(_POLL_S)

    def look() -> _Seen | None:
        return _look(root.pid, directory / "data")

    n_before = -1

    def settled() -> bool:
        nonlocal n_before
        seen = look()
        if seen is None:
            return False
        is_quiet, n_before = seen.n == n_before, seen.n
        return is_quiet and seen.n >= sent * _LEAST_COMPARED and not seen.n_unfolded

    say("starting everything")
    wait(lambda: _accepts(port) and look() is not None, "the processes did not start")
    sent = _LEAD
    say(f"sending {_LEAD} requests, so that everything is loaded")
    _send(port, _LEAD, n_values)
    wait(settled, "the first exchanges were not compared and folded")
    before = look()
    say(f"sending {_N:,} requests")
    _send(port, _N, n_values)
    sent += _N
    wait(settled, "the exchanges were not compared and folded")
    after = look()
    if before is None or after is None:
        raise RetryError("Postgres went away; try again")
    n, n_batches = after.n - before.n, after.n_batches - before.n_batches
    us = {part: 1e6 * (after.cpu_s[part] - before.cpu_s[part]) / n for part in _PARTS}
    # What of it is of a batch, and what of an exchange, is not known here: the proportion of the shipped costs is.
    batch = n / max(n_batches, 1)
    say(f"measured {n:,} exchanges in batches of {batch:.0f}")
    shipped = msgspec.structs.asdict(COSTS)
    scaled: dict[str, float] = {}
    for part in _PARTS:
        of_exchange, of_batch = f"{part}_us", f"{part}_batch_us"
        scale = us[part] / (shipped[of_exchange] + shipped[of_batch] / batch)
        scaled |= {name: scale * shipped[name] for name in (of_exchange, of_batch)}
    return msgspec.structs.replace(
        COSTS,
        **scaled,
        comparison_bytes=(after.n_bytes - before.n_bytes) / n,
    )


def _look(root: int, data: Path) -> _Seen | None:
    """Return rows and processor time; None: Postgres, or its schema, is not there yet."""
    try:
        dsn = (data / "dsn").read_text(encoding="utf-8").strip()
        n, n_batches, n_unfolded, n_bytes = asyncio.run(_counts(dsn))
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return None
    return _Seen(n, n_batches, n_unfolded, int(n_bytes or 0), _cpu_s(root, data))


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
    return {part: parts[part] for part in _PARTS}


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


def _send(port: int, n: int, n_values: int) -> None:
    """Send so many requests on a few connections, each with an image of its own."""

    def client(number: int) -> None:
        rng = np.random.default_rng(number)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_STOP_S)
        with contextlib.closing(connection):
            for index in range(number, n, _CLIENTS):
                data = rng.normal(size=_INPUTS).round(3).tolist()
                tensor = {"name": "x", "datatype": "FP32", "shape": [1, _INPUTS], "data": data}
                headers = {"Content-Type": "application/json", "X-Site": f"site{index % n_values}"}
                connection.request(
                    "POST", f"/v2/models/{_MODEL}/infer", json.dumps({"inputs": [tensor]}), headers
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

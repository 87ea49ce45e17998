"""The ways from a client to the backend that `benchmarks.relay` compares: started, and their processes known."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.payload import SCANNER, Payload, Wire, path, response

OFFERED, PUBLISHED = "quantdrift_sidecar_offered_total", "quantdrift_sidecar_published_total"
QUEUED = "quantdrift_sidecar_queued_bytes"
PROGRAMS = {"nginx": "nginx", "wrk": "wrk", "h2load": "nghttp2-client"}
_READY_S = 30.0
_STOP_S = 20.0
_HZ = os.sysconf("SC_CLK_TCK")
# Requests end by a body that was read whole: the mirror module reads it first. Static files refuse POST, and the
# page for that refusal is the answer.
_BACKEND = """
  server {{
    listen 127.0.0.1:{port} backlog=4096{http2};
    location / {{ mirror /read; error_page 405 =200 /answers$uri; root {directory}; }}
    location = /read {{ internal; return 204; }}
{answers}
  }}
"""
_PROXY = """
  upstream backend {{ server 127.0.0.1:{backend}; keepalive 256; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096{http2};
    location / {{ {forward}{mirror} }}
    location = /mirror {{ internal; {forward_mirror} }}
  }}
"""
_HTTP = 'proxy_pass http://backend{uri}; proxy_http_version 1.1; proxy_set_header Connection "";'
_GRPC = "grpc_pass grpc://backend;"
# What nginx does not need costs it nothing here: no log, no limit on a connection's requests, bodies in memory.
_NGINX = """\
daemon off;
worker_processes 1;
worker_rlimit_nofile 65536;
pid {directory}/pid;
error_log {directory}/error.log error;
{user}
events {{ worker_connections 16384; }}
http {{
  access_log off;
  keepalive_requests 1000000000;
  client_max_body_size 16m;
  client_body_buffer_size 1m;
  client_body_temp_path {directory}/temporary;
  proxy_temp_path {directory}/temporary;
  fastcgi_temp_path {directory}/temporary;
  uwsgi_temp_path {directory}/temporary;
  scgi_temp_path {directory}/temporary;
  open_file_cache max=16;
  types {{ }}
{servers}
}}
"""
_SIDECAR = """\
[sidecar]
listen = "127.0.0.1:{port}"
backend = "127.0.0.1:{backend}"
admin = "127.0.0.1:{admin}"
drain_delay_s = 0.0

[stream]
url = "{nats_url}"

[sampling]
rate = {rate}
{caps}
[[sampling.header_strata]]
name = "mobile"
headers = {{ {header} = "mobile" }}
rate = {rate}
{models}"""
_MODEL = """
[[models]]
name = "{name}"
output = "logits"

[[models.references]]
path = "reference.onnx"
"""
_NO_CAPS = "max_exchanges_per_s = 1e6\nmax_bytes_per_s = 10_000_000_000\n"


class Way:
    """One way to the backend.

    Parameters
    ----------
    port
        Where it listens on this host.
    serving
        Processes on the serving path.
    capturing
        Processes beside it.
    admin
        Port of its metrics; 0 where it has none.
    """

    def __init__(
        self,
        port: int,
        serving: Sequence[psutil.Process] = (),
        capturing: Sequence[psutil.Process] = (),
        admin: int = 0,
    ) -> None:
        self.port = port
        self.serving = tuple(serving)
        self.capturing = tuple(capturing)
        self._admin = admin

    def url(self, wire: Wire) -> str:
        """Return where requests go."""
        return f"http://127.0.0.1:{self.port}{path(wire)}"

    def counts(self) -> dict[str, float]:
        """Return the sums of its counters over all labels, by name; nothing where it has none."""
        if not self._admin:
            return {}
        with urllib.request.urlopen(f"http://127.0.0.1:{self._admin}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found


def missing() -> list[str]:
    """Return the Debian packages of programs that are not here."""
    return [package for program, package in PROGRAMS.items() if _find(program) is None]


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the processor time that they took so far, their own and the kernel's for them."""
    total = 0
    for process in processes:
        # The name may hold anything; what follows its closing bracket is numbers.
        fields = Path(f"/proc/{process.pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / _HZ


def rss_mb(processes: Sequence[psutil.Process]) -> float:
    """Return their resident memory, in MB."""
    return sum(process.memory_info().rss for process in processes) / 1e6


@contextlib.contextmanager
def backend(directory: Path) -> Iterator[dict[str, Way]]:
    """Run a server that reads a request whole and answers at once; yield it under `http` and `grpc`."""
    ports = {"http": free_port(), "grpc": free_port()}
    answers = []
    for wire in Wire:
        reply = response(wire)
        for place in (directory, directory / "answers"):
            file = place / path(wire).removeprefix("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(reply.body)
        answers.append(_answer(wire, reply, directory))
    servers = "".join(
        _BACKEND.format(port=port, http2=_http2(name), directory=directory, answers="\n".join(answers))
        for name, port in ports.items()
    )
    with _nginx(directory, servers, list(ports.values())) as processes:
        yield {name: Way(port, processes) for name, port in ports.items()}


@contextlib.contextmanager
def nginx(directory: Path, backend_port: int, *, mirror: bool = False, grpc: bool = False) -> Iterator[Way]:
    """Run Debian's nginx with one worker, which keeps connections to the backend.

    Parameters
    ----------
    directory
        For its files.
    backend_port
        Of the server behind it.
    mirror
        Send every request there once more, and drop that answer.
    grpc
        HTTP/2 and `grpc_pass` in place of `proxy_pass`.
    """
    port = free_port()
    server = _PROXY.format(
        port=port,
        backend=backend_port,
        http2=_http2("grpc" if grpc else "http"),
        forward=_GRPC if grpc else _HTTP.format(uri=""),
        forward_mirror=_HTTP.format(uri="$request_uri"),
        mirror=" mirror /mirror;" if mirror else "",
    )
    with _nginx(directory, server, [port]) as processes:
        yield Way(port, processes)


@contextlib.contextmanager
def aiohttp_proxy(backend_port: int) -> Iterator[Way]:
    """Run a proxy written with aiohttp."""
    port = free_port()
    code = "import sys; from benchmarks.aiohttp_proxy import main; main(int(sys.argv[1]), sys.argv[2])"
    with _child([sys.executable, "-c", code, str(port), f"http://127.0.0.1:{backend_port}"]) as child:
        _wait_for(child, [port])
        yield Way(port, [psutil.Process(child.pid)])


@contextlib.contextmanager
def sidecar(directory: Path, backend_port: int, *, rate: float, capped: bool, nats_url: str) -> Iterator[Way]:
    """Run `quantdrift sidecar` with one relay worker.

    Parameters
    ----------
    directory
        Made for its configuration: the defaults, and a header stratum.
    backend_port
        Of the server behind it.
    rate
        Of every stratum.
    capped
        Keep the caps on exchanges and bytes per second that it is shipped with.
    nats_url
        Takes the samples.
    """
    directory.mkdir(parents=True)
    port, admin = free_port(), free_port()
    config = directory / "config.toml"
    config.write_text(
        _SIDECAR.format(
            port=port,
            backend=backend_port,
            admin=admin,
            nats_url=nats_url,
            rate=rate,
            caps="" if capped else _NO_CAPS,
            header=SCANNER,
            models="".join(_MODEL.format(name=wire) for wire in Wire),
        ),
        encoding="utf-8",
    )
    (directory / "reference.onnx").touch()
    command = [sys.executable, "-m", "quantdrift", "sidecar", "-c", str(config)]
    with _child(command) as child:
        _wait_for(child, [admin], "/readyz")
        family = psutil.Process(child.pid).children()
        serving, capturing = (
            [process for process in family if module in process.cmdline()]
            for module in ("quantdrift.sidecar.relay.worker", "quantdrift.sidecar.capture.process")
        )
        if len(serving) != 1 or len(capturing) != 1:
            raise RuntimeError("the sidecar does not have a relay worker and a capture process")
        yield Way(port, serving, capturing, admin)


def _answer(wire: Wire, reply: Payload, directory: Path) -> str:
    headers = dict(reply.headers)
    lines = [f"default_type {headers.pop('content-type')};"]
    headers.pop("te", None)
    lines += [f"add_header {name} {value} always;" for name, value in headers.items()]
    if wire is Wire.GRPC:
        lines.append("add_trailer grpc-status 0 always;")
    return f"    location = /answers{path(wire)} {{ internal; root {directory}; {' '.join(lines)} }}"


def _http2(name: str) -> str:
    return " http2" if name == "grpc" else ""


@contextlib.contextmanager
def _nginx(directory: Path, servers: str, ports: Sequence[int]) -> Iterator[list[psutil.Process]]:
    directory.mkdir(parents=True, exist_ok=True)
    user = "user root;" if os.getuid() == 0 else ""  # its files are in a directory of ours
    config = directory / "nginx.conf"
    config.write_text(_NGINX.format(directory=directory, user=user, servers=servers), encoding="utf-8")
    program = _find("nginx")
    if program is None:
        raise FileNotFoundError("there is no nginx: apt-get install nginx")
    with _child([program, "-p", str(directory), "-e", f"{directory}/error.log", "-c", str(config)]) as child:
        _wait_for(child, ports)
        yield _workers(psutil.Process(child.pid))


def _workers(master: psutil.Process) -> list[psutil.Process]:
    """Return the workers of nginx: its master listens before it has started them."""
    until = time.monotonic() + _READY_S
    while not (workers := master.children()):
        if time.monotonic() > until:
            raise TimeoutError("nginx has no worker")
        time.sleep(0.05)
    return workers


@contextlib.contextmanager
def _child(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(command)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _wait_for(child: subprocess.Popen[bytes], ports: Sequence[int], ready: str = "") -> None:
    until = time.monotonic() + _READY_S
    for port in ports:
        while not _answers(port, ready):
            if child.poll() is not None or time.monotonic() > until:
                raise TimeoutError(f"nothing listens on port {port}")
            time.sleep(0.05)


def _answers(port: int, ready: str) -> bool:
    try:
        if ready:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{ready}", timeout=2) as answer:
                return bool(answer.status == 200)
        with socket.create_connection(("127.0.0.1", port), timeout=2):
            return True
    except (OSError, urllib.error.URLError):
        return False


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return int(unused.getsockname()[1])


def _find(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")  # Debian's nginx is there

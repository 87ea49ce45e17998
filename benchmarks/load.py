"""wrk and h2load: driven for some seconds, and what they say taken from their text."""

import math
import re
import subprocess
import tempfile
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.payload import Payload

_MARGIN_S = 60.0
_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 60e3}
_WRK_PERCENTILE = re.compile(r"^\s+(50|99)%\s+([0-9.]+)(us|ms|s|m)\s*$", re.MULTILINE)
_WRK_REQUESTS = re.compile(r"^\s+([0-9]+) requests in ", re.MULTILINE)
_WRK_RATE = re.compile(r"^Requests/sec:\s+([0-9.]+)$", re.MULTILINE)
_WRK_REFUSED = re.compile(r"Non-2xx or 3xx responses: ([0-9]+)")
_WRK_BROKEN = re.compile(r"Socket errors: connect ([0-9]+), read ([0-9]+), write ([0-9]+), timeout ([0-9]+)")
_H2_RATE = re.compile(r"^finished in [^,]+, ([0-9.]+) req/s", re.MULTILINE)
_H2_REQUESTS = re.compile(r"^requests: .* ([0-9]+) done, ([0-9]+) succeeded,", re.MULTILINE)


class LoadError(RuntimeError):
    """A load generator did not do what it should; its words are in the message."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a load generator saw.

    Parameters
    ----------
    requests
        Answered.
    per_s
        Of them each second.
    p50_ms, p99_ms
        Their latency.
    failed
        Not answered, or answered with another status than 2xx.
    """

    requests: int
    per_s: float
    p50_ms: float
    p99_ms: float
    failed: int


def wrk(script: Path, url: str, *, connections: int, seconds: float) -> Load:
    """Send requests on HTTP/1.1 as fast as they are answered.

    Parameters
    ----------
    script
        Lua; see `payload.write_script`.
    url
        Path included.
    connections
        Each sends one request at a time.
    seconds
        Rounded up to whole ones, which is all that wrk knows.

    Raises
    ------
    LoadError
        It failed, or its text is not understood.
    """
    command = ["wrk", "-t1", f"-c{connections}", f"-d{math.ceil(seconds)}s", "--timeout", "30s", "--latency"]
    return parse_wrk(_run([*command, "-s", str(script), url], seconds))


def parse_wrk(text: str) -> Load:
    """Return what wrk printed with `--latency`.

    Raises
    ------
    LoadError
        Something is missing in it.
    """
    found = {
        percent: float(value) * _UNITS_MS[unit] for percent, value, unit in _WRK_PERCENTILE.findall(text)
    }
    requests, rate = _WRK_REQUESTS.search(text), _WRK_RATE.search(text)
    if requests is None or rate is None or set(found) != {"50", "99"}:
        raise LoadError(f"this is not what wrk prints:\n{text}")
    refused, broken = _WRK_REFUSED.search(text), _WRK_BROKEN.search(text)
    return Load(
        requests=int(requests[1]),
        per_s=float(rate[1]),
        p50_ms=found["50"],
        p99_ms=found["99"],
        failed=(int(refused[1]) if refused else 0) + (sum(map(int, broken.groups())) if broken else 0),
    )


def h2load(payload: Payload, url: str, *, connections: int, streams: int, seconds: float) -> Load:
    """Send requests on HTTP/2 in clear text as fast as they are answered.

    Parameters
    ----------
    payload
        Of each.
    url
        Path included.
    connections
        Each has so many `streams` at a time.
    streams
        Requests under way on a connection.
    seconds
        Rounded up to whole ones.

    Raises
    ------
    LoadError
        It failed, or its text is not understood.
    """
    with tempfile.TemporaryDirectory(prefix="quantdrift-bench-") as directory:
        body, log = Path(directory) / "body", Path(directory) / "log"
        body.write_bytes(payload.body)
        command = ["h2load", f"-c{connections}", f"-m{streams}", f"-D{math.ceil(seconds)}", "-d", str(body)]
        command += [f"--log-file={log}"]
        for name, value in payload.headers.items():
            command += ["-H", f"{name}: {value}"]
        text = _run([*command, url], seconds)
        return parse_h2load(text, log.read_text(encoding="ascii"))


def parse_h2load(text: str, log: str) -> Load:
    """Return what h2load printed, and its latencies from its log: start (us), status, latency (us) in a line.

    Raises
    ------
    LoadError
        Something is missing in it.
    """
    rate, requests = _H2_RATE.search(text), _H2_REQUESTS.search(text)
    took_us = [float(fields[2]) for line in log.splitlines() if len(fields := line.split("\t")) == 3]
    if rate is None or requests is None or not took_us:
        raise LoadError(f"this is not what h2load prints:\n{text}")
    p50, p99 = np.percentile(took_us, (50, 99))
    return Load(
        requests=int(requests[2]),
        per_s=float(rate[1]),
        p50_ms=float(p50) / 1e3,
        p99_ms=float(p99) / 1e3,
        failed=int(requests[1]) - int(requests[2]),
    )


def _run(command: list[str], seconds: float) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds + _MARGIN_S, check=False, errors="replace"
    )
    if done.returncode:
        raise LoadError(f"{command[0]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout

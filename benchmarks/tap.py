"""What a call of the tap costs the server that makes it, against a bare copy of the same tensors.

    python -m benchmarks.tap [--quick]

A tap in this process tells a real intake process, over its Unix socket, of exchanges with a 3x224x224 float32 input
and 1,000 float32 outputs. Measured on the calling thread: calls that sampling does not take, calls that it takes, and
in turn with these `bytes(array)` of both tensors. Medians of short rounds; a taken call is followed by a pause in which the
tap's own thread sends, as between the requests of a server.
"""

import argparse
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.result import Goal, finish
from quantdrift import Tap

_FAINT = {"x-scanner": "faint"}
_STRATA = '[{"name": "faint", "rate": 1.0, "headers": {"x-scanner": "faint"}}]'


def main(rounds: int, calls: int) -> None:
    """Measure and print."""
    pixels = np.random.default_rng(1).random((1, 3, 224, 224), dtype=np.float32)
    scores = np.random.default_rng(2).random((1, 1000), dtype=np.float32)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tap"
        sidecar = _sidecar(Path(directory), path)
        try:
            tap = Tap(str(path), model="any")
            until = time.monotonic() + 30
            while not tap.is_ready:
                if time.monotonic() > until:
                    raise SystemExit("the sidecar has not answered")
                time.sleep(0.01)
            bare, unsampled, with_headers, sampled, copied = [], [], [], [], []
            for _ in range(rounds):
                bare.append(_ns(lambda: None, calls))
                unsampled.append(_ns(lambda: tap.record({"x": pixels}, {"y": scores}), calls))
                with_headers.append(
                    _ns(lambda: tap.record({"x": pixels}, {"y": scores}, headers={"x-scanner": "new"}), calls)
                )
                for _ in range(10):
                    copied.append(_ns(lambda: (bytes(pixels), bytes(scores)), 1))
                    sampled.append(_ns(lambda: tap.record({"x": pixels}, {"y": scores}, headers=_FAINT), 1))
                    time.sleep(0.01)
            tap.close(5.0)
        finally:
            sidecar.terminate()
            sidecar.wait()
    loop_ns = statistics.median(bare)
    figures: dict[str, float | int | str | None] = {
        "unsampled_ns": round(statistics.median(with_headers) - loop_ns, 1),
        "unsampled_without_headers_ns": round(statistics.median(unsampled) - loop_ns, 1),
        "sampled_us": round(statistics.median(sampled) / 1e3, 2),
        "copy_us": round(statistics.median(copied) / 1e3, 2),
        "sampled_over_copy": round(statistics.median(sampled) / statistics.median(copied), 3),
        "tensor_bytes": pixels.nbytes + scores.nbytes,
        "load_average": round(os.getloadavg()[0], 2),
    }
    for name, value in figures.items():
        print(f"{name:30} {value}")
    finish(
        "tap",
        figures,
        [
            Goal(name="unsampled_ns", value=float(figures["unsampled_ns"] or 0), bound=1000, unit="ns"),
            Goal(
                name="sampled_over_copy",
                value=float(figures["sampled_over_copy"] or 0),
                bound=2.0,
                unit="ratio",
            ),
        ],
    )


def _ns(work: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(calls):
        work()
    return (time.perf_counter_ns() - begin) / calls


def _sidecar(directory: Path, path: Path) -> subprocess.Popen[bytes]:
    """Start a sidecar with a tap socket, no relay, and no stream: samples are drawn, sent, and let go of."""
    options = {
        "SIDECAR__LISTEN": "",
        "SIDECAR__ADMIN": "127.0.0.1:0",
        "STREAM__URL": "nats://127.0.0.1:1",
        "INTAKE__TAP": str(path),
        "SAMPLING__RATE": "0",
        "SAMPLING__HEADER_STRATA": _STRATA,
    }
    (directory / "config.toml").write_text("")
    return subprocess.Popen(
        [sys.executable, "-m", "quantdrift", "sidecar", "-c", str(directory / "config.toml")],
        env={
            **os.environ,
            "TMPDIR": directory.as_posix(),
            "QUANTDRIFT_SAMPLING_SALT": secrets.token_hex(8),
            **{f"QUANTDRIFT__{name}": value for name, value in options.items()},
        },
        stderr=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    given = parser.parse_args()
    main(*((20, 500) if given.quick else (200, 500)))

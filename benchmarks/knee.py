"""The knee that `quantdrift load` finds, beside the one of theory: `python -m benchmarks.knee [--quick]`.

The target is a server of this host that answers one request at a time in a known time (`benchmarks.serial_server`), so with requests at random times it is
the queue M/D/1. Its mean wait at the utilisation rho is rho / (2 (1 - rho)) service times, and the knee, where a request waits as long as a single one
takes, is at rho = 2/3. `knee_error` is the distance of the found knee from that, as a share of it.
"""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import quantdrift
from benchmarks.result import Figures, Goal, finish
from quantdrift.core.process.child import ending_with_parent

SERVICE_S: Final = 0.01
_UTILISATION: Final = 2 / 3
_GOAL: Final = 0.1


def main() -> int:
    """Run the load test, and print the curve, both knees and the goal; return 1 if no knee was found."""
    figures, goals = measured(is_quick="--quick" in sys.argv[1:])
    if not goals:
        return 1
    finish("knee", figures, goals)
    return 0


def measured(*, is_quick: bool) -> tuple[Figures, list[Goal]]:
    """Run the load test, print the curve and both knees, and return what was found; nothing if no knee was."""
    with (
        serial_server(SERVICE_S) as url,
        tempfile.TemporaryDirectory(prefix="quantdrift-bench-") as directory,
    ):
        recording = Path(directory) / "requests.jsonl"
        recording.write_text('{"path": "/predict", "body": {"x": 1}}\n', encoding="utf-8")
        result = quantdrift.load(
            url,
            source=recording,
            config=Path(directory) / "none.toml",
            allow=[url],
            step_s=5 if is_quick else 20,
            sustain_s=5 if is_quick else 60,
        )
    print(result)
    test = result.load_test
    if test.knee is None or test.knee.per_s is None or test.sustained is None or test.alone is None:
        return {}, []
    theory, found = _UTILISATION / SERVICE_S, test.knee.per_s
    error = abs(found.value / theory - 1)
    print(
        f"theory: {theory:.4g} requests per second, found: {found.value:.4g} [{found.low:.4g}, {found.high:.4g}]"
    )
    figures: Figures = {
        "knee_per_s": found.value,
        "knee_low_per_s": found.low,
        "knee_high_per_s": found.high,
        "theory_per_s": theory,
        "alone_ms": 1000 * test.alone.mean_s.value,
        "sustained_per_s": test.sustained.throughput_per_s.value,
        "late_p99_ms": 1000 * max(step.late_p99_s for step in test.steps),
        "steps_not_judged": sum(not step.is_on_schedule for step in test.steps),
    }
    return {"knee_error": error, **figures}, [Goal(name="knee_error", value=error, bound=_GOAL, unit="ratio")]


@contextlib.contextmanager
def serial_server(service_s: float) -> Iterator[str]:
    """Run the server in a process of its own inside the block; return its address."""
    command = [sys.executable, "-m", "benchmarks.serial_server", str(service_s)]
    with subprocess.Popen(
        ending_with_parent(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main())

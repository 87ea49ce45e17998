"""What a peer is given and what it hands back. Runs inside the peers' environments: numpy and the standard library."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Values with a change at a known place.

    Parameters
    ----------
    name
        Of the case.
    values
        (runs, groups).
    baseline
        Groups at the beginning that may be learned from; alarms there are not counted.
    change
        Groups before the change.
    binary
        Whether the values are 0 or 1.
    """

    name: str
    values: Values
    baseline: int
    change: int
    binary: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one method did with one setting.

    Parameters
    ----------
    case, method, setting
        What was run; the setting `default` is the one that its makers ship.
    n_false
        Alarms before the change.
    n_groups
        Groups in which they could have come.
    delays
        Per run the groups from the change to the next alarm, or None where none came.
    us_per_group
        Time it took.
    """

    case: str
    method: str
    setting: str
    n_false: int
    n_groups: int
    delays: list[int | None]
    us_per_group: float


def outcome(
    streams: Streams,
    method: str,
    setting: str,
    alarms: Sequence[Sequence[int]],
    *,
    begin: int | None = None,
    spent_s: float = 0.0,
) -> Outcome:
    """Return the outcome of alarms, given per run as the number of groups that had been seen.

    Parameters
    ----------
    begin
        Groups before the method was started, if that is not the end of the baseline.
    spent_s
        Time for all runs.
    """
    start = streams.baseline if begin is None else begin
    delays = [next((at - streams.change for at in found if at > streams.change), None) for found in alarms]
    return Outcome(
        case=streams.name,
        method=method,
        setting=setting,
        n_false=sum(start < at <= streams.change for found in alarms for at in found),
        n_groups=len(alarms) * (streams.change - start),
        delays=delays,
        us_per_group=1e6 * spent_s / max(1, len(alarms) * (streams.values.shape[1] - start)),
    )


def chunks(streams: Streams, size: int) -> list[tuple[int, int]]:
    """Return begin and end of chunks after the baseline; the change falls into the middle of one."""
    first = streams.baseline + (streams.change - streams.baseline - size // 2) % size
    last = streams.values.shape[1] - size
    return [(begin, begin + size) for begin in range(first, last + 1, size)]


def scored(
    streams: Streams,
    method: str,
    scores: Values,
    ends: Sequence[int],
    levels: Sequence[float],
    *,
    spent_s: float,
) -> list[Outcome]:
    """Return the outcome of alarming where a chunk's score, (runs, chunks), is at least a level, for each level."""
    return [
        outcome(
            streams,
            method,
            f"score >= {level:.4g}",
            [[ends[int(place)] for place in np.flatnonzero(run >= level)] for run in scores],
            spent_s=spent_s,
        )
        for level in levels
    ]


def grid(scores: Values, before: int) -> list[float]:
    """Return levels from the largest scores of the first `before` chunks, where false alarms become rare."""
    healthy = np.sort(scores[:, :before].ravel())
    shares = (0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
    picked = [float(np.quantile(healthy, 1 - share)) for share in shares]
    return sorted({*picked, float(np.nextafter(healthy[-1], np.inf))})


def timed() -> Callable[[], float]:
    """Return a function that tells the seconds since now."""
    begin = time.perf_counter()
    return lambda: time.perf_counter() - begin


def main(package: str, judge: Callable[[Streams], list[Outcome]]) -> None:
    """Read the streams in the directory that the command line names, and print one line of JSON."""
    found: list[Outcome] = []
    for path in sorted(Path(sys.argv[1]).glob("*.json")):
        facts = json.loads(path.read_text())
        found += judge(Streams(values=np.load(path.with_suffix(".npy")), **facts))
    print(json.dumps({"version": version(package), "outcomes": [asdict(one) for one in found]}))

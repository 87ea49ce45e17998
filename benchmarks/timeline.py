"""A picture of one run: what a shift does to each slice, and what the fold makes of it."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.watching import Run
from quantdrift.core.records import Verdict
from quantdrift.drift.block import FloatArray

_BEFORE_S = 300.0
_AFTER_S = 150.0  # beyond the last alarm
_LEAST_EVIDENCE = 1e-9
_SMOOTH = 3  # points
_LEAST_KL = 1e-6


def timeline(
    titles: tuple[str, str], run: Run, *, slices: Sequence[str], budget: float, stem: Path
) -> list[Path]:
    """Write a PNG and an SVG beside each other and return their paths.

    Parameters
    ----------
    titles
        Heading and the line under it.
    run
        What to show.
    slices
        Those to show, the shifted ones first.
    budget
        Accepted mean divergence, nats.
    stem
        Path without its suffix.
    """
    mpl.rcParams["svg.hashsalt"] = stem.name
    figure = Figure(figsize=(10.0, 7.0), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    last = max((alarm.after_s for alarm in run.alarms), default=run.points[-1].at_s)
    points = [p for p in run.points if -_BEFORE_S <= p.at_s <= last + _AFTER_S]
    at = np.array([point.at_s for point in points])
    for number, name in enumerate(slices):
        colour = mpl.colormaps["tab10"](number % 10)
        kl = np.array([point.kl.get(name, np.nan) for point in points])
        upper.plot(at, _smooth(kl), color=colour, label=name, linewidth=1.6)
        lower.plot(
            at,
            [_shown(point.evidence.get(name, np.nan), point.verdicts.get(name)) for point in points],
            color=colour,
            linewidth=1.6,
        )
        for alarm in run.alarms:
            if alarm.slice == name:
                firing = alarm.verdict == Verdict.FIRING.value
                lower.plot(alarm.after_s, 3.0 ** (1 + number), "v" if firing else "o", color=colour)
    upper.axhline(budget, color="grey", linestyle=":", label="budget")
    upper.set_yscale("log")
    upper.set_ylabel("mean KL, nat (capped at 2)")
    figure.suptitle("\n".join(titles), fontsize=10)
    lower.set_yscale("log")
    lower.set_ylim(_LEAST_EVIDENCE, 3.0 ** (2 + len(slices)))
    lower.set_ylabel("evidence / page threshold\n(o ticket, v page; 1 while firing)")
    lower.set_xlabel("event time since the onset, s")
    for axes in (upper, lower):
        axes.axvline(0.0, color="black", linewidth=0.8)
        axes.grid(which="major", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=110)
    return paths


def _shown(evidence: float, verdict: str | None) -> float:
    return 1.0 if verdict == Verdict.FIRING.value else float(np.clip(evidence, _LEAST_EVIDENCE, 1.0))


def _smooth(values: FloatArray) -> FloatArray:
    """Return means over a point and those just before it: nothing shows before it was there."""
    wide = np.pad(values, (_SMOOTH - 1, 0), mode="edge")
    means: FloatArray = np.convolve(wide, np.full(_SMOOTH, 1.0 / _SMOOTH), mode="valid")
    return np.maximum(means, _LEAST_KL)

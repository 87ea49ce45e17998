"""A picture of one run: what a shift does to each slice, and what the fold makes of it."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from benchmarks.watching import Point, Run
from quantdrift.core.records import Verdict
from quantdrift.drift.evidence.observations import FloatArray

_BEFORE_S = 300.0
_AFTER_S = 150.0  # beyond the last alarm
_LEAST_EVIDENCE = 1e-9
_SMOOTH = 3  # points
_LEAST_KL = 1e-6
_FEW_DECADES = 2.0  # on fewer the axis has ticks between the powers of ten
_ROW = 0.25  # height of a slice's row of alerts, inches
_MARKERS = {Verdict.WARNING.value: "o", Verdict.FIRING.value: "v"}
_FACES = {Verdict.WARNING.value: "white", Verdict.FIRING.value: None}  # both may fall on one point


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
    rows = _ROW * (len(slices) + 1)
    figure = Figure(figsize=(10.0, 6.5 + rows), layout="constrained")
    upper, lower, strip = figure.subplots(3, 1, sharex=True, height_ratios=(3.0, 3.0, rows))
    last = max((alarm.after_s for alarm in run.alarms), default=run.points[-1].at_s)
    points = [p for p in run.points if -_BEFORE_S <= p.at_s <= last + _AFTER_S]
    at = np.array([point.at_s for point in points])
    for number, name in enumerate(slices):
        colour = _colour(number)
        # Slices may have the same course: those drawn first are wider, and show beside those drawn over them.
        width = 1.4 + 2.0 * (1.0 - number / len(slices))
        divergence = np.array([point.divergence.get(name, np.nan) for point in points])
        upper.plot(at, _smooth(divergence), color=colour, linewidth=width)
        lower.plot(at, _running(points, name), color=colour, linewidth=width)
        _alerts(strip, run, points, (number, name))
    upper.axhline(budget, color="grey", linestyle=":", label="budget")
    upper.set_ylabel("mean KL, nat\n(capped at 2; 0 is drawn at 1e-6)")
    figure.suptitle("\n".join(titles), fontsize=10)
    lower.axhline(1.0, color="grey", linestyle="--", label="page")
    lower.set_ylim(_LEAST_EVIDENCE, 3.0)
    lower.set_ylabel("evidence / page threshold\n(until the page)")
    strip.set_yticks([-float(number) for number in range(len(slices))], slices, fontsize=8)
    for label, number in zip(strip.get_yticklabels(), range(len(slices)), strict=True):
        label.set_color(_colour(number))
    strip.set_ylim(-len(slices) + 0.3, 0.7)
    strip.set_xlabel("event time since the onset, s")
    for verdict, told in ((Verdict.WARNING, "ticket"), (Verdict.FIRING, "page, and while it lasts")):
        strip.plot(
            [], [], _MARKERS[verdict.value], color="black", label=told, markerfacecolor=_FACES[verdict.value]
        )
    for axes in (upper, lower):
        axes.set_yscale("log")
        axes.grid(which="major", alpha=0.25)
    upper.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    decades = float(np.diff(np.log10(upper.get_ylim()))[0])
    if decades < _FEW_DECADES:
        subs = tuple(map(float, range(1, 10))) if decades < 1.0 else (1.0, 2.0, 5.0)
        upper.yaxis.set_major_locator(LogLocator(subs=subs))
    upper.yaxis.set_minor_formatter(NullFormatter())
    for axes in (upper, lower, strip):
        axes.axvline(0.0, color="black", linewidth=0.8)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=110)
    return paths


def _running(points: Sequence[Point], name: str) -> FloatArray:
    """Return a slice's evidence over what pages; nothing while it fires, when none is gathered."""
    firing = np.array([point.verdicts.get(name) == Verdict.FIRING.value for point in points])
    evidence = np.array([point.evidence.get(name, np.nan) for point in points])
    shown = np.clip(evidence, _LEAST_EVIDENCE, 1.0)
    # The first point of a page is where the line comes to it.
    began = firing & ~np.append(False, firing[:-1])
    return np.where(began, 1.0, np.where(firing, np.nan, shown))


def _alerts(strip: Axes, run: Run, points: Sequence[Point], slice_: tuple[int, str]) -> None:
    """Draw one slice's tickets and pages, and how long a page lasts."""
    number, name = slice_
    colour = _colour(number)
    for alarm in run.alarms:
        if alarm.slice != name:
            continue
        face = _FACES[alarm.verdict] or colour
        strip.plot(alarm.after_s, -number, _MARKERS[alarm.verdict], color=colour, markerfacecolor=face)
        if alarm.verdict == Verdict.FIRING.value:
            after = [point for point in points if point.at_s > alarm.after_s]
            over = (point.at_s for point in after if point.verdicts.get(name) != Verdict.FIRING.value)
            end = next(over, points[-1].at_s)
            strip.hlines(-number, alarm.after_s, end, color=colour, linewidth=3.0)


def _colour(number: int) -> tuple[float, ...]:
    found: tuple[float, ...] = mpl.colormaps["tab10"](number % 10)
    return found


def _smooth(values: FloatArray) -> FloatArray:
    """Return means over a point and those just before it: nothing shows before it was there."""
    wide = np.pad(values, (_SMOOTH - 1, 0), mode="edge")
    means: FloatArray = np.convolve(wide, np.full(_SMOOTH, 1.0 / _SMOOTH), mode="valid")
    return np.maximum(means, _LEAST_KL)

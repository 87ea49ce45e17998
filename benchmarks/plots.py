"""Plots of delay against false-alarm rate."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import msgspec
import numpy as np
from matplotlib.figure import Figure


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One method at several settings.

    Parameters
    ----------
    label
        For the legend.
    rates
        False alarms per million groups, as measured; 0 where there were none.
    delays
        Mean delay, groups.
    style
        Of matplotlib: a line is a threshold that was varied, a marker a single setting.
    least
        One over the groups that were looked at: where no alarm was seen, the quickest setting is drawn there, hollow.
    """

    label: str
    rates: Sequence[float]
    delays: Sequence[float]
    style: str
    least: float


def delay_against_rate(title: str, curves: Sequence[Curve], directory: Path, stem: str) -> list[Path]:
    """Write a PNG and an SVG and return their paths."""
    mpl.rcParams["svg.hashsalt"] = stem
    figure = Figure(figsize=(10.5, 6.0), layout="constrained")
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        colour = mpl.colormaps["tab20"](2 * number % 20 + number // 10 % 2)
        points = sorted(zip(curve.rates, curve.delays, strict=True))
        # Without a false alarm the rate is below what can be measured; only the quickest such setting tells something.
        quiet = [delay for rate, delay in points if rate < curve.least]
        seen = [point for point in points if point[0] >= curve.least]
        shown = [(curve.least, min(quiet)), *seen] if quiet else seen
        axes.plot(
            *np.array(shown).T, curve.style, color=colour, label=curve.label, markersize=6, linewidth=1.8
        )
        if quiet:
            axes.plot(curve.least, min(quiet), "o", color=colour, markerfacecolor="white", markersize=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("false alarms per million groups, measured (hollow: none seen)")
    axes.set_ylabel("mean delay, groups of the slice")
    axes.set_title(title)
    axes.grid(which="both", alpha=0.25)
    figure.legend(loc="outside right upper", fontsize=8)
    paths = [directory / f"{stem}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=120)
    return paths

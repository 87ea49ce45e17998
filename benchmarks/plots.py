"""Plots of delay against false-alarm rate, and of costs along an axis."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

# A library is told by its marker, its methods by their colours; what a label does not begin with one of these is river's.
_MARKERS = {"Alibi": "*", "Evidently": "s", "MAPIE": "D", "NannyML": "^"}
_RIVER = "X"
_LINE = "-"
_OWN = {"PageHinkley": "black"}  # the nearest peer: not to be taken for another, in neither plot


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
        "-" where its settings are one threshold that was varied; else each is a marker by itself.
    least
        One over the groups that were looked at: where no alarm was seen, the quickest setting is drawn at half of it,
        hollow.
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
    drawn: Counter[str] = Counter()
    for curve in curves:
        marker = "" if curve.style == _LINE else _marker(curve.label)
        colour = _OWN.get(curve.label) or mpl.colormaps["tab10"](drawn[marker] % 10)
        drawn[marker] += curve.label not in _OWN
        _draw(axes, curve, marker, colour)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("false alarms per million groups, measured (hollow: none seen)")
    axes.set_ylabel("mean delay, groups of the slice")
    axes.set_title(title)
    axes.grid(which="both", alpha=0.25)
    figure.legend(loc="outside right upper", fontsize=8)
    return _saved(figure, directory, stem)


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """What each part costs along an axis.

    Parameters
    ----------
    label
        Of the axis.
    values
        Where it was measured, rising.
    parts
        Microseconds by part, at each of them.
    """

    label: str
    values: Sequence[float]
    parts: Sequence[Mapping[str, float]]


def bend(values: Sequence[float], totals: Sequence[float]) -> float | None:
    """Return where an axis costs twice what it costs at its cheapest point, nearest to that and between points on a straight line of logarithms; None: nowhere."""
    x, y = np.log(values), np.log(np.asarray(totals) / (2 * min(totals)))
    cheapest = int(np.argmin(y))
    crossed = [place for place in range(len(y) - 1) if (y[place] > 0) != (y[place + 1] > 0)]
    if not crossed:
        return None
    place = min(crossed, key=lambda place: abs(place + 0.5 - cheapest))
    share = y[place] / (y[place] - y[place + 1])
    return float(np.exp(x[place] + share * (x[place + 1] - x[place])))


def stacked(title: str, panels: Sequence[Stack], directory: Path, stem: str) -> list[Path]:
    """Write a PNG and an SVG with an area for each part and a mark at each bend, one panel for each axis, and return their paths."""
    mpl.rcParams["svg.hashsalt"] = stem
    n_columns = min(3, len(panels))
    n_rows = math.ceil(len(panels) / n_columns)
    figure = Figure(figsize=(max(4.4 * n_columns, 8.0), 3.8 * n_rows + 0.9), layout="constrained")
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(n_rows, n_columns, number)
        names = list(panel.parts[0])
        heights = np.array([[part[name] for part in panel.parts] for name in names])
        totals = heights.sum(axis=0)
        axes.stackplot(panel.values, heights, labels=names, alpha=0.85)
        axes.plot(panel.values, totals, "o", color="black", markersize=3.5)
        if (at := bend(panel.values, totals.tolist())) is not None:
            axes.axvline(at, color="black", linestyle="--", linewidth=1.2, label=_BEND)
            axes.set_title(
                f"twice the lowest at {at:,.2g}" if at < 10 else f"twice the lowest at {at:,.0f}", fontsize=9
            )
        axes.set_xscale("log")
        axes.set_xticks(panel.values, [f"{value:,g}" for value in panel.values], rotation=30)
        axes.set_xticks([], minor=True)
        axes.set_xlabel(panel.label)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("processor time, us an exchange")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.grid(alpha=0.25)
    labelled = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(labelled.values()),
        list(labelled),
        loc="outside lower center",
        ncols=min(len(labelled), 2 * n_columns),
        fontsize=8,
    )
    figure.suptitle(title, fontsize=10, wrap=True)
    return _saved(figure, directory, stem)


_BEND = "twice the lowest cost of the axis"


def _saved(figure: Figure, directory: Path, stem: str) -> list[Path]:
    paths = [directory / f"{stem}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=120)
    return paths


def _draw(axes: Axes, curve: Curve, marker: str, colour: str | tuple[float, ...]) -> None:
    """Draw one method: what was seen filled, and what is below any rate that could be seen hollow."""
    points = sorted(zip(curve.rates, curve.delays, strict=True))
    # Without a false alarm the rate is below what can be measured; only the quickest such setting tells something.
    quiet = [delay for rate, delay in points if rate < curve.least]
    seen = [point for point in points if point[0] >= curve.least]
    is_line = curve.style == _LINE
    if is_line:
        # Of thresholds with as many alarms, over nearly as many groups, the quickest is the best.
        best = {round(math.log10(rate), 2): (rate, delay) for rate, delay in sorted(seen, key=_slowest)}
        seen = sorted(best.values())

    def plot(shown: Sequence[tuple[float, float]], look: str, face: str | None, label: str = "") -> None:
        x, y = np.array(shown).reshape(-1, 2).T
        line = look if is_line else "none"
        axes.plot(
            x,
            y,
            linestyle=line,
            linewidth=1.8,
            marker=marker,
            markersize=6.5,
            color=colour,
            markerfacecolor=face or colour,
            label=label,
        )

    plot(seen, "-", None, curve.label)
    if quiet:
        hollow = (curve.least / 2, min(quiet))
        plot([hollow, *seen[:1]] if is_line else [hollow], ":", "white")
        if is_line:
            axes.plot(*hollow, "o", color=colour, markerfacecolor="white", markersize=6.5)


def _slowest(point: tuple[float, float]) -> float:
    return -point[1]


def _marker(label: str) -> str:
    return _MARKERS.get(label.split(maxsplit=1)[0], _RIVER)

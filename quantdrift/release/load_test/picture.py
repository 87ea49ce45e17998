"""The picture of a load test: latency and errors over the offered load, with the knee."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from quantdrift.core.errors import OperatorError
from quantdrift.facts.load_test import LoadStep, LoadTest
from quantdrift.release.drawing import STYLE, save

_P50, _P95, _P99 = "#2a8a6a", "#2f6fb3", "#7a5195"
_KNEE, _ERRORS, _LINE, _PRODUCTION = "#c77700", "#b3261e", "#8a8f98", "#30343b"


def write(test: LoadTest, path: Path) -> None:
    """Write the picture as SVG or PNG, by the ending of the path.

    Raises
    ------
    OperatorError
        There is no load to draw, or the file cannot be written.
    """
    if not test.steps:
        raise OperatorError(f"--picture {path}: the load test ended before its first load")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 5.6), layout="constrained")
        FigureCanvasAgg(figure)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        figure.suptitle(f"{test.model or test.target}: latency over the offered load")
        _latency(upper, test)
        _errors(lower, test)
        handles, labels = upper.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        save(figure, path)


def _latency(axis: Axes, test: LoadTest) -> None:
    steps = test.steps
    for name, colour, latencies in (
        ("p50", _P50, [step.p50_s for step in steps]),
        ("p95", _P95, [step.p95_s for step in steps]),
        ("p99", _P99, [step.p99_s for step in steps]),
    ):
        points = [
            (step.offered_per_s, 1000 * latency)
            for step, latency in zip(steps, latencies, strict=True)
            if latency is not None
        ]
        axis.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=colour,
            marker="o",
            markersize=4,
            linewidth=1.3,
            label=name,
        )
    unjudged = [step for step in steps if not step.is_on_schedule and step.p99_s is not None]
    if unjudged:
        axis.scatter(
            [step.offered_per_s for step in unjudged],
            [1000 * (step.p99_s or 0.0) for step in unjudged],
            s=70,
            marker="x",
            color=_LINE,
            label="the client sent late",
            zorder=3,
        )
    if test.alone:
        axis.axhline(
            1000 * test.alone.mean_s.value, color=_LINE, linewidth=1, linestyle=":", label="alone, mean"
        )
    _marks(axis, test)
    if test.knee and test.knee.per_s:
        axis.annotate(
            f"{test.knee.per_s.value:,.4g} per second",
            (test.knee.per_s.value, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -10),
            textcoords="offset points",
            color=_KNEE,
        )
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_ylabel("latency, in ms")


def _errors(axis: Axes, test: LoadTest) -> None:
    def share(step: LoadStep) -> float:
        return 100 * step.error_share

    axis.plot(
        [step.offered_per_s for step in test.steps],
        [share(step) for step in test.steps],
        color=_ERRORS,
        marker="o",
        markersize=4,
        linewidth=1.3,
    )
    _marks(axis, test)
    axis.set_ylim(-0.02 * (top := max(1.0, *map(share, test.steps))), 1.1 * top)
    axis.set_xlim(left=0)
    axis.set_ylabel("errors, in %")
    axis.set_xlabel("offered load, in requests per second")


def _marks(axis: Axes, test: LoadTest) -> None:
    """Draw the knee with its interval, and the load of production."""
    if test.knee and (knee := test.knee.per_s):
        axis.axvspan(knee.low, knee.high, color=_KNEE, alpha=0.18, linewidth=0)
        axis.axvline(knee.value, color=_KNEE, linewidth=1.3, label="knee, 95 % interval")
    if test.traffic.rate_per_s is not None and test.steps:
        highest = max(step.offered_per_s for step in test.steps)
        if test.traffic.rate_per_s <= 1.5 * highest:
            axis.axvline(
                test.traffic.rate_per_s, color=_PRODUCTION, linewidth=1, linestyle="--", label="production"
            )

"""The picture of a diagnosis: what each site restores, and how much of each activation range is used."""

from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from quantdrift.facts.diagnosis import Diagnosis
from quantdrift.release.drawing import STYLE, save

_MOST_SITES: Final = 20
_LONGEST_NAME: Final = 40
_NAMED, _OTHER, _LINE = "#b3261e", "#8a8f98", "#30343b"


def write(diagnosis: Diagnosis, path: Path, *, title: str) -> None:
    """Write the picture as SVG or PNG, by the ending of the path.

    Raises
    ------
    OperatorError
        The file cannot be written.
    """
    ranked = sorted(diagnosis.one_off.items(), key=lambda entry: -entry[1])[:_MOST_SITES]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 1.6 + 0.26 * max(len(ranked), 4)), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, sharey=False)
        figure.suptitle(title)
        _restored(left, diagnosis, ranked)
        _used(right, diagnosis)
        save(figure, path)


def _restored(axis: Axes, diagnosis: Diagnosis, ranked: list[tuple[str, float]]) -> None:
    """Draw the share of the damage that each site alone restores, the largest first."""
    named = {blamed.site for blamed in diagnosis.blamed}
    names = [_short(name) for name, _ in ranked]
    colours = [_NAMED if name in named else _OTHER for name, _ in ranked]
    axis.barh(range(len(ranked)), [100 * share for _, share in ranked], color=colours)
    axis.set_yticks(range(len(ranked)), names)
    axis.invert_yaxis()
    axis.axvline(0, color=_LINE, linewidth=0.8)
    more = len(diagnosis.one_off) - len(ranked)
    axis.set_xlabel("% of the damage that the site restores alone in FP32")
    axis.set_title(
        "Sites" + (f", the best {len(ranked)} of {more + len(ranked)}" if more else ""), loc="left"
    )


def _used(axis: Axes, diagnosis: Diagnosis) -> None:
    """Draw how much of the range of each named activation the slice uses, and other slices."""
    ranges = [blamed for blamed in diagnosis.blamed if blamed.used is not None]
    axis.set_title("Activation ranges of the named sites", loc="left")
    axis.set_xlim(0, 100)
    axis.set_xlabel("% of the range that is used")
    if not ranges:
        axis.set_yticks([])
        axis.text(50, 0.5, "no single range is named", ha="center", va="center", color=_OTHER)
        return
    for row, blamed in enumerate(ranges):
        assert blamed.used is not None
        axis.barh(
            row - 0.18, 100 * blamed.used, height=0.32, color=_NAMED, label="this slice" if not row else None
        )
        if blamed.elsewhere_used is not None:
            axis.barh(
                row + 0.18,
                100 * blamed.elsewhere_used,
                height=0.32,
                color=_OTHER,
                label="other slices" if not row else None,
            )
        if blamed.outside is not None and blamed.outside >= 0.0005:
            axis.text(
                min(100 * blamed.used + 1, 60),
                row - 0.18,
                f"{blamed.outside:.1%} of the values are outside",
                va="center",
            )
    axis.set_yticks(range(len(ranges)), [_short(blamed.site) for blamed in ranges])
    axis.invert_yaxis()
    axis.legend(loc="lower right", frameon=False)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[:18]}...{name[-19:]}"

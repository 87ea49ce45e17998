"""The picture of a search: what each recipe costs, in size and in time, and how many answers of the worst slice it changes."""

from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from quantdrift.facts.quantised import CostKind, Family, Quantised, TriedRecipe
from quantdrift.facts.words.quantised import name_of
from quantdrift.release.drawing import STYLE, save

_COLOURS: Final = {
    Family.FP32: "#30343b",
    Family.FP16: "#7a5195",
    Family.STATIC: "#2f6fb3",
    Family.DYNAMIC: "#c77700",
    Family.BLOCKS: "#2a8a6a",
}
_LABELS: Final = {
    Family.FP32: "FP32",
    Family.FP16: "FP16",
    Family.STATIC: "INT8 static",
    Family.DYNAMIC: "INT8 dynamic",
    Family.BLOCKS: "weights in blocks",
}
_BUDGET, _LINE, _CHOSEN = "#b3261e", "#8a8f98", "#30343b"


def write(found: Quantised, path: Path) -> None:
    """Write the picture as SVG or PNG, by the ending of the path.

    Raises
    ------
    OperatorError
        The file cannot be written.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, sharey=True)
        figure.suptitle(
            f"{found.model}: cost and changed answers of the worst slice, of {len(found.tried) - 1} recipes"
        )
        _drawn(left, found, CostKind.SIZE)
        _drawn(right, found, CostKind.TIME)
        left.set_xlabel("size of the file, in % of the reference")
        right.set_xlabel("processor time of an answer, in % of the reference")
        left.set_ylabel("changed answers of the worst slice, in %")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        save(figure, path)


def _drawn(axis: Axes, found: Quantised, kind: CostKind) -> None:
    """Draw each recipe as a point, the front as steps, the budget as a line, and a ring around what was chosen."""

    def x(tried: TriedRecipe) -> float:
        return 100 * (tried.n_bytes / found.n_bytes if kind is CostKind.SIZE else tried.time_ratio)

    def y(tried: TriedRecipe) -> float:
        return 100 * tried.worst[1].share

    for family, colour in _COLOURS.items():
        of_family = [each for each in found.usable if each.recipe.family is family]
        if of_family:
            axis.scatter(
                [x(each) for each in of_family],
                [y(each) for each in of_family],
                s=22,
                color=colour,
                alpha=0.75,
                label=_LABELS[family],
            )
    budget = 100 * found.budget
    axis.axhline(budget, color=_BUDGET, linewidth=1, linestyle="--", label="budget")
    if kind is found.prefer:
        front = found.front()
        axis.step(
            [x(each) for each in front],
            [y(each) for each in front],
            where="post",
            color=_LINE,
            linewidth=1,
            zorder=0,
        )
    if found.chosen is not None:
        chosen = found.tried[found.chosen]
        axis.scatter([x(chosen)], [y(chosen)], s=120, facecolors="none", edgecolors=_CHOSEN, linewidths=1.5)
        if kind is found.prefer:
            axis.annotate(
                name_of(chosen.recipe),
                (x(chosen), y(chosen)),
                xytext=(8, 10),
                textcoords="offset points",
                fontsize=8,
            )
    axis.set_yscale("symlog", linthresh=budget, linscale=1.0)
    top = 1.3 * max(*(y(each) for each in found.usable), 2 * budget)
    axis.set_ylim(-0.1 * budget, top)
    axis.set_xlim(0, 1.08 * max(x(each) for each in found.usable))
    ticks = [
        tick
        for tick in (0, budget / 2, budget, *(budget * factor for factor in (3, 10, 30, 100)))
        if tick <= min(top, 100)
    ]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()

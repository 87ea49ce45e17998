"""Plots as SVG: they need no script, print, follow light and dark, fit any width, and are part of the first answer.

What lies along a plot is placed in percent of its width, and letters have a fixed size; lines are drawn in a frame of their own
that is stretched. So the style sheet alone decides how wide a plot is. Labels that have no room in the narrowest plot are of the
class `wide`, which the style sheet hides there. Colours come from classes, too. Each plot has a text that says the same for
screen readers.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import msgspec
from markupsafe import Markup, escape

from quantdrift.core.notation import number, percent
from quantdrift.facts.status import LEVEL

LETTER: Final = 8.0
"""Pixels of a letter of a label in a wide font; the style sheet sets 12 px."""
LEFT: Final = 60
"""Pixels left of the axis, where the labels of the levels stand; the padding of `.plot` in the style sheet."""
RIGHT: Final = 10
NARROW: Final = 215
"""Pixels between the axes where a card is as narrow as a small phone, 320 px."""
WIDE: Final = 480
"""Pixels between the axes where the style sheet shows labels of the class `wide`."""
HEIGHT: Final = 240
_BOTTOM: Final = 40
_TOP: Final = 20
_STRIP: Final = 12
_FRAME: Final = 1000
"""Units of the frame of the lines, whatever its width is on the screen."""
_CLASSES: Final = tuple(reversed(LEVEL))
_SECOND, _MINUTE, _HOUR, _DAY = (timedelta(seconds=seconds) for seconds in (1, 60, 3600, 86400))
_STEPS: Final = (
    *(n * _SECOND for n in (1, 5, 15, 30)),
    *(n * _MINUTE for n in (1, 2, 5, 10, 15, 30)),
    *(n * _HOUR for n in (1, 2, 3, 6, 12)),
    *(n * _DAY for n in (1, 2, 7, 14)),
)
_MONTHS: Final = (1, 2, 3, 6, 12, 24, 60)
_MONDAY: Final = datetime(2001, 1, 1, tzinfo=UTC)
_OTHER_SIDE: Final = {"start": "end", "end": "start"}
_MOST_TICKS: Final = 8
_MOST_LEVELS: Final = 4
_LEAST_SHARE: Final = 1e-4
"""The smallest share that a plot with a logarithmic axis shows."""
_JOINED: Final = 1.5
"""Points further apart than so many widths are not joined: between them nothing was compared."""


class Point(NamedTuple):
    """A mean with its interval at a time; None where there is too little data for an interval."""

    at: datetime
    mean: float
    low: float | None
    high: float | None


class VerticalLine(msgspec.Struct, frozen=True, kw_only=True):
    """A vertical line: `release`, `onset`, `alert` or `decision`, with its text."""

    at: datetime
    kind: str
    text: str


class _Label(NamedTuple):
    """A text beside a place along the axis, in [0, 1]; its anchor is `start`, `middle` or `end`."""

    along: float
    text: str
    anchor: str = "middle"

    def ends(self, width: float) -> tuple[float, float]:
        """Return where it begins and ends in a plot so many pixels wide."""
        size = LETTER * len(self.text)
        begin = width * self.along - {"start": 0.0, "middle": size / 2, "end": size}[self.anchor]
        return begin, begin + size


def line(
    points: Sequence[Point],
    begin: datetime,
    end: datetime,
    *,
    title: str,
    width: timedelta,
    others: Sequence[Point] = (),
    budget: float | None = None,
    baseline: float | None = None,
    marks: Sequence[VerticalLine] = (),
    alerts: Sequence[tuple[datetime, datetime]] = (),
    is_share: bool = True,
    top: float | None = None,
    height: int = HEIGHT,
) -> Markup:
    """Return a line with its interval as a band, budget and baseline as dashed and dotted lines, and marks.

    Parameters
    ----------
    width
        Time of one point.
    alerts
        Begins and ends of times that are shaded.
    top
        The largest value that the axis must show; None: the largest mean. What is above it is cut.
    """
    if top is None:
        top = max((point.mean for point in (*points, *others)), default=0.0)
        top = max([1.1 * top, *(min(point.high or 0.0, 2 * point.mean) for point in points)])
    top = max(top, 1.25 * max(budget or 0.0, baseline or 0.0))
    levels = round_levels(min(top, 1.0) if is_share else top)
    floor = height - _BOTTOM
    along = places(begin, end)

    def y(value: float) -> float:
        return round(floor - (floor - _TOP) * min(max(value / levels[-1], 0.0), 1.0), 1)

    parts = [
        f'<rect class="alert-time" x="{_percent(along(start))}" width="{_percent(along(stop) - along(start))}" y="{_TOP}"'
        f' height="{floor - _TOP}"/>'
        for start, stop in alerts
        if start < end and stop > begin
    ]
    parts += grid_lines(levels, y, percent if is_share else number)
    parts.append(time_axis(begin, end, floor))
    framed = []
    for kind, drawn in (("other", others), ("mean", points)):
        for run in _runs([point for point in drawn if begin <= point.at <= end], width):
            x = [round(_FRAME * along(point.at), 1) for point in run]
            if kind == "mean":
                framed.append(_band(run, x, y))
            if len(run) > 1:
                path = " ".join(f"{at},{y(point.mean)}" for at, point in zip(x, run, strict=True))
                framed.append(f'<polyline class="{kind}" points="{path}"/>')
            else:
                cx, cy = _percent(along(run[0].at)), y(run[0].mean)
                parts.append(f'<circle class="{kind} dot" cx="{cx}" cy="{cy}" r="3"/>')
    parts.append(frame(framed, height))
    for kind, value, text_x, anchor in (
        ("budget", budget, "100%", "end"),
        ("baseline", baseline, "4", "start"),
    ):
        if value is None or (kind == "budget" and not value):
            continue
        parts.append(
            f'<line class="{kind}" x1="0" x2="100%" y1="{y(value)}" y2="{y(value)}"/>'
            f'<text class="{kind}-text" x="{text_x}" y="{y(value) - 4}" text-anchor="{anchor}">{kind}</text>'
        )
    parts.append(_marks([mark for mark in marks if begin <= mark.at <= end], along, floor))
    return _svg(parts, title, height)


def bars(before: Sequence[float], after: Sequence[float], *, title: str) -> Markup:
    """Return two histograms over the 64 bins of the divergence, joined by fours, as shares."""
    groups = [[sum(bins[at : at + 4]) for at in range(0, 64, 4)] if bins else [] for bins in (before, after)]
    ticks = [_Label((exponent + 6) / 7, number(10.0**exponent)) for exponent in range(-6, 2)]
    return _pair(groups[0], groups[1], ticks, title)


def margin_bars(same: Sequence[float], changed: Sequence[float], *, title: str) -> Markup:
    """Return two histograms over equal parts of [0, 1], as shares."""
    return _pair(same, changed, [_Label(tick / 5, percent(tick / 5)) for tick in range(6)], title)


def beyond(
    shares: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]], *, title: str
) -> Markup:
    """Return which share of the values is as large as a value or larger, as a falling line: both axes are logarithmic.

    Parameters
    ----------
    shares, others
        Values from 1e-6 to 100 with their shares, and those of what they are beside.
    """
    levels = [10.0**exponent for exponent in range(-4, 1)]
    height, floor = HEIGHT, HEIGHT - _BOTTOM

    def y(share: float) -> float:
        return round(floor - (floor - _TOP) * (1 - math.log10(share) / math.log10(_LEAST_SHARE)), 1)

    def x(value: float) -> float:
        return (6 + math.log10(value)) / 8

    parts = grid_lines(levels, y, percent)
    framed = [
        f'<polyline class="{kind}" points="{" ".join(f"{round(_FRAME * x(value), 1)},{y(share)}" for value, share in drawn if share >= _LEAST_SHARE)}"/>'
        for kind, drawn in (("other", others), ("mean", shares))
        if drawn
    ]
    parts.append(frame(framed, height))
    parts.append(
        _texts(
            [_Label(x(10.0**exponent), number(10.0**exponent)) for exponent in range(-5, 2)],
            "tick",
            floor + 20,
        )
    )
    return _svg(parts, title, height)


def _pair(first: Sequence[float], second: Sequence[float], ticks: Sequence[_Label], title: str) -> Markup:
    """Return two histograms side by side, each as shares of its sum."""
    groups = [[value / sum(sums) for value in sums] if sum(sums) else [] for sums in (first, second)]
    levels = round_levels(max([*groups[0], *groups[1], 1e-9]))
    step, floor = 1 / max(len(first), len(second), 1), 130
    parts = grid_lines(levels, lambda level: round(floor - (floor - 8) * level / levels[-1], 1), percent)
    for which, shares in enumerate(groups):
        for bin_, share in enumerate(shares):
            height = round((floor - 8) * share / levels[-1], 1)
            parts.append(
                f'<rect class="{("before", "after")[which]}" x="{_percent(step * (bin_ + 0.08 + 0.42 * which))}"'
                f' y="{floor - height:.1f}" width="{_percent(0.4 * step)}" height="{height}"/>'
            )
    parts.append(_texts(ticks, "tick", floor + 20))
    return _svg(parts, title, floor + 28)


def strip(
    changes: Sequence[tuple[datetime, str, str]],
    now_verdict: str,
    known_from: datetime,
    period: tuple[datetime, datetime],
    *,
    n: int = 90,
) -> Markup:
    """Return the worst verdict of each of `n` equal times as a row of cells: higher is worse, beside its colour.

    Parameters
    ----------
    changes
        When, verdict before, verdict after; in order.
    known_from
        Since when anything is known: there is no cell before it.
    """
    begin, end = period
    width = (end - begin) / n
    level = [-1] * n
    first = changes[0][1] if changes else now_verdict
    runs = [(max(begin, known_from), first), *((max(at, begin), after) for at, _, after in changes)]
    for index, (at, verdict) in enumerate(runs):
        until = runs[index + 1][0] if index + 1 < len(runs) else end
        low = max(0, int((at - begin) / width))
        high = min(n - 1, int((until - begin - timedelta(microseconds=1)) / width))
        for cell in range(low, high + 1):
            level[cell] = max(level[cell], LEVEL[verdict])
    paths: dict[int, list[str]] = {}
    cell = 0
    while cell < n:
        run = cell
        while run < n and level[run] == level[cell]:
            run += 1
        if level[cell] >= 0:
            height = (4, 6, 9, _STRIP)[level[cell]]
            paths.setdefault(level[cell], []).append(
                f"M{cell} {_STRIP - height}h{run - cell}v{height}h{cell - run}z"
            )
        cell = run
    drawn = "".join(
        f'<path class="{_CLASSES[which]}" d="{"".join(pieces)}"/>' for which, pieces in paths.items()
    )
    return Markup(  # noqa: S704 - numbers and names of our own
        f'<svg class="strip" viewBox="0 0 {n} {_STRIP}" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'
    )


def round_levels(top: float) -> list[float]:
    """Return the levels with a line and a label, from 0 to the first round one that is not below `top`."""
    if top <= 0 or not math.isfinite(top):
        return [0.0, 1.0]
    size = 10.0 ** math.floor(math.log10(top / _MOST_LEVELS))
    step = next(size * part for part in (1, 2, 2.5, 5, 10) if size * part * _MOST_LEVELS >= top * (1 - 1e-9))
    return [step * n for n in range(math.ceil(top / step * (1 - 1e-9)) + 1)]


def grid_lines(
    levels: Sequence[float], y: Callable[[float], float], text: Callable[[float], str]
) -> list[str]:
    """Return a line with its label for each level, at the height that `y` returns."""
    return [
        f'<line class="grid" x1="0" x2="100%" y1="{y(level)}" y2="{y(level)}"/>'
        f'<text class="level" x="-6" y="{y(level) + 4}" text-anchor="end">{text(level)}</text>'
        for level in levels
    ]


def _runs(points: Sequence[Point], width: timedelta) -> list[list[Point]]:
    """Return the points in runs without a gap."""
    runs: list[list[Point]] = []
    for point in points:
        if runs and point.at - runs[-1][-1].at <= _JOINED * width:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def _band(run: Sequence[Point], x: Sequence[float], y: Callable[[float], float]) -> str:
    """Return the intervals of a run as an area; of a single point, as a bar of some width."""
    parts = [
        (at, y(point.low), y(point.high))
        for at, point in zip(x, run, strict=True)
        if point.low is not None and point.high is not None
    ]
    if len(parts) == 1:
        at, low, high = parts[0]
        parts = [(max(at - 3, 0.0), low, high), (min(at + 3, float(_FRAME)), low, high)]
    path = [*(f"{at},{high}" for at, _, high in parts), *(f"{at},{low}" for at, low, _ in reversed(parts))]
    return f'<polygon class="band" points="{" ".join(path)}"/>' if path else ""


def _marks(marks: Sequence[VerticalLine], along: Callable[[datetime], float], floor: float) -> str:
    parts = []
    for mark in sorted(marks, key=lambda mark: mark.at):
        at = _percent(along(mark.at))
        parts.append(
            f'<line class="mark {escape(mark.kind)}" x1="{at}" x2="{at}" y1="{_TOP - 4}" y2="{floor}">'
            f"<title>{escape(mark.text)}</title></line>"
        )
    ranked = sorted(marks, key=lambda mark: ("alert", "onset", "release", "decision").index(mark.kind))
    labels = [
        _Label(along(mark.at), mark.text, "end" if along(mark.at) > 0.5 else "start") for mark in ranked
    ]
    return "".join(parts) + _texts(labels, "mark-text", 11, is_movable=True)


def time_axis(begin: datetime, end: datetime, floor: float) -> str:
    """Return the labels of a time axis: what changes from tick to tick, and below it the day or year that they are of."""
    ticks, form, of = _ticks(begin, end)
    along = places(begin, end)
    # Every second one first: where there is no room for all, the rest is evenly spaced.
    ordered = [*ticks[::2], *ticks[1::2]] if len(ticks) > 3 else ticks
    lines = "".join(
        f'<line class="axis" x1="{x}" x2="{x}" y1="{floor}" y2="{floor + 4}"/>'
        for x in (_percent(along(tick)) for tick in ticks)
    )
    changes = [
        tick
        for before, tick in zip([begin, *ticks], ticks, strict=False)
        if f"{tick:{of}}" != f"{before:{of}}"
    ]
    below = [_Label(1.0, "UTC", "end"), _Label(0.0, f"{begin:{of}}", "start")]
    below += [_Label(along(tick), f"{tick:{of}}", "start") for tick in changes if along(tick) > 0]
    rows = _texts([_Label(along(tick), f"{tick:{form}}") for tick in ordered], "tick", floor + 20)
    return lines + rows + _texts(below, "tick", floor + 34)


def _ticks(begin: datetime, end: datetime) -> tuple[list[datetime], str, str]:
    """Return at most `_MOST_TICKS` round times, their format, and that of what they are a part of."""
    begin, end = begin.astimezone(UTC), end.astimezone(UTC)
    for step in _STEPS:
        first = _MONDAY + math.ceil((begin - _MONDAY) / step) * step
        if (end - first) / step < _MOST_TICKS:
            n = max(int((end - first) / step) + 1, 0)
            form = "%H:%M:%S" if step < _MINUTE else "%H:%M" if step < _DAY else "%d %b"
            return [first + step * k for k in range(n)], form, "%d %b %Y" if step < _DAY else "%Y"
    for months in _MONTHS:
        n_begin = 12 * begin.year + begin.month - 1
        numbers = range(n_begin - n_begin % months, 12 * end.year + end.month, months)
        ticks = [datetime(n // 12, n % 12 + 1, 1, tzinfo=UTC) for n in numbers]
        ticks = [tick for tick in ticks if begin <= tick <= end]
        if len(ticks) <= _MOST_TICKS:
            break
    return ticks, "%b", "%Y"


def _texts(labels: Iterable[_Label], kind: str, y: float, *, is_movable: bool = False) -> str:
    """Return those of some labels in a row that fit beside each other; the first ones have the right of way.

    A label that fits into a narrow plot fits into each wider one: places move apart, and letters stay as large as they are.

    Parameters
    ----------
    is_movable
        Whether a label may stand on the other side of its place.
    """
    placed: list[tuple[_Label, bool]] = []
    left: list[_Label] = []
    for size, tried in ((NARROW, list(labels)), (WIDE, left)):
        for label in tried:
            sides = [label, label._replace(anchor=_OTHER_SIDE[label.anchor])] if is_movable else [label]
            fitting = next((side for side in sides if _fits(side, placed, size)), None)
            if fitting is not None:
                placed.append((fitting, size == WIDE))
            elif size == NARROW:
                left.append(label)
    return "".join(
        f'<text class="{kind}{" wide" if is_wide else ""}" x="{_percent(label.along)}" y="{y}"'
        f' text-anchor="{label.anchor}">{escape(label.text)}</text>'
        for label, is_wide in placed
    )


def _fits(label: _Label, placed: Sequence[tuple[_Label, bool]], width: float) -> bool:
    begin, end = label.ends(width)
    if begin < -LEFT or end > width + RIGHT:
        return False
    others = [other.ends(width) for other, _ in placed]
    return all(end + LETTER <= low or begin >= high + LETTER for low, high in others)


def places(begin: datetime, end: datetime) -> Callable[[datetime], float]:
    """Return a function from times to places along the axis, in [0, 1]."""
    span = max(end - begin, timedelta(seconds=1))
    return lambda at: min(max((at - begin) / span, 0.0), 1.0)


def _percent(along: float) -> str:
    return f"{100 * along:.2f}%"


def frame(parts: Sequence[str], height: float) -> str:
    """Return lines in a frame that is as wide as the plot."""
    return (
        f'<svg aria-hidden="true" width="100%" height="{height}" viewBox="0 0 {_FRAME} {height}" preserveAspectRatio="none">{"".join(parts)}</svg>'
        if parts
        else ""
    )


def _svg(parts: Sequence[str], title: str, height: float) -> Markup:
    return Markup(  # noqa: S704 - numbers, and texts that are escaped
        f'<svg class="chart plot" height="{height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )

"""Charts as SVG, drawn by the server: they need no script, print, follow light and dark, and are part of the first answer.

Colours come from classes of the style sheet. Each chart has a text that says the same for screen readers.
"""

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import msgspec
from markupsafe import Markup, escape

from quantdrift.core.notation import number, percent
from quantdrift.facts.status import LEVEL

_WIDTH: Final = 720
_HEIGHT: Final = 230
_LEFT: Final = 70
_BOTTOM: Final = 24
_TOP: Final = 18
_STRIP: Final = 12
_CLASSES: Final = tuple(reversed(LEVEL))
_LETTER_WIDTH: Final = 11  # of the text of a mark, as large as a phone shows it


class Point(NamedTuple):
    """A mean with its interval at a time."""

    at: datetime
    mean: float
    low: float
    high: float


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A vertical line: `release`, `onset`, `alert` or `decision`, with its text."""

    at: datetime
    kind: str
    text: str


def line(
    points: Sequence[Point],
    begin: datetime,
    end: datetime,
    *,
    title: str,
    others: Sequence[Point] = (),
    budget: float | None = None,
    baseline: float | None = None,
    marks: Sequence[Mark] = (),
    is_share: bool = True,
) -> Markup:
    """Return a line with its interval as a band, budget and baseline as dashed and dotted lines, and marks."""
    top = 1.25 * max([budget or 0.0, baseline or 0.0, *(point.mean for point in (*points, *others)), 1e-9])
    top = min(
        max(top, *(min(point.high, 2 * point.mean + 1e-9) for point in points)) if points else top,
        1.0 if is_share else top,
    )
    span = max((end - begin).total_seconds(), 1.0)

    def x(at: datetime) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - 8) * (at - begin).total_seconds() / span, 1)

    def y(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * min(value, top) / top, 1)

    parts = [_axes((begin, end), top, x, y, is_share=is_share)]
    if points:
        upper = " ".join(f"{x(point.at)},{y(point.high)}" for point in points)
        lower = " ".join(f"{x(point.at)},{y(point.low)}" for point in reversed(points))
        parts.append(f'<polygon class="band" points="{upper} {lower}"/>')
    for kind, drawn in (("other", others), ("mean", points)):
        if len(drawn) == 1:
            parts.append(f'<circle class="{kind} dot" cx="{x(drawn[0].at)}" cy="{y(drawn[0].mean)}" r="3"/>')
        elif drawn:
            path = " ".join(f"{x(point.at)},{y(point.mean)}" for point in drawn)
            parts.append(f'<polyline class="{kind}" points="{path}"/>')
    for kind, level, word, anchor in (
        ("budget", budget, "budget", "end"),
        ("baseline", baseline, "baseline", "start"),
    ):
        if level is None or (kind == "budget" and not level):
            continue
        at = _WIDTH - 10 if anchor == "end" else _LEFT + 4
        parts.append(
            f'<line class="{kind}" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y(level)}" y2="{y(level)}"/>'
            f'<text class="{kind}-text" x="{at}" y="{y(level) - 4}" text-anchor="{anchor}">{word}</text>'
        )
    parts.append(_marks([mark for mark in marks if begin <= mark.at <= end], x))
    return _svg(parts, title, _WIDTH, _HEIGHT)


def bars(before: Sequence[float], after: Sequence[float], *, title: str) -> Markup:
    """Return two histograms over the 64 bins of the divergence, joined by fours, as shares."""
    groups = [[sum(bins[at : at + 4]) for at in range(0, 64, 4)] if bins else [] for bins in (before, after)]
    ticks = [((exponent + 6) / 7, number(10.0**exponent)) for exponent in range(-6, 2, 2)]
    return _pair(groups[0], groups[1], ticks, title)


def margin_bars(same: Sequence[float], changed: Sequence[float], *, title: str) -> Markup:
    """Return two histograms over equal parts of [0, 1], as shares."""
    return _pair(same, changed, [(tick / 5, percent(tick / 5)) for tick in range(6)], title)


def _pair(
    first: Sequence[float], second: Sequence[float], ticks: Sequence[tuple[float, str]], title: str
) -> Markup:
    """Return two histograms side by side, each as shares of its sum.

    Parameters
    ----------
    ticks
        Places along the axis in [0, 1], and their texts.
    """
    groups = [[value / sum(sums) for value in sums] if sum(sums) else [] for sums in (first, second)]
    top = max([*groups[0], *groups[1], 1e-9])
    step, floor = (_WIDTH - _LEFT - 8) / max(len(first), len(second), 1), 160 - _BOTTOM
    parts = []
    for which, shares in enumerate(groups):
        for place, share in enumerate(shares):
            height = round((floor - 8) * share / top, 1)
            parts.append(
                f'<rect class="{("before", "after")[which]}" x="{_LEFT + place * step + which * step * 0.42 + 2:.1f}" y="{floor - height:.1f}"'
                f' width="{step * 0.4:.1f}" height="{height}"/>'
            )
    for along, text in ticks:
        middle = _LEFT + (_WIDTH - _LEFT - 8) * along
        parts.append(f'<text x="{middle:.0f}" y="{floor + 15}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{_LEFT - 6}" y="16" text-anchor="end">{percent(top)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{floor}" y2="{floor}"/>')
    return _svg(parts, title, _WIDTH, 160)


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
        f'<path class="{_CLASSES[which]}" d="{"".join(found)}"/>' for which, found in paths.items()
    )
    return Markup(  # noqa: S704 - numbers and names of our own
        f'<svg class="strip" viewBox="0 0 {n} {_STRIP}" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'
    )


def _marks(marks: Sequence[Mark], x: Callable[[datetime], float]) -> str:
    parts, last_x = [], -math.inf
    for mark in sorted(marks, key=lambda one: one.at):
        at, text = x(mark.at), escape(mark.text)
        parts.append(
            f'<line class="mark {mark.kind}" x1="{at}" x2="{at}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"><title>{text}</title></line>'
        )
        wide = _LETTER_WIDTH * len(mark.text)
        is_left = at + wide > _WIDTH
        if (at - wide if is_left else at) > last_x + _LETTER_WIDTH and not (is_left and at < wide):
            anchor = "end" if is_left else "start"
            parts.append(f'<text class="mark-text" x="{at}" y="11" text-anchor="{anchor}">{text}</text>')
            last_x = at if is_left else at + wide
    return "".join(parts)


def _axes(
    period: tuple[datetime, datetime],
    top: float,
    x: Callable[[datetime], float],
    y: Callable[[float], float],
    *,
    is_share: bool,
) -> str:
    begin, end = period
    parts = []
    for tick in (0, top / 2, top):
        text = percent(tick) if is_share else number(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y(tick)}" y2="{y(tick)}"/>'
            f'<text x="{_LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{text}</text>'
        )
    form = "%H:%M" if end - begin <= timedelta(days=2) else "%d %b"
    for step in range(5):
        at = begin + (end - begin) * step / 4
        anchor = ("start", "middle", "middle", "middle", "end")[step]
        parts.append(
            f'<text x="{x(at)}" y="{_HEIGHT - 7}" text-anchor="{anchor}">{at.astimezone(UTC).strftime(form)}</text>'
        )
    return "".join(parts)


def _svg(parts: Sequence[str], title: str, width: int, height: int) -> Markup:
    return Markup(  # noqa: S704 - numbers, and texts that are escaped
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )

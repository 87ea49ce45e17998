"""Measures as people read them: a value with its unit and interval, a difference, and what was measured of one item."""

from collections.abc import Mapping, Sequence
from typing import Any

from quantdrift.core.notation import decimals, fixed, number, percent
from quantdrift.core.records import Metric
from quantdrift.core.signals import signal_of
from quantdrift.core.tasks import OF_TOKENS
from quantdrift.facts.estimate import Estimate
from quantdrift.facts.figures import RATES, Figure


def amount(metric: Metric, value: float, unit: str) -> str:
    """Return a value of a metric as text: `5.2 %`, or with the unit of the model's divergence, if any: `0.021 nat`."""
    return percent(value) if signal_of(metric).is_share else f"{number(value)} {unit}".rstrip()


def interval(metric: Metric, estimate: Estimate | None) -> str:
    """Return the bounds with as many decimals as the mean: `[3.9, 6.8]`; empty where there are none."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    scale = 100 if signal_of(metric).is_share else 1
    n_decimals = decimals(scale * (estimate.mean or estimate.high))
    return f"[{fixed(scale * estimate.low, n_decimals)}, {fixed(scale * estimate.high, n_decimals)}]"


def measured(metric: Metric, estimate: Estimate | None, unit: str) -> str:
    """Return mean and bounds: `5.2 % [3.9, 6.8]`."""
    if estimate is None:
        return "no data"
    return f"{amount(metric, estimate.mean, unit)} {interval(metric, estimate)}".strip()


def signed(metric: Metric, estimate: Estimate) -> str:
    """Return a difference with its sign and bounds, flips in percentage points: `+1.2 [0.4, 2.1]`."""
    scale = 100 if signal_of(metric).is_share else 1
    mean = scale * estimate.mean
    text = f"{'+' if mean > 0 else ''}{number(mean)}"
    if estimate.low is None or estimate.high is None:
        return f"{text} [too few]"
    n_decimals = decimals(mean or max(-scale * estimate.low, scale * estimate.high))
    return f"{text} [{fixed(scale * estimate.low, n_decimals)}, {fixed(scale * estimate.high, n_decimals)}]"


def rate_of(figure: Figure) -> str:
    """Return what a number of answers or requests is: a rate, `a day`, or a count, `so far`."""
    return "a day" if figure.name in RATES else "so far"


def points(estimate: Estimate | None) -> str:
    """Return a share in percent with its interval, to a tenth: `5.0 (3.0 to 7.3)`; a dash for None."""
    if estimate is None:
        return "-"
    mean, low, high = (
        "" if value is None else f"{round(100 * value, 1) + 0.0:.1f}"  # + 0.0: no -0.0
        for value in (estimate.mean, estimate.low, estimate.high)
    )
    return f"{mean} ({low} to {high})" if low and high else mean


def detail(figures: Mapping[str, Any]) -> str:
    """Return the comparator's measures of an item as text, from `comparison.detail`: `missed 2, box shift 0.12`.

    Parameters
    ----------
    figures
        By name: numbers, flags, texts, lists, or further figures by name.
    """
    return ", ".join(
        name.replace("_", " ") + _figure(value)
        for name, value in figures.items()
        if name not in {"clustering", OF_TOKENS}
        and value is not None
        and value is not False
        and value not in ([], {})
    )


def _figure(value: Any) -> str:
    """Return a figure as it follows its name; empty for a flag."""
    match value:
        case bool():
            return ""
        case float():
            return f" {number(value)}"
        case list() if all(isinstance(entry, list) for entry in value):  # classes with their scores
            return f" {', '.join(f'{label} ({percent(score)})' for label, score in value)}"
        case list():
            return f" {'/'.join(map(str, value))}"
        case dict():
            return f" ({detail(value)})"
    return f" {value}"


def class_name(labels: Sequence[str], index: int) -> str:
    """Return what a class is called: by its label, if the model has one for it, else by its number."""
    if index < 0:
        return "no class"
    return labels[index] if index < len(labels) else f"class {index}"


def scores(of: Any, labels: Sequence[str]) -> str:
    """Return the highest scores of an answer: `seven 71 %, one 20 %`; empty if it has none."""
    try:
        return ", ".join(
            f"{class_name(labels, int(index))} {percent(float(score))}" for index, score in of or ()
        )
    except (TypeError, ValueError):  # of another version
        return ""

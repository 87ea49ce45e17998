"""What a plan says: the policy, a row for each slice, and which slices cannot be observed."""

from collections.abc import Sequence
from typing import Final

from quantdrift.core.notation import number
from quantdrift.core.text import Table
from quantdrift.facts.plan import Forecast, SliceForecast

_QUANTILES: Final = ("10 %", "50 %", "90 %")


def planned(plan: Forecast) -> list[str | Table]:
    """Return what is planned, a row for each slice, and which slices cannot be observed."""
    policy = "the allocation's rates" if plan.allocated else "the configured rates"
    lines: list[str | Table] = [
        f"model {plan.model}: {_count(plan.requests_per_s)} requests/s, {policy}: "
        f"{_count(plan.granted * plan.replays_per_s)} replays/s"
        + (f", {number(plan.gpu_share)} GPU" if plan.gpu_share is not None else ""),
        f"to detect: {plan.what} from {plan.budget:.2%} (the budget) to {plan.shifted:.2%}",
        f"before the shift: {plan.quiet_days:g} days without drift",
        f"false pages: at most {plan.pages_per_30_days:g} in 30 days, shared by {plan.n_detectors} detectors",
        "",
        _table(plan.slices),
    ]
    blind = [entry for entry in plan.slices if not entry.observable]
    if blind:
        lines += [
            "",
            f"NOT OBSERVABLE: nine of ten such shifts would not page within {plan.horizon_days:g} days",
        ]
        lines += [f"  {entry.slice}: {_wanted(entry)}" for entry in blind]
    if plan.notes:
        lines += ["", "Notes:", *(f"  - {note}" for note in plan.notes)]
    return lines


def _table(slices: Sequence[SliceForecast]) -> Table:
    """Return a row for each slice; in a terminal its numbers stand below each other."""
    width = max(len(entry.slice) for entry in slices)
    rows = [_row(entry) for entry in slices]
    head = f"{'slice':<{width}}  {'share':>8}  {'samples/h':>10}"
    quantiles = "  ".join(
        [
            "".join(f"{quantile:>8}" for quantile in _QUANTILES),
            " ".join(f"{quantile:>8}" for quantile in _QUANTILES),
        ]
    )
    lines = [
        f"{head}  {'samples to page':^24}  {'time to page':^26}".rstrip(),
        f"{'':<{len(head)}}  {quantiles}",
    ]
    for name, share, per_hour, *cells in rows:
        samples = "".join(f"{text:>8}" for text in cells[:3])
        times = " ".join(f"{text:>8}" for text in cells[3:])
        lines.append(f"{name:<{width}}  {share:>8}  {per_hour:>10}  {samples}  {times}")
    columns = (
        *(f"samples to page, {quantile}" for quantile in _QUANTILES),
        *(f"time to page, {quantile}" for quantile in _QUANTILES),
    )
    return Table(("slice", "share", "samples/h", *columns), tuple(rows), "\n".join(lines))


def _row(entry: SliceForecast) -> tuple[str, ...]:
    samples = (entry.samples.p10, entry.samples.p50, entry.samples.p90)
    return (
        entry.slice,
        _percent(entry.share),
        _count(3600 * entry.samples_per_s),
        *("-" if n is None else f"{n:,}" for n in samples),
        *(_length(hours) for hours in entry.hours),
    )


def _wanted(entry: SliceForecast) -> str:
    if entry.needed_per_s is None:
        return "no rate is enough: the shift is too small"
    day = 86_400 * entry.needed_per_s
    if entry.needed_rate is None or entry.needed_rate > 1:
        return (
            f"it would need {_count(day)} samples a day and gets {_count(86_400 * entry.requests_per_s)} requests: "
            "merge it with other slices, or plan for larger shifts"
        )
    return f"sample it at {_percent(entry.needed_rate, digits=2)} ({_count(day)} samples a day)"


def _count(n: float) -> str:
    """Format a number that may be below one."""
    return f"{n:,.0f}" if n >= 100 or n == 0 else number(n, 3 if n >= 1 else 2)


def _percent(share: float, *, digits: int = 3) -> str:
    """Format a share with `digits` decimals, and a smaller one with two significant digits."""
    return f"{number(100 * share)}%" if 0 < 100 * share < 10.0**-digits else f"{share:.{digits}%}"


def _length(hours: float | None) -> str:
    if hours is None:
        return "-"
    if hours < 1 / 60:
        return f"{3600 * hours:.0f} s" if hours >= 1 / 3600 else "< 1 s"
    if hours < 1:
        return f"{60 * hours:.0f} min"
    if hours < 48:
        return f"{hours:.1f} h"
    return f"{hours / 24:.1f} d" if hours < 24_000 else f"{hours / 24:,.0f} d"

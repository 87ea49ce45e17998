"""Numbers as text: two or three significant digits, no exponent, nouns in singular or plural."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from math import floor, isfinite, log10

_MOST_DECIMALS = 9  # smaller numbers are shown as 0
_MOST_DIGITS = 6
_LARGEST = 1e15
_LEAST_PART = 1e-4
_UNITS = ((86_400, "day"), (3600, "hour"), (60, "minute"))


def count_of(n: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 exchange`, `1,042 exchanges`; `plural` is for nouns that take no s."""
    return f"{n:,} {noun if n == 1 else plural or f'{noun}s'}"


def listed(names: Sequence[str], most: int = 0) -> str:
    """Return names as a sentence has them: `a`, `a and b`, `a, b and c`, with `most` above 0 also `a, b and 4 more`."""
    if 0 < most < len(names):
        return f"{', '.join(names[:most])} and {len(names) - most:,} more"
    *first, last = names or [""]
    return f"{', '.join(first)} and {last}" if first else last


def capital(text: str) -> str:
    """Return a text that begins with a capital letter."""
    return f"{text[:1].upper()}{text[1:]}"


def moment(at: datetime) -> str:
    """Return a time in UTC, to the minute: `2026-03-01 12:00 UTC`."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def number(value: float | None, digits: int = 2) -> str:
    """Return a number with `digits` significant digits and no exponent, e.g. `0.021`; `?` for None, or `infinite`."""
    if value is None:
        return "?"
    if not isfinite(value):
        return "infinite"
    if abs(value) >= _LARGEST:
        return f"{'less than -' if value < 0 else 'more than '}{_LARGEST:,.0f}"
    return fixed(value, decimals(value, digits))


def estimated(n: float) -> int:
    """Return a large number that was estimated, such as a rate of a day, with two significant digits: 68,178 is 68,000."""
    size = 10 ** max(0, floor(log10(n)) - 1) if n >= 1 else 1
    return round(n / size) * size


def about(n: float) -> str:
    """Return a large number that was estimated as people say it: `about 1,200`, `less than 1`."""
    if n < 10:
        return f"{n:.0f}" if n >= 1 or not n else "less than 1"
    return f"about {estimated(n):,}"


def percent(ratio: float, digits: int = 2) -> str:
    """Return a share as a percentage with `digits` significant digits: 0.0523 is `5.2 %`."""
    return f"{number(100 * ratio, digits)} %"


def part(ratio: float, digits: int = 3) -> str:
    """Return a share as a percentage that reaches 0 and 100 % only where it is that: 0.99996 is `99.99 %`, 0.00001 `below 0.01 %`."""
    if 0 < ratio < _LEAST_PART:
        return f"below {number(100 * _LEAST_PART, 1)} %"
    text = number(100 * ratio, digits)
    if ratio < 1 and float(text.replace(",", "")) >= 100:
        text = f"{floor(min(ratio, 1 - _LEAST_PART) * 10_000) / 100:.2f}"
    return f"{text} %"


def from_to(before: float, after: float, digits: int = 3) -> tuple[str, str] | None:
    """Return two numbers with enough digits to differ; None if six digits are not enough."""
    for more in range(digits, _MOST_DIGITS + 1):
        texts = number(before, more), number(after, more)
        if texts[0] != texts[1]:
            return texts
    return None


def decimals(value: float, digits: int = 2) -> int:
    """Return the number of decimals that gives `value` so many significant digits."""
    return digits - 1 if not value or not isfinite(value) else max(0, digits - 1 - floor(log10(abs(value))))


def fixed(value: float, n_decimals: int) -> str:
    """Return a number with at most `n_decimals` decimals, without trailing zeros."""
    text = f"{value:,.{min(n_decimals, _MOST_DECIMALS)}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def duration(span: timedelta) -> str:
    """Return a span with its largest unit: `3 hours`; `less than a minute` below one."""
    seconds = span.total_seconds()
    for size, unit in _UNITS:
        if seconds >= size:
            n = int(seconds // size)
            return f"{n:,} {unit}{'' if n == 1 else 's'}"
    return "less than a minute"

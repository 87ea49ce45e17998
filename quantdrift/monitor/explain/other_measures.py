"""What else moved where an alert fires: every number and yes or no that the comparator keeps in `comparison.detail`. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from quantdrift.core.tasks import COUNTED, LABELS
from quantdrift.drift.explain.moves import Measured, Moves, moves
from quantdrift.storage.monitor.evidence import DetailItem

MOST_MEASURES: Final = 64


def beside(before: Sequence[DetailItem], after: Sequence[DetailItem]) -> Moves:
    """Return which measures moved; of more than 64 those are looked at that most items have.

    Parameters
    ----------
    before, after
        Items of the two windows.
    """
    figures = [[_figures(item.detail) for item in window] for window in (before, after)]
    there = Counter(name for window in figures for of_item in window for name in of_item)
    names = [name for name, _ in sorted(there.items(), key=lambda one: (-one[1], one[0]))[:MOST_MEASURES]]
    old, new = (_measured(window, rows, names) for window, rows in zip((before, after), figures, strict=True))
    return moves(old, new)


def _figures(detail: str | None) -> dict[str, float]:
    """Return the measures of an item; what is told of each of several outputs by their names."""
    found: dict[str, float] = {}
    told: Mapping[str, Any] = msgspec.json.decode(detail) if detail else {}
    for name, value in told.items():
        for key, one in value.items() if isinstance(value, dict) else (("", value),):
            if isinstance(one, (bool, int, float)) and name not in LABELS:
                found[f"{name}.{key}" if key else name] = float(one)
    return found


def _measured(
    items: Sequence[DetailItem], figures: Sequence[Mapping[str, float]], names: Sequence[str]
) -> Measured:
    parts = Counter(item.exchange for item in items)
    numbers: dict[str, int] = {}
    return Measured(
        weight=np.array([1.0 / (item.pi * parts[item.exchange]) for item in items]),
        cluster=np.array([numbers.setdefault(item.group, len(numbers)) for item in items], dtype=np.int64),
        values={
            name: np.array([of_item.get(name, 0.0 if name in COUNTED else np.nan) for of_item in figures])
            for name in names
        },
    )

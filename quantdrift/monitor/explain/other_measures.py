"""Other measures that moved in an alert's slice: numbers and flags that the comparator stores in `comparison.detail`. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from quantdrift.core.tasks import COUNTED, LABELS
from quantdrift.drift.explain.moves import Measured, Moves, moves
from quantdrift.storage.alerts.evidence import DetailItem

MOST_MEASURES: Final = 64


def other_moves(before: Sequence[DetailItem], after: Sequence[DetailItem]) -> Moves:
    """Return the measures that moved between two windows; of more than 64, those that most items have are compared."""
    figures = [[_figures(item.detail) for item in window] for window in (before, after)]
    n_items = Counter(name for window in figures for of_item in window for name in of_item)
    names = [
        name for name, _ in sorted(n_items.items(), key=lambda pair: (-pair[1], pair[0]))[:MOST_MEASURES]
    ]
    old, new = (_measured(window, rows, names) for window, rows in zip((before, after), figures, strict=True))
    return moves(old, new)


def _figures(detail: str | None) -> dict[str, float]:
    """Return the measures of an item by name; those of several outputs are named `measure.output`."""
    figures: dict[str, float] = {}
    measured: Mapping[str, Any] = msgspec.json.decode(detail) if detail else {}
    for name, value in measured.items():
        for key, figure in value.items() if isinstance(value, dict) else (("", value),):
            if isinstance(figure, (bool, int, float)) and name not in LABELS:
                figures[f"{name}.{key}" if key else name] = float(figure)
    return figures


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

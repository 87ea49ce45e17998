"""Wrong parts of detectors: compiled like the right ones, and all that they are part of with them."""

from collections.abc import Callable
from types import ModuleType

import numba
import pytest

from quantdrift.drift import bets, budget, course, memory, rank, resolve, stake, tail
from quantdrift.drift.block import FloatArray, IntArray
from quantdrift.drift.margin import N_BINS

_BORN = memory.ROWS.start + memory.BORN * memory.ROW
_CHANGE = ((bets, "factors"), (course, "_follow"))
_BUDGET = ((resolve, "reflect"), (budget, "_see"), (budget, "_follow"))
_TAIL = (
    (rank, "e_values"),
    (rank, "stretch_values"),
    (stake, "factors"),
    (tail, "factors"),
    (tail, "_follow"),
)
_WHOLES = {memory: _CHANGE, bets: _CHANGE, resolve: _BUDGET, rank: _TAIL}


def plant(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, part: Callable[..., object] | float
) -> None:
    """Put `part` in the place of a compiled function, or of a number that compiled functions know."""
    monkeypatch.setattr(module, name, numba.njit(part) if callable(part) else part)
    for other, whole in _WHOLES[module]:
        source = getattr(other, whole).py_func
        monkeypatch.setattr(other, whole, numba.njit(source, error_model="numpy"))


def known_when_born(state: FloatArray, strata: IntArray, stratum: int) -> tuple[float, float]:
    """Return what `memory.known` was when the baseline went live: a null that stands still."""
    share = total = 0.0
    for place in range(N_BINS):
        if strata[place] == stratum:
            share += state[_BORN + memory.SHARE_AT + place]
            total += state[_BORN + memory.TOTAL_AT + place]
    return share, total

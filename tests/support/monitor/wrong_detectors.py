"""Wrong parts of detectors: compiled like the right ones, and all that they are part of with them."""

from collections.abc import Callable
from types import ModuleType

import numba
import pytest

from quantdrift.drift.detectors import budget
from quantdrift.drift.detectors.change import baseline_state, bets, run
from quantdrift.drift.detectors.tail import detector, past, payoff, rank
from quantdrift.drift.evidence import header, recovery
from quantdrift.drift.evidence.margin import N_BINS
from quantdrift.drift.evidence.observations import FloatArray, IntArray

_BORN = baseline_state.ROWS.start + baseline_state.BORN * baseline_state.ROW
_CHANGE = ((bets, "factors"), (run, "_see"), (run, "_evidence"), (run, "_follow"))
_BUDGET = ((recovery, "reflect"), (budget, "see"), (budget, "_follow"))
_TAIL = (
    (rank, "e_values"),
    (rank, "tolerated"),
    (payoff, "factors"),
    (detector, "factors"),
    (detector, "_follow"),
)
_PAST = ((past, "weigh"), (past, "look"), (detector, "_look"), (detector, "_follow"))
_SPEND = ((budget, "_follow"),)
_WHOLES = {
    header: _SPEND,
    baseline_state: _CHANGE,
    bets: _CHANGE,
    recovery: _BUDGET,
    rank: _TAIL,
    past: _PAST,
}


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
            share += state[_BORN + baseline_state.SHARE_AT + place]
            total += state[_BORN + baseline_state.TOTAL_AT + place]
    return share, total

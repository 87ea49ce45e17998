"""Wrong detectors whose numbers leave what is finite and nonnegative, at values where the shipped ones do not.

The values are 0, the budget, 1 and infinity, all of the time, with pi = 1 and v = 1. That the shipped detectors of every
kind and in every stage stay sound there is a contract; here the check is shown to be able to fail, by each kind.
"""

from collections.abc import Callable

import numpy as np
import pytest

from quantdrift.drift.detectors import budget
from quantdrift.drift.detectors.change import bets
from quantdrift.drift.detectors.protocol import BUDGET, CHANGE, DETECTORS, GROWTH, TAIL, Detector
from quantdrift.drift.detectors.tail import rank
from quantdrift.drift.evidence import recovery
from quantdrift.drift.evidence.observations import STEPS, FloatArray
from tests.support.monitor.change_streams import baseline
from tests.support.monitor.detectors import EXAMPLES, pairs, phases, sound
from tests.support.monitor.wrong_detectors import plant

pytestmark = pytest.mark.statistical

EDGES = (0.0, 0.01, 1.0, np.inf)


def budgeted(m: float, *, alerting: bool = False) -> FloatArray:
    """Return a signal with this budget."""
    state = BUDGET.fresh(budget=m, scale=1.0, weighted=False, mass=0.0, at_us=0)
    if alerting:
        BUDGET.alarmed(state, page=True)
    return state[None]


def changing(n: int, events: float, tau: float) -> FloatArray:
    """Return a signal with a baseline of so many groups and events."""
    return CHANGE.from_content(baseline(n, events, tau=tau), scale=1.0, mass=0.0, at_us=0)[None]


def everywhere(detector: Detector, states: FloatArray, shown: Callable[[FloatArray], FloatArray]) -> bool:
    """Return whether a detector is sound at every edge."""
    return all(sound(detector, states, shown(np.full((STEPS, len(states)), x))) for x in EDGES)


@pytest.mark.parametrize("m", [1e-5, 0.01, 0.95])
@pytest.mark.parametrize("alerting", [False, True])
def test_a_budget_of_any_size_is_sound_at_the_edges(m: float, *, alerting: bool) -> None:
    """As is recovery from it."""
    assert everywhere(BUDGET, budgeted(m, alerting=alerting), pairs)


def test_bets_beyond_one_over_the_budget_have_negative_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bet of 1.05 / m loses more than all of its evidence at x = 0, whether the budget was given or learned."""
    shown = EXAMPLES["growth"].shown
    assert everywhere(GROWTH, phases("growth"), shown)
    monkeypatch.setattr(budget, "LARGEST_BET", 1.05)
    assert not everywhere(BUDGET, budgeted(0.01), pairs)
    assert not everywhere(GROWTH, phases("growth"), shown)


def test_an_infinite_divergence_that_nobody_clipped_leaves_the_numbers() -> None:
    """It counts as the cap, or the state holds infinities and what is no number."""

    def as_it_is(x: FloatArray) -> FloatArray:
        return np.stack((x, np.ones(x.shape)), axis=-1)

    assert not everywhere(BUDGET, budgeted(0.01), as_it_is)


@pytest.mark.release
def test_recovery_with_the_bets_of_the_alarm_has_negative_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its largest bet is 1 / (1 - m), as z is at most 1 - m there; with c / m it loses more than all at x = 1."""

    def reflect(mirror: FloatArray, m: float, z: float) -> None:
        for k in range(len(recovery.BETS)):
            mirror[k] = (mirror[k] + 1.0) * (1.0 - recovery.BETS[k] / m * z)

    plant(monkeypatch, recovery, "reflect", reflect)
    assert not everywhere(BUDGET, budgeted(0.01, alerting=True), pairs)


def test_recovery_without_a_ceiling_passes_all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sure for months, while another signal of its slice is not: at a budget of 0.95 it takes 250 groups of 0."""
    plant(monkeypatch, recovery, "CEILING", np.inf)
    assert not everywhere(BUDGET, budgeted(0.95, alerting=True), pairs)


def test_the_plain_likelihood_ratio_is_no_bet(monkeypatch: pytest.MonkeyPatch) -> None:
    """`r` for an event and `(1 - r pi) / (1 - pi)` for none: negative where r pi > 1, and no number at pi = 1.

    The shipped bets, `(1 + (r - 1) x) / (1 + (r - 1) pi)`, are sound from no baseline at all to one of events alone.
    """
    known = np.concatenate([changing(0, 0.0, 0.0), changing(6000, 60.0, 0.25), changing(200, 200.0, 1.0)])
    shown = EXAMPLES["change"].shown
    assert everywhere(CHANGE, known, shown)
    ratios = np.concatenate((bets.COMMON, bets.SINGLE))

    def likelihood(
        half: FloatArray, _common: FloatArray, _stratum: int, cell: tuple[float, float], pi: float
    ) -> None:
        x = cell[1] / cell[0]
        for bet in range(len(ratios)):
            half[bet] = x * ratios[bet] + (1.0 - x) * (1.0 - ratios[bet] * pi) / (1.0 - pi)

    plant(monkeypatch, bets, "gain", likelihood)
    assert not everywhere(CHANGE, known[1:2], shown)
    assert not everywhere(CHANGE, known[2:], shown)


@pytest.mark.release
def test_a_rank_that_nothing_lies_between_is_no_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both shares of a bin are cut at 1 an average over none of the ranks between them is no number."""
    states, shown = phases("tail"), EXAMPLES["tail"].shown
    assert everywhere(TAIL, states, shown)
    plant(monkeypatch, rank, "_NARROW", -1.0)
    assert not everywhere(TAIL, states, shown)


def test_every_kind_is_put_to_this() -> None:
    """A detector that is registered has a wrong variant here."""
    assert set(DETECTORS) == {one.kind for one in (BUDGET, CHANGE, TAIL, GROWTH)}

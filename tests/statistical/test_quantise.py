"""`quantdrift quantise`: of many recipes at the budget hardly ever one is the result, whatever the search has seen.

Seeds are fixed: each test states with which probability another seed would fail.
"""

from datetime import UTC, datetime
from functools import partial

import numpy as np
import pytest
from numpy.random import Generator

from quantdrift.core.slices import ALL
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.gate import Question
from quantdrift.facts.gate import Decision
from quantdrift.facts.quantised import CostKind, Family, Recipe, SliceChange, TriedRecipe
from quantdrift.release.gate.judge import Asked, Observed, judge
from quantdrift.release.quantise.search import judged_in_turn, keeps, order_of_judgement, split

pytestmark = pytest.mark.statistical

BUDGET, ALPHA, N = 0.1, 0.2, 200
RUNS = 200
SLICES = ("site=faint", "site=plain")


def _decision(flips: dict[str, FloatArray]) -> Decision:
    """Return the gate's decision about the flips of two slices."""
    items = Observed(
        flip=np.concatenate([*flips.values()]),
        served_flip=None,
        divergence=np.zeros(2 * N),
        right=None,
        group=np.arange(2 * N),
        members={SLICES[0]: np.arange(N), SLICES[1]: np.arange(N, 2 * N)},
    )
    asked = Asked(slices=(Question.flips(BUDGET),))
    return judge(asked, items, model="digits", candidate="", at=datetime.now(UTC), alpha=ALPHA)


def _drawn(rng: Generator, rates: list[float]) -> dict[str, FloatArray]:
    return {name: (rng.random(N) < rate).astype(np.float64) for name, rate in zip(SLICES, rates, strict=True)}


def _tried(number: int, flips: dict[str, FloatArray]) -> TriedRecipe:
    changes = {name: SliceChange(n=N, share=float(flip.mean())) for name, flip in flips.items()}
    changes[ALL] = SliceChange(n=2 * N, share=float(np.mean([*flips.values()])))
    return TriedRecipe(
        recipe=Recipe(family=Family.STATIC),
        n_bytes=100 + number,
        time_ratio=1.0,
        changes=changes,
        within=keeps(changes, BUDGET),
    )


def _judged(rng: Generator, rates: list[list[float]], number: int) -> Decision:
    """Return the decision about a recipe on flips that chose nothing."""
    return _decision(_drawn(rng, rates[number - 1]))


REFERENCE = TriedRecipe(
    recipe=Recipe(family=Family.FP32, bits=32), n_bytes=1_000, time_ratio=1.0, within=True
)


def _chosen_wrongly(rng: Generator, n_recipes: int, *, is_fresh: bool) -> bool:
    """Return whether a search ends with a recipe that is not good enough: each is at the budget in one slice.

    Parameters
    ----------
    is_fresh
        Judge on flips that chose nothing; else on those that chose.
    """
    rates = [[BUDGET, 0.0] if rng.random() < 0.5 else [0.02, BUDGET] for _ in range(n_recipes)]
    chose = [_drawn(rng, each) for each in rates]
    tried = [REFERENCE, *(_tried(number, flips) for number, flips in enumerate(chose))]

    def decide(number: int) -> Decision:
        return _judged(rng, rates, number) if is_fresh else _decision(chose[number - 1])

    _, chosen = judged_in_turn(order_of_judgement(tried, CostKind.SIZE), decide)
    return chosen is not None


def test_a_recipe_at_the_budget_is_the_result_in_at_most_alpha_of_searches() -> None:
    """Of 40 recipes at the budget none is, but for 20 %: with this many runs a share above 28.8 % has a probability of 0.1 %."""
    rng = np.random.default_rng(1)
    wrong = np.mean([_chosen_wrongly(rng, 40, is_fresh=True) for _ in range(RUNS)])
    assert wrong <= ALPHA + 3.1 * (ALPHA * (1 - ALPHA) / RUNS) ** 0.5


def test_judging_on_what_chose_is_seen_by_this_test() -> None:
    """The best of 150 on the flips that chose it passes far too often: the check above refuses it, with a probability above 99.9 %."""
    rng = np.random.default_rng(1)
    wrong = np.mean([_chosen_wrongly(rng, 150, is_fresh=False) for _ in range(50)])
    assert wrong > ALPHA + 3.1 * (ALPHA * (1 - ALPHA) / RUNS) ** 0.5


def test_a_good_recipe_is_found_among_bad_ones() -> None:
    """The only one without changed answers is the result, though 39 cheaper ones are at the budget: in 90 % of searches.

    One of the cheaper ones passes after it with a probability of at most 20 %, and hardly ever does.
    """
    rng = np.random.default_rng(2)
    found = []
    for _ in range(40):
        rates = [[0.0, 0.0], *([BUDGET, BUDGET] for _ in range(39))]
        tried = [REFERENCE, *(_tried(-number, _drawn(rng, each)) for number, each in enumerate(rates))]
        order = order_of_judgement(tried, CostKind.SIZE)
        _, chosen = judged_in_turn(order, partial(_judged, rng, rates))
        found.append(chosen == 1)
    assert np.mean(found) >= 0.9


def test_copies_and_observations_are_in_one_part() -> None:
    """Whatever is drawn: no input of the half that judges has a copy, or a neighbour of its session, that worked."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        copy, group = rng.integers(400, size=1_000), rng.integers(300, size=1_000)
        nothing = np.full(1_000, np.nan)
        items = Observed(
            flip=nothing,
            served_flip=None,
            divergence=nothing,
            right=None,
            group=np.where(np.arange(1_000) < 500, group, np.arange(1_000) + 400),
            members={ALL: np.arange(1_000), SLICES[0]: np.arange(0, 1_000, 10)},
            copy=np.where(np.arange(1_000) < 500, np.arange(1_000), copy + 2_000),
        )
        parts = split(items, rng)
        every = [parts.calibrate, parts.choose, parts.judge]
        for labels in (items.group, items.copy):
            assert labels is not None
            seen = [set(labels[rows].tolist()) for rows in every]
            assert not any(seen[left] & seen[right] for left, right in ((0, 1), (0, 2), (1, 2)))
        assert all(len(rows) for rows in every)

"""The search for the layers of a language model that make answers diverge, on losses that are made up."""

from collections.abc import Collection

import numpy as np
import pytest

from quantdrift.models.comparators.protocol import Values
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.diagnose.language.search import LossOf, Rows, SearchResult, searched

pytestmark = pytest.mark.unit

LAYERS = ((0,), (1, 2, 3), (4, 5, 6), (7, 8, 9))
SIZES = (400, *([100] * 9))
N = 80


def _losses(harm: Values, seed: int = 1) -> LossOf:
    """Return losses that are the sum of what each weight does, differently for each answer; factors add noise."""
    rng = np.random.default_rng(seed)
    of_answers = rng.gamma(4.0, 0.25, (N, len(harm))) * harm

    def loss_of(rows: Rows, restored: Collection[int], factors: Array | None) -> Values:
        left = np.array([number not in set(restored) for number in range(len(harm))], dtype=np.float64)
        steps = left if factors is None else left * (1.0 + 0.5 * (factors - 1.025))
        return np.asarray(of_answers[rows] @ steps)

    return loss_of


def _found(harm: Values, *, budget: float = 0.02, seed: int = 1) -> SearchResult:
    return searched(_losses(harm, seed), LAYERS, SIZES, N, budget=budget, seed=seed)


def _rounding() -> Values:
    """Return what rounding alone does: as much as a weight is large."""
    return 1e-5 * np.array(SIZES, dtype=np.float64)


def _named(found: SearchResult) -> list[tuple[int, tuple[int, ...]]]:
    return [(layer.layer, tuple(matrix.weight for matrix in layer.matrices)) for layer in found.layers]


def test_one_matrix_is_named_with_its_layer() -> None:
    """What it heals is measured on the answers that were kept aside."""
    harm = _rounding()
    harm[5] = 0.2
    found = _found(harm)
    assert _named(found) == [(2, (5,))]
    (layer,) = found.layers
    assert layer.heals == pytest.approx(0.2 / harm.sum(), abs=0.03)
    assert layer.left == pytest.approx(found.fresh * (1 - layer.heals))
    assert (found.n_examined, found.n_fresh) == (N // 2, N // 2)


def test_two_faults_are_named_in_their_order() -> None:
    """Also a table of one matrix, which has no matrices to choose from."""
    harm = _rounding()
    harm[0], harm[8] = 0.2, 0.1
    assert _named(_found(harm)) == [(0, ()), (3, (8,))]


def test_a_layer_whose_matrices_are_all_damaged_is_named_as_a_whole() -> None:
    """No matrix alone does most of it."""
    harm = _rounding()
    harm[4:7] = 0.1
    assert _named(_found(harm)) == [(2, ())]


def test_nobody_is_named_where_each_layer_does_its_share() -> None:
    """Of twenty candidates that are rounded alike everywhere, with a budget below what that does, in none."""
    assert [_named(_found(50 * _rounding(), budget=1e-6, seed=seed)) for seed in range(20)] == [[]] * 20


def test_the_search_ends_within_the_budget() -> None:
    """A smaller fault that the budget allows is not looked for."""
    harm = _rounding()
    harm[0], harm[8] = 0.2, 0.01
    assert _named(_found(harm, budget=0.03)) == [(0, ())]

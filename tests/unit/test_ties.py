"""Ties: a decision that differs only because several entries share the largest score of a side."""

import numpy as np
import pytest

from quantdrift.core.config.schema import Model, OutputKind
from quantdrift.core.config.tasks import Ranking
from quantdrift.core.tasks import Task
from quantdrift.models.comparators.classes.classification import ClassificationComparator
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.comparators.ranking import RankingComparator
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.shadow.replay.rows import items_of

pytestmark = pytest.mark.unit

# Candidates in 8 bits; the reference prefers entry 2 of each, but for the last, which has a tie of its own.
CANDIDATE = np.array([[0, 5, 5, 1], [0, 5, 4, 1], [0, 1, 5, 5], [5, 5, 4, 1], [0, 5, 1, 1]], dtype=np.float32)
REFERENCE = np.array([[0.0, 5.1, 5.2, 1]] * 4 + [[5.1, 5.1, 0.0, 0.0]], dtype=np.float32)
FLIPS, TIES = [1, 1, 0, 1, 1], [1, 0, 0, 0, 1]


def columns(found: Divergences) -> tuple[list[float], list[float]]:
    """Return flips and ties."""
    return found.flip.tolist(), found.tie.tolist()


def test_a_classifiers_ties_are_told_apart_and_count_unless_told_otherwise() -> None:
    """A flip is a tie where one class is at the top of both sides; without ties it is one that no order mends."""
    counted = ClassificationComparator(OutputKind.LOGITS, 2)
    assert columns(counted.compare(CANDIDATE, REFERENCE)) == (FLIPS, TIES)
    uncounted = ClassificationComparator(OutputKind.LOGITS, 2, (1,), count_ties=False)
    found = uncounted.compare(CANDIDATE, REFERENCE)
    assert columns(found) == ([0, 1, 0, 1, 0], TIES)
    assert found.detail["weighted_flip"][0] == 0
    assert found.detail["gained"].tolist() == [False, True, False, False, False]


def test_a_rankers_ties_are_told_apart_in_the_same_way() -> None:
    """What the reference itself scores equal was never a flip of a ranking: that is no tie of the candidate's either."""
    counted, uncounted = (RankingComparator(Ranking(), count_ties=count) for count in (True, False))
    assert columns(counted.compare(CANDIDATE, REFERENCE)) == ([1, 1, 0, 1, 0], [1, 0, 0, 0, 0])
    assert columns(uncounted.compare(CANDIDATE, REFERENCE)) == ([0, 1, 0, 1, 0], [1, 0, 0, 0, 0])


def test_ties_of_a_list_of_top_classes_are_those_that_it_shows() -> None:
    """Triton sorts equal values in any order: the second listed class may be the reference's."""
    lists = np.array([[b"0.4:1", b"0.4:2"], [b"0.5:1", b"0.4:2"]], dtype=object)
    reference = np.array([[0.1, 0.3, 0.5, 0.1]] * 2)
    for count, flips in ((True, [1, 1]), (False, [0, 1])):
        comparator = ClassificationComparator(OutputKind.PROBABILITIES, 2, count_ties=count)
        assert columns(comparator.compare(lists, reference)) == (flips, [1, 0])


def test_what_is_not_finite_is_no_tie() -> None:
    """A candidate without a top class flips for another reason, and a reference without one says nothing."""
    broken = np.full((1, 4), np.nan, dtype=np.float32)
    comparator = ClassificationComparator(OutputKind.LOGITS, 2, count_ties=False)
    assert columns(comparator.compare(broken, REFERENCE[:1])) == ([1], [0])
    assert np.isnan(comparator.compare(REFERENCE[:1], broken).tie[0])


def test_the_option_reaches_the_comparator_and_the_tie_the_row() -> None:
    """`count_ties` of the model; a task that chooses no entry stores no tie."""
    model = Model(name="m", count_ties=False)
    found = comparator_of(model).compare({"y": CANDIDATE}, {"y": REFERENCE})
    assert columns(found) == ([0, 1, 0, 1, 0], TIES)
    rows = items_of(found, slices=[()] * 5, features=[{}] * 5, clusterings=[0] * 5)
    assert [row.tie for row in rows] == [True, False, False, False, True]
    numbers = np.arange(3.0)
    regressed = comparator_of(Model(name="m", task=Task.REGRESSION)).compare({"y": numbers}, {"y": numbers})
    rows = items_of(regressed, slices=[()] * 3, features=[{}] * 3, clusterings=[0] * 3)
    assert [row.tie for row in rows] == [None] * 3

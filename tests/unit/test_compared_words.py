"""The words of a comparison of two versions: what changed is said, not only that something did."""

import pytest

from quantdrift.facts.estimate import Change, Difference
from quantdrift.report.figures import ComparedSlice, SideFigures

pytestmark = pytest.mark.unit

SIDE = SideFigures(n_exchanges=900, n_clusters=900, flip=None, divergence=None)
NONE = Difference(mean=0.0, low=-0.004, high=0.004, p=0.9, p_adjusted=1.0)
LESS = Difference(mean=-0.1, low=-0.2, high=-0.05, p=1e-4, p_adjusted=1e-3)
MORE = Difference(mean=0.1, low=0.05, high=0.2, p=1e-4, p_adjusted=1e-3)


@pytest.mark.parametrize(
    ("change", "flip", "divergence", "words"),
    [
        (Change.BETTER, LESS, LESS, "better"),
        (Change.BETTER, NONE, LESS, "better: outputs closer to the reference"),
        (Change.WORSE, NONE, MORE, "worse: outputs further from the reference"),
        (Change.WORSE, MORE, NONE, "worse"),
        (Change.BETTER, None, LESS, "better: outputs closer to the reference"),
        (Change.UNCLEAR, NONE, NONE, "no clear difference"),
    ],
)
def test_a_slice_whose_answers_are_the_same_is_not_called_better_without_saying_why(
    change: Change, flip: Difference | None, divergence: Difference, words: str
) -> None:
    """From 0 % to 0 % changed answers nothing got better but the outputs behind them."""
    compared = ComparedSlice(
        slice_id=1,
        name="scanner=office",
        predicate="",
        change=change,
        old=SIDE,
        new=SIDE,
        flip=flip,
        divergence=divergence,
    )
    assert compared.shown == words

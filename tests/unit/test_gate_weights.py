"""The gate on items that do not all stand for as many others."""

from datetime import UTC, datetime

import numpy as np
import pytest

from quantdrift.drift.gate import Question
from quantdrift.release.gate.judge import Asked, Observed, judge

pytestmark = pytest.mark.unit


def test_a_rarely_drawn_item_counts_for_as_many_as_it_stands_for() -> None:
    """Of 100 items half were drawn ten times as often as the rest, and all of them flip: the mean is that of what they were drawn from."""
    often = np.arange(100) < 50
    items = Observed(
        flip=often.astype(float),
        served_flip=None,
        divergence=np.where(often, 0.4, 0.0),
        right=None,
        group=np.arange(100),
        members={"all": np.arange(100)},
        weight=np.where(often, 0.1, 1.0),
    )
    asked = Asked(slices=(Question.flips(0.2), Question.divergence(0.5, 1.0)))
    made = judge(asked, items, model="digits", candidate="sha256:0", at=datetime.now(UTC))
    flips, divergence = made.slices
    assert flips.mean == pytest.approx(5 / 55)
    assert divergence.mean == pytest.approx(0.4 * 5 / 55)
    assert flips.n == 100

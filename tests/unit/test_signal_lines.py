"""The table of signals that `quantdrift slices show` prints."""

import re

import pytest

from quantdrift.cli.look.slices import signal_lines
from quantdrift.drift.evidence.interval import WeightedEstimate
from quantdrift.monitor.baselines.signal_view import SignalView

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("size", [3.68e-11, 1.6e-5, 0.0, 1.0, 1_234.5, 7.7e6])
def test_no_figure_of_a_signal_has_an_exponent(size: float) -> None:
    """`1.23e+06` is not read at first sight."""
    view = SignalView(
        metric="divergence",
        kind="budget",
        n_groups=4_000,
        missing=0,
        n_learned=None,
        budget=size,
        noise=size,
        evidence=size,
        recent=WeightedEstimate(mean=size, low=size / 2, high=2 * size, n=400),
        tail=(),
    )
    said = "\n".join(signal_lines([view], verdict="ok", unit="nat"))
    assert not re.search(r"\de[+-]?\d", said), said

"""The verdict on a slice, from its evidence, counts and time."""

from typing import Any

import msgspec
import pytest

from quantdrift.core.config.schema import Monitor
from quantdrift.core.records import Verdict
from quantdrift.drift.watch import Phase
from quantdrift.monitor.fold.loss import RecentCounts
from quantdrift.monitor.fold.verdict import SliceStatus, judge

pytestmark = pytest.mark.unit

LIMITS = Monitor(min_groups=300, max_loss_ratio=0.05, stale_after_s=600)
WELL = SliceStatus(
    phase=Phase.WATCHING,
    evidence_ratio=1e-6,
    n_groups=300,
    silent_s=1,
    counts=RecentCounts(offered=10_000, taken=1000, lost=10),
)
DOUBTS: dict[str, dict[str, Any]] = {
    "needs 1 more": {"n_groups": 299},
    "loss": {"counts": RecentCounts(offered=10_000, taken=1000, lost=51)},
    "loss: 37 % of this model's samples of the last hour left the stream": {
        "counts": RecentCounts(offered=10_000, taken=1000, lost=10, expired=370)
    },
    "loss: 100 %": {
        "counts": RecentCounts(offered=0, taken=0, lost=0, expired=5)
    },  # all of it was taken before
    "stale": {"silent_s": 601},
    "samples missing": {"fallen": "samples missing: its share of the samples fell from 4 % to 0.4 %"},
    "undecided": {"evidence_ratio": 1e-3},
    "noise not measured": {"evidence_ratio": 1e-3, "asked": True},
}


def test_a_slice_is_ok_only_when_nothing_could_hide_drift() -> None:
    """Enough compared, little lost, fresh, and no evidence growing."""
    assert judge(WELL, LIMITS)[0] is Verdict.OK


@pytest.mark.parametrize("doubt", DOUBTS)
def test_each_doubt_alone_makes_it_unknown_and_is_named(doubt: str) -> None:
    """Silence is never reported as health."""
    verdict, reason = judge(msgspec.structs.replace(WELL, **DOUBTS[doubt]), LIMITS)
    assert verdict is Verdict.UNKNOWN
    assert reason.startswith(doubt)


@pytest.mark.parametrize("doubt", DOUBTS)
def test_no_doubt_hides_an_alert(doubt: str) -> None:
    """A firing slice keeps firing while samples are lost."""
    for phase, expected in ((Phase.FIRING, Verdict.FIRING), (Phase.WARNING, Verdict.WARNING)):
        standing = msgspec.structs.replace(WELL, phase=phase, **DOUBTS[doubt])
        assert judge(standing, LIMITS)[0] is expected


def test_without_traffic_nothing_is_stale_and_few_losses_are_no_pattern() -> None:
    """A quiet night is not an outage; four lost requests are chance."""
    quiet = msgspec.structs.replace(WELL, silent_s=1e6, counts=RecentCounts(offered=0, taken=0, lost=0))
    assert judge(quiet, LIMITS)[0] is Verdict.OK
    few = msgspec.structs.replace(WELL, counts=RecentCounts(offered=9, taken=9, lost=4))
    assert judge(few, LIMITS)[0] is Verdict.OK

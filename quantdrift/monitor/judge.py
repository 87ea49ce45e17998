"""From evidence, counts and time to a verdict with its reason."""

import msgspec

from quantdrift.core.records import Verdict
from quantdrift.drift.watch import Phase
from quantdrift.monitor.ledger import Counts

LEAST_LOST = 5  # a lost request or two among a handful taken is no pattern
NO_REFERENCE = "no reference: map this version to one in models.references"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When a slice is `unknown`; see the options of the same names in `[monitor]`."""

    min_groups: int
    max_loss_ratio: float
    stale_after_s: float


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a slice.

    Parameters
    ----------
    phase
        What the evidence says.
    n_groups
        Exchanges compared so far.
    silent_s
        Event time since its last comparison.
    counts
        Of the header strata that its items may fall into, over the recent hour.
    """

    phase: Phase
    n_groups: int
    silent_s: float
    counts: Counts


def judge(standing: Standing, limits: Limits) -> tuple[Verdict, str]:
    """Return the verdict and why, in words.

    An alert lasts until its slice has shown to be inside the budget again: what makes others `unknown` does not hide
    it. Otherwise whatever could hide drift makes the slice `unknown`, never `ok`.
    """
    if standing.phase is Phase.FIRING:
        return Verdict.FIRING, "the mean divergence is above the budget"
    if standing.phase is Phase.WARNING:
        return Verdict.WARNING, "the mean divergence seems to be above the budget"
    missing = limits.min_groups - standing.n_groups
    if missing > 0:
        return Verdict.UNKNOWN, f"needs {missing} more exchanges"
    counts = standing.counts
    if counts.lost >= LEAST_LOST and counts.lost > limits.max_loss_ratio * counts.taken:
        return Verdict.UNKNOWN, "loss: too many of its samples were lost in the last hour"
    if standing.silent_s > limits.stale_after_s and counts.offered > 0:
        return Verdict.UNKNOWN, "stale: there is traffic and no comparison"
    return Verdict.OK, "inside its budget"

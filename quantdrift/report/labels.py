"""What true labels say of each slice: was the drift a loss of accuracy? For display: alerts never come from it."""

from collections.abc import Sequence
from math import sqrt

import msgspec

from quantdrift.report.difference import clustered_share
from quantdrift.report.interval import Estimate
from quantdrift.storage.labels import Outcome


class LabelledSlice(msgspec.Struct, frozen=True, kw_only=True):
    """What the labels say of one slice, as shares of its labelled traffic with 95 % intervals.

    Parameters
    ----------
    n_items, n_clusters
        Labelled items, and their sessions; an exchange without a session counts as one.
    harm
        The reference is right and the candidate wrong.
    help
        The candidate is right and the reference wrong.
    both_wrong
        Neither is right.
    loss
        `harm` - `help`: the accuracy that the candidate loses against the reference.
    """

    slice: str
    n_items: int
    n_clusters: int
    harm: Estimate
    help: Estimate
    both_wrong: Estimate
    loss: Estimate

    @property
    def words(self) -> str:
        """The result in words."""
        if self.loss.low is None or self.loss.high is None:
            return "too few labels"
        if self.loss.low > 0:
            return "less accurate than the reference"
        return "more accurate than the reference" if self.loss.high < 0 else "no clear difference in accuracy"


def worst_first(outcomes: Sequence[Outcome]) -> tuple[LabelledSlice, ...]:
    """Return the slices of one version, those with the clearest loss of accuracy first."""
    slices = [one for outcome in outcomes if (one := labelled(outcome)) is not None]
    return tuple(
        sorted(
            slices,
            key=lambda one: (-(one.loss.low if one.loss.low is not None else one.loss.mean - 1), one.slice),
        )
    )


def labelled(outcome: Outcome) -> LabelledSlice | None:
    """Return the shares of one slice with their intervals (`clustered_share`); None without any weight.

    Assumption: whether an item has a label says nothing about who is right about it, given its slice. Sessions are independent.
    """
    harm, help_, both_wrong = (
        clustered_share(sums) for sums in (outcome.harm, outcome.help, outcome.both_wrong)
    )
    if harm is None or help_ is None or both_wrong is None:
        return None
    return LabelledSlice(
        slice=outcome.slice,
        n_items=outcome.n_items,
        n_clusters=outcome.n_clusters,
        harm=harm,
        help=help_,
        both_wrong=both_wrong,
        loss=paired_difference(help_, harm),
    )


def paired_difference(old: Estimate, new: Estimate) -> Estimate:
    """Return new minus old, two shares of the same items that exclude each other, with the interval that the two give.

    Assumption: at most one of the two is true of an item, as `harm` and `help` are. Their estimates then have the correlation
    r = -sqrt(p q / ((1 - p) (1 - q))) of two cells of a multinomial, which makes the interval wider than for independent ones.

    Bound: 95 % for one look at one slice, as far as the two intervals keep theirs. With d = new - old, and the ends l, h of
    each:

        low = d - sqrt((new - l_new)^2 + (h_old - old)^2 - 2 r (new - l_new) (h_old - old))
        high = d + sqrt((h_new - new)^2 + (old - l_old)^2 - 2 r (h_new - new) (old - l_old))

    References
    ----------
    Newcombe (1998), Improved confidence intervals for the difference between binomial proportions based on paired data,
    Statistics in Medicine 17; Zou and Donner (2008), Construction of confidence limits about effect measures, Statistics in
    Medicine 27.
    """
    mean = new.mean - old.mean
    if old.low is None or old.high is None or new.low is None or new.high is None:
        return Estimate(mean=mean, low=None, high=None)
    odds = [p / (1 - p) if p < 1 else 0.0 for p in (old.mean, new.mean)]
    r = -sqrt(odds[0] * odds[1])
    down, up = (new.mean - new.low, old.high - old.mean), (new.high - new.mean, old.mean - old.low)
    low, high = (sqrt(max(a * a + b * b - 2 * r * a * b, 0.0)) for a, b in (down, up))
    return Estimate(mean=mean, low=max(mean - low, -1.0), high=min(mean + high, 1.0))

"""What true labels say of each slice: was the drift a loss of accuracy? For display: alerts never come from it."""

from collections.abc import Sequence

import msgspec

from quantdrift.facts.estimate import Estimate, correlation, difference, ratio
from quantdrift.storage.labels import Outcome


class LabelledSlice(msgspec.Struct, frozen=True, kw_only=True):
    """What the labels say of one slice, as shares of its labelled traffic with 95 % intervals.

    Parameters
    ----------
    n_items, n_clusters
        Labelled items, and their people; an exchange without a person counts as one.
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
    """Return the shares of one slice with their intervals (`quantdrift.facts.estimate.ratio`); None without any weight.

    Assumption: whether an item has a label says nothing about who is right about it, given its slice. People are independent.
    """
    harm, help_, both_wrong = (ratio(sums) for sums in (outcome.harm, outcome.help, outcome.both_wrong))
    if harm is None or help_ is None or both_wrong is None:
        return None
    loss = difference(help_, harm, correlation(outcome.help, outcome.harm, outcome.help_and_harm))
    assert loss is not None
    assert loss.low is not None
    assert loss.high is not None
    return LabelledSlice(
        slice=outcome.slice,
        n_items=outcome.n_items,
        n_clusters=outcome.n_clusters,
        harm=harm,
        help=help_,
        both_wrong=both_wrong,
        loss=Estimate(mean=loss.mean, low=max(loss.low, -1.0), high=min(loss.high, 1.0)),
    )

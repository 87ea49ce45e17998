"""What true labels say of each slice: was the drift a loss of accuracy? For display: alerts never come from it."""

from collections.abc import Sequence
from typing import Final

import msgspec

from quantdrift.facts.estimate import Estimate, correlation, difference, product, ratio
from quantdrift.facts.words import labels
from quantdrift.storage.labels import Drawn, LabelOutcome

FEWEST_DRAWN: Final = 10
"""With fewer labels of drawn answers their interval would hold nearly every loss."""


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
    is_drawn
        Whether the labels are of changed answers that were drawn for somebody to label; else they came by themselves.
    """

    slice: str
    n_items: int
    n_clusters: int
    harm: Estimate
    help: Estimate
    both_wrong: Estimate | None
    loss: Estimate
    is_drawn: bool = False

    @property
    def counted(self) -> str:
        """How many labels there are: `5,310`, or `50 drawn`."""
        return f"{self.n_items:,}{' drawn' if self.is_drawn else ''}"

    @property
    def words(self) -> str:
        """The result in words."""
        return labels.outcome(self.loss)

    @property
    def accuracy(self) -> str:
        """How much accuracy is lost or gained, in words."""
        return labels.accuracy(self.loss)


def worst_first(outcomes: Sequence[LabelOutcome]) -> tuple[LabelledSlice, ...]:
    """Return the slices of one version, those with the clearest loss of accuracy first."""
    slices = [slice_ for outcome in outcomes if (slice_ := labelled(outcome)) is not None]
    return tuple(
        sorted(
            slices,
            key=lambda slice_: (
                -(slice_.loss.low if slice_.loss.low is not None else slice_.loss.mean - 1),
                slice_.slice,
            ),
        )
    )


def labelled(outcome: LabelOutcome) -> LabelledSlice | None:
    """Return the shares of one slice with their intervals; None without any label.

    From labels that came by themselves these are `quantdrift.facts.estimate.ratio` of the labelled items. Assumption: whether an item
    has a label says nothing about who is right about it, given its slice. People are independent.

    With `FEWEST_DRAWN` labels of drawn changed answers they come from those alone: the candidate can only lose or gain accuracy
    where its answer changed, how many changed is known from all comparisons, and the labels say what a change does
    (`quantdrift.facts.estimate.product`). Assumption: an answer that did not change is as right as before, and of the drawn
    answers those that nobody labelled are as the others.
    """
    drawn = outcome.drawn
    if drawn is not None and drawn.n_items >= FEWEST_DRAWN:
        return _of_drawn(outcome.slice, drawn)
    harm, help_, both_wrong = (ratio(sums) for sums in (outcome.harm, outcome.help, outcome.both_wrong))
    if harm is None or help_ is None or both_wrong is None:
        return None
    loss = difference(help_, harm, correlation(outcome.help, outcome.harm, outcome.help_and_harm))
    return LabelledSlice(
        slice=outcome.slice,
        n_items=outcome.n_items,
        n_clusters=outcome.n_clusters,
        harm=harm,
        help=help_,
        both_wrong=both_wrong,
        loss=_within_one(loss),
    )


def _of_drawn(name: str, drawn: Drawn) -> LabelledSlice | None:
    changed = ratio(drawn.changed)
    of_changed = ratio(drawn.help), ratio(drawn.harm)
    help_, harm = (product(changed, share) for share in of_changed)
    effect = difference(*of_changed, correlation(drawn.help, drawn.harm, drawn.help_and_harm))
    loss = product(changed, effect)
    if harm is None or help_ is None or loss is None:
        return None
    return LabelledSlice(
        slice=name,
        n_items=drawn.n_items,
        n_clusters=drawn.n_clusters,
        harm=harm,
        help=help_,
        both_wrong=None,
        loss=_within_one(loss),
        is_drawn=True,
    )


def _within_one(loss: Estimate | None) -> Estimate:
    assert loss is not None
    assert loss.low is not None
    assert loss.high is not None
    return Estimate(mean=loss.mean, low=max(loss.low, -1.0), high=min(loss.high, 1.0))

"""The diagnosis of a damaged slice: records of what was found, and of what the weights of a candidate are."""

from enum import StrEnum
from typing import Final

import msgspec

DAMAGED: Final = 32
"""Exemplars whose decision flips without which nothing is said of the sites that are not named."""
FEWEST_DAMAGED: Final = 8
FEWEST_ITEMS: Final = 32
"""With fewer the right site is found in no more than half of all cases."""
EVERYWHERE: Final = 0.9
"""Share of changed answers that a site heals, in the slice and elsewhere, from which it is the cause for every slice."""


class WeightsOrigin(StrEnum):
    """What a candidate's weights are."""

    ROUNDED = "rounded"
    FAULTS = "faults"
    OTHER = "another checkpoint"
    SCALED = "scaled by channel"
    MOVED = "moved by whole steps"


class WeightFault(StrEnum):
    """What is wrong with a tensor that is no rounding of the reference's."""

    CHANNELS = "channels"
    BIAS = "bias"
    SHIFT = "zero point"
    VALUES = "values"


class OffTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that is no rounding of the reference's.

    Parameters
    ----------
    site
        Number of its site.
    fault
        What is wrong.
    share
        Share of the values that are off by more than 0.6 steps.
    channels
        Numbers of the channels that are off, where these are at most half of them.
    """

    site: int
    fault: WeightFault
    share: float
    channels: tuple[int, ...] = ()


class NamedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that is off, by the name of its site."""

    site: str
    tensor: OffTensor


class OffValues(msgspec.Struct, frozen=True, kw_only=True):
    """How the thresholds of decision trees at a column, or their leaves, differ from the reference's.

    Parameters
    ----------
    n, n_off, n_far
        All, those that differ, and those that are off by more than rounding explains.
    low, high, reference_low, reference_high
        The smallest and the largest, of the candidate and of the reference.
    rounding
        The largest error of those that are rounded.
    """

    n: int
    n_off: int
    n_far: int
    low: float
    high: float
    reference_low: float
    reference_high: float
    rounding: float


class DiagnosisVerdict(StrEnum):
    """The outcome of a diagnosis: whether a site is named, or ranges that clip together."""

    NAMED = "named"
    NOBODY = "no cause found"
    TOO_FEW = "too few exemplars"


class Cause(StrEnum):
    """Why a slice flips."""

    SATURATION = "saturation"
    RESOLUTION = "resolution"
    WEIGHTS = "weights"
    LAYER = "layer"
    PRECISION = "precision"
    THRESHOLDS = "thresholds"
    LEAVES = "leaves"
    SPREAD = "spread"
    NOT_THIS_SLICE = "not this slice"
    INPUT = "input"
    WITHIN_BUDGET = "within budget"


class HalfUse(msgspec.Struct, frozen=True, kw_only=True):
    """How the results of an operator fit into 16 bits, on the damaged exemplars, with everything in FP32.

    Parameters
    ----------
    kind
        `FP16` or `BF16`.
    bits
        Bits of a number that are kept.
    largest
        The largest absolute value.
    most
        The largest number of 16 bits.
    above
        Share of values that are larger than that: they become infinite.
    below
        Share of values that are smaller than the smallest normal number, and not 0: they lose bits, or become 0.
    """

    kind: str
    bits: int
    largest: float
    most: float
    above: float
    below: float


class Blamed(msgspec.Struct, frozen=True, kw_only=True):
    """A site that was named.

    Parameters
    ----------
    site
        Its name.
    cause
        Saturation, resolution, weights, or the layer where the last two cannot be told apart; the precision of 16 bits; of decision trees
        thresholds or leaves.
    restores
        Share of the loss of the exemplars that it restores on the halves on which it was not chosen, with the sites before it in FP32.
    placebo
        The largest share that a placebo restores there.
    heals
        Share of the candidate's changed answers that are those of the reference with it and the sites before it in FP32, less that
        without it: of the half of the slice's items that no exemplar was drawn from, or of the exemplars where there are too few.
    flips_left
        Share of flips with it and the sites before it in FP32, of the half of the slice's items that no exemplar was drawn from;
        None: there are too few.
    elsewhere_left
        Share of flips on items of other slices with it and the sites before it in FP32; None: none were given.
    outside, used, levels
        Of an activation range, on the damaged exemplars: mean share of values outside, share of the range that is used, and number
        of levels; None for weights.
    low, high, step
        Of an activation range that has one scale for all inputs, else None.
    elsewhere_used, elsewhere_levels
        The same on items of other slices; None: none were given.
    contrast
        Mean square error relative to the values' variance, of the damaged exemplars over that of items of other slices; None: unknown.
    weight_error
        Root mean square of the error of a weight, relative to the weight; None for activations.
    off
        How its tensors differ from the reference's by more than rounding; empty: they do not, or it is not known.
    is_by_channel
        Whether a weight has a scale for each channel; None for activations.
    cost
        Share of multiplications that read it, and run in FP32 with it; None: unknown.
    values
        Of decision trees, how thresholds or leaves differ; None: it is another kind of site.
    is_dynamic
        Whether a range is found while it runs, so that nothing can be calibrated.
    block_size
        Values of a weight that share a scale; 0: it is not in blocks.
    half
        Of an operator in 16 bits, how its results fit into these; None: it is another kind of site.
    """

    site: str
    cause: Cause
    restores: float
    placebo: float
    heals: float
    flips_left: float | None
    elsewhere_left: float | None = None
    outside: float | None = None
    used: float | None = None
    levels: float | None = None
    low: float | None = None
    high: float | None = None
    step: float | None = None
    elsewhere_used: float | None = None
    elsewhere_levels: float | None = None
    contrast: float | None = None
    weight_error: float | None = None
    off: tuple[OffTensor, ...] = ()
    is_by_channel: bool | None = None
    cost: float | None = None
    values: OffValues | None = None
    is_dynamic: bool = False
    block_size: int = 0
    half: HalfUse | None = None


class Clipped(msgspec.Struct, frozen=True, kw_only=True):
    """An activation range that cuts values off.

    Parameters
    ----------
    site
        Its name.
    outside
        Mean share of values outside the range, on the damaged exemplars.
    elsewhere
        The same on items of other slices; None: none were given.
    low, high
        The range; None where each channel has its own.
    """

    site: str
    outside: float
    elsewhere: float | None
    low: float | None
    high: float | None


class Clipping(msgspec.Struct, frozen=True, kw_only=True):
    """Activation ranges that are too narrow together.

    Parameters
    ----------
    ranges
        Those that clip and are not named, by the share of values outside, the largest first.
    n_ranges
        Activation ranges of the candidate.
    restores
        Share of the loss of the exemplars that goes away with all of them in FP32, beside the named sites.
    placebo
        The largest share that a placebo restores there.
    heals, flips_left
        As in `Blamed`, with them and the named sites in FP32; `heals` less that of the named sites.
    """

    ranges: tuple[Clipped, ...]
    n_ranges: int
    restores: float
    placebo: float
    heals: float
    flips_left: float | None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What was found.

    Parameters
    ----------
    verdict
        Whether a site is named, or ranges that clip together.
    causes
        In words, the most important one first.
    flips, budget
        Share of the slice's items that flip, and what the budget allows.
    elsewhere
        Share of flips on other items; None: none were given.
    n_items, n_damaged, n_random
        Items of the slice, and exemplars among them.
    n_sites
        Sites of the candidate.
    blamed
        The named sites in the order in which they are best put into FP32.
    clipping
        Ranges that clip together, beside the named sites; None: they do no damage.
    order
        Names of the sites that greedy search would put into FP32, named or not.
    one_off, one_on
        By the name of the site: share of the exemplars' loss that it restores alone, and that it causes alone.
    together
        By the letter of a kind of site: share of changed answers that heal with all of its sites in FP32, of the items of
        `Blamed.heals`. Empty where a site is named, or none was tried.
    fresh_flips
        Share of flips of the half that no exemplar was drawn from; None: there are too few.
    reproduced
        Share of decisions of the candidate that the copy reproduces.
    rounding
        Share of decisions that change when scales change by a ten-thousandth, at most; measured where `reproduced` is below 99.9 %,
        else 0.
    origin, off
        What the weights are, by the files alone, and the tensors that are not the reference's, rounded, where these are faults.
    n_moved, n_tensors
        Tensors that are off by more than rounding, and all that were compared.
    difference
        Of the copy in FP32 from the reference, relative to its largest output.
    unmatched
        Weights that the reference does not have: they stay quantised.
    emulated
        `FP16` or `BF16`: the copy stands for the candidate. Empty: the candidate was computed, too.
    """

    verdict: DiagnosisVerdict
    causes: tuple[Cause, ...]
    flips: float
    budget: float
    elsewhere: float | None
    n_items: int
    n_damaged: int
    n_random: int
    n_sites: int
    blamed: tuple[Blamed, ...] = ()
    clipping: Clipping | None = None
    order: tuple[str, ...] = ()
    one_off: dict[str, float] = {}
    one_on: dict[str, float] = {}
    together: dict[str, float] = {}
    fresh_flips: float | None = None
    reproduced: float
    rounding: float = 0.0
    origin: WeightsOrigin = WeightsOrigin.ROUNDED
    off: tuple[NamedTensor, ...] = ()
    n_moved: int = 0
    n_tensors: int = 0
    difference: float
    unmatched: tuple[str, ...]
    emulated: str = ""

    @property
    def is_of_trees(self) -> bool:
        """Whether the sites are thresholds and leaves of decision trees."""
        return any(site.startswith(("T:", "V:")) for site in self.one_off)

    @property
    def left(self) -> float | None:
        """Share of flips with all that is named in FP32; None: nothing is named, or there are too few items."""
        if self.clipping is not None:
            return self.clipping.flips_left
        return self.blamed[-1].flips_left if self.blamed else None

    @property
    def is_of_every_slice(self) -> bool:
        """Whether the first site heals nine tenths of the changed answers in the slice and elsewhere, with damage elsewhere."""
        if not self.blamed or not self.elsewhere or self.blamed[0].elsewhere_left is None:
            return False
        healed = 1.0 - self.blamed[0].elsewhere_left / self.elsewhere
        return min(self.blamed[0].heals, healed) > EVERYWHERE

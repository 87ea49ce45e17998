"""Pools: real inputs that candidate and reference have both answered, compared once, to be replayed as traffic."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.config.schema import OutputKind
from quantdrift.models.comparators.classes.classification import ClassificationComparator
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.tensors.arrays import Array

TOP_K = 3
KL_CAP = 2.0  # nats, the shipped default
Values = npt.NDArray[np.float64]


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Items of one kind, n of them, served by one candidate version.

    Parameters
    ----------
    name
        Kind and version, for people.
    found
        What the shadow's comparator says of each.
    reference_right, candidate_right
        (n,), 1.0 where the label agrees.
    features
        Per item what slices bin, as the shadow computes it.
    """

    name: str
    found: Divergences
    reference_right: Values
    candidate_right: Values
    features: tuple[Mapping[str, float], ...]

    def __len__(self) -> int:
        return len(self.reference_right)


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """What traffic made of pools is like.

    Parameters
    ----------
    flip
        Share of items whose top class differs.
    divergence, kl_p99
        Mean of the capped divergence, and its 99 % quantile, nats.
    reference_accuracy, candidate_accuracy
        By the labels.
    gap, gap_se
        Candidate's accuracy over the reference's on the same items, and the standard error that the pool's size leaves.
    """

    flip: float
    divergence: float
    kl_p99: float
    reference_accuracy: float
    candidate_accuracy: float
    gap: float
    gap_se: float


def compare(
    name: str,
    candidate: Array,
    reference: Array,
    labels: Array,
    features: Sequence[Mapping[str, float]] | None = None,
) -> Pool:
    """Return the items compared by the shadow's comparator.

    Parameters
    ----------
    name
        For people.
    candidate, reference
        (n, classes), logits.
    labels
        (n,), the true classes.
    features
        Per item; none where it is left out.
    """
    return Pool(
        name=name,
        found=ClassificationComparator(OutputKind.LOGITS, TOP_K).compare(candidate, reference),
        reference_right=(reference.argmax(axis=1) == labels).astype(np.float64),
        candidate_right=(candidate.argmax(axis=1) == labels).astype(np.float64),
        features=tuple(features) if features is not None else ({},) * len(labels),
    )


def quality(
    chance: Values, flip: Values, divergence: Values, reference: Values, candidate: Values
) -> Quality:
    """Return what traffic is like whose items have these chances.

    Parameters
    ----------
    chance
        (n,), any positive sum.
    flip, divergence
        (n,), the divergence capped.
    reference, candidate
        (n,), 1.0 where each is right.
    """
    p = chance / chance.sum()
    gap = candidate - reference
    mean_gap = float(p @ gap)
    order = np.argsort(divergence)
    place = int(np.searchsorted(np.cumsum(p[order]), 0.99))
    return Quality(
        flip=float(p @ flip),
        divergence=float(p @ divergence),
        kl_p99=float(divergence[order[min(place, len(divergence) - 1)]]),
        reference_accuracy=float(p @ reference),
        candidate_accuracy=float(p @ candidate),
        gap=mean_gap,
        gap_se=float(np.sqrt(p**2 @ (gap - mean_gap) ** 2)),
    )


def capped(pool: Pool) -> Values:
    """Return the divergences of all items, capped as the monitor does, nats."""
    return np.minimum(pool.found.divergence, KL_CAP)


def balance(before: Pool, better: Pool, worse: Pool) -> float:
    """Return the share of `worse` that gives a mixture with `better` the mean capped divergence of `before`.

    Raises
    ------
    ValueError
        There is none: `before` does not lie between the two.
    """
    low, middle, high = (float(capped(pool).mean()) for pool in (better, before, worse))
    if not low < middle < high:
        raise ValueError(f"a mean of {middle:g} nat does not lie between {low:g} and {high:g}")
    return (middle - low) / (high - low)

"""The value of one group, which is the observation of a detector.

The items of one exchange are correlated, so the exchange is the unit. With `v_i = c / pi_i`, c at most every
inclusion probability of the policy,

    z = (1 / n) * sum over the sampled items i of v_i * (x_i - m)

has mean at most 0 while the mean over groups is at most m: the sampling probabilities cancel. It is kept as the two
numbers `vx = sum(v_i x_i) / n` and `v = sum(v_i) / n`, so that `z = vx - v * m` for every m.
"""

from collections.abc import Sequence

import msgspec

ROUNDING = 1e-9


class GroupValue(msgspec.Struct, frozen=True):
    """One observation.

    Parameters
    ----------
    vx
        Weighted mean of the items' values over the group's offered items, in [0, 1].
    v
        Mean of the weights over the same items, in [0, 1]; at least `vx`.
    """

    vx: float
    v: float


def group_value(x: Sequence[float], pi: Sequence[float], c: float, n_offered: int) -> GroupValue:
    """Return the value of a group.

    Parameters
    ----------
    x
        Values of the sampled items, clipped to [0, 1] by the caller: `min(x, cap) / cap`, so that an infinite one
        counts 1.
    pi
        Their inclusion probabilities.
    c
        Positive lower bound of every inclusion probability of the policy in force.
    n_offered
        Items of the group that were offered, sampled or not.

    Raises
    ------
    ValueError
        A value outside [0, 1], or a probability below c: weights above 1 would break the false-alarm bound, and
        mean that the observation belongs to another policy than c does.
    """
    if not 0 < len(x) == len(pi) <= n_offered:
        raise ValueError("a group holds at least one sampled item and no more than were offered")
    vx = weight = 0.0
    for value, probability in zip(x, pi, strict=True):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"the value {value} is not clipped to [0, 1]")
        v = c / probability
        if not 0.0 < v <= 1.0 + ROUNDING:
            raise ValueError(f"the weight {v} = c / pi is above 1: c is no bound of this policy")
        v = min(v, 1.0)
        vx += v * value
        weight += v
    return GroupValue(vx / n_offered, weight / n_offered)

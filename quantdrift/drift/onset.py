"""When the drift began: each bet's CUSUM twin remembers when it was last at its floor.

The twin of bet k is `C <- max(1, C * e_k)`; while nothing is wrong it falls back to its floor 1 again and again. The
last time there, of the bet with the most evidence, is the estimated onset. It is an estimate with no interval, and
what is averaged from it on is biased upwards: it was chosen by looking.
"""

import msgspec
import numpy as np

from quantdrift.drift.block import BoolArray, FloatArray, IntArray, accumulate

CEILING = 1e30  # far above the evidence of any alarm; keeps the twin finite while an alarm lasts


class Twin(msgspec.Struct, frozen=True, kw_only=True):
    """The twins along a block.

    Parameters
    ----------
    cusum
        (steps, N, K) after each step.
    floor
        (steps, N, K) index of the last step in the block at which the twin was at its floor; -1 before.
    """

    cusum: FloatArray
    floor: IntArray


def follow(cusum: FloatArray, product: FloatArray, seen: BoolArray) -> Twin:
    """Return the twins along a block.

    Parameters
    ----------
    cusum
        (N, K) before the first step.
    product
        (steps, N, K) running product of the bets' factors.
    seen
        (steps, N) where there is an observation.
    """
    # C_t = P_t * max(C_0, max over s <= t of 1 / P_s), and it is at its floor where s = t attains the maximum.
    inverse = np.reciprocal(product)
    top = np.maximum(accumulate(np.maximum, inverse), cusum)
    at_floor = (inverse >= top) & seen[:, :, None]
    step = np.where(at_floor, np.arange(len(product))[:, None, None], -1)
    value = np.where(inverse >= top, 1.0, np.minimum(product * top, CEILING))
    return Twin(cusum=value, floor=np.maximum.accumulate(step, axis=0))


def onset_bet(evidence: FloatArray) -> int:
    """Return the bet with the most evidence, from (K,) page evidence."""
    return int(np.argmax(evidence))

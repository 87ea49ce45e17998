"""When the drift began: each bet's CUSUM twin remembers when it was last at its floor.

The twin of bet k is `C <- max(1, C * e_k)`; while nothing is wrong it falls back to its floor 1 again and again. The
last time there, of the bet with the most evidence, is the estimated onset. It is an estimate with no interval, and
what is averaged from it on is biased upwards: it was chosen by looking.
"""

import msgspec
import numpy as np

from quantdrift.drift.block import BoolArray, FloatArray, IntArray, Steps

CEILING = 1e30  # far above the evidence of any alarm; keeps the twin finite while an alarm lasts


class Twin(msgspec.Struct, frozen=True, kw_only=True):
    """Where the twins end.

    Parameters
    ----------
    cusum
        (N, K) after the last group.
    floor
        (N, K) the last step at which the twin was at its floor; -1 where that was before.
    """

    cusum: FloatArray
    floor: IntArray


def follow(steps: Steps, cusum: FloatArray, factor: FloatArray, seen: BoolArray) -> Twin:
    """Return where the twins end.

    Parameters
    ----------
    steps
        Who has how many groups.
    cusum
        (N, K) before the first group.
    factor
        (groups, K) what the bets multiply their evidence by; 1 where there is no observation.
    seen
        (groups,) where there is one.
    """
    after = steps.fall(cusum, factor)
    floor = steps.latest((after == 1.0) & seen[:, None])
    return Twin(cusum=np.minimum(after[steps.last], CEILING), floor=floor)


def onset_bet(evidence: FloatArray) -> int:
    """Return the bet with the most evidence, from (K,) page evidence."""
    return int(np.argmax(evidence))

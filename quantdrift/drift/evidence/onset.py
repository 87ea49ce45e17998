"""The estimate of the onset: the last time at which a bet's CUSUM twin was at its floor.

The twin of bet k is `C <- max(1, C * e_k)`; without drift it returns to its floor 1 again and again. The last time
there, of the bet with the most evidence, is the estimated onset. It is an estimate without an interval, and means from
it on are biased upwards, because it is chosen from the same data.
"""

import numpy as np

from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import FloatArray

CEILING = 1e30  # far above the evidence of any alarm; keeps the twin finite while an alarm lasts


@compiled
def twin(cusum: float, factor: float) -> float:
    """Return C after a group by which a bet multiplies its evidence by `factor`; 1 is its floor."""
    return min(max(cusum * factor, 1.0), CEILING)


def onset_bet(evidence: FloatArray) -> int:
    """Return the bet with the most evidence, from (K,) page evidence."""
    return int(np.argmax(evidence))

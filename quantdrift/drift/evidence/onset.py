"""When the drift began: each bet's CUSUM twin remembers when it was last at its floor.

The twin of bet k is `C <- max(1, C * e_k)`; while nothing is wrong it falls back to its floor 1 again and again. The
last time there, of the bet with the most evidence, is the estimated onset. It is an estimate with no interval, and
what is averaged from it on is biased upwards: it was chosen by looking.
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

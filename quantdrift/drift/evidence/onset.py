"""The estimate of the onset: the last time at which a bet's CUSUM twin was at its floor.

The twin of bet k is `C <- max(1, C * e_k)`; without drift it returns to its floor 1 again and again. The last time
there, of the bet with the most evidence, is the estimated onset. It is an estimate without an interval, and means from
it on are biased upwards, because it is chosen from the same data.

Time there is that of the fold, which never runs backwards. After an outage some groups come after newer ones: what is delivered again, and
a model that lags behind others. If such a group adds to the evidence since the floor, the onset is no later than its capture.
"""

import numpy as np

from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import FloatArray

CEILING = 1e30  # far above the evidence of any alarm; keeps the twin finite while an alarm lasts


@compiled
def twin(cusum: float, factor: float) -> float:
    """Return C after a group by which a bet multiplies its evidence by `factor`; 1 is its floor."""
    return min(max(cusum * factor, 1.0), CEILING)


@compiled
def redate(floor_us: FloatArray, cusum: FloatArray, factor: FloatArray, captured_us: float) -> None:
    """Date the floor of each bet, in place, no later than the capture of a group that came late and added to its evidence.

    Parameters
    ----------
    floor_us, cusum, factor
        (bets,) the last time at the floor, the twin after the group, and by what the group multiplied its evidence.
    """
    for bet in range(len(floor_us)):
        if cusum[bet] > 1.0 and factor[bet] > 1.0:
            floor_us[bet] = min(floor_us[bet], captured_us)


def onset_bet(evidence: FloatArray) -> int:
    """Return the bet with the most evidence, from (K,) page evidence."""
    return int(np.argmax(evidence))

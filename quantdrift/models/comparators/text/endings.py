r"""The reference's probability of ending the answer earlier, on the served path, per answer, in float64.

With e_i the reference's probability of a token that ends the answer at position i, given the prompt and all served tokens
before it, and m the number of positions at which the candidate went on (all of them if a limit cut it):

- `end_p` = e_m, its probability of ending where the candidate ended itself, in [0, 1]: low if the candidate stopped too
  early.
- `early_end` = 1 - prod (1 - e_i) over i < m, in [0, 1]: the probability that it would have ended earlier on the same
  tokens. High if the candidate's answer goes on for too long.
- `kept_share` = (1 / m) sum over i = 1..m of prod (1 - e_j) over j < i, in [0, 1]: E min(L, m) / m, where L is the length at
  which it ends on that path (the restricted mean survival time: Royston and Parmar, BMC Medical Research Methodology 13:152,
  2013).

All of it is at temperature 1, before filters. A server lists only the most likely tokens: an unlisted end token has at most
the probability of the least likely listed one. `early_end` is then a lower bound, `early_end_upper` and `kept_share` are
upper bounds; for a model in a folder they are exact, and `early_end_upper` equals `early_end`.
"""

from collections.abc import Sequence

import numpy as np

from quantdrift.models.comparators.protocol import Values
from quantdrift.models.language.scoring import Scores


def endings(scores: Sequence[Scores]) -> dict[str, Values]:
    """Return the measures of each answer's end, by name : (items,); NaN where unknown.

    Parameters
    ----------
    scores
        The reference's scores.
    """
    end_p = np.array([score.end_p for score in scores], dtype=np.float64)
    # Without positions either the answer ended at once, and could not end earlier, or its end is unknown.
    has_ends = [len(score.ends) > 0 or not np.isnan(score.end_p) for score in scores]
    survived = [_survived(score.ends) for score in scores]
    at_least = np.array([1 - steps[-1] for steps in survived])
    at_most = np.array([1 - _survived(score.ends_upper)[-1] for score in scores])
    return {
        "end_p": end_p,
        "early_end": np.where(has_ends, at_least, np.nan),
        "early_end_upper": np.where(has_ends, at_most, np.nan),
        "kept_share": np.array([steps[1:].mean() if len(steps) > 1 else np.nan for steps in survived]),
    }


def _survived(ends: Values) -> Values:
    """Return the probability of not having ended before each position, and after the last one : (positions + 1,)."""
    return np.concatenate([[1.0], np.cumprod(1 - ends)])

"""Unlikely tokens: how far a sampled token is among the least likely ones of the reference.

Of a sampled answer no single token tells anything: any may be drawn. But it is known how often the reference itself would draw one of
its least likely tokens. At a position, p is the reference's distribution at the request's temperature, t the token that was served, F the
probability of all tokens that are less likely than t, and G that of t and of those that are exactly as likely. Then

    x = min(1, max(0, (a - F) / G)),    a = `LEAST_LIKELY`

is the probability that t lies in the least likely a of the distribution, where equally likely tokens are in random order: the randomised
probability integral transform (Rosenblatt, Annals of Mathematical Statistics 23, 1952), its random number integrated out. Where the candidate
draws from p, E x = a at every position, given all tokens before it, whatever p is.

What holds beyond that:

- Samplers that only remove less likely tokens (`top_k`, `top_p`, `min_p`, before or after the temperature) make E x at most a, so they
  need not be known, and so does a lower temperature than the one that is assumed.
- Where only the k most likely tokens are known, x is a lower bound: exact at temperature 1 if t is likelier than the least of them.
- A mean over an answer has the expectation a only if the answer's length does not depend on x: a budget leaves room for that.
- Penalties, biases, grammars and samplers that remove likely tokens are not known here: such an answer has no x.
"""

from typing import Final, TypeGuard

import numpy as np
import numpy.typing as npt

from quantdrift.models.language.scoring import Scores

LEAST_LIKELY: Final = 0.05
_LEAST_TEMPERATURE: Final = 0.05  # below, it is greedy but for rounding errors
_MOST_TOKENS: Final = float(2**20)  # of a vocabulary
_ROUNDING: Final = 1e-9

Values = npt.NDArray[np.float64]


def is_drawn(temperature: float | None) -> TypeGuard[float]:
    """Return whether tokens are drawn at this temperature, which is known."""
    return temperature is not None and temperature >= _LEAST_TEMPERATURE


def unlikely_share(below: Values, same: Values) -> Values:
    """Return x from F and G."""
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(same > 0.0, (LEAST_LIKELY - below) / same, np.where(below < LEAST_LIKELY, 1.0, 0.0))
    return np.clip(share, 0.0, 1.0)


def unlikely_tokens(scores: Scores, temperature: float) -> Values:
    """Return x of each token, or a lower bound from the listed ones; NaN where its log-probability is not known.

    The tokens that are not listed count as less likely, and their probability at the temperature as as large as it can be: none is above
    the least of the listed.

    Parameters
    ----------
    scores
        The reference's.
    """
    if len(scores.unlikely):
        return scores.unlikely
    own = scores.logprobs
    is_there = ~np.isnan(scores.top_logprobs)
    listed = np.where(is_there, scores.top_logprobs, -np.inf)
    least = np.min(np.where(is_there, scores.top_logprobs, 0.0), axis=1, initial=0.0)
    adds = is_there.any(axis=1) & (own >= least - _ROUNDING)  # one of the listed
    rest = np.maximum(1.0 - np.exp(listed).sum(axis=1) - np.where(adds, 0.0, np.exp(own)), 0.0)
    power = 1.0 / temperature
    if power >= 1.0:
        tail = rest * np.exp(least * (power - 1.0))
    else:
        tail = (
            _MOST_TOKENS * (rest / _MOST_TOKENS) ** power
        )  # all of them equally likely: Jensen's inequality
    mass, mass_own = np.exp(listed * power), np.exp(own * power)
    is_same = is_there & (np.abs(listed - own[:, None]) <= _ROUNDING)
    same = np.where(is_same.any(axis=1), np.where(is_same, mass, 0.0).sum(axis=1), mass_own)
    below = np.where((listed < own[:, None]) & ~is_same, mass, 0.0).sum(axis=1) + tail
    whole = mass.sum(axis=1) + np.where(adds, 0.0, mass_own) + tail
    return np.where(np.isnan(own), np.nan, unlikely_share(below / whole, same / whole))

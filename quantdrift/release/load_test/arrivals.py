"""The times at which requests are due: with the gaps of a recording, with its changes of the rate, or at random.

All are stretched to the offered load, so that the shape of the traffic stays and its mean changes. A stretched recording has bursts of as many
requests as the recorded one, in a shorter time.

Where only a part p of the requests was captured, the gaps between them are not those of the traffic: a thinned stream looks more like one at random. But
its rate goes up and down as that of the traffic does. So requests are then drawn at random with that rate: the recording is cut into spans of
some `_SPAN` captured requests on average, and the rate of each is its count, shrunk towards the mean by the share of the variance that chance alone
does not explain (James and Stein's estimator for Poisson counts). Bursts shorter than a span are not seen.
"""

import math
from typing import Final

import msgspec
import numpy as np

from quantdrift.drift.evidence.observations import FloatArray, IntArray
from quantdrift.facts.load_test import Arrival

_WHOLE: Final = 0.9  # of the requests were captured: the gaps are those of the traffic
_LEAST_GAPS: Final = 20
_SPAN: Final = 20
_LEAST_SPANS: Final = 10


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """How requests follow each other.

    Parameters
    ----------
    kind
        What is known of it.
    gaps
        Recorded gaps, with the mean 1; the k-th is before the recorded request k : (requests,). Of `RECORDED` alone.
    rates
        Rate of each span, with the mean 1 : (spans,). Of `RATES` alone.
    per_span
        Requests of a span, captured or not.
    gap_cv
        Standard deviation of the recorded gaps divided by their mean; None: not known.
    """

    kind: Arrival
    gaps: FloatArray
    rates: FloatArray
    per_span: float = 1.0
    gap_cv: float | None = None

    def due(self, n: int, per_s: float, rng: np.random.Generator) -> tuple[FloatArray, IntArray | None]:
        """Return when requests are due, in seconds from the first on, in order, and which recorded request each is; None: any.

        Their mean rate is `per_s` exactly.
        """
        chosen: IntArray | None = None
        if self.kind is Arrival.RECORDED:
            chosen = (rng.integers(len(self.gaps)) + np.arange(n)) % len(self.gaps)
            at = np.cumsum(self.gaps[chosen])
        elif self.kind is Arrival.RATES:
            points = np.cumsum(rng.exponential(size=n))
            # As often around as it takes until as many requests are expected.
            n_spans = len(self.rates) * (1 + math.ceil(points[-1] / (self.per_span * len(self.rates))))
            spans = (rng.integers(len(self.rates)) + np.arange(n_spans)) % len(self.rates)
            expected = np.concatenate(([0.0], np.cumsum(self.rates[spans]))) * self.per_span
            at = np.interp(points, expected, np.arange(len(expected)) * self.per_span)
        else:
            at = np.cumsum(rng.exponential(size=n))
        at = at - at[0]
        # n requests stand for n gaps: the one after the last is not seen, and counts as a mean one.
        span = float(at[-1]) * n / max(n - 1, 1)
        return (at * (n / per_s / span) if span > 0 else at), chosen


def arrivals_of(at_s: FloatArray | None, captured_share: float) -> Arrivals:
    """Return how recorded requests follow each other.

    Parameters
    ----------
    at_s
        When they came, in seconds, in order; None: not recorded.
    captured_share
        Share of the requests that was captured.
    """
    none: FloatArray = np.empty(0)
    if at_s is None or len(at_s) < _LEAST_GAPS or at_s[-1] <= at_s[0]:
        return Arrivals(kind=Arrival.POISSON, gaps=none, rates=none)
    gaps = np.diff(at_s)
    cv = float(gaps.std() / gaps.mean())
    if captured_share >= _WHOLE:
        # The gap before the first request is not recorded: a mean one, where the recording begins again.
        every = np.concatenate(([gaps.mean()], gaps)) / gaps.mean()
        return Arrivals(kind=Arrival.RECORDED, gaps=every, rates=none, gap_cv=cv)
    n_spans = len(at_s) // _SPAN
    if n_spans < _LEAST_SPANS:
        return Arrivals(kind=Arrival.POISSON, gaps=none, rates=none, gap_cv=cv)
    counts, _ = np.histogram(at_s, bins=n_spans, range=(float(at_s[0]), float(at_s[-1])))
    mean, variance = counts.mean(), counts.var(ddof=1)
    kept = max(0.0, 1.0 - mean / variance) if variance > 0 else 0.0
    rates = np.maximum(1.0 + kept * (counts / mean - 1.0), 1e-3)
    return Arrivals(
        kind=Arrival.RATES,
        gaps=none,
        rates=rates / rates.mean(),
        per_span=float(mean) / captured_share,
        gap_cv=cv,
    )

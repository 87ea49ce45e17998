"""The local caps: what may leave this pod in a second, and how much of what is drawn need not even be held.

A token bucket: a hard bound on a rate, with a burst of one second.
"""

import math

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import Sampling
from quantdrift.core.records import Loss
from quantdrift.sidecar.state.counters import Gauge, Slot


class TokenBucket:
    """Lets through `rate` tokens per second on average.

    It holds at most one second's tokens. Whatever comes passes while there is a token, and may leave the bucket in
    debt: so it is decided without knowing a size, and a large one has the same chance as a small one. In any T seconds
    at most `rate * T`, one burst and the last one's tokens pass.

    Parameters
    ----------
    rate
        Tokens per second, > 0.
    clock
        Tells the time.
    """

    def __init__(self, rate: float, clock: Clock) -> None:
        self._rate = rate
        self._burst = max(rate, 1.0)
        self._clock = clock
        self._tokens = self._burst
        self._at_s = clock.monotonic_s()

    def allows(self) -> bool:
        """Return whether something may pass now; nothing is taken."""
        now_s = self._clock.monotonic_s()
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        return self._tokens >= 1.0

    def take(self, n: float) -> None:
        """Take `n` tokens."""
        self._tokens -= n


HEADROOM = 2.0  # so many times what the caps let through is let in: chance must leave no token unused
VALID_S = 3.0  # a share holds at most so long: who tells it may have died
BILLION = 1_000_000_000
_FADING = 0.84  # of what was seen, at each look: half of it within a second
_LEAST = 1e-6  # exchanges: what has faded so far tells nothing any more
# Of what is judged, the caps must refuse so much before a share is told: with one they refuse about half, and a burst
# that the buckets still have tokens for is none above the caps.
_ABOVE = 0.25


class RateLimits:
    """Judges each exchange that is to leave, and tells the relay workers beforehand how many would be refused.

    An exchange is judged once, when it has ended. To refuse by the buckets when a request is drawn, too, would ask long
    exchanges twice and short ones once; what is refused there is left to chance, alike for all.

    Parameters
    ----------
    sampling
        The caps.
    slot
        Counts of the capture process, where the workers read the share.
    clock
        Times the caps.
    """

    def __init__(self, sampling: Sampling, slot: Slot, clock: Clock) -> None:
        self._slot = slot
        self._clock = clock
        self._limits: tuple[float, float] | None = None
        self.reconfigure(sampling)
        self._at_s = clock.monotonic_s()
        self._n_drawn: int | None = None  # until the first look
        self._n_admitted = 0
        self._admitted = self._judged = self._passed = self._passed_bytes = 0.0
        slot.set(Gauge.REFUSING_UNTIL_NS, 0)

    def reconfigure(self, sampling: Sampling) -> None:
        """Go over to other caps; those that stay are not filled anew: a file that is touched must not do that."""
        limits = sampling.max_exchanges_per_s, float(sampling.max_bytes_per_s)
        if limits != self._limits:
            self._limits = limits
            self._exchanges, self._bytes = (TokenBucket(limit, self._clock) for limit in limits)
            self._slot.set(Gauge.REFUSING_UNTIL_NS, 0)

    def refusal(self) -> Loss | None:
        """Return the cap that an exchange is above now, whatever its size, or None."""
        if not self._exchanges.allows():
            return Loss.RATE_CAP
        return None if self._bytes.allows() else Loss.BYTE_CAP

    def refuse(self) -> None:
        """Take note of an exchange that was refused."""
        self._judged += 1

    def take(self, n_bytes: int) -> None:
        """Let an exchange of so many bytes pass."""
        self._exchanges.take(1)
        self._bytes.take(n_bytes)
        self._judged += 1
        self._passed += 1
        self._passed_bytes += n_bytes

    def tell(self, n_drawn: int, n_refused: int, *, keeps_all: bool) -> None:
        """Tell the relay workers which share of what they draw to refuse. Called some times a second.

        Parameters
        ----------
        n_drawn
            Requests that the first phase has ever taken, refused ones included.
        n_refused
            Of them those that were refused at once.
        keeps_all
            Whether whatever the first phase takes comes before the caps: nothing is thinned or paused.
        """
        now_s = self._clock.monotonic_s()
        elapsed_s, self._at_s = now_s - self._at_s, now_s
        before, self._n_drawn = self._n_drawn, n_drawn
        n_admitted, self._n_admitted = self._n_admitted, n_drawn - n_refused
        if before is None or elapsed_s <= 0:
            return
        self._admitted += self._n_admitted - n_admitted
        share = self._refused((n_drawn - before) / elapsed_s) if keeps_all else 0.0
        by_rate, by_bytes = self._capacities()
        billionths = int(share * BILLION)
        self._slot.set(Gauge.REFUSED_BY_RATE, billionths if by_rate <= by_bytes else 0)
        self._slot.set(Gauge.REFUSED_BY_BYTES, billionths if by_rate > by_bytes else 0)
        self._slot.set(Gauge.REFUSING_UNTIL_NS, int((now_s + VALID_S) * BILLION) if share else 0)
        self._admitted *= _FADING
        self._judged *= _FADING
        self._passed *= _FADING
        self._passed_bytes *= _FADING

    def _refused(self, drawn_per_s: float) -> float:
        """Return the share that leaves `HEADROOM` times what passes; many that are drawn end before they are judged."""
        if self._admitted < _LEAST or self._passed >= (1 - _ABOVE) * self._judged:
            return 0.0
        judged_per_s = drawn_per_s * min(1.0, self._judged / self._admitted)
        wanted = HEADROOM * min(self._capacities())
        return max(0.0, 1.0 - wanted / judged_per_s) if judged_per_s else 0.0

    def _capacities(self) -> tuple[float, float]:
        """Return how many exchanges per second each cap lets through, at the mean size of late."""
        assert self._limits is not None
        rate, n_bytes = self._limits
        return rate, n_bytes * self._passed / self._passed_bytes if self._passed >= _LEAST else math.inf

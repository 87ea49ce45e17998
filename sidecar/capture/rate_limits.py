"""Rate limits on what leaves this pod, and the share of drawn requests to refuse because of them.

A limit is a token bucket: a hard bound on the rate, with a burst of one second. What the capture process reads late, because
it or the whole machine did not run for some seconds, is judged by the time of its capture.
"""

import math
from typing import Final

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import SamplingOptions
from quantdrift.core.records import Loss
from quantdrift.sidecar.state.counters import Gauge, Slot


class TokenBucket:
    """A token bucket of `rate` tokens per second.

    It holds at most the tokens of `burst_s` seconds. An item passes while there is at least one token, and may leave
    the bucket in debt: so the decision does not depend on the size, and a large item has the same chance as a
    small one. In any T seconds at most `rate * T` tokens, one burst and the tokens of the last item pass.

    Parameters
    ----------
    rate
        Tokens per second, > 0.
    clock
        Monotonic.
    burst_s
        Seconds whose tokens it holds, and at least one token.
    """

    def __init__(self, rate: float, clock: Clock, burst_s: float = 1.0) -> None:
        self._rate = rate
        self._burst = max(rate * burst_s, 1.0)
        self._clock = clock
        self._tokens = self._burst
        self._at_s = clock.monotonic_s()

    def allows(self) -> bool:
        """Return whether an item may pass now; no token is taken."""
        now_s = self._clock.monotonic_s()
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        return self._tokens >= 1.0

    def take(self, n: float) -> None:
        """Take `n` tokens."""
        self._tokens -= n


LATE_S: Final = 1.0
"""An exchange that is read so long after its capture, in seconds, is judged by the time of its capture."""
TOO_LATE_S: Final = 30.0
"""One that is read after more than this is judged by the time of its reading again, so that the rate of reading has a bound."""


class Limit:
    """One limit on what is sent, in units per second of capture.

    An exchange that is read in time passes while a token bucket has a token. One that is read late passes while fewer than
    `rate` units of its second of capture have passed: what waited while nobody read it is not refused because it comes at
    once. All that passes takes from a second bucket too, which has the tokens of `TOO_LATE_S` and refuses late exchanges when
    it is empty. So in any T seconds of reading at most `rate * (T + TOO_LATE_S)` units pass, one burst, and the units of two items.

    Parameters
    ----------
    rate
        Units per second, > 0.
    clock
        Times the readings; its `now` is compared with the times of capture.
    """

    def __init__(self, rate: float, clock: Clock) -> None:
        self._rate = rate
        self._clock = clock
        self._in_time = TokenBucket(rate, clock)
        self._in_all = TokenBucket(rate, clock, TOO_LATE_S)
        self._by_second: dict[int, float] = {}  # of capture: the units that have passed

    def allows(self, captured_s: float) -> bool:
        """Return whether an exchange may pass now that was captured at this time, in seconds since 1970."""
        if not LATE_S < self._clock.now().timestamp() - captured_s <= TOO_LATE_S:
            return self._in_time.allows()
        return self._by_second.get(int(captured_s), 0.0) < self._rate and self._in_all.allows()

    def take(self, n: float, captured_s: float) -> None:
        """Take `n` units for an exchange that was captured at this time."""
        now_s = self._clock.now().timestamp()
        late_s = now_s - captured_s
        if not LATE_S < late_s <= TOO_LATE_S:
            self._in_time.take(n)
        self._in_all.take(n)
        if 0.0 <= late_s <= TOO_LATE_S:
            second = int(captured_s)
            if second not in self._by_second:
                oldest = now_s - TOO_LATE_S - 1.0
                self._by_second = {at: units for at, units in self._by_second.items() if at >= oldest}
            self._by_second[second] = self._by_second.get(second, 0.0) + n


HEADROOM: Final = 2.0  # this many times the limit is admitted, so that chance leaves no token unused
VALID_S = 3.0  # a share is valid for at most this long, since the process that sets it may die
BILLION = 1_000_000_000
_DECAY = 0.84  # of past observations, at each call: half of their weight is gone within a second
_MIN_EXCHANGES = 1e-6  # observations that have decayed to less than this are ignored
# The limits must refuse this part of the checked exchanges before a share is published. With a share in
# effect they refuse about half; and a burst for which the buckets have tokens is not above the limits.
_MIN_REFUSED = 0.25


class RateLimits:
    """Checks each exchange that is to leave, and publishes the share of drawn requests to refuse in advance.

    An exchange is checked against the limits once, when it has ended. If the buckets also decided when a
    request is drawn, long exchanges would be checked twice and short ones once; so refusal in advance is
    random, alike for all.

    Parameters
    ----------
    sampling
        The limits.
    slot
        Counters of the capture process; relay workers read the share there.
    clock
        Times the limits.
    """

    def __init__(self, sampling: SamplingOptions, slot: Slot, clock: Clock) -> None:
        self._slot = slot
        self._clock = clock
        self._limits: tuple[float, float] | None = None
        self.reconfigure(sampling)
        self._at_s = clock.monotonic_s()
        self._n_drawn: int | None = None  # None until the first call
        self._n_admitted = 0
        self._admitted = self._judged = self._passed = self._passed_bytes = 0.0
        slot.set(Gauge.REFUSING_UNTIL_NS, 0)

    def reconfigure(self, sampling: SamplingOptions) -> None:
        """Apply other limits.

        Unchanged limits keep their tokens, so that touching the file does not refill them.
        """
        limits = sampling.max_exchanges_per_s, float(sampling.max_bytes_per_s)
        if limits != self._limits:
            self._limits = limits
            self._exchanges, self._bytes = (Limit(limit, self._clock) for limit in limits)
            self._slot.set(Gauge.REFUSING_UNTIL_NS, 0)

    def refusal(self, captured_s: float) -> Loss | None:
        """Return the limit that refuses an exchange that was captured at this time, whatever its size, or None."""
        if not self._exchanges.allows(captured_s):
            return Loss.RATE_CAP
        return None if self._bytes.allows(captured_s) else Loss.BYTE_CAP

    def count_refusal(self) -> None:
        """Count a refused exchange."""
        self._judged += 1

    def count_passed(self, n_bytes: int, captured_s: float) -> None:
        """Take the tokens of an exchange of `n_bytes` that passes."""
        self._exchanges.take(1, captured_s)
        self._bytes.take(n_bytes, captured_s)
        self._judged += 1
        self._passed += 1
        self._passed_bytes += n_bytes

    def publish_refusal_share(self, n_drawn: int, n_refused: int, *, keeps_all: bool) -> None:
        """Publish the share of drawn requests that the relay workers must refuse.

        Called several times a second.

        Parameters
        ----------
        n_drawn
            Requests that the first phase has ever taken, refused ones included.
        n_refused
            Those of them that were refused in advance.
        keeps_all
            Whether every taken exchange reaches the limits: none is thinned or paused.
        """
        now_s = self._clock.monotonic_s()
        elapsed_s, self._at_s = now_s - self._at_s, now_s
        before, self._n_drawn = self._n_drawn, n_drawn
        n_admitted, self._n_admitted = self._n_admitted, n_drawn - n_refused
        if before is None or elapsed_s <= 0:
            return
        self._admitted += self._n_admitted - n_admitted
        share = self._refusal_share((n_drawn - before) / elapsed_s) if keeps_all else 0.0
        by_rate, by_bytes = self._exchanges_per_s()
        billionths = int(share * BILLION)
        self._slot.set(Gauge.REFUSED_BY_RATE, billionths if by_rate <= by_bytes else 0)
        self._slot.set(Gauge.REFUSED_BY_BYTES, billionths if by_rate > by_bytes else 0)
        self._slot.set(Gauge.REFUSING_UNTIL_NS, int((now_s + VALID_S) * BILLION) if share else 0)
        self._admitted *= _DECAY
        self._judged *= _DECAY
        self._passed *= _DECAY
        self._passed_bytes *= _DECAY

    def _refusal_share(self, drawn_per_s: float) -> float:
        """Return the share whose refusal leaves `HEADROOM` times what passes.

        Some drawn requests never reach the limits.
        """
        if self._admitted < _MIN_EXCHANGES or self._passed >= (1 - _MIN_REFUSED) * self._judged:
            return 0.0
        judged_per_s = drawn_per_s * min(1.0, self._judged / self._admitted)
        wanted = HEADROOM * min(self._exchanges_per_s())
        return max(0.0, 1.0 - wanted / judged_per_s) if judged_per_s else 0.0

    def _exchanges_per_s(self) -> tuple[float, float]:
        """Return how many exchanges per second each limit lets through, at their recent mean size."""
        assert self._limits is not None
        rate, n_bytes = self._limits
        return (
            rate,
            n_bytes * self._passed / self._passed_bytes if self._passed >= _MIN_EXCHANGES else math.inf,
        )

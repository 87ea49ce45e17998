"""A token bucket: a hard bound on a rate, with a burst of one second."""

from quantdrift.core.clock import Clock


class Bucket:
    """Lets through `rate` tokens per second.

    It holds at most one second's tokens. A single request above that passes when the bucket is full and leaves it
    in debt: else it would never pass.

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

    def allows(self, n: float) -> bool:
        """Return whether `n` tokens may be taken now; nothing is taken."""
        now_s = self._clock.monotonic_s()
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        return self._tokens >= min(n, self._burst)

    def take(self, n: float) -> None:
        """Take `n` tokens."""
        self._tokens -= n

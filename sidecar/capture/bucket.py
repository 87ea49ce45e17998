"""A token bucket: a hard bound on a rate, with a burst of one second."""

from quantdrift.core.clock import Clock


class Bucket:
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

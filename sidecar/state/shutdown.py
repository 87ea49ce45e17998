"""How the time from SIGTERM to the end is shared out between the sidecar's processes."""

from typing import Self

import msgspec

from quantdrift.core.config.schema import Sidecar


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """What must have happened by when, in seconds after SIGTERM.

    Parameters
    ----------
    accept_s
        Until then new connections are accepted.
    drain_s
        By then a relay worker has closed its connections: those still in an exchange are cut.
    handout_s
        By then it has handed over what it had.
    relay_s
        By then it has ended, or is killed. The capture process has the rest.
    capture_s
        By then the capture process has ended, or is killed.
    """

    accept_s: float
    drain_s: float
    handout_s: float
    relay_s: float
    capture_s: float

    @classmethod
    def of(cls, sidecar: Sidecar) -> Self:
        """Return the deadlines that the drain delay and the grace period leave."""
        start, rest = sidecar.drain_delay_s, sidecar.grace_s - sidecar.drain_delay_s
        return cls(
            accept_s=start,
            drain_s=start + 0.4 * rest,
            handout_s=start + 0.45 * rest,
            relay_s=start + 0.5 * rest,
            capture_s=start + 0.95 * rest,
        )

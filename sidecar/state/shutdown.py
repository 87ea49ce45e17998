"""The deadlines of a shutdown: the time from SIGTERM to the end, divided among the sidecar's processes."""

from typing import Self

import msgspec

from quantdrift.core.config.schema import Sidecar


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """The deadlines of a shutdown, in seconds after SIGTERM.

    Parameters
    ----------
    accept_s
        New connections are accepted until then.
    drain_s
        A relay worker closes the connections that are still in an exchange.
    handoff_s
        A relay worker stops sending samples to the capture process.
    relay_s
        A relay worker that has not ended is killed. The rest of the time is for the capture process.
    capture_s
        A capture process that has not ended is killed.
    """

    accept_s: float
    drain_s: float
    handoff_s: float
    relay_s: float
    capture_s: float

    @classmethod
    def of(cls, sidecar: Sidecar) -> Self:
        """Return the deadlines for the configured drain delay and grace period."""
        start, rest = sidecar.drain_delay_s, sidecar.grace_s - sidecar.drain_delay_s
        return cls(
            accept_s=start,
            drain_s=start + 0.4 * rest,
            handoff_s=start + 0.45 * rest,
            relay_s=start + 0.5 * rest,
            capture_s=start + 0.95 * rest,
        )

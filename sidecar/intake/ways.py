"""The ways in that are configured."""

import socket
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from quantdrift.core.config import Secrets
from quantdrift.sidecar.intake.entrance import Entrance
from quantdrift.sidecar.intake.http import HttpWay
from quantdrift.sidecar.intake.taps import Taps
from quantdrift.sidecar.settled import Settled
from quantdrift.sidecar.tap.wire import Rates


class Sockets(NamedTuple):
    """What listens already: the HTTP ways' port and the taps' Unix socket, or None where there is none."""

    http: socket.socket | None
    tap: socket.socket | None


class Way(Protocol):
    """One way in: entered, it takes exchanges in."""

    async def __aenter__(self) -> Self:
        """Begin."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take no more in, and end."""

    def reconfigure(self, settled: Settled) -> None:
        """Go over to another configuration's bounds."""


def ways(
    settled: Settled, secrets: Secrets, entrance: Entrance, sockets: Sockets, rates: Callable[[], Rates]
) -> Iterator[Way]:
    """Return each way in that the configuration asks for.

    Parameters
    ----------
    settled, secrets
        Of the sidecar.
    entrance
        Where exchanges go.
    sockets
        What listens.
    rates
        Returns what holds now, for those who draw themselves.
    """
    config = settled.config
    if sockets.http is not None:
        yield HttpWay(config, secrets.intake_token, entrance, sockets.http)
    if sockets.tap is not None:
        yield Taps(entrance, sockets.tap, rates, settled)
    if config.intake.ext_proc:
        from quantdrift.sidecar.intake.ext_proc import ExtProc  # noqa: PLC0415 - grpcio is absent in a base install

        yield ExtProc(config, secrets.intake_token, entrance)

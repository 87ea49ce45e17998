"""The ways in that are configured, as context managers: entered, they take exchanges in."""

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from quantdrift.core.config import Config, Secrets
from sidecar.intake.entrance import Entrance
from sidecar.intake.http import HttpWay
from sidecar.intake.taps import Taps
from sidecar.tap.wire import Rates


class Sockets(NamedTuple):
    """What listens already: the HTTP ways' port and the taps' Unix socket, or None where there is none."""

    http: socket.socket | None
    tap: socket.socket | None


def ways(
    config: Config, secrets: Secrets, entrance: Entrance, sockets: Sockets, rates: Callable[[], Rates]
) -> Iterator[AbstractAsyncContextManager[object]]:
    """Return each way in that the configuration asks for.

    Parameters
    ----------
    config, secrets
        Of the sidecar.
    entrance
        Where exchanges go.
    sockets
        What listens.
    rates
        Returns what holds now, for those who draw themselves.
    """
    if sockets.http is not None:
        yield HttpWay(config, secrets.intake_token, entrance, sockets.http)
    if sockets.tap is not None:
        yield Taps(entrance, sockets.tap, rates)

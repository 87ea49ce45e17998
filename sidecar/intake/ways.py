"""The ways in that are configured, as context managers: entered, they take exchanges in."""

import socket
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager

from quantdrift.core.config import Config, Secrets
from sidecar.intake.entrance import Entrance
from sidecar.intake.http import HttpWay


def ways(
    config: Config, secrets: Secrets, entrance: Entrance, listener: socket.socket | None
) -> Iterator[AbstractAsyncContextManager[object]]:
    """Return each way in that the configuration asks for.

    Parameters
    ----------
    config, secrets
        Of the sidecar.
    entrance
        Where exchanges go.
    listener
        Listening socket of the HTTP ways, or None.
    """
    if listener is not None:
        yield HttpWay(config, secrets.intake_token, entrance, listener)

"""The NATS client library's errors, turned into ours at its border."""

import contextlib
import os
from collections.abc import AsyncIterator

import nats.errors
import nats.js.errors

from quantdrift.core.errors import RetryError

# JetStream's error codes.
_FULL = {10002, 10023, 10047, 10077}  # account, server, storage or stream has no room
_TOO_LARGE = 10054


class StreamFullError(RetryError):
    """The stream refused a message because it, or its disk, is full."""


class TooLargeError(RetryError):
    """The message is above the server's payload limit: the same message will never pass."""


@contextlib.asynccontextmanager
async def mapped() -> AsyncIterator[None]:
    """Raise ours in place of the client library's errors.

    Raises
    ------
    StreamFullError, TooLargeError
        A message was refused for good reason.
    RetryError
        Anything else: the server is away, slow or not ready.
    """
    try:
        yield
    except nats.js.errors.APIError as error:
        if error.err_code in _FULL:
            raise StreamFullError(f"NATS has no room: {error.description}") from error
        if error.err_code == _TOO_LARGE:
            raise TooLargeError(str(error.description)) from error
        raise RetryError(f"NATS answered {error.code}: {error.description}") from error
    except nats.errors.MaxPayloadError as error:
        raise TooLargeError("above the server's payload limit") from error
    except (nats.errors.Error, OSError, TimeoutError) as error:
        raise RetryError(f"NATS: {in_words(error)}") from error


def in_words(error: BaseException) -> str:
    """Return what a person should read of an error of the client library or of a socket."""
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno).lower()  # its own text repeats the address as Python writes it
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    silent = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
    return str(error).removeprefix("nats: ") or silent

"""Conversion of errors of the NATS client library to ours."""

import contextlib
import re
from collections.abc import AsyncIterator

import nats.errors
import nats.js.errors

from quantdrift.core.errors import RetryError, os_error_text

# JetStream's error codes.
_FULL = {10002, 10023, 10047, 10077}  # account, server, storage or stream is full
_TOO_LARGE = 10054
_REFUSAL = re.compile("authorization|authentication", re.IGNORECASE)
_WRONG_LAST_SEQUENCE = 10071


class StreamFullError(RetryError):
    """The stream refused a message because it, or its disk, is full."""


class TooLargeError(RetryError):
    """The message exceeds the server's payload limit; a retry cannot succeed."""


class ChangedError(RetryError):
    """The value of a key is not the one that the caller has seen last."""


@contextlib.asynccontextmanager
async def mapped() -> AsyncIterator[None]:
    """Convert errors of the client library to ours.

    Raises
    ------
    StreamFullError, TooLargeError, ChangedError
        The server refused a message for this reason.
    RetryError
        Any other error: the server is unavailable, slow or not ready.
    """
    try:
        yield
    except nats.js.errors.APIError as error:
        # JetStream stores no message above 32 MiB, whatever `max_payload` is; the code is that of any failure of the store.
        if error.err_code == _TOO_LARGE or error.description == "message too large":
            raise TooLargeError(str(error.description)) from error
        if error.err_code in _FULL:
            raise StreamFullError(f"NATS is full: {error.description}") from error
        if error.err_code == _WRONG_LAST_SEQUENCE:
            raise ChangedError("another process has stored a newer value") from error
        raise RetryError(f"NATS answered {error.code}: {error.description}") from error
    except nats.errors.MaxPayloadError as error:
        raise TooLargeError("above the server's payload limit") from error
    except (nats.errors.Error, OSError, TimeoutError) as error:
        raise RetryError(f"NATS: {in_words(error)}") from error


def is_refusal(error: BaseException) -> bool:
    """Return whether the server refuses the password, token, user or credentials of the client."""
    return isinstance(error, nats.errors.Error) and bool(_REFUSAL.search(str(error)))


def in_words(error: BaseException) -> str:
    """Return the text of an error of the client library or of a socket, for people."""
    if is_refusal(error):
        said = str(error).removeprefix("nats: ").strip("'")
        return (
            f"it refuses our password, token or credentials ({said}): correct stream.url_file or"
            " stream.credentials_file, which are read again for each attempt"
        )
    if isinstance(error, OSError) and not isinstance(error, nats.errors.Error):
        return os_error_text(error)
    return str(error).removeprefix("nats: ") or type(error).__name__

"""The text of an error of a socket or file."""

import errno
import socket

import pytest

from quantdrift.core.errors import os_error_text

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 5432)"),
            "connection refused",
        ),
        (
            OSError(
                "Multiple exceptions: [Errno 111] Connect call failed ('::1', 5432, 0, 0), "
                "[Errno 111] Connect call failed ('127.0.0.1', 5432)"
            ),
            "connection refused",
        ),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "Permission denied"),
        (TimeoutError(), "no answer in time"),
        (ConnectionResetError("the peer closed the connection"), "the peer closed the connection"),
        (ConnectionResetError(), "ConnectionResetError"),
    ],
)
def test_an_error_is_described_in_words_and_not_in_python_notation(error: OSError, text: str) -> None:
    """A name with several addresses has an error for each of them, and one reason."""
    assert os_error_text(error) == text

"""What a person reads of an error of NATS."""

import asyncio
import errno
import os

import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client

from quantdrift.core.errors import RetryError
from quantdrift.core.stream.errors import StreamFullError, TooLargeError, in_words, mapped
from quantdrift.core.stream.nats_client import NatsClient, within

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 4222)"),
            os.strerror(errno.ECONNREFUSED).lower(),
        ),
        (OSError(-2, "Name or service not known"), "Name or service not known"),
        (TimeoutError(), "no answer in time"),
        (nats.errors.TimeoutError(), "timeout"),
        (nats.errors.NoServersError(), "no servers available for connection"),
        (nats.errors.Error(), "Error"),
    ],
)
async def test_an_error_is_said_in_words(error: Exception, said: str) -> None:
    """No class names, numbers or tuples where there is a word for it."""
    assert in_words(error) == said
    with pytest.raises(RetryError) as raised:
        async with mapped():
            raise error
    assert str(raised.value) == f"NATS: {said}"


@pytest.mark.parametrize(
    "raw",
    [
        b"Nats-Msg-Id: a\r\nQuantdrift-Number: b.0.1\r\n\r\n",
        b"Name:value\r\nOther:\t spaced out \r\nBad name: 1\r\nno colon\r\n a : b:c\r\n",
        "Name: größe\r\nNäme: 2\r\n".encode(),
        b"Name: \xff\r\nLast: 1\r\nLast: 2",
        b"",
    ],
)
def test_headers_are_read_as_the_library_reads_them(raw: bytes) -> None:
    """Ours is only quicker."""
    assert NatsClient._parse_header_lines(raw) == Client._parse_header_lines(raw)


@pytest.mark.parametrize(
    ("said", "expected"),
    [("message too large", TooLargeError), ("no space left on device", StreamFullError)],
)
async def test_a_failure_of_the_store_is_told_apart(said: str, expected: type[Exception]) -> None:
    """JetStream has one code for a message above 32 MiB and for a disk that is full."""
    with pytest.raises(expected):
        async with mapped():
            raise nats.js.errors.APIError(code=503, err_code=10077, description=said)


async def test_what_loses_a_cancellation_is_cancelled_again() -> None:
    """A client that swallows it, as `asyncio.wait_for` before Python 3.12 may, ends all the same."""
    lost = 0

    async def connect() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost += 1
                if lost == 3:
                    raise

    with pytest.raises(TimeoutError):
        await within(0.01, connect())
    assert lost == 3

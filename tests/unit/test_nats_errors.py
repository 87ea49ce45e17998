"""What a person reads of an error of NATS."""

import errno
import os

import nats.errors
import pytest

from quantdrift.core.errors import RetryError
from quantdrift.core.stream.errors import in_words, mapped

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

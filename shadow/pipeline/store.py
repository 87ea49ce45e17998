"""Storing with patience: Postgres may be away for as long as it likes.

A password that was changed or a right that was taken away is no fault of the samples either: they wait until it is
mended. Only what Postgres says of the rows themselves goes through.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.run import Stop
from quantdrift.storage.shadow.rows import Written

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0


async def until_stored(
    write: Callable[[], Awaitable[Written]],
    stop: Stop,
    *,
    limit_s: float,
    failed: Callable[[], None],
) -> Written | None:
    """Call `write` until it succeeds; return None when it fails after `stop` was set.

    Parameters
    ----------
    write
        One transaction, safe to repeat.
    stop
        Whether the process is to end.
    limit_s
        One try may take so long: a connection can die without a word.
    failed
        Called after each try that failed.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            async with asyncio.timeout(limit_s):
                return await write()
        except (RetryError, OperatorError, TimeoutError) as error:
            failed()
            if stop.is_set():
                return None
            _LOG.warning("could not store: %s; again in %.1f s", str(error) or "no answer", pause_s)
        await stop.wait(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

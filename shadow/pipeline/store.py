"""Storing with retries: samples wait for as long as Postgres is unreachable.

They also wait when Postgres refuses the connection or a privilege (a changed password, a revoked right), because an
operator can repair that. Only an error that concerns the rows themselves is raised.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.backoff import Backoff
from quantdrift.core.process.run import Stop
from quantdrift.storage.comparisons.rows import Written

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
    limit_s
        Longest time of one try: a dead connection does not always raise an error.
    failed
        Called after each failed try.
    """
    backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while True:
        try:
            async with asyncio.timeout(limit_s):
                return await write()
        except (RetryError, OperatorError, TimeoutError) as error:
            failed()
            if stop.is_set():
                return None
            pause_s = backoff.next_s()
            _LOG.warning(
                "could not store in Postgres, trying again in %.1f s: %s",
                pause_s,
                str(error) or f"no answer within {limit_s:g} s",
            )
        await stop.wait(pause_s)

"""One way to run a long-lived process: an event loop, a stop that SIGTERM sets, and a deadline after it."""

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine

_LOG = logging.getLogger(__name__)


class Stop:
    """Says that the process should end; waiting for it is cheap."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Ask everybody to end."""
        self._event.set()

    def is_set(self) -> bool:
        """Return whether the end was asked for."""
        return self._event.is_set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the end is asked for, or `timeout_s` passed; return whether it was."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


def run(main: Callable[[Stop], Coroutine[None, None, int]], *, grace_s: float) -> int:
    """Run `main` to its end and return its exit code.

    The first SIGTERM or SIGINT sets the `Stop`; `grace_s` later the process ends whatever is still going on, with
    exit code 1. A second signal ends it at once.
    """

    async def supervised() -> int:
        stop = Stop()
        loop = asyncio.get_running_loop()

        def asked(number: int) -> None:
            if stop.is_set():
                os._exit(128 + number)
            _LOG.info("%s: finishing", signal.Signals(number).name)
            stop.set()
            loop.call_later(grace_s, _give_up, grace_s)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, asked, number)
        return await main(stop)

    try:
        import uvloop  # noqa: PLC0415 - absent on some platforms; asyncio does as well
    except ImportError:  # pragma: no cover
        return asyncio.run(supervised())
    return int(uvloop.run(supervised()))


def _give_up(grace_s: float) -> None:
    _LOG.error("not finished %g s after the signal: ending", grace_s)
    os._exit(1)


async def supervise(
    name: str, work: Callable[[], Awaitable[None]], stop: Stop, *, retry_s: float = 1.0
) -> None:
    """Keep `work` running until `stop`: an error is logged and it starts again after a growing pause.

    This is one of the two places that catch everything: nothing of ours may end a process over one bad turn.
    """
    pause_s = retry_s
    while not stop.is_set():
        try:
            await work()
        except Exception:  # noqa: BLE001 - the top of a supervised task
            _LOG.exception("%s failed: again in %g s", name, pause_s)
            await stop.wait(pause_s)
            pause_s = min(pause_s * 2, 30.0)
        else:
            pause_s = retry_s

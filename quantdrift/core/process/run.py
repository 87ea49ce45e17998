"""Main loop of a process: an event loop, a stop that SIGTERM sets, a deadline after it, and supervised tasks."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Final, NoReturn

from quantdrift.core.errors import QuantdriftError
from quantdrift.core.logs import log_in_background
from quantdrift.core.output import drain
from quantdrift.core.process.backoff import Backoff
from quantdrift.core.process.heartbeat import EVERY_S, Heartbeat

_LOG = logging.getLogger(__name__)
_STDERR: Final = 2
_LONGEST_PAUSE_S = 30.0
_COLLECT_AFTER: Final = (50_000, 20, 20)  # objects, and collections of younger ones

GRACE_S: Final = 25.0
"""Time of a shadow worker or monitor from SIGTERM to its end: below the 30 s that Kubernetes gives by default."""
TURN_S: Final = 0.5
"""Pause of the monitor between two looks at new results: short beside the time in which a drift is found, and one small
query."""


class Stop:
    """The request to end the process. Waiting for it costs no polling.

    Attributes
    ----------
    why
        Why this process sends itself the signal that ends it, for the log; empty: somebody else sends it.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.why = ""

    def set(self) -> None:
        """Request the end."""
        self._event.set()

    def is_set(self) -> bool:
        """Return whether the end was requested."""
        return self._event.is_set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the end is requested or `timeout_s` is over; return whether it was requested."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


class SignalStop(Stop):
    """A stop that Ctrl-C and SIGTERM set, for a command that records something before it ends. A second signal ends it at once.

    The running event loop takes over both signals until it is closed.

    Attributes
    ----------
    exit_code
        As a shell reports a process that the signal ended: 130 for Ctrl-C, 143 for SIGTERM; 0 before a signal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exit_code = 0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        self.exit_code = 128 + number
        if self.is_set():
            exit_at_once(self.exit_code)
        self.set()


def run(main: Callable[[Stop], Coroutine[None, None, int]], *, grace_s: float) -> int:
    """Run `main` to its end and return its exit code.

    The first SIGTERM or SIGINT sets the `Stop`. If `main` has not returned `grace_s` later, the process exits with
    code 1. A second signal ends it at once. If a parent watches this process, its event loop beats the heartbeat.
    """

    async def supervised() -> int:
        stop = Stop()
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if stop.is_set():
                exit_at_once(128 + number)
            _LOG.info(
                "%s: stopping, which may take %g s; another signal ends it at once",
                stop.why or f"{signal.Signals(number).name} received",
                grace_s,
            )
            stop.set()
            loop.call_later(grace_s, _give_up, grace_s)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        if (heartbeat := Heartbeat.of_parent()) is not None:
            _keep_beating(loop, heartbeat)
        return await main(stop)

    keep_files_private()
    log_in_background()
    try:
        try:
            import uvloop  # noqa: PLC0415 - missing on some platforms, where asyncio works too
        except ImportError:  # pragma: no cover
            return asyncio.run(supervised())
        return int(uvloop.run(supervised()))
    finally:
        drain()


def keep_files_private() -> None:
    """Let no child inherit the files that this process got from its parent, unless they are handed on by name.

    A child that outlives this process would keep the locks on them.
    """
    with contextlib.suppress(OSError):  # there is no /proc
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the one of the listing is closed by now
                if int(entry.name) > _STDERR:
                    os.set_inheritable(int(entry.name), False)


def spare_collector() -> None:
    """Leave what is loaded by now out of garbage collection, and collect what is new more seldom. Call it once, before the work begins.

    Some hundred thousand objects of libraries live as long as the process. To look through them again and again took a sixth of the
    processor time of a shadow worker with a small reference. Nearly all that its work makes dies without a collection.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def _keep_beating(loop: asyncio.AbstractEventLoop, heartbeat: Heartbeat) -> None:
    heartbeat.beat()
    loop.call_later(EVERY_S, _keep_beating, loop, heartbeat)


def _give_up(grace_s: float) -> None:
    _LOG.error("not finished %g s after the signal: exiting", grace_s)
    exit_at_once(1)


def exit_at_once(code: int) -> NoReturn:
    """End the process as it is, after its last log lines."""
    drain()
    os._exit(code)


async def supervise(
    name: str, work: Callable[[], Awaitable[None]], stop: Stop, *, retry_s: float = 1.0
) -> None:
    """Run `work` until `stop`; after an error, log it and run it again after a growing pause of at most 30 s.

    One of quantdrift's own errors says what to do and is logged in one line; any other is logged with its traceback.

    This is one of the two places that catch every exception, so that one error does not end the process.
    """
    backoff = Backoff(retry_s, max(retry_s, _LONGEST_PAUSE_S))
    while not stop.is_set():
        try:
            await work()
        except QuantdriftError as error:
            pause_s = backoff.next_s()
            _LOG.warning("%s: %s; trying again in %.1f s", name, error, pause_s)
            await stop.wait(pause_s)
        except Exception:  # noqa: BLE001 - the top of a supervised task
            pause_s = backoff.next_s()
            _LOG.exception("%s failed; retrying in %.1f s", name, pause_s)
            await stop.wait(pause_s)
        else:
            backoff.reset()

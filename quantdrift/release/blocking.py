"""Calls from code with and without an event loop: a notebook has one that runs, a script has none."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from quantdrift.release.progress import Progress

P = ParamSpec("P")
R = TypeVar("R")


class _Cancelled(BaseException):  # no `except Exception` of what runs may keep it
    """The task that waits for a call was cancelled."""


def wait_for(coroutine: Coroutine[Any, Any, R]) -> R:
    """Return what a coroutine returns; where an event loop runs in this thread, it runs in a loop and a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    ended: list[R] = []
    failure: list[BaseException] = []
    task: asyncio.Task[Any] | None = None

    async def supervised() -> R:
        nonlocal task
        task = asyncio.current_task()
        return await coroutine

    def run() -> None:
        try:
            ended.append(asyncio.run(supervised()))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        if task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)  # it closes what it opened
        thread.join()
        raise
    if failure:
        raise failure[0]
    return ended[0]


def in_thread(function: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Return a function as a coroutine function, which runs it in a thread; `progress` is called in the event loop.

    If the task is cancelled, the call ends the next time that it tells its progress.
    """
    tells_progress = "progress" in inspect.signature(function).parameters

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        loop, is_cancelled = asyncio.get_running_loop(), threading.Event()
        callback: Any = kwargs.get("progress")

        def progress(now: Progress) -> None:
            if is_cancelled.is_set():
                raise _Cancelled
            if callback is not None:
                loop.call_soon_threadsafe(callback, now)

        if tells_progress:
            kwargs["progress"] = progress
        try:
            return await asyncio.to_thread(function, *args, **kwargs)
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    return call

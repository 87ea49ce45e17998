"""Keeping a process running."""

import asyncio
import os

import pytest

from quantdrift.core.child import Child

pytestmark = pytest.mark.unit


async def test_a_process_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A host without memory or processes left, for a moment, must not leave the port without its workers for ever."""
    start = asyncio.create_subprocess_exec
    failures = [BlockingIOError("no process left"), OSError("no memory")]

    async def refuse_twice(*arguments: str, **named: object) -> asyncio.subprocess.Process:
        if failures:
            raise failures.pop()
        return await start(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse_twice)
    child = Child("late", "this", [], environment=os.environ, final=0)
    async with asyncio.timeout(30):
        assert await child.run() == 0
    assert not failures
    assert caplog.text.count("late cannot be started") == 2

"""Keeping a process running."""

import asyncio
import os
import sys

import pytest

from quantdrift.core.process.backoff import Backoff
from quantdrift.core.process.child import Child

pytestmark = pytest.mark.integration


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


async def test_a_childs_output_is_passed_on_line_by_line_and_its_exit_is_reported() -> None:
    """Also what it wrote last, a line that is longer than any reader wants, and one that does not end."""
    lines: list[bytes] = []
    ends: list[tuple[str, int | None]] = []

    def on_end(how: str, code: int | None, _pause_s: float) -> None:
        ends.append((how, code))
        child.final = 7

    child = Child(
        "a part",
        "this",
        [],
        environment=os.environ,
        on_end=on_end,
        on_output={1: lines.append},
    )
    child._command = [sys.executable, "-c", "print('a'); print('b' * 200_000); print('c', end=''); exit(7)"]
    async with asyncio.timeout(30):
        assert await child.run() == 7
    assert ends == [("ended with exit code 7", 7)]
    assert lines[0] == b"a"
    assert b"".join(lines) == 2 * (b"a" + b"b" * 200_000 + b"c")
    assert max(map(len, lines)) < 200_000


async def test_a_restart_is_no_death_and_waits_for_no_pause() -> None:
    """It ends by the signal, or else by SIGKILL, and is started again; an end by itself is a death as before."""
    wait = "print('here', flush=True); signal.pause()"
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    programs = [f"import signal; {wait}", f"import signal; {ignore}; {wait}", "exit(3)"]
    deadlines_s = [60.0, 0.1]
    ends: list[str] = []
    restarts: list[int] = []

    def begin_next() -> None:
        child._command = [sys.executable, "-c", programs.pop(0)]

    def on_line(_line: bytes) -> None:
        begin_next()
        child.restart(within_s=deadlines_s.pop(0))

    def on_end(how: str, _code: int | None, _pause_s: float) -> None:
        ends.append(how)
        child.terminate()

    child = Child(
        "a part",
        "this",
        [],
        environment=os.environ,
        on_restart=lambda: restarts.append(len(programs)),
        on_death=ends.append,
        on_end=on_end,
        on_output={1: on_line},
    )
    child._backoff = Backoff(3600.0, 3600.0)
    begin_next()
    async with asyncio.timeout(60):
        await child.run()
    assert restarts == [1, 0]
    assert ends == ["exit_3", "ended with exit code 3"]

"""Compilation of the detectors' loops before the monitor reports ready: the monitor would not respond while compiling."""

import asyncio
import logging
import os
import sys
import time
from typing import Final

from quantdrift.core.passed_secrets import without_secrets
from quantdrift.core.process.child import ending_with_parent
from quantdrift.core.process.run import Stop
from quantdrift.drift.detectors.protocol import compile_all
from quantdrift.drift.evidence.numba_cache import is_complete, is_shared

# A separate process with low priority, so that it does not slow down the model served on this machine.
_COMPILE: Final = (
    "import os; os.nice(10); from quantdrift.drift.detectors.protocol import compile_all; compile_all()"
)
_LOG = logging.getLogger(__name__)


async def compile_loops(stop: Stop) -> None:
    """Return when everything is compiled or `stop` is set; immediately where a cache holds the compiled code."""
    if is_complete():
        return
    begun_s = time.monotonic()
    how_often = (
        "once per machine and release" if is_shared() else "at each start: no cache folder is writable"
    )
    _LOG.info(
        "compiling the detectors' loops (%s; some 6 s of a free processor): the first fold waits", how_often
    )
    if is_shared():
        code = await _in_child_process(stop)
    else:
        await asyncio.to_thread(compile_all)
        code = 0
    if stop.is_set():
        return
    if code:
        _LOG.warning("compiling ended with code %d: the detectors' loops are compiled on first use", code)
    else:
        _LOG.info("compiled in %.1f s: folding can begin", time.monotonic() - begun_s)


async def _in_child_process(stop: Stop) -> int:
    process = await asyncio.create_subprocess_exec(
        *ending_with_parent([sys.executable, "-P", "-c", _COMPILE]), env=without_secrets(os.environ)
    )
    ended, asked = asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())
    await asyncio.wait([ended, asked], return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        process.kill()
    asked.cancel()
    return await ended

"""A warning, once, where an answer costs a process more processor time than it should, with the part that takes most of it."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from quantdrift.core.notation import number

LIMIT_S: Final = 0.001
"""Processor time of an answer from which on it is too much: a thousand answers a second would fill a core."""
WINDOW: Final = 1_000
"""Answers that are looked at together. The first of them count for nothing: a process loads and compiles while it begins."""
_LOG = logging.getLogger(__name__)


class ProcessorTime:
    """Adds up the processor time of the parts of a process. Parts that run in different threads have different names.

    Parameters
    ----------
    hints
        The parts by name, and what makes each of them cheaper.
    """

    def __init__(self, hints: Mapping[str, str]) -> None:
        self._hints = hints
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        self._n = 0
        self._is_warm = self._has_warned = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the processor time of this thread inside the block."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            self.spent(name, time.thread_time() - began_s)

    def spent(self, name: str, seconds: float) -> None:
        """Count the processor time of a part that was measured elsewhere."""
        if name in self._hints:
            self._spent_s[name] += seconds

    def seconds(self, name: str) -> float:
        """Return the processor time of a part in the present window."""
        return self._spent_s[name]

    def answered(self, n: int) -> None:
        """Count answers, and warn where those of the last window cost too much."""
        self._n += n
        if self._has_warned or self._n < WINDOW:
            return
        if self._is_warm and (text := self._too_much()):
            self._has_warned = True
            _LOG.warning("%s", text)
        self._is_warm, self._n = True, 0
        self._spent_s.clear()

    def _too_much(self) -> str:
        """Return that an answer costs too much, and which part; empty: it does not."""
        of_each_s = sum(self._spent_s.values()) / self._n
        if of_each_s <= LIMIT_S:
            return ""
        name, spent_s = max(self._spent_s.items(), key=lambda part: part[1])
        return (
            f"one answer costs {number(1e3 * of_each_s)} ms of processor time here, of which `{name}` takes"
            f" {number(1e3 * spent_s / self._n)} ms: {self._hints[name]}"
        )

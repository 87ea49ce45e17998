"""Logging to stderr: one line per event, as text or JSON. Never payloads, never secrets."""

import logging
import sys
from datetime import UTC, datetime
from typing import Final

import msgspec

from quantdrift.core.clock import Clock, SystemClock

MOST: Final = 20  # warnings of one kind
WINDOW_S: Final = 60.0


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


class Sparse(logging.Filter):
    """Lets at most 20 warnings and errors through in a minute that come from the same line of code.

    What is wrong with one sidecar is wrong with each of its exchanges: thousands of the same line tell no more, and
    hide the others. The last one that is let through says so, and the first of the next minute how many were left out.

    Parameters
    ----------
    clock
        Measures the minute.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to show a record."""
        if record.levelno < logging.WARNING:
            return True
        place, now_s = (record.pathname, record.lineno), self._clock.monotonic_s()
        begun_s, n_before = self._seen.get(place, (now_s, 0))
        if now_s - begun_s >= WINDOW_S:
            if n_before > MOST:
                _add(record, f"{n_before - MOST} more like this one were left out before it")
            begun_s, n_before = now_s, 0
        self._seen[place] = (begun_s, n_before + 1)
        if n_before == MOST - 1:
            _add(record, f"more like this one are left out for {WINDOW_S:g} s")
        return n_before < MOST


def _add(record: logging.LogRecord, text: str) -> None:
    record.msg, record.args = f"{record.getMessage()} ({text})", None


def setup_logs(level: str, *, as_json: bool, role: str) -> None:
    """Send this process's logs to stderr, floods of the same warning thinned.

    Parameters
    ----------
    level
        debug, info, warning or error.
    as_json
        One JSON object per line; else text.
    role
        Shown in each line of text, so that one terminal can hold several processes.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonFormatter()
        if as_json
        else logging.Formatter(f"%(asctime)s {role:<8} %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    )
    handler.addFilter(Sparse(SystemClock()))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("nats").setLevel(logging.ERROR)  # it logs every reconnect; ours says it once
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)

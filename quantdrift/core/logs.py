"""Logging to stderr: one line per event, as text or JSON, without payloads or secrets."""

import contextlib
import logging
import os
import re
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from quantdrift.core.clock import Clock, SystemClock
from quantdrift.core.output import background
from quantdrift.core.text import plain_lines

MOST: Final = 20  # different warnings of one line of code
WINDOW_S: Final = 60.0
_MOST_KEPT: Final = 1_000
_NUMBER: Final = re.compile(r"\d+(?:[.,]\d+)*")
EXPORTERS: Final = "opentelemetry."
"""Loggers of a library that says at each export that the collector does not take it: once an hour, and a metric counts."""
EXPORT_WINDOW_S: Final = 3600.0
_MODEL: Final = "quantdrift_model"


class _Formatter(logging.Formatter):
    """Writes no control characters, and of an exception where it was raised: its message may quote users' data."""

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # another handler may have put its own form of the exception there
        return plain_lines(super().format(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name is of the standard library
        kind, _, trace = ei
        frames = "".join(traceback.format_tb(trace))
        return f"Traceback (most recent call last):\n{frames}{kind.__name__ if kind else 'no exception'}"


def of_model(name: str) -> dict[str, str]:
    """Return the argument `extra` of a log line about one model: JSON lines show it as `model`."""
    return {_MODEL: name}


class JsonFormatter(_Formatter):
    """Writes each line as one JSON object: time, level, role, pid, logger, model where the line is about one, message.

    Parameters
    ----------
    role
        Name of the process.
    """

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        entry: dict[str, str | int] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "role": self._role,
            "pid": record.process or 0,
            "logger": _module() if record.name == "__main__" else record.name,
            "message": plain_lines(record.getMessage()),
        }
        if model := getattr(record, _MODEL, ""):
            entry["model"] = model
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


def _module() -> str:
    """Return the name of the module that this process runs, whose own name is `__main__`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return "__main__" if spec is None else str(spec.name)


class Sparse(logging.Filter):
    """Rate limit: the same warning or error once a minute, of an exporter once an hour, and at most 20 different ones from one line of code.

    A fault of one sidecar repeats with each of its exchanges; thousands of equal lines would hide all others. Two are the same
    if they differ in numbers alone. What passes after some that were left out says how many these were. Once the same module has
    said something else at level INFO, such as that a part works again, the next warning is news.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._said: dict[
            str, dict[tuple[int, str], tuple[float, int]]
        ] = {}  # since when, how many were left out
        self._lines: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to show a record."""
        if record.levelno < logging.WARNING:
            if record.levelno == logging.INFO:
                self._said.pop(record.pathname, None)
            return True
        now_s, said = self._clock.monotonic_s(), self._said.setdefault(record.pathname, {})
        text = (record.lineno, _NUMBER.sub("0", record.getMessage()))
        window_s = EXPORT_WINDOW_S if record.name.startswith(EXPORTERS) else WINDOW_S
        begun_s, n_left_out = said.get(text, (now_s - window_s, 0))
        if now_s - begun_s < window_s:
            said[text] = (begun_s, n_left_out + 1)
            return False
        if not self._is_within(record, now_s):
            return False
        if n_left_out:
            _add(record, f"{n_left_out} more like this one were left out before it")
        if len(said) >= _MOST_KEPT:
            said.clear()
        said[text] = (now_s, 0)
        return True

    def _is_within(self, record: logging.LogRecord, now_s: float) -> bool:
        """Return whether a line of code has not yet shown too many different records."""
        source_line = (record.pathname, record.lineno)
        begun_s, n_before = self._lines.get(source_line, (now_s, 0))
        if now_s - begun_s >= WINDOW_S:
            if n_before > MOST:
                _add(record, f"{n_before - MOST} others of its kind were left out before it")
            begun_s, n_before = now_s, 0
        self._lines[source_line] = (begun_s, n_before + 1)
        if n_before == MOST - 1:
            _add(record, f"others of its kind are left out for {WINDOW_S:g} s")
        return n_before < MOST


def _add(record: logging.LogRecord, text: str) -> None:
    record.msg, record.args = f"{record.getMessage()} ({text})", None


def logs_json() -> bool:
    """Return whether this process logs JSON lines."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def log_in_background() -> None:
    """Let a thread write the logs of this process, which then never waits for whoever reads them."""

    def note(text: str) -> str:
        return handler.format(logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None))

    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
            with contextlib.suppress(OSError):  # it has no file descriptor
                output = background(sys.stderr.fileno())
                output.note = note
                handler.setStream(output)
            break


def setup_logs(level: str, *, as_json: bool, role: str) -> None:
    """Send the logs of this process to stderr, with a rate limit for repeated warnings.

    Parameters
    ----------
    level
        debug, info, warning or error.
    as_json
        One JSON object per line; else text.
    role
        Name of the process in each line.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter(role)
        if as_json
        else _Formatter(f"%(asctime)s {role:<8} %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    )
    handler.addFilter(Sparse(SystemClock()))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Its library in C would write lines of its own to stderr, which are no log lines of ours; its errors reach us as exceptions.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logging.getLogger("nats").setLevel(
        logging.ERROR
    )  # it logs every attempt to reconnect; our client logs one line
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)

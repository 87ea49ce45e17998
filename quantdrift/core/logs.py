"""Logging to stderr: one line per event, as text or JSON. Never payloads, never secrets."""

import logging
import sys
from datetime import UTC, datetime

import msgspec


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


def setup_logs(level: str, *, as_json: bool, role: str) -> None:
    """Send this process's logs to stderr.

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
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("nats").setLevel(logging.ERROR)  # it logs every reconnect; ours says it once
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)

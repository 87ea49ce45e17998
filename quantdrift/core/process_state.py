"""What a process without rights on the audit reports of its configuration and its local pause.

Sidecars send it in their tallies, shadow workers store it. The leading monitor writes the entries. A report says what the
process claims: whoever has its key or its password can claim something else.
"""

import hashlib
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from quantdrift.core.config.schema import Config
from quantdrift.core.config.state import config_digest, config_state
from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.records import ProcessState
from quantdrift.core.sampling.pause import Pause
from quantdrift.core.text import plain

MOST_BYTES: Final = 65_536
"""Of a state that is read, as JSON."""
_MOST_SENT: Final = MOST_BYTES // 4
_LONGEST_VALUE: Final = 1024
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class StateReports:
    """The configuration and the local pause of one process, as it reports them; computed again only when they change.

    Parameters
    ----------
    config
        Returns the configuration in effect; the same object as long as it is the same.
    pause
        Returns what is paused at this process alone.
    """

    def __init__(self, config: Callable[[], Config], pause: Callable[[], Pause] = Pause) -> None:
        self._config = config
        self._pause = pause
        self._of: Config | None = None
        self._options: dict[str, Any] = {}
        self._digest = ""

    def take(self) -> ProcessState:
        """Return what is so now."""
        if (config := self._config()) is not self._of:
            options = config_state(config)
            self._options, self._digest, self._of = bounded(options), config_digest(options), config
        return ProcessState(digest=self._digest, options=self._options, pause=_pause_state(self._pause()))


def bounded(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of at most 16 KiB as JSON: long values, or else all of them, are replaced by their SHA-256."""
    short = {
        name: value if len(msgspec.json.encode(value)) <= _LONGEST_VALUE else _hashed(value)
        for name, value in options.items()
    }
    if _size(short) <= _MOST_SENT:
        return short
    hashed = {name: _hashed(value) for name, value in options.items()}
    return hashed if _size(hashed) <= _MOST_SENT else {f"({len(options)} options)": _hashed(options)}


def read_state(state: ProcessState) -> ProcessState:
    """Return a state that came from a process, with texts that are safe to store and to show.

    Raises
    ------
    QuarantineError
        Reason `decode`: its digest is invalid, or Postgres could not store it. Reason `limits`: it is larger than that of
        any process.
    """
    if not _DIGEST.fullmatch(state.digest):
        raise QuarantineError(
            QuarantineReason.DECODE, "the digest of its configuration is not 64 hexadecimal digits"
        )
    wire = msgspec.json.encode((state.options, state.pause))
    if len(wire) > MOST_BYTES:
        raise QuarantineError(
            QuarantineReason.LIMITS, f"its configuration and pause have {len(wire)} bytes as JSON"
        )
    options, pause = _clean(msgspec.json.decode(wire))
    return ProcessState(digest=state.digest, options=options, pause=pause)


def _pause_state(pause: Pause) -> dict[str, Any] | None:
    if pause.everything is None and not pause.models:
        return None
    state = pause.state()
    if _size(state) > _MOST_SENT:
        return {"models": f"{len(pause.models)} models", "sha256": _hashed(sorted(pause.models))}
    return state


def _hashed(value: Any) -> str:
    return f"sha256:{hashlib.sha256(msgspec.json.encode(value, order='sorted')).hexdigest()}"


def _size(state: Any) -> int:
    return len(msgspec.json.encode(state))


def _clean(value: Any) -> Any:
    # Numbers of Postgres' jsonb have no bound that JSON of this size could exceed: msgspec reads them as int or float.
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, list):
        return [_clean(entry) for entry in value]
    if isinstance(value, dict):
        return {plain(key): _clean(entry) for key, entry in value.items()}
    return value

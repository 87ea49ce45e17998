"""Tells of a part that does not run: one line says since when and why, and one that it runs again."""

import logging
import re
from datetime import datetime
from typing import Any, Final

import msgspec

from quantdrift.core.clock import Clock

REPEAT_S: Final = 600.0
_LONGEST_WHY: Final = 500
_MOST_KINDS: Final = 20
_NUMBER: Final = re.compile(r"\d+")
_OURS: Final = "quantdrift: "  # what the command line puts before its last words
_LOGGED: Final = re.compile(
    r"\d\d:\d\d:\d\d .+? (?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) +(?P<message>.*)"
)
_RAISED: Final = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)(: .*)?$")  # the last line of a traceback
_LOG = logging.getLogger(__name__)


class Outage:
    """The time during which a part does not run.

    A part that is tried again every half minute would say the same a thousand times in a night: the same reason is
    told again every ten minutes, another one at once.

    Parameters
    ----------
    name
        Of the part.
    longest_pause_s
        Between two tries, for the reader.
    clock
        Tells the time.
    """

    def __init__(self, name: str, longest_pause_s: float, clock: Clock) -> None:
        self._name = name
        self._longest_pause_s = longest_pause_s
        self._clock = clock
        self._since: datetime | None = None
        self._since_s = 0.0
        self._told_s: dict[str, float] = {}

    @property
    def lasts(self) -> bool:
        """Whether the part does not run now."""
        return self._since is not None

    def failed(self, why: str) -> None:
        """Note that the part has ended, or could not be started."""
        now_s = self._clock.monotonic_s()
        if self._since is None:
            self._since, self._since_s = self._clock.now(), now_s
            self._told_s.clear()
        kind = _NUMBER.sub("0", why)  # a process or a file of the same error has another number each time
        if now_s - self._told_s.get(kind, -REPEAT_S) < REPEAT_S:
            return
        if len(self._told_s) == _MOST_KINDS:
            self._told_s.clear()
        self._told_s[kind] = now_s
        _LOG.error(
            "%s does not run since %s: %s; it is tried again, at least every %g s",
            self._name,
            self._shown(self._since),
            why,
            self._longest_pause_s,
        )

    def over(self) -> None:
        """Note that the part does its work."""
        if self._since is not None:
            _LOG.info("%s runs again, after %.0f s", self._name, self._clock.monotonic_s() - self._since_s)
        self._since = None

    def _shown(self, since: datetime) -> str:
        there, now = since.astimezone(), self._clock.now().astimezone()
        return there.strftime("%H:%M:%S" if there.date() == now.date() else "%Y-%m-%d %H:%M:%S")


class LastWords:
    """Finds in what a process writes to stderr the reason why it ends: its last error."""

    def __init__(self) -> None:
        self._words = ""
        self._is_last = False

    def hear(self, line: bytes) -> bool:
        """Take a line; return whether it is of what the command line says at the very end."""
        text = line.decode(errors="replace").rstrip()
        if text.startswith(_OURS):
            self._words, self._is_last = text.removeprefix(_OURS), True
        elif self._is_last:
            self._words = f"{self._words} {text.strip(' -')}"
        elif logged := _logged(text):
            self._words = logged["message"] if logged["level"] in {"ERROR", "CRITICAL"} else self._words
        elif _RAISED.match(text):
            self._words = text
        return self._is_last

    def take(self) -> str:
        """Return the reason in one line, or nothing, and begin again."""
        words = " ".join(self._words.split())[:_LONGEST_WHY].removesuffix(" (try again)")
        self._words, self._is_last = "", False
        return words


def _logged(text: str) -> dict[str, str] | None:
    if found := _LOGGED.match(text):
        return found.groupdict()
    if not text.startswith("{"):
        return None
    try:
        entry: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return None
    return {"level": str(entry.get("level", "")).upper(), "message": str(entry.get("message", ""))}

"""Log lines about a process that is down: since when and why, and when it runs again."""

import logging
import re
from datetime import datetime
from typing import Any, Final

import msgspec

from quantdrift.core.clock import Clock

REPEAT_S: Final = 600.0
_LONGEST_REASON: Final = 500
_MOST_KINDS: Final = 20
_NUMBER: Final = re.compile(r"\d+")
_PREFIX: Final = "quantdrift: "  # prefix of the error that a command prints before it exits
_COMMAND: Final = "quantdrift.cli.main"  # logger of that error where lines are JSON
_LOGGED: Final = re.compile(
    r"\d\d:\d\d:\d\d .+? (?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) +(?P<message>.*)(?P<logger>)"
)
_RAISED: Final = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)(: .*)?$")  # the last line of a traceback
_LOG = logging.getLogger(__name__)


class Outage:
    """The outage of a process, if it is down.

    A process that is restarted every half minute would log the same line a thousand times in a night. So the same
    reason is logged every ten minutes, and a new reason at once.

    Parameters
    ----------
    longest_pause_s
        Longest pause between two restarts, for the log line.

    Attributes
    ----------
    why
        Why it last ended or could not start.
    """

    def __init__(self, name: str, longest_pause_s: float, clock: Clock) -> None:
        self._name = name
        self._longest_pause_s = longest_pause_s
        self._clock = clock
        self._since: datetime | None = None
        self._since_s = 0.0
        self._logged_s: dict[str, float] = {}
        self.why = ""

    @property
    def since(self) -> datetime | None:
        """When the process went down; None while it works, or has not failed yet."""
        return self._since

    @property
    def is_down(self) -> bool:
        """Whether the process is down now."""
        return self._since is not None

    def failed(self, why: str, *, plan: str = "") -> None:
        """Record that the process ended, could not start or does not work.

        Parameters
        ----------
        plan
            What is done about it, for the log line; empty: it is restarted after a pause.
        """
        self.why = why
        now_s = self._clock.monotonic_s()
        if self._since is None:
            self._since, self._since_s = self._clock.now(), now_s
            self._logged_s.clear()
        kind = _NUMBER.sub("0", why)  # the same error has another process id or file number each time
        if now_s - self._logged_s.get(kind, -REPEAT_S) < REPEAT_S:
            return
        if len(self._logged_s) == _MOST_KINDS:
            self._logged_s.clear()
        self._logged_s[kind] = now_s
        _LOG.error(
            "%s is down since %s: %s; %s",
            self._name,
            self._shown(self._since),
            why,
            plan or f"it is restarted, at least every {self._longest_pause_s:g} s",
        )

    def over(self) -> None:
        """Record that the process works."""
        if self._since is not None:
            _LOG.info("%s runs again after %.0f s", self._name, self._clock.monotonic_s() - self._since_s)
        self._since = None

    def _shown(self, since: datetime) -> str:
        local, now = since.astimezone(), self._clock.now().astimezone()
        return local.strftime("%H:%M:%S" if local.date() == now.date() else "%Y-%m-%d %H:%M:%S")


class LastError:
    """The last error in the stderr of a process: the reason why it ended."""

    def __init__(self) -> None:
        self._text = ""
        self._is_last = False

    def read(self, line: bytes) -> bool:
        """Take a line; return whether it belongs to the error that a command prints before it exits."""
        text = line.decode(errors="replace").rstrip()
        if text.startswith(_PREFIX):
            self._text, self._is_last = text.removeprefix(_PREFIX), True
        elif self._is_last:
            self._text = f"{self._text} {text.strip(' -')}"
        elif logged := _logged(text):
            if logged["logger"] == _COMMAND:
                self._text = logged["message"]
                return True
            self._text = logged["message"] if logged["level"] in {"ERROR", "CRITICAL"} else self._text
        elif _RAISED.match(text):
            self._text = text
        return self._is_last

    def take(self) -> str:
        """Return the reason in one line, empty if there is none, and clear it."""
        text = " ".join(self._text.split())[:_LONGEST_REASON].removesuffix(" (try again)")
        self._text, self._is_last = "", False
        return text


def _logged(text: str) -> dict[str, str] | None:
    if match := _LOGGED.match(text):
        return match.groupdict()
    if not text.startswith("{"):
        return None
    try:
        entry: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return None
    return {
        "level": str(entry.get("level", "")).upper(),
        "message": str(entry.get("message", "")),
        "logger": str(entry.get("logger", "")),
    }

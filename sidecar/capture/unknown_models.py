"""Models that sampled exchanges name but the configuration does not: mostly misspelt names.

These exchanges are counted as lost (`unknown_model`) in any case. The names are in the log, and in the tallies, from
where `quantdrift status` shows them. Metrics contain no names that clients choose.
"""

import difflib
import logging
from collections.abc import Sequence

from quantdrift.core.clock import Clock
from quantdrift.core.notation import count_of

_LOG = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0
MAX_NAMES = 16
MAX_LENGTH = 64
_MAX_SHOWN = 3
_MAX_CONFIGURED = 10


class UnknownModels:
    """Counts a bounded number of names and logs them at most once in `LOG_INTERVAL_S`.

    Parameters
    ----------
    clock
        Times the log lines.

    Attributes
    ----------
    totals
        Exchanges by header stratum and name since the name got its counter, for at most `MAX_NAMES` names. In
        the names, what cannot be printed or stored in Postgres is escaped.

    Notes
    -----
    Clients choose the names, so invented ones must not keep the places of misspelt ones: the names are those of a
    Misra-Gries summary with `MAX_NAMES` counters. A name in more than 1 / (`MAX_NAMES` + 1) of these exchanges is always
    among them.
    """

    def __init__(self, clock: Clock) -> None:
        self.totals: dict[tuple[str, str], int] = {}
        self._clock = clock
        self._counters: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._n_other = 0
        self._since_s = 0.0  # when the first name was seen since the last line
        self._logged_s: float | None = None

    def count(self, name: str, stratum: str) -> None:
        """Count an exchange of a header stratum whose model is not configured."""
        if not self._seen:
            self._since_s = self._clock.monotonic_s()
        name = name[:MAX_LENGTH]
        if self._has_counter(name):
            key = stratum, _quote(name)
            self.totals[key] = self.totals.get(key, 0) + 1
        if name in self._seen or len(self._seen) < MAX_NAMES:
            self._seen[name] = self._seen.get(name, 0) + 1
        else:
            self._n_other += 1

    def _has_counter(self, name: str) -> bool:
        """Count a name in the summary; return whether it has a counter."""
        counters = self._counters
        if name in counters or len(counters) < MAX_NAMES:
            counters[name] = counters.get(name, 0) + 1
            return True
        for counted in list(counters):
            counters[counted] -= 1
            if not counters[counted]:
                del counters[counted]
                for key in [key for key in self.totals if key[1] == _quote(counted)]:
                    del self.totals[key]
        return False

    def log(self, configured: Sequence[str]) -> None:
        """Log the names seen since the last line. Called about once a second.

        Parameters
        ----------
        configured
            Names of the configured models.
        """
        now_s = self._clock.monotonic_s()
        for name in self._seen.keys() & set(configured):  # corrected meanwhile
            del self._seen[name]
        if not self._seen or (self._logged_s is not None and now_s - self._logged_s < LOG_INTERVAL_S):
            return
        seen = sorted(self._seen.items(), key=lambda item: -item[1])
        others = sum(n for _, n in seen[_MAX_SHOWN:]) + self._n_other
        _LOG.warning(
            "no such model is configured: saw %s%s in the sampled requests of the last %.0f s, and compared none of "
            "them. Configured: %s. Correct models.name, or add a [[models]]",
            ", ".join(_describe(name, n, configured) for name, n in seen[:_MAX_SHOWN]),
            f" and other names {count_of(others, 'time')}" if others else "",
            max(1.0, now_s - self._since_s),
            _join_names(configured),
        )
        self._seen, self._n_other, self._logged_s = {}, 0, now_s


def _describe(name: str, n: int, configured: Sequence[str]) -> str:
    matches = difflib.get_close_matches(
        name.lower(),
        {
            configured_name.lower(): configured_name
            for configured_name in configured
            if len(configured_name) <= 2 * MAX_LENGTH
        },
        n=1,
        cutoff=0.5,
    )
    meant = next(
        (
            configured_name
            for configured_name in configured
            if matches and configured_name.lower() == matches[0]
        ),
        "",
    )
    hint = f" (did you mean `{meant}`?)" if meant else ""
    return f"model `{_quote(name)}` {count_of(n, 'time')}{hint}"


def _quote(name: str) -> str:
    """Return a name chosen by a client in a form that is safe in a log line."""
    return repr(name)[1:-1].replace("`", "'")


def _join_names(configured: Sequence[str]) -> str:
    more = len(configured) - _MAX_CONFIGURED
    names = ", ".join(configured[:_MAX_CONFIGURED]) or "none"
    return f"{names} and {more} more" if more > 0 else names

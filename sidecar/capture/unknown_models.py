"""Says in the log which models the sampled exchanges name that the configuration does not: a misspelt name, mostly.

They are counted as lost, `unknown_model`, in any case; metrics carry no names that clients choose.
"""

import difflib
import logging
from collections.abc import Sequence

from quantdrift.core.clock import Clock

_LOG = logging.getLogger(__name__)

EVERY_S = 60.0
MOST_NAMES = 16
MOST_LENGTH = 64
_MOST_SHOWN = 3
_MOST_CONFIGURED = 10


class UnknownModels:
    """Counts names, a bounded number of them, and tells them at most once in `EVERY_S`.

    Parameters
    ----------
    clock
        Tells the time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, int] = {}
        self._n_other = 0
        self._since_s = 0.0  # when the first of them was seen
        self._told_s: float | None = None

    def saw(self, name: str) -> None:
        """Count an exchange of a model that is not configured."""
        if not self._seen:
            self._since_s = self._clock.monotonic_s()
        name = name[:MOST_LENGTH]
        if name in self._seen or len(self._seen) < MOST_NAMES:
            self._seen[name] = self._seen.get(name, 0) + 1
        else:
            self._n_other += 1

    def tell(self, configured: Sequence[str]) -> None:
        """Say what was seen since the last line. Called about once a second.

        Parameters
        ----------
        configured
            The names of the models of the configuration.
        """
        now_s = self._clock.monotonic_s()
        if not self._seen or (self._told_s is not None and now_s - self._told_s < EVERY_S):
            return
        seen = sorted(self._seen.items(), key=lambda one: -one[1])
        others = sum(count for _, count in seen[_MOST_SHOWN:]) + self._n_other
        _LOG.warning(
            "no such model is configured: saw %s%s in the sampled requests of the last %.0f s, and compared none of "
            "them. Configured: %s. Correct models.name, or add a [[models]]",
            ", ".join(_told(name, count, configured) for name, count in seen[:_MOST_SHOWN]),
            f" and other names {others} times" if others else "",
            max(1.0, now_s - self._since_s),
            _listed(configured),
        )
        self._seen, self._n_other, self._told_s = {}, 0, now_s


def _told(name: str, count: int, configured: Sequence[str]) -> str:
    near = difflib.get_close_matches(
        name.lower(), {one.lower(): one for one in configured if len(one) <= 2 * MOST_LENGTH}, n=1, cutoff=0.5
    )
    meant = next((one for one in configured if near and one.lower() == near[0]), "")
    hint = f" (did you mean `{meant}`?)" if meant else ""
    return f"model `{_shown(name)}` {count} times{hint}"


def _shown(name: str) -> str:
    """Return a name that a client chose, for one line of a log."""
    return repr(name)[1:-1].replace("`", "'")


def _listed(configured: Sequence[str]) -> str:
    more = len(configured) - _MOST_CONFIGURED
    names = ", ".join(configured[:_MOST_CONFIGURED]) or "none"
    return f"{names} and {more} more" if more > 0 else names

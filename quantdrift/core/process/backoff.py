"""Growing pauses between attempts, with jitter."""

import random


class Backoff:
    """The pauses between attempts at something that fails: each about twice the one before, up to a limit.

    Each pause is drawn between half of its nominal length and the whole ("equal jitter"): processes that lost the same
    server at the same moment do not come back to it at the same moment. It takes no time and knows no errors, so
    coroutines, threads and callbacks use it alike.

    Parameters
    ----------
    first_s, longest_s
        Nominal length of the first pause, and the limit; seconds, 0 < `first_s` <= `longest_s`.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._nominal_s = first_s

    def next_s(self) -> float:
        """Return the length of the next pause, seconds."""
        nominal_s = self._nominal_s
        self._nominal_s = min(2 * nominal_s, self._longest_s)
        return nominal_s * random.uniform(0.5, 1.0)  # noqa: S311 - a pause is no secret

    def reset(self) -> None:
        """Begin with the first pause again, after a success."""
        self._nominal_s = self._first_s

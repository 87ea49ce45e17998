"""The steps of a search for what causes a damage, whatever is switched: a choice on one half, judged on the other against placebos."""

from collections.abc import Callable, Mapping, Sequence
from math import comb
from typing import Protocol

import msgspec
import numpy as np

from quantdrift.models.comparators.protocol import Flags, Values

Progress = Callable[[int, int], None]
"""Called with the number of runs that were done, and that are needed at most."""


class Halved(Protocol):
    """Items with their losses, in two halves."""

    def share(self, loss: Values, half: int | None = None) -> float:
        """Return a mean loss as a share of the candidate's, on a half or on all."""


class SearchStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the greedy search; shares are of the loss of the half on which it was judged."""

    site: int
    restores: float
    placebo: float

    @property
    def is_named(self) -> bool:
        """Whether it restores more than each placebo."""
        return self.restores > self.placebo


def judged(
    items: Halved, before: Values, losses: Mapping[int, Values], placebos: Sequence[Values]
) -> SearchStep:
    """Return the best site, chosen on one half and judged on the other."""
    both = []
    for chosen_on, judged_on in ((0, 1), (1, 0)):
        site = min(losses, key=lambda choice: items.share(losses[choice], chosen_on))
        placebo = max(items.share(before - loss, judged_on) for loss in placebos)
        step = SearchStep(site=site, restores=items.share(before - losses[site], judged_on), placebo=placebo)
        both.append((step.is_named, -items.share(losses[site]), step))
    return max(both, key=lambda choice: choice[:2])[2]


def leading(one_off: Values, one_on: Values, n_sites: int) -> list[int]:
    """Return the sites that lead by one-off and by one-on, in turn."""
    ranks = zip(np.argsort(one_off, kind="stable"), np.argsort(-one_on, kind="stable"), strict=True)
    return list(dict.fromkeys(int(site) for pair in ranks for site in pair))[:n_sites]


def sign_test(healed: Flags, broken: Flags) -> float:
    """Return the probability of at least as many healed items, if healing and breaking are equally probable."""
    more, n = int(healed.sum()), int(healed.sum() + broken.sum())
    return sum(comb(n, count) for count in range(more, n + 1)) / (1 << n)


class CountedRuns:
    """Counts runs for a progress bar."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def one(self) -> None:
        """Count one run."""
        self._done += 1
        if self._progress is not None and self._done < self._total:
            self._progress(self._done, self._total)

    def finish(self) -> None:
        """Tell that no further run is needed."""
        if self._progress is not None:
            self._progress(self._total, self._total)

"""What the policies say of each slice, worked out once per slice and policy."""

import msgspec

from quantdrift.core.slices import reachable_strata, smallest_rate
from storage.fold_rows import Catalog


class SliceRates(msgspec.Struct, frozen=True, kw_only=True):
    """How a slice is sampled under a policy.

    Parameters
    ----------
    smallest
        c: lower bound of its items' inclusion probabilities.
    weighted
        Whether these differ within the slice.
    strata
        Names of the header strata that its items may fall into.
    """

    smallest: float
    weighted: bool
    strata: tuple[str, ...]


MOST_KNOWN = 65_536  # policies change daily: what is remembered for years of them must not grow


class Rates:
    """Remembers `SliceRates`; slices and policies never change once they have a number."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], SliceRates] = {}

    def of(self, catalog: Catalog, slice_id: int, policy_id: int) -> SliceRates:
        """Return how slice `slice_id` is sampled under policy `policy_id`, both in `catalog`."""
        known = self._known.get((slice_id, policy_id))
        if known is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            where, policy = catalog.slices[slice_id].where, catalog.policies[policy_id]
            strata = reachable_strata(where, policy)
            first = {stratum.rate for stratum in strata if stratum.rate > 0}
            second = {stratum.rate for stratum in policy.body_strata if stratum.rate > 0}
            known = self._known[slice_id, policy_id] = SliceRates(
                smallest=smallest_rate(where, policy),
                weighted=len(first) > 1 or len(second) > 1,
                strata=tuple(stratum.name for stratum in strata),
            )
        return known

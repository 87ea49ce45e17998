"""What the policies say of each slice, worked out once per slice and policy."""

import msgspec

from quantdrift.core.sampling.inclusion import (
    largest_rate,
    of_model,
    reachable_strata,
    second_rate,
    smallest_rate,
)
from quantdrift.storage.monitor.rows import Catalog


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
    first, second
        Draws below which a session is in, whatever its items are: all of it is then seen with the same probability.

    Detectors without weights are given the items that have at least probability `smallest`, thinned to it: every item
    of the slice with the same probability. Not with a rate for each margin bin: when a policy moves these, the mix of
    margins moves, and a tail or a stratum that holds several bins would see drift where there is none.
    """

    smallest: float
    weighted: bool
    strata: tuple[str, ...]
    first: float
    second: float


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
            place, policy = catalog.slices[slice_id], catalog.policies[policy_id]
            where = of_model(place.where, place.model)
            strata = reachable_strata(where, policy)
            taking = [stratum.rate for stratum in strata if stratum.rate > 0]
            smallest = smallest_rate(where, policy)
            known = self._known[slice_id, policy_id] = SliceRates(
                smallest=smallest,
                weighted=largest_rate(where, policy) > smallest,
                strata=tuple(stratum.name for stratum in strata),
                first=min(taking, default=1.0),
                second=min((second_rate(smallest, rate) for rate in taking), default=1.0),
            )
        return known

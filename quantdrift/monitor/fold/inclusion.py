"""What the policies say of each slice, worked out once per slice and policy."""

from collections.abc import Sequence

import msgspec

from quantdrift.core.sampling.inclusion import (
    largest_rate,
    of_model,
    reachable_strata,
    smallest_rate,
    sure_rate,
)
from quantdrift.storage.fold_rows import Catalog


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
    sure
        Lower bound of the largest body rate of its items: in a header stratum with rate pi1 all items of a session are in, or
        none, where `u2 < sure / pi1`, with probability min(pi1, sure).
    session
        c of a session's parts, one for each rate of a header stratum: 1 over the sum of 1 / min(pi1, sure), so that the
        weights of all parts together are at most 1.
    session_weighted
        Whether these probabilities differ.

    Detectors without weights are given the items that have at least probability `smallest`, thinned to it: every item
    of the slice with the same probability. Not with a rate for each margin bin: when a policy moves these, the mix of
    margins moves, and a tail or a stratum that holds several bins would see drift where there is none. The same holds for the
    parts of sessions.
    """

    smallest: float
    weighted: bool
    strata: tuple[str, ...]
    sure: float
    session: float
    session_weighted: bool


MOST_KNOWN = 65_536  # policies change daily: what is remembered for years of them must not grow


class RememberedRates:
    """Remembers `SliceRates`; slices and policies never change once they have a number."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], SliceRates] = {}

    def of(self, catalog: Catalog, slice_id: int, policy_id: int) -> SliceRates:
        """Return how slice `slice_id` is sampled under policy `policy_id`, both in `catalog`."""
        rates = self._known.get((slice_id, policy_id))
        if rates is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            slice_, policy = catalog.slices[slice_id], catalog.policies[policy_id]
            where = of_model(slice_.where, slice_.model)
            strata = reachable_strata(where, policy)
            smallest, sure = smallest_rate(where, policy), sure_rate(where, policy)
            parts = sorted({min(stratum.rate, sure) for stratum in strata if stratum.rate > 0})
            rates = self._known[slice_id, policy_id] = SliceRates(
                smallest=smallest,
                weighted=largest_rate(where, policy) > smallest,
                strata=tuple(stratum.name for stratum in strata),
                sure=sure,
                session=_smallest_of_parts([stratum.rate for stratum in strata if stratum.rate > 0], sure),
                session_weighted=len(parts) > 1,
            )
        return rates


def _smallest_of_parts(rates: Sequence[float], sure: float) -> float:
    """Return c of a session's parts, of which there is one for each different rate of a header stratum."""
    parts = [min(rate, sure) for rate in sorted(set(rates))]
    # Of a single part exactly its probability: its weight is then 1.
    return parts[0] if len(parts) == 1 else 1.0 / sum(1.0 / part for part in parts) if parts else 1.0

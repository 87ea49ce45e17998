"""A simulated population of requests, for running the allocation before there is traffic."""

import msgspec
import numpy as np

from quantdrift.core.records import HeaderStratum, Policy, Predicate
from quantdrift.core.slices import SliceKey, everything
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray
from quantdrift.drift.sampling.allocation import Allocation, Budget, Demand, Recent, allocate
from quantdrift.drift.sampling.boosts import Layout

N_REQUESTS = 20_000


class Population(msgspec.Struct, frozen=True, kw_only=True):
    """The expected requests of one model.

    Parameters
    ----------
    slices
        With their shares; `all` is not among them.
    strata
        Header strata, in order.
    shares
        Their shares; the sum is 1.
    """

    slices: tuple[tuple[SliceKey, float], ...]
    strata: tuple[HeaderStratum, ...]
    shares: tuple[float, ...]

    def sample(self, requests_per_s: float, seed: int = 1) -> Recent:
        """Return requests of one item each, without margins and flips, that have these shares.

        Slices of one attribute or feature exclude each other, those of different ones are independent. A header
        stratum with the same condition as a slice has that slice's requests.
        """
        rng = np.random.default_rng(seed)
        inside = self._memberships(rng)
        item, row = np.nonzero(np.column_stack((np.ones(N_REQUESTS, dtype=bool), inside)))
        unknown = np.full(N_REQUESTS, np.nan)
        ones = np.ones(N_REQUESTS)
        return Recent(
            weight=ones,
            n_items=ones,
            header=self._headers(inside, rng),
            margin=unknown,
            flip=unknown,
            item=item,
            slice=row,
            offered_per_s=requests_per_s * np.array(self.shares),
        )

    def _memberships(self, rng: np.random.Generator) -> BoolArray:
        inside = np.zeros((N_REQUESTS, len(self.slices)), dtype=bool)
        families: dict[tuple[str, ...], list[int]] = {}
        for index, (key, _) in enumerate(self.slices):
            families.setdefault(tuple(condition.key for condition in key.where), []).append(index)
        for members in families.values():
            borders = np.cumsum([self.slices[index][1] for index in members])
            drawn = np.searchsorted(borders, _spread(rng), side="right")
            for position, index in enumerate(members):
                inside[:, index] = drawn == position
        return inside

    def _headers(self, inside: BoolArray, rng: np.random.Generator) -> IntArray:
        shares = np.array(self.shares)
        header = np.full(N_REQUESTS, -1, dtype=np.intp)
        free = []
        for index, stratum in enumerate(self.strata):
            column = alike(stratum, self.slices)
            if column is None:
                free.append(index)
            else:
                header[inside[:, column] & (header < 0)] = index
        cumulative: FloatArray = np.cumsum(shares[free] / max(shares[free].sum(), np.finfo(np.float64).tiny))
        drawn = np.array(free)[
            np.minimum(np.searchsorted(cumulative, _spread(rng), side="right"), len(free) - 1)
        ]
        return np.where(header < 0, drawn, header)


def allotted(
    policy: Policy, population: Population, requests_per_s: float, replays_per_s: float
) -> Allocation:
    """Return the allocation of a replay budget when there is no evidence against any slice.

    Parameters
    ----------
    policy
        Its header strata are kept; their rates are computed.
    replays_per_s
        The budget.
    """
    shares = ((everything(""), 1.0), *population.slices)
    demands = [
        Demand(name=key.name, where=key.where, traffic_per_s=requests_per_s * share) for key, share in shares
    ]
    return allocate(
        population.sample(requests_per_s),
        demands,
        Layout(header_strata=policy.header_strata, edges=()),
        Budget(replays_per_s=replays_per_s, taken_per_s=requests_per_s),
        epoch=policy.epoch,
    )


def alike(stratum: HeaderStratum, slices: tuple[tuple[SliceKey, float], ...]) -> int | None:
    """Return the index of the slice that has the condition of a header stratum, or None."""
    if stratum.method or stratum.path_prefix or not stratum.headers:
        return None
    wanted = {Predicate(key=f"header.{name}", equals=value) for name, value in stratum.headers.items()}
    return next((index for index, (key, _) in enumerate(slices) if set(key.where) == wanted), None)


def _spread(rng: np.random.Generator) -> FloatArray:
    """Return evenly spaced numbers in [0, 1) in a random order, so that shares are exact."""
    return rng.permutation((np.arange(N_REQUESTS) + 0.5) / N_REQUESTS)

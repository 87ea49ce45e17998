"""How the requests of a slice are sampled under a policy: its inclusion probabilities, and their weights."""

from collections.abc import Mapping

import msgspec

from quantdrift.core.inclusion import largest_rate, of_model, reachable_strata, smallest_rate
from quantdrift.core.records import HeaderStratum, Policy, Predicate
from quantdrift.core.slices import SliceKey
from quantdrift.monitor.population import alike


class Mixture(msgspec.Struct, frozen=True, kw_only=True):
    """How the requests of a slice are sampled.

    Parameters
    ----------
    rate, most
        Mean inclusion probability at the base rates, and at the largest.
    mix
        Weights with their share of the samples; empty where nothing is taken.
    weighted
        Whether inclusion probabilities differ within the slice.
    """

    rate: float
    most: float
    mix: tuple[tuple[float, float], ...]
    weighted: bool


def mixture_of(key: SliceKey, policy: Policy, strata: Mapping[str, float]) -> Mixture:
    """Return how the requests of a slice are sampled, as far as the policy alone says.

    Boosts by body strata that hold a part of the slice alone do not count: they add samples of little weight. Header
    strata are taken to be as frequent inside the slice as they are elsewhere, unless one excludes the other.

    Parameters
    ----------
    key
        The slice.
    policy
        The rates.
    strata
        Share of all requests by header stratum.
    """
    where = of_model(key.where, key.model)
    reachable = reachable_strata(where, policy)
    share = {one.name: strata[one.name] for one in reachable}
    if not sum(share.values()):
        share = {one.name: float(one is reachable[-1]) for one in reachable}
    total = sum(share.values())
    rates = {one.name: _rates(where, policy, one) for one in reachable}
    smallest = min((low for low, _ in rates.values() if low > 0), default=1.0)
    taken = {name: share[name] / total * low for name, (low, _) in rates.items()}
    rate = sum(taken.values())
    return Mixture(
        rate=rate,
        most=sum(share[name] / total * high for name, (_, high) in rates.items()),
        mix=tuple((smallest / rates[name][0], part / rate) for name, part in taken.items() if part > 0),
        weighted=largest_rate(where, policy) > smallest_rate(where, policy),
    )


def _rates(where: tuple[Predicate, ...], policy: Policy, stratum: HeaderStratum) -> tuple[float, float]:
    """Return the smallest and the largest inclusion probability of a slice's items in one header stratum."""
    alone = msgspec.structs.replace(policy, header_strata=(stratum,))
    high = largest_rate(where, alone)
    return (smallest_rate(where, alone), high) if high > 0 else (0.0, 0.0)


def stratum_shares(
    policy: Policy, slices: tuple[tuple[SliceKey, float], ...], known: Mapping[str, float]
) -> tuple[dict[str, float], list[str]]:
    """Return the share of the requests by header stratum, and what had to be assumed.

    A stratum's share is as given, or that of the slice with the same condition; the last one holds the rest.
    """
    shares: dict[str, float] = {}
    notes = []
    *named, last = policy.header_strata
    for stratum in named:
        share = known.get(stratum.name)
        if share is None:
            same = alike(stratum, slices)
            share = None if same is None else slices[same][1]
        if share is None:
            notes.append(
                f"header stratum `{stratum.name}`: its share of the traffic is not known and taken as 0; "
                f"give --stratum {stratum.name}=SHARE"
            )
        shares[stratum.name] = share or 0.0
    shares[last.name] = known.get(last.name, max(0.0, 1.0 - sum(shares.values())))
    return shares, notes

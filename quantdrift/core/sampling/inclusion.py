"""Inclusion probabilities of a sampling policy, and their bounds for the items of a slice.

An exchange in header stratum h and in the body strata B is sampled with total probability

    pi = min(rate of h, max over b in B of rate of b) = pi1 * pi2

by two independent random numbers, u1 < pi1 = rate of h and u2 < pi2. The rates of the body strata enter as their
maximum and not as a product, because boosts overlap, and an item of two boosted slices is not needed twice.
"""

from collections.abc import Mapping

from quantdrift.core.config.strata import MARGIN, MODEL
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate
from quantdrift.core.slices import CAPTURED


def known_at_capture(condition: Predicate) -> bool:
    """Return whether a sidecar can check a condition: on model, attributes, time or margins, but not on features or clusters."""
    return condition.key.startswith(CAPTURED) or condition.key in {MARGIN, MODEL}


def of_model(where: tuple[Predicate, ...], model: str) -> tuple[Predicate, ...]:
    """Return the conditions of a slice with one more on the model, in the form of a body stratum."""
    return (*where, Predicate(key=MODEL, equals=model))


def second_rate(total: float, pi1: float) -> float:
    """Return pi2 such that pi1 * pi2 = min(pi1, total); 0 if the first phase samples nothing."""
    return min(1.0, total / pi1) if pi1 > 0 else 0.0


def smallest_rate(where: tuple[Predicate, ...], policy: Policy) -> float:
    """Return c, a positive lower bound of the inclusion probability of every item of a slice that can be sampled.

    Weights are v = c / pi <= 1. Only header strata that `reachable_strata` returns count, and only body strata that
    contain the whole slice. Strata with rate 0 sample nothing and have no weight.

    Parameters
    ----------
    where
        Conditions of the slice, with `of_model`; otherwise a stratum of a model is not known to contain the slice. A
        condition on the candidate's margin is about one item, but that of a policy is about the smallest margin of the
        exchange, of which only the upper end of the item's interval is a bound.
    """
    sure = sure_rate(where, policy)
    first = (h.rate for h in reachable_strata(where, policy) if h.rate > 0)
    return min((min(rate, sure) for rate in first), default=sure)


def sure_rate(where: tuple[Predicate, ...], policy: Policy) -> float:
    """Return a positive lower bound of the largest body rate of every item of a slice; `where` as for `smallest_rate`."""
    sure = max((b.rate for b in policy.body_strata if _inside(where, b)), default=0.0)
    return sure if sure > 0 else min((b.rate for b in policy.body_strata if b.rate > 0), default=1.0)


def largest_rate(where: tuple[Predicate, ...], policy: Policy) -> float:
    """Return an upper bound of the inclusion probability of every item of a slice."""
    most = max((b.rate for b in policy.body_strata if not _contradicts(where, b)), default=0.0)
    return max((min(h.rate, most) for h in reachable_strata(where, policy)), default=0.0)


def reachable_strata(where: tuple[Predicate, ...], policy: Policy) -> tuple[HeaderStratum, ...]:
    """Return the header strata that items of a slice may fall into, in the policy's order.

    A stratum whose conditions contradict those of the slice is skipped. The list ends with the first stratum that
    contains the whole slice. A stratum that is not known to be disjoint counts as reachable.
    """
    wanted = _wanted(where)
    strata: list[HeaderStratum] = []
    for stratum in policy.header_strata:
        if any(
            f"header.{name}" in wanted and wanted[f"header.{name}"] != value
            for name, value in stratum.headers.items()
        ):
            continue
        strata.append(stratum)
        if _takes_whole(stratum, wanted):
            break
    return tuple(strata)


def _wanted(where: tuple[Predicate, ...]) -> dict[str, str]:
    return {p.key: p.equals for p in where if p.equals is not None}


def _takes_whole(stratum: HeaderStratum, wanted: Mapping[str, str]) -> bool:
    return (
        not stratum.method
        and not stratum.path_prefix
        and all(wanted.get(f"header.{name}") == value for name, value in stratum.headers.items())
    )


def _inside(where: tuple[Predicate, ...], body: BodyStratum) -> bool:
    """Return whether every item of the slice is in the body stratum."""
    if not all(known_at_capture(condition) for condition in body.where):
        return False
    wanted = _wanted(where)
    high = min((p.high for p in where if p.key == MARGIN and p.high is not None), default=None)
    for condition in body.where:
        if condition.key == MARGIN:
            # There is no lower bound of the margin: the exchange may contain an item with a smaller one.
            if condition.low is not None and condition.low > 0:
                return False
            if condition.high is not None and (high is None or high > condition.high):
                return False
        elif condition.equals is None or wanted.get(condition.key) != condition.equals:
            return False
    return True


def _contradicts(where: tuple[Predicate, ...], body: BodyStratum) -> bool:
    wanted = _wanted(where)
    return any(
        condition.equals is not None and condition.key in wanted and wanted[condition.key] != condition.equals
        for condition in body.where
    )

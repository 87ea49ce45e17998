"""What a sampling policy gives an exchange, and the bounds that it gives the items of a slice.

An exchange in header stratum h and in the body strata B is taken with total probability

    pi = min(rate of h, max over b in B of rate of b) = pi1 * pi2

by two independent draws u1 < pi1 = rate of h and u2 < pi2. The maximum, not the product, of the body strata's rates:
boosts overlap, and an item of two boosted slices is not wanted twice.
"""

from collections.abc import Mapping

from quantdrift.core.config.strata import MARGIN, MODEL
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate

_CAPTURED = ("header.", "parameter.", "json.")


def known_at_capture(condition: Predicate) -> bool:
    """Return whether a sidecar can see what a condition asks for: model, attributes, margins; no features or clusters."""
    return condition.key.startswith(_CAPTURED) or condition.key in {MARGIN, MODEL}


def of_model(where: tuple[Predicate, ...], model: str) -> tuple[Predicate, ...]:
    """Return the conditions of a slice together with the one that it is of this model, as a body stratum tells it."""
    return (*where, Predicate(key=MODEL, equals=model))


def second_rate(total: float, pi1: float) -> float:
    """Return pi2, so that pi1 * pi2 = min(pi1, total); 0 where the first phase takes nothing."""
    return min(1.0, total / pi1) if pi1 > 0 else 0.0


def smallest_rate(where: tuple[Predicate, ...], policy: Policy) -> float:
    """Return c: a positive lower bound of the inclusion probability of every item of a slice that can be taken.

    Weights are v = c / pi <= 1. A header stratum whose conditions contradict the slice's is passed over, and the
    walk ends at the first that takes the slice whole; what is not known to be apart counts. A body stratum counts
    where the slice lies inside it. Strata with rate 0 take nothing and have no weight.

    Parameters
    ----------
    where
        The slice's conditions, with `of_model`: without it a stratum of a model is not known to hold the slice. One
        on the candidate's margin is of an item, the policy's are of the smallest in its
        exchange: the item's upper end alone is known of it.
    policy
        The rates of the epoch.
    """
    sure = max((b.rate for b in policy.body_strata if _inside(where, b)), default=0.0)
    if sure == 0:
        sure = min((b.rate for b in policy.body_strata if b.rate > 0), default=1.0)
    first = (h.rate for h in reachable_strata(where, policy) if h.rate > 0)
    return min((min(rate, sure) for rate in first), default=sure)


def largest_rate(where: tuple[Predicate, ...], policy: Policy) -> float:
    """Return an upper bound of the inclusion probability of every item of a slice."""
    most = max((b.rate for b in policy.body_strata if not _contradicts(where, b)), default=0.0)
    return max((min(h.rate, most) for h in reachable_strata(where, policy)), default=0.0)


def reachable_strata(where: tuple[Predicate, ...], policy: Policy) -> tuple[HeaderStratum, ...]:
    """Return the header strata that items of a slice may fall into, in the policy's order.

    A stratum whose conditions contradict the slice's is passed over, and the walk ends at the first that takes the
    slice whole; what is not known to be apart is reachable.

    Parameters
    ----------
    where
        The slice's conditions.
    policy
        The rates of the epoch.
    """
    wanted = _wanted(where)
    found: list[HeaderStratum] = []
    for stratum in policy.header_strata:
        if any(
            f"header.{name}" in wanted and wanted[f"header.{name}"] != value
            for name, value in stratum.headers.items()
        ):
            continue
        found.append(stratum)
        if _takes_whole(stratum, wanted):
            break
    return tuple(found)


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
            # Nothing is known of a margin's lower end: the exchange may hold an item with a smaller one.
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

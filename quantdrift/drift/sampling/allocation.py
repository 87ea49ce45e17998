"""The allocation of replays to slices: traffic, evidence and margins determine a sampling policy.

The replay budget is divided as follows:

- A tenth is a uniform base rate, so that traffic outside of all slices is sampled too.
- Half of the rest goes to the slices by the square root of their traffic. (With equal shares, rare slices were not found
  earlier, and large ones later than with a uniform sample.) The other half goes by the logarithm of their evidence (see
  `urgency`).
- Inside a slice the samples are spread over margin bins (`quantdrift.drift.sampling.stratification`).

A slice becomes a boost: body strata with its conditions and falling rates over nested margin intervals, `margin < e1`,
`margin < e2`, ... and, last, any margin. An exchange gets the largest rate of the strata that it is in, so boosts that
overlap do not add up. Then all rates are multiplied by one factor, found by bisection, with which the replay of a recent
sample of items, each with all its slices, would use the budget. If a slice has too little traffic to use its share, the
same factor gives the rest to the others.

A slice that is not known at capture (by input features, by the reference's embedding) cannot be boosted; its share goes to
the base rate.

Assumption: the recent sample is like the future traffic. If it is not, the sidecars' own caps limit the samples. A bad
policy biases no estimate and breaks no false-alarm bound, because probabilities are stored and are fixed before the
reference runs. A bad policy makes detection slower.
"""

import math
from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np

from quantdrift.core.records import Policy, Predicate
from quantdrift.drift.evidence.observations import FloatArray, IntArray
from quantdrift.drift.sampling.boosts import Boosts, Layout, PolicyRates, boostable
from quantdrift.drift.sampling.stratification import bins_of, profile_of, rounded_down

BASE_SHARE = 0.1
EVIDENCE_SHARE = 0.5
HEADROOM = 0.95  # of the budget when a policy is made: traffic may rise a little before another is needed
UNDECIDED = (
    1.0  # so much evidence is spread as the rest is: a trace of it in one slice is no reason to go there
)
KEPT_RATIO = (
    2.0  # a policy is kept while no slice would get more than so many times its samples from a new one
)
_HALVINGS = 20
_ROUNDS = 4


class Spread(StrEnum):
    """The distribution, over slices, of the part of the budget that does not follow the evidence."""

    EQUAL = "equal"
    ROOT = "root"  # by the square root of the slice's traffic


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The demand of a slice for samples.

    Parameters
    ----------
    name
        The readable name, with which the names of its body strata begin.
    where
        Its conditions.
    traffic_per_s
        Its offered items per second, over a longer time than the recent sample.
    evidence
        Not negative; see `urgency`. Only proportions matter.
    """

    name: str
    where: tuple[Predicate, ...]
    traffic_per_s: float
    evidence: float = 0.0


class Recent(msgspec.Struct, frozen=True, kw_only=True):
    """A sample of recently compared items, with all values that sampling depends on.

    Parameters
    ----------
    weight
        (items,) inverse total inclusion probabilities.
    n_items
        (items,) items of the exchange that each came with.
    header
        (items,) index of its header stratum.
    margin
        (items,) the candidate's smallest margin in the exchange, which the draw looks at; not a number: none.
    flip
        (items,) 0 or 1; not a number where it is not known.
    item, slice
        (memberships,) pairs of an item's and a demand's index, ordered by item.
    offered_per_s
        (header strata,) requests per second, from the tallies.
    """

    weight: FloatArray
    n_items: FloatArray
    header: IntArray
    margin: FloatArray
    flip: FloatArray
    item: IntArray
    slice: IntArray
    offered_per_s: FloatArray

    def items_per_s(self) -> FloatArray:
        """Return how many offered items per second each item represents: its weight, scaled to the tally of its stratum."""
        n = len(self.offered_per_s)
        exchanges = np.bincount(self.header, weights=self.weight / self.n_items, minlength=n)
        scale = np.divide(self.offered_per_s, exchanges, out=np.zeros(n), where=exchanges > 0)
        return np.asarray(self.weight * scale[self.header], dtype=np.float64)


class SamplingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling budget and its division.

    Parameters
    ----------
    replays_per_s
        Largest number of items per second for the shadow workers.
    taken_per_s
        Exchanges per second that the relays may hand to the capture processes, which decode them.
    spread
        Distribution of the part that does not follow the evidence.
    base_share
        Share of the replays for the uniform base rate.
    evidence_share
        Share of the rest that is distributed in proportion to the evidence.
    n_strata
        Most body strata: each costs the capture process time, and the policy room in every exchange.
    """

    replays_per_s: float
    taken_per_s: float
    spread: Spread = Spread.ROOT
    base_share: float = BASE_SHARE
    evidence_share: float = EVIDENCE_SHARE
    n_strata: int = 256


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """A policy and its expected cost.

    Parameters
    ----------
    policy
        The policy to use; the previous one where `kept`.
    kept
        Whether the previous policy is still good enough.
    replays_per_s, taken_per_s
        Items per second that will be replayed, and exchanges per second that the relays hand over, if traffic is
        as in the recent sample.
    per_slice_per_s
        (demands,) items per second of each slice that will be replayed.
    n_unboosted
        Slices that could be boosted and are not, because there would be too many body strata.
    """

    policy: Policy
    kept: bool
    replays_per_s: float
    taken_per_s: float
    per_slice_per_s: FloatArray
    n_unboosted: int


def urgency(evidence: float, mass: float) -> float:
    """Return the urgency of a slice, `log(evidence / mass)`, or 0 where that is negative.

    The evidence of an e-detector that finds nothing has its calendar mass for mean, so 0 is what there is to expect,
    and with a drift it rises in proportion to the samples, up to the threshold's logarithm. Without the logarithm
    the luckiest of many undrifted slices would get nearly all that follows the evidence.

    Parameters
    ----------
    evidence
        Summed over the slice's signals, of the copies that page.
    mass
        Calendar mass that these were given since their reset, summed likewise.
    """
    return math.log(evidence / mass) if evidence > mass > 0 else 0.0


def allocate(
    recent: Recent,
    demands: Sequence[Demand],
    layout: Layout,
    budget: SamplingBudget,
    *,
    epoch: str,
    previous: Policy | None = None,
) -> Allocation:
    """Return the policy for recent traffic.

    Parameters
    ----------
    recent
        Recent items, as a sample of the traffic.
    demands
        The demands of the slices, `all` included.
    layout
        Header strata of the first phase, and margin bins. A header stratum whose rate is 0 is left at 0.
    budget
        The budget of the fleet.
    epoch
        Name of a new policy.
    previous
        The policy in effect. It is kept if it costs no more than the budget and no slice would get more than twice its
        samples from a new one. The caller renames it on another day.

    Raises
    ------
    ValueError
        The budget is not positive, or evidence is negative.
    """
    if not (budget.replays_per_s > 0 and budget.taken_per_s > 0):
        raise ValueError("the budget must be positive: pause sampling to take nothing")
    plan = _Plan(recent, demands, layout, budget)
    rates = plan.solve()
    new = plan.cost(rates)
    old = plan.boosts.read(previous) if previous is not None else None
    if previous is not None and old is not None:
        cost = plan.cost(old)
        affordable = (
            cost.replays_per_s <= budget.replays_per_s
            and cost.taken_per_s <= budget.taken_per_s
            and len(previous.body_strata) <= budget.n_strata
        )
        if affordable and (new.per_slice_per_s <= KEPT_RATIO * cost.per_slice_per_s).all():
            return plan.allocation(previous, cost, kept=True)
    return plan.allocation(plan.boosts.policy(rates, epoch), new, kept=False)


class _Cost(msgspec.Struct, frozen=True, kw_only=True):
    replays_per_s: float
    taken_per_s: float
    per_slice_per_s: FloatArray


class _Plan:
    """The computation of one allocation. Slices with the same conditions share one boost."""

    def __init__(
        self, recent: Recent, demands: Sequence[Demand], layout: Layout, budget: SamplingBudget
    ) -> None:
        self._budget, self._demands, self._recent = budget, demands, recent
        self._offered = recent.offered_per_s
        self._per_s = recent.items_per_s()
        self._bins = bins_of(recent.margin, layout.edges)
        self.boosts, self._boost_of = _boosts(demands, layout)
        boost_of = self._boost_of[recent.slice]
        boosted = boost_of >= 0
        self._pair_item, self._pair_boost = recent.item[boosted], boost_of[boosted]
        self._starts = np.flatnonzero(np.diff(self._pair_item, prepend=-1))
        self._pair_cell = self._pair_boost * self.boosts.layout.n_bins + self._bins[self._pair_item]
        self._reach = self.boosts.reach()
        self._wanted()

    def _wanted(self) -> None:
        """Compute the demand of each boost and of the base rate, before it is scaled to the budget."""
        demands, budget, n = self._demands, self._budget, len(self.boosts.wheres)
        traffic = np.array([demand.traffic_per_s for demand in demands], dtype=np.float64)
        even = np.sqrt(traffic) if budget.spread is Spread.ROOT else np.ones(len(demands))
        evidence = np.array([demand.evidence for demand in demands], dtype=np.float64)
        if (evidence < 0).any():
            raise ValueError("evidence must not be negative: use `urgency`")
        follows = evidence + UNDECIDED * _portion(even)
        share = (1 - budget.evidence_share) * _portion(even) + budget.evidence_share * _portion(follows)
        per_s = (1 - budget.base_share) * budget.replays_per_s * share
        boosted = self._boost_of >= 0
        boost_traffic = np.bincount(self._boost_of[boosted], weights=traffic[boosted], minlength=n)
        boost_per_s = np.bincount(self._boost_of[boosted], weights=per_s[boosted], minlength=n)
        self._absent = np.bincount(self._pair_boost, minlength=n) == 0
        total = float(self._per_s.sum() + boost_traffic[self._absent].sum())
        base_per_s = budget.base_share * budget.replays_per_s + per_s[~boosted].sum()
        self._base = float(base_per_s) / max(total, np.finfo(np.float64).tiny)
        self._traffic = boost_traffic
        self._mean = np.divide(boost_per_s, boost_traffic, out=np.zeros(n), where=boost_traffic > 0)
        self._profile = profile_of(
            self._bins[self._pair_item],
            self._recent.flip[self._pair_item],
            self._per_s[self._pair_item],
            self._pair_boost,
            (n, self.boosts.layout.n_bins),
        )
        # The order in which boosts are dropped where there are too many: least evidence first, then least gain.
        urgent = np.bincount(self._boost_of[boosted], weights=evidence[boosted], minlength=n)
        self._rank = np.lexsort((-self._mean, -urgent))
        self._boosted = np.ones(n, dtype=bool)

    def solve(self) -> PolicyRates:
        """Return the largest rates within the budget."""
        ceiling = np.array([float(stratum.rate > 0) for stratum in self.boosts.layout.header_strata])
        while True:
            for _ in range(_ROUNDS):
                rates = self._spent(ceiling)
                lowered = self._ceiling(rates.envelope)
                if (lowered >= rates.envelope).all():
                    break
                ceiling = np.minimum(ceiling, lowered)
            rates = msgspec.structs.replace(
                rates, envelope=np.minimum(rates.envelope, self._ceiling(rates.envelope))
            )
            needed = np.array(
                [len(self.boosts.strata(row, rates)) for row in range(len(self.boosts.wheres))], dtype=np.intp
            )
            if needed.sum() < self._budget.n_strata:
                return rates
            within_limit = np.cumsum(needed[self._rank]) < self._budget.n_strata
            self._boosted[self._rank[~within_limit & (needed[self._rank] > 0)]] = False

    def _spent(self, ceiling: FloatArray) -> PolicyRates:
        aim = HEADROOM * self._budget.replays_per_s
        smallest = min(
            [self._base, *(self._mean[self._boosted] * self._profile.shape[self._boosted].min(axis=1))]
        )
        high = 1.0 / max(smallest, 1e-12)
        low = high * 1e-15
        if self.cost(self._scaled(high, ceiling)).replays_per_s <= aim:
            return self._scaled(high, ceiling)
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            if self.cost(self._scaled(middle, ceiling)).replays_per_s <= aim:
                low = middle
            else:
                high = middle
        return self._scaled(low, ceiling)

    def _scaled(self, factor: float, ceiling: FloatArray) -> PolicyRates:
        base = float(rounded_down(np.array(min(1.0, factor * self._base))))
        mean = np.minimum(1.0, factor * self._mean)
        boost = rounded_down(self._profile.spread(mean)) * self._boosted[:, None]
        top = boost.max(axis=1, initial=0.0)
        envelope = (self._reach * top[:, None]).max(axis=0, initial=base)
        return PolicyRates(base=base, boost=boost, envelope=np.minimum(envelope, ceiling))

    def _ceiling(self, envelope: FloatArray) -> FloatArray:
        """Return the first-phase rates within the capacity of the capture processes: the largest are lowered first."""
        limit = self._budget.taken_per_s
        if (self._offered * envelope).sum() <= limit:
            return envelope
        order = np.argsort(envelope)
        offered, rates = self._offered[order], envelope[order]
        below = np.concatenate(([0.0], np.cumsum(offered * rates)))[:-1]
        above = np.cumsum(offered[::-1])[::-1]
        level = (limit - below) / np.maximum(above, np.finfo(np.float64).tiny)
        first = int(np.argmax(level < rates))
        return np.minimum(envelope, rounded_down(level[first]))

    def cost(self, rates: PolicyRates) -> _Cost:
        """Return the cost of these rates on the recent traffic."""
        total = np.full(len(self._per_s), rates.base)
        if len(self._starts):
            largest = np.maximum.reduceat(rates.boost.ravel()[self._pair_cell], self._starts)
            at = self._pair_item[self._starts]
            total[at] = np.maximum(total[at], largest)
        taken = self._per_s * np.minimum(total, rates.envelope[self._recent.header])
        # Slices without items in the sample count with their largest possible cost: separate, at the smallest margins.
        unseen = self._absent * self._traffic * np.maximum(rates.boost[:, 0], rates.base)
        recent = self._recent
        per_slice = np.bincount(recent.slice, weights=taken[recent.item], minlength=len(self._demands))
        return _Cost(
            replays_per_s=float(taken.sum() + unseen.sum()),
            taken_per_s=float((self._offered * rates.envelope).sum()),
            per_slice_per_s=np.asarray(per_slice, dtype=np.float64),
        )

    def allocation(self, policy: Policy, cost: _Cost, *, kept: bool) -> Allocation:
        """Return the allocation."""
        return Allocation(
            policy=policy,
            kept=kept,
            replays_per_s=cost.replays_per_s,
            taken_per_s=cost.taken_per_s,
            per_slice_per_s=cost.per_slice_per_s,
            n_unboosted=int((~self._boosted).sum()),
        )


def _boosts(demands: Sequence[Demand], layout: Layout) -> tuple[Boosts, IntArray]:
    """Return the boosts, and the index of each demand's boost, -1 where it cannot have one."""
    rows: dict[tuple[Predicate, ...], int] = {}
    names: list[str] = []
    boost_rows = np.full(len(demands), -1, dtype=np.intp)
    for index, demand in enumerate(demands):
        if boostable(demand.where):
            if demand.where not in rows:
                rows[demand.where] = len(rows)
                names.append(demand.name)
            boost_rows[index] = rows[demand.where]
    return Boosts(names=tuple(names), wheres=tuple(rows), layout=layout), boost_rows


def _portion(weights: FloatArray) -> FloatArray:
    total = weights.sum()
    return weights / total if total > 0 else weights

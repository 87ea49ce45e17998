"""Sessions under rates that differ between header strata: unbiased, and nothing is thrown away without need.

A population of users whose requests fall into several header and body strata is offered again and again, with new draws for
each user. Estimates by `session_value` are compared with the mean over all parts of sessions, a part being what a user sends in
header strata of one rate. Their mean over the epochs lies within 5 standard errors of the truth: with 2,000 epochs that fails
with P < 1e-6 for each of the estimates.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest

from quantdrift.core.config.schema import Budget
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate
from quantdrift.core.sampling.inclusion import second_rate
from quantdrift.drift.evidence.observations import BoolArray
from quantdrift.drift.watch import SignalKey
from quantdrift.monitor.fold.inclusion import RememberedRates, SliceRates
from quantdrift.storage.fold_rows import Catalog, ComparisonRow, SliceRow
from tests.support.monitor.plain_groups import keeps_part, shown

pytestmark = pytest.mark.statistical

EPOCHS, USERS = 2000, 12
FLIP, CHANGE = SignalKey("flip", "budget"), SignalKey("flip", "change")
BUDGET = Budget(flip=0.01, divergence=0.05)
WHERES = {1: (), 2: (Predicate(key="json.k", equals="1"),)}


def policy(*, rest: float = 0.05, gold: float = 1.0, body: float = 1.0) -> Policy:
    """Return rates for two header strata and the rest, and for two body strata and the rest."""
    return Policy(
        epoch="1-m",
        header_strata=(
            HeaderStratum(name="gold", rate=gold, headers={"x-a": "gold"}),
            HeaderStratum(name="silver", rate=0.4, headers={"x-a": "silver"}),
            HeaderStratum(name="default", rate=rest),
        ),
        body_strata=(
            BodyStratum(name="k", rate=max(body, 0.5), where=(Predicate(key="json.k", equals="1"),)),
            BodyStratum(name="default", rate=body),
        ),
    )


POLICIES = {
    "bodies at 1": policy(),
    "bodies below": policy(body=0.2),
    "bodies lowest": policy(body=0.02),
}


def rates_of(rules: Policy, slice_id: int) -> SliceRates:
    """Return how a slice is sampled."""
    where = WHERES[slice_id]
    row = SliceRow(id=slice_id, model="m", name="s", predicate="s", where=where)
    catalog = Catalog(versions={}, slices={slice_id: row}, policies={1: rules})
    return RememberedRates().of(catalog, slice_id, 1)


class Offered:
    """Requests of users: header stratum and k of each, whether it flips, and which user sent it."""

    def __init__(self, rules: Policy) -> None:
        rng = np.random.default_rng(12)
        n = 6 * USERS
        self.user = np.repeat(np.arange(USERS), 6)
        # Half of the users stay in one stratum, the others do not; flips hang on the user, the stratum and on k.
        self.header = np.where(self.user % 2, rng.integers(0, 3, n), self.user % 3)
        self.k: BoolArray = np.asarray(rng.random(n) < 0.4)
        self.flip = (
            rng.random(n) < 0.1 + 0.3 * (self.user % 3 == 0) + 0.2 * (self.header == 2) + 0.45 * self.k
        ).astype(float)
        rates = np.array([stratum.rate for stratum in rules.header_strata])
        boost, base = (stratum.rate for stratum in rules.body_strata)
        self.pi1 = rates[self.header]
        self.pi2 = np.array(
            [
                second_rate(max(boost, base) if k else base, pi1)
                for k, pi1 in zip(self.k, self.pi1, strict=True)
            ]
        )

    def inside(self, slice_id: int) -> BoolArray:
        """Return which requests lie in a slice."""
        return self.k if slice_id == 2 else np.ones(len(self.k), dtype=np.bool_)

    def truth(self, slice_id: int) -> float:
        """Return the mean over the parts of all sessions in a slice."""
        inside = self.inside(slice_id)
        of_users = [inside & (self.user == user) for user in range(USERS)]
        parts = [own & (self.pi1 == rate) for own in of_users for rate in set(self.pi1[own])]
        return float(np.mean([self.flip[part].mean() for part in parts]))

    def sampled(self, user: int, slice_id: int, u1: float, u2: float) -> list[ComparisonRow]:
        """Return the rows of a user's session in a slice."""
        taken = self.inside(slice_id) & (self.user == user) & (u1 < self.pi1) & (u2 < self.pi2)
        return [
            ComparisonRow(
                exchange_id=str(place),
                item=0,
                captured_us=0,
                model_version_id=1,
                policy_id=1,
                slice_ids=(slice_id,),
                group_key=str(user),
                pi1=float(self.pi1[place]),
                pi2=float(self.pi2[place]),
                u1=u1,
                u2=u2,
                candidate_margin=0.5,
                flip=float(self.flip[place]),
                topk=None,
                js=None,
                divergence=None,
                margin=None,
            )
            for place in np.flatnonzero(taken).tolist()
        ]


def by_value(rows: list[ComparisonRow], rates: SliceRates, slice_id: int) -> tuple[float, float]:
    """Return the two sums that a session adds, as the detectors are given them, over c."""
    found = shown(slice_id, rows, lambda *_: rates, BUDGET).get(FLIP)
    return (0.0, 0.0) if found is None else (found[0] / found[2], found[1] / found[2])


def score(
    rules: Policy, slice_id: int, value: Callable[[list[ComparisonRow], SliceRates, int], tuple[float, float]]
) -> float:
    """Return by how many standard errors the estimates of a slice's mean miss the truth."""
    offered, rates, rng = Offered(rules), rates_of(rules, slice_id), np.random.default_rng([3, slice_id])
    truth = offered.truth(slice_id)
    misses = np.zeros(EPOCHS)
    for epoch in range(EPOCHS):
        for user, (u1, u2) in enumerate(rng.random((USERS, 2)).tolist()):
            if rows := offered.sampled(user, slice_id, u1, u2):
                vx, v = value(rows, rates, slice_id)
                misses[epoch] += vx - v * truth
    return float(abs(misses.mean()) / (misses.std(ddof=1) / math.sqrt(EPOCHS)))


@pytest.mark.parametrize("slice_id", WHERES)
@pytest.mark.parametrize("name", POLICIES)
def test_the_mean_over_parts_of_sessions_is_unbiased_under_every_policy(name: str, slice_id: int) -> None:
    """Although parts of one session hang together, and whether the others were sampled is not known."""
    assert score(POLICIES[name], slice_id, by_value) < 5


def _all_alike(rows: list[ComparisonRow], _rates: SliceRates, _slice_id: int) -> tuple[float, float]:
    """Return what a session would add if all that was sampled counted once, with weight 1."""
    return sum(row.flip or 0.0 for row in rows) / len(rows), 1.0


def _as_stored(rows: list[ComparisonRow], _rates: SliceRates, _slice_id: int) -> tuple[float, float]:
    """Return what it would add with each item's own probability: a part of the session is then seen in part."""
    weights = [1 / row.pi for row in rows]
    flips = sum(weight * (row.flip or 0.0) for weight, row in zip(weights, rows, strict=True))
    return flips / len(rows), sum(weights) / len(rows)


@pytest.mark.parametrize("mutant", [_all_alike, pytest.param(_as_stored, marks=pytest.mark.release)])
def test_wrong_weights_of_sessions_are_found_out(mutant: Callable[..., tuple[float, float]]) -> None:
    """The same check rejects sessions without weights, and with those of their items."""
    assert max(score(rules, 1, mutant) for rules in POLICIES.values()) > 5


def used(rules: Policy) -> tuple[float, float]:
    """Return the shares of the parts of replayed sessions that detectors with and without weights are given, in `all`."""
    offered, rates, rng = Offered(rules), rates_of(rules, 1), np.random.default_rng(5)
    n_replayed = n_weighted = n_plain = 0
    for _ in range(EPOCHS):
        for user, (u1, u2) in enumerate(rng.random((USERS, 2)).tolist()):
            rows = offered.sampled(user, 1, u1, u2)
            parts = {row.pi1: row for row in rows}.values()
            n_replayed += len(parts)
            n_weighted += sum(row.u2 < second_rate(rates.sure, row.pi1) for row in parts)
            n_plain += len({row.pi1 for row in rows if keeps_part(rates, row)})
            assert (
                (CHANGE in shown(1, rows, lambda *_: rates, BUDGET))
                == any(keeps_part(rates, row) for row in rows)
                if rows
                else True
            )
    return n_weighted / n_replayed, n_plain / n_replayed


def test_nothing_replayed_is_thrown_away_without_need() -> None:
    """With default rate 0.01 and a stratum at 1 all replayed sessions count where a detector has weights.

    Detectors without weights see every part with probability 0.01, as they must, and not with 0.0001.
    """
    rules = policy(rest=0.01)
    weighted, plain = used(rules)
    offered = Offered(rules)
    parts = [rate for user in range(USERS) for rate in set(offered.pi1[offered.user == user])]
    assert weighted == 1.0
    assert plain == pytest.approx(0.01 * len(parts) / sum(parts), rel=0.25)
    rates = rates_of(rules, 1)
    assert (rates.smallest, rates.sure, rates.session_weighted) == (0.01, 1.0, True)
    assert rates.session == pytest.approx(1 / (1 / 0.01 + 1 / 0.4 + 1))

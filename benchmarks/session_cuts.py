"""Declared sessions that go on while sampling policies change: what one user sends must stay one observation.

Users send requests over half an hour (`monitor.session_s`), and a new policy comes every 300 s, each with draws of its own. Whatever a
user shows goes through the shipped sessions and groups to the budget's detector.
"""

from typing import Final

import msgspec
import numpy as np

from benchmarks.batch_order import Pages, pages
from benchmarks.race import Shipped
from quantdrift.core.config.schema import Monitor
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy
from quantdrift.core.sampling.rates import POLICY_S
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.watch import SignalKey
from quantdrift.monitor.fold.groups import Columns, Observation, slice_groups
from quantdrift.monitor.fold.inclusion import RememberedRates
from quantdrift.monitor.fold.sessions import Sessions
from quantdrift.storage.fold_rows import Catalog, ComparisonRow, SliceRow

SESSION_S: Final = Monitor().session_s
_STARTS_S: Final = 60.0  # from one user to the next: some thirty at a time
_SECOND_US: Final = 1_000_000
_FLIPS: Final = SignalKey("flip", BUDGET.kind)


class UserLaw(msgspec.Struct, frozen=True, kw_only=True):
    """What users send; the mean over users is at the budget of 1 %.

    Parameters
    ----------
    name
        A few words.
    fewest, most
        Requests of a user.
    always
        Share of the mean that comes from users all of whose answers changed; the rest is independent.
    """

    name: str
    fewest: int
    most: int
    always: float


LAWS: Final = (
    UserLaw(name="12 requests, one user in 100 flips always", fewest=12, most=12, always=1.0),
    UserLaw(name="3 to 25 requests, half of the flips from such users", fewest=3, most=25, always=0.5),
)
RATES: Final = (1.0, 0.3, 0.1)
RATE: Final = 0.01
ROW: Final = ComparisonRow(
    exchange_id="",
    item=0,
    captured_us=0,
    model_version_id=1,
    policy_id=1,
    slice_ids=(1,),
    group_key="",
    pi1=1.0,
    pi2=1.0,
    u1=0.0,
    u2=0.0,
    candidate_margin=0.5,
    flip=0.0,
    topk=None,
    js=None,
    divergence=None,
    margin=None,
)


def observations(
    rng: np.random.Generator, law: UserLaw, rate: float, n_users: int, *, cut: bool
) -> FloatArray:
    """Return what the budget's detector is given of a version, (groups, 2).

    Parameters
    ----------
    rate
        With which users are sampled, in every policy.
    n_users
        That come, sampled or not.
    cut
        Whether each policy begins a new session, as it must not.
    """
    starts = np.cumsum(rng.exponential(_STARTS_S, n_users))
    n_requests = rng.integers(law.fewest, law.most + 1, n_users)
    user = np.repeat(np.arange(n_users), n_requests)
    at_s = starts[user] + rng.random(len(user)) * (SESSION_S - 1.0)
    of_user = rng.random(n_users) < RATE * law.always
    chance = np.where(of_user, 1.0, RATE * (1 - law.always) / (1 - RATE * law.always))
    flip = rng.random(len(user)) < chance[user]
    policy = 1 + (at_s // POLICY_S).astype(np.intp)
    u1 = rng.random((n_users, int(policy.max()) + 1))[user, policy]
    order = np.argsort(at_s)
    order = order[u1[order] < rate]
    sessions, observed = Sessions(round(SESSION_S * _SECOND_US)), list[Observation]()
    for place in order.tolist():
        now_us = round(at_s[place] * _SECOND_US)
        name = f"{user[place]}-{policy[place]}" if cut else f"{user[place]}"
        row = msgspec.structs.replace(
            ROW,
            exchange_id=f"{place:032x}",
            captured_us=now_us,
            policy_id=int(policy[place]),
            group_key=name,
            pi1=rate,
            u1=float(u1[place]),
            flip=float(flip[place]),
        )
        sessions.add([row], now_us)
        observed += [
            Observation(len(observed), items, now_us, closed=True) for _, items, _ in sessions.due(now_us)
        ]
    columns = Columns(observed)
    everything = SliceRow(id=1, model="m", name="all", predicate="true", where=())
    policies = {number: _policy(number, rate) for number in range(int(policy.max()) + 1)}
    catalog, rates = Catalog(versions={}, slices={1: everything}, policies=policies), RememberedRates()
    groups = slice_groups(
        observed,
        columns,
        np.ones(len(columns.ends), dtype=np.bool_),
        np.ones(len(columns.rows)),
        lambda slice_id, policy_id: rates.of(catalog, slice_id, policy_id),
    )
    values, _ = groups.values(0, _FLIPS)
    return np.ascontiguousarray(values[:, :2])


def ratio(
    law: UserLaw, rate: float, *, runs: int, n_users: int, seed: int, cut: bool = False
) -> tuple[Pages, float]:
    """Return how often healthy users page, and the observations that each of their sampled sessions became."""
    rng = np.random.default_rng(seed)
    series = [observations(rng, law, rate, round(n_users / min(1.0, rate * 3)), cut=cut) for _ in range(runs)]
    n = min(len(one) for one in series)
    state = BUDGET.fresh(budget=RATE, scale=1.0, weighted=False, mass=0.0, at_us=0)
    places = np.broadcast_to(np.arange(n)[:, None], (n, runs)).astype(np.float64)
    values = np.stack([one[:n] for one in series], axis=1)
    detector = Shipped(BUDGET, state, lambda x: values[x[:, 0].astype(np.intp)], runs)
    return pages(detector, places), n / n_users


def _policy(number: int, rate: float) -> Policy:
    return Policy(
        epoch=f"e{number}",
        header_strata=(HeaderStratum(name="default", rate=rate),),
        body_strata=(BodyStratum(name="default", rate=1.0),),
    )


def measure(*, quick: bool, seed: int = 560) -> dict[str, float]:
    """Return the worst ratio over laws and rates, and what it is where each policy cuts; print each."""
    runs, n_users = (16, 1_000) if quick else (64, 4_000)
    worst = of_cut = 0.0
    for law in LAWS:
        for rate in RATES:
            ours, n = ratio(law, rate, runs=runs, n_users=n_users, seed=seed)
            theirs, n_cut = ratio(law, rate, runs=runs, n_users=n_users, seed=seed, cut=True)
            print(
                f"  {law.name}, pi {rate:g}: ratio {ours.ratio:.2f}, pages {ours.at_a:.0%} at A, {ours.at_production:.0%} in"
                f" production ({n:.2f} observations a user); cut by policies: {theirs.ratio:.2f}, {theirs.at_a:.0%},"
                f" {theirs.at_production:.0%} ({n_cut:.2f})",
                flush=True,
            )
            worst, of_cut = max(worst, ours.ratio), max(of_cut, theirs.ratio)
    return {"session_cut_ratio": worst, "session_cut_ratio_by_policy": of_cut}

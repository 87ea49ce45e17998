"""Weighted estimates equal the truth under every policy, through the sidecar's own decisions in both phases.

A population is offered again and again, each time in another epoch with another salt, and every estimate
`sum of x / pi over what was taken, over n` is compared with the mean that is known. Per policy and slice the mean
over the epochs lies within 5 standard errors of the truth: for all of them together that fails with P < 1e-3
(Student's t with 119 degrees of freedom, 5 standard errors: 2e-6 two-sided, at most 100 estimates).
"""

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from quantdrift.core.config.schema import SamplingOptions
from quantdrift.core.config.strata import MARGIN
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate
from quantdrift.core.sampling.rates import EPOCH_S, epoch_salt
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.sampling.allocation import SamplingBudget, allocate
from quantdrift.sidecar.sampling.first_phase import ExchangeIds, Sampler
from quantdrift.sidecar.sampling.second_phase import SecondPhase, phase_salt
from tests.support.monitor.known_traffic import LAYOUT, WHERES, World, world

pytestmark = pytest.mark.statistical

N = 120
EPOCHS = 120
USERS = 30
SECRET = b"secret"
WATCHED = ("all", "a=2", "k=1", "mean<0")


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What became of each exchange in each epoch: arrays are (epochs, exchanges)."""

    kept: FloatArray
    pi1: FloatArray
    pi2: FloatArray


def random_policy(rng: np.random.Generator) -> Policy:
    """Return a policy without any sense: overlapping strata, rates anywhere."""

    def rate() -> float:
        return float(rng.choice([0.1, 0.3, 0.6, 1.0]))

    return Policy(
        epoch="",
        header_strata=(
            HeaderStratum(name="a is 1", rate=rate(), headers={"x-a": "1"}),
            HeaderStratum(name="path", rate=rate(), path_prefix="/v2/models/m"),
            HeaderStratum(name="default", rate=rate()),
        ),
        body_strata=(
            BodyStratum(name="a is 2", rate=rate(), where=(Predicate(key="header.x-a", equals="2"),)),
            BodyStratum(name="k is 1", rate=rate(), where=(Predicate(key="json.k", equals="1"),)),
            BodyStratum(name="close", rate=rate(), where=(Predicate(key=MARGIN, low=0.02, high=0.4),)),
            BodyStratum(name="default", rate=rate()),
        ),
    )


def allocated_policy(these: World, rng: np.random.Generator) -> Policy:
    """Return what the allocation makes of this world with random evidence and budget."""
    evidence = {name: float(rng.exponential(3)) for name in WHERES}
    budget = SamplingBudget(
        replays_per_s=float(rng.uniform(10, 60)), taken_per_s=float(rng.choice([70.0, math.inf]))
    )
    recent = these.recent(np.ones(len(these.margin)), 100.0)
    return allocate(recent, these.demands(100.0, evidence), LAYOUT, budget, epoch="").policy


def offer(these: World, policy: Policy, *, sticky: bool, same_draw: bool = False) -> Taken:
    """Offer the world in every epoch; `same_draw` is the mutant that has one hash for both phases."""
    *headers, rest = policy.header_strata
    *bodies, base = policy.body_strata
    sampling = SamplingOptions(
        rate=rest.rate,
        header_strata=tuple(headers),
        body_rate=base.rate,
        body_strata=tuple(bodies),
        sticky_header="x-user" if sticky else "",
    )
    sampler = Sampler(sampling, SECRET, ExchangeIds(), 0.0)
    kept, pi1, pi2 = (np.zeros((EPOCHS, len(these.margin))) for _ in range(3))
    heads = [
        f"POST /v2/models/{'m' if i % 2 else 'n'}/infer HTTP/1.1\r\n"
        f"X-A: {attributes['header.x-a']}\r\nX-User: {i % USERS}\r\n\r\n".encode()
        for i, attributes in enumerate(these.attributes)
    ]
    for epoch in range(EPOCHS):
        sampler.refresh(EPOCH_S * epoch)
        for i, (head, attributes) in enumerate(zip(heads, these.attributes, strict=True)):
            draw = sampler.draw(b"POST", head.split(b" ")[1], head, 0, len(head))
            margin = None if math.isnan(these.margin[i]) else float(these.margin[i])
            key = str(i % USERS) if sticky else draw.id
            salt = epoch_salt(SECRET, draw.epoch, 1) if same_draw else phase_salt(SECRET, draw.epoch)
            thinned = SecondPhase(policy.body_strata, salt).draw(key, draw.pi1, attributes, margin)
            kept[epoch, i] = draw.taken and thinned.kept
            pi1[epoch, i], pi2[epoch, i] = draw.pi1, thinned.pi2
    return Taken(kept=kept, pi1=pi1, pi2=pi2)


def scores(these: World, taken: Taken, pi: FloatArray) -> FloatArray:
    """Return by how many standard errors each slice's mean estimate misses the truth."""
    weight = taken.kept / np.where(pi > 0, pi, 1.0)
    x = these.flip + np.nan_to_num(these.margin, nan=0.5)
    found = []
    reached = taken.pi1[0] > 0  # what a stratum with rate 0 holds is not observed, and not claimed
    for name in WATCHED:
        inside = these.inside(WHERES[name]) * reached
        estimates = (weight * inside * x).sum(axis=1) / inside.sum()
        truth = (inside * x).sum() / inside.sum()
        error = estimates.std(ddof=1) / math.sqrt(EPOCHS)
        found.append(abs(estimates.mean() - truth) / max(error, 1e-9))
    return np.array(found)


@pytest.mark.parametrize(
    ("kind", "sticky"),
    [
        ("random", False),
        ("allocated", True),
        pytest.param("random", True, marks=pytest.mark.release),
        pytest.param("allocated", False, marks=pytest.mark.release),
    ],
)
def test_weighted_estimates_equal_the_truth_under_every_policy(kind: str, *, sticky: bool) -> None:
    """Six policies each; with `pi = pi1 * pi2` as stored."""
    rng = np.random.default_rng([7, sticky, kind == "random"])
    for seed in range(6):
        these = world(seed, N)
        policy = random_policy(rng) if kind == "random" else allocated_policy(these, rng)
        taken = offer(these, policy, sticky=sticky)
        assert (scores(these, taken, taken.pi1 * taken.pi2) < 5).all()


MUTANTS: dict[str, Callable[[Taken], FloatArray]] = {
    "unweighted": lambda taken: np.full_like(taken.pi1, taken.kept.mean()),
    "second phase alone": lambda taken: taken.pi2,
    "first phase alone": lambda taken: taken.pi1,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_weights_are_detected(mutant: str) -> None:
    """The same check rejects estimates that forget a phase, or both."""
    rng = np.random.default_rng(8)
    these = world(0, N)
    taken = offer(these, allocated_policy(these, rng), sticky=False)
    assert (scores(these, taken, MUTANTS[mutant](taken)) > 5).any()


def test_one_hash_for_both_phases_is_detected() -> None:
    """With u2 = u1 what the first phase took passes the second too often: the product is not the probability."""
    policy = Policy(
        epoch="",
        header_strata=(HeaderStratum(name="default", rate=0.5),),
        body_strata=(BodyStratum(name="default", rate=0.25),),
    )
    these = world(0, N)
    honest, mutant = (offer(these, policy, sticky=True, same_draw=same) for same in (False, True))
    assert (scores(these, honest, honest.pi1 * honest.pi2) < 5).all()
    assert (scores(these, mutant, mutant.pi1 * mutant.pi2) > 5).any()

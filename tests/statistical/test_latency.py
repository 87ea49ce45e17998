"""The latency signal against its bound: from stored times to evidence, with weights."""

from functools import partial

import msgspec
import numpy as np
import pytest

from quantdrift.core.config.schema import Budget
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence.observations import STEPS, FloatArray, ObservationBlock
from quantdrift.monitor.fold.groups import LATENCY, SLOW_SHARE, Columns, Observation, slice_groups
from quantdrift.monitor.fold.inclusion import Rates
from tests.support.monitor.fold_stream import ALL_ID, CATALOG, batches

pytestmark = pytest.mark.statistical

LIMIT_S, STREAMS, N = 0.25, 256, 400
RARE, COMMON = 0.8, 0.1  # inclusion probabilities: large requests are boosted
CATALOG_OF_BOOST = msgspec.structs.replace(
    CATALOG,
    policies={
        1: Policy(
            epoch="boosted",
            header_strata=(HeaderStratum(name="default", rate=1.0),),
            body_strata=(
                BodyStratum(
                    name="large", rate=RARE, where=(Predicate(key="feature.candidate_margin", high=0.1),)
                ),
                BodyStratum(name="default", rate=COMMON),
            ),
        )
    },
)


def shown(rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Return weighted values and weights of the latency signal of sampled exchanges, (N, STREAMS) each.

    One exchange in ten is large and takes longer than the budget with probability 8 %, the others with 0.222 %: together
    1 %. Of those that are sampled 47 % are large, and 3.9 % are slow. One long series of exchanges is cut into streams.
    """
    template = batches(1)[0].comparisons[0]
    n = N * STREAMS
    large = rng.random(n) < 0.1 * RARE / (0.1 * RARE + 0.9 * COMMON)
    slow = rng.random(n) < np.where(large, 0.08, (SLOW_SHARE - 0.1 * 0.08) / 0.9)
    latency_s = np.where(slow, LIMIT_S * (1.001 + rng.exponential(1.0, n)), LIMIT_S * rng.random(n))
    pi2 = np.where(large, RARE, COMMON)
    u2 = rng.random(n) * pi2
    rows = [
        msgspec.structs.replace(
            template,
            exchange_id=f"{number:032x}",
            policy_id=1,
            slice_ids=(ALL_ID,),
            pi1=1.0,
            pi2=pi,
            u1=0.0,
            u2=u,
            latency_s=took,
        )
        for number, (pi, u, took) in enumerate(
            zip(pi2.tolist(), u2.tolist(), latency_s.tolist(), strict=True)
        )
    ]
    observed = [Observation(order, (row,), row.captured_us, closed=False) for order, row in enumerate(rows)]
    groups = slice_groups(
        observed,
        Columns(observed),
        np.ones(n, dtype=np.bool_),
        np.full(n, Budget().cap),
        partial(Rates().of, CATALOG_OF_BOOST),
        limit_s=np.full(n, LIMIT_S),
    )
    x, _ = groups.values(0, LATENCY)
    assert len(x) == n
    return x[:, 0].reshape(N, STREAMS), x[:, 1].reshape(N, STREAMS)


def alarmed(vx: FloatArray, v: FloatArray, *, weighted: bool) -> float:
    """Return the share of streams whose evidence reaches 4 N within N groups, on the sample clock."""
    one = BUDGET.fresh(budget=SLOW_SHARE, scale=1.0, weighted=weighted, mass=0.0, at_us=0)
    states, hit = np.tile(one, (STREAMS, 1)), np.zeros(STREAMS, dtype=np.bool_)
    for first in range(0, N, STEPS):
        part = slice(first, first + STEPS)
        steps = np.arange(first + 1, first + 1 + len(vx[part]), dtype=np.float64)[:, None]
        run = BUDGET.run(
            states,
            ObservationBlock(
                x=np.stack((vx[part], v[part]), axis=-1),
                seen=np.ones(vx[part].shape, dtype=np.bool_),
                mass=np.broadcast_to(steps, vx[part].shape),
                at_us=np.broadcast_to(steps, vx[part].shape),
            ),
        )
        hit |= (run.page >= 4.0 * N).any(axis=0)
        states = run.stopped(np.full(STREAMS, len(vx[part]) - 1))
    return float(hit.mean())


def test_sampling_slow_requests_more_often_is_no_evidence_against_the_latency() -> None:
    """P(alarm within n) <= n / A = 1/4 where exactly 1 % of the traffic is slow, and 3.9 % of what is sampled.

    256 streams: the estimate's standard error is at most 0.027, and 0.11 of slack fails with P < 1e-4. A detector without
    the weights raises an alarm in most streams, which proves that the test can fail.
    """
    vx, v = shown(np.random.default_rng(24))
    assert alarmed(vx, v, weighted=True) <= 0.25 + 0.11
    assert alarmed(vx / v, np.ones_like(v), weighted=False) > 0.5

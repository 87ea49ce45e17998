"""The values of one group for each signal, weighted by the probability of being sampled."""

from functools import partial

import msgspec
import numpy as np
import pytest

from quantdrift.core.config.schema import Budget
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.watch import SignalKey
from quantdrift.monitor.fold.groups import Columns, Observation, slice_groups
from quantdrift.monitor.fold.inclusion import RememberedRates
from quantdrift.storage.fold_rows import ComparisonRow
from tests.support.monitor.fold_stream import ALL_ID, CATALOG, batches

pytestmark = pytest.mark.unit

TEMPLATE = batches(1)[0].comparisons[0]
FLIP, KL = SignalKey("flip", "change"), SignalKey("divergence", "tail")


def policy(epoch: str, boost: float) -> Policy:
    """Return a policy that takes close calls with `boost` and everything else with 0.1."""
    return Policy(
        epoch=epoch,
        header_strata=(HeaderStratum(name="default", rate=1.0),),
        body_strata=(
            BodyStratum(
                name="close", rate=boost, where=(Predicate(key="feature.candidate_margin", high=0.1),)
            ),
            BodyStratum(name="default", rate=0.1),
        ),
    )


CATALOG_OF_TWO = msgspec.structs.replace(
    CATALOG, policies={1: policy("even", 0.1), 2: policy("boosted", 0.8)}
)


def taken(rng: np.random.Generator, policy_id: int) -> list[ComparisonRow]:
    """Return what the sidecars take of 4,000 exchanges, half of them close calls, under a policy."""
    boost = {1: 0.1, 2: 0.8}[policy_id]
    found = []
    for number in range(4000):
        close = number % 2 == 0
        pi2, u2 = (boost if close else 0.1), float(rng.random())
        if u2 < pi2:
            row = msgspec.structs.replace(
                TEMPLATE,
                exchange_id=f"{number:032x}",
                policy_id=policy_id,
                slice_ids=(ALL_ID,),
                pi1=1.0,
                pi2=pi2,
                u1=0.0,
                u2=u2,
                candidate_margin=0.05 if close else 0.5,
                flip=0.0,
                divergence=1.0 if close else 0.001,
            )
            found.append(row)
    return found


def shown(row: ComparisonRow, rates: RememberedRates) -> dict[SignalKey, FloatArray]:
    """Return what an exchange of one item shows of each signal."""
    observed = [Observation(0, (row,), row.captured_us, closed=False)]
    columns = Columns(observed)
    every, cap = np.ones(1, dtype=np.bool_), np.full(1, Budget().cap)
    groups = slice_groups(observed, columns, every, cap, partial(rates.of, CATALOG_OF_TWO))
    values = {signal: groups.values(0, signal)[0] for signal in groups.signals if groups.keys}
    return {signal: found[0] for signal, found in values.items() if len(found)}


@pytest.mark.slow
def test_detectors_without_weights_see_the_same_mix_of_margins_under_every_policy() -> None:
    """Boosting close calls eightfold leaves them half of what is seen, within 5 standard errors; all of them is 89 %."""
    rng = np.random.default_rng(4)
    rates = RememberedRates()
    for policy_id in (1, 2):
        rows = taken(rng, policy_id)
        seen = [values for row in rows if (values := shown(row, rates))]
        tails = np.array([values[KL] for values in seen if KL in values])
        changes = np.array([values[FLIP] for values in seen if FLIP in values])
        assert len(tails) == len(changes)
        close = tails[:, 40:].sum(axis=1).mean()
        assert abs(close - 0.5) < 5 * 0.5 / len(tails) ** 0.5
        assert len(seen) == len(rows)  # with weights all of it is seen
    assert np.mean([row.candidate_margin == 0.05 for row in rows]) > 0.85


def test_what_was_taken_with_less_than_its_policy_says_shows_nothing() -> None:
    """Neither with weights nor without: it belongs to another policy."""
    row = msgspec.structs.replace(
        TEMPLATE, policy_id=1, slice_ids=(ALL_ID,), pi1=0.01, pi2=1.0, u1=0.0, u2=0.0
    )
    assert shown(row, RememberedRates()) == {}

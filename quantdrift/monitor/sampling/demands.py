"""A sampling policy from stored traffic: the input of `quantdrift.drift.sampling.allocation`, and a summary of its result.

Pure.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import numpy as np

from quantdrift.core.config.schema import Config
from quantdrift.core.records import HeaderStratum, Policy, Verdict
from quantdrift.core.sampling.inclusion import of_model
from quantdrift.core.sampling.policy_message import (
    PlannedSlice,
    PolicyMessage,
    PolicySummary,
    encode,
    name_of,
)
from quantdrift.drift.detectors.protocol import DETECTORS
from quantdrift.drift.evidence.margin import EDGES
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.evidence.state import load_state
from quantdrift.drift.sampling.allocation import Allocation, Demand, Recent, SamplingBudget, allocate, urgency
from quantdrift.drift.sampling.boosts import Layout
from quantdrift.drift.sampling.stratification import margin_edges
from quantdrift.storage.sampling import SignalEvidence, SliceWeight, TrafficRecord

LEAST_ITEMS = 200  # with fewer no policy is made: the current rates stay

POLICY_STRATA = 64
"""Most body strata of a policy. Every exchange carries them, some 160 bytes each."""
_MOST_LISTED = 50
_SURGE = 100.0
_MOST_URGENT = 1000.0  # limits unbounded evidence, so that the shares of other slices stay visible


class PolicyDraft(msgspec.Struct, frozen=True, kw_only=True):
    """A computed policy.

    Parameters
    ----------
    allocation
        Its rates and their cost, not lowered by any lag.
    demands
        The demands of the slices, in the allocation's order.
    slices
        The traffic of the same slices, in the same order.
    n_items
        Recent items that it was computed from.
    """

    allocation: Allocation
    demands: tuple[Demand, ...]
    slices: tuple[SliceWeight, ...]
    n_items: int


def header_layout(config: Config) -> tuple[HeaderStratum, ...]:
    """Return the header strata of the configuration, `default` last."""
    sampling = config.sampling
    return (*sampling.header_strata, HeaderStratum(name="default", rate=sampling.rate))


def draft(
    config: Config, traffic: TrafficRecord, previous: Policy | None, *, n_strata: int = POLICY_STRATA
) -> PolicyDraft | None:
    """Return the policy for recent traffic, with as many strata as fit into a policy message.

    None: there was too little traffic.

    Parameters
    ----------
    traffic
        The recent traffic.
    previous
        The current policy, not lowered by any lag; it is kept while it is good enough.
    n_strata
        Most body strata.

    Raises
    ------
    OperatorError
        This program cannot read a detector state in the database.
    """
    strata = header_layout(config)
    recent = recent_of(traffic, strata)
    if len(recent.weight) < LEAST_ITEMS or not recent.offered_per_s.sum() > 0:
        return None
    demands = _demands(traffic, recent)
    while True:
        allocation = allocate(
            recent,
            demands,
            Layout(header_strata=strata, edges=edges_of(recent.margin, recent.weight)),
            SamplingBudget(
                replays_per_s=config.sampling.replays_per_s,
                taken_per_s=traffic.offered.n_sources * config.sampling.max_exchanges_per_s,
                n_strata=n_strata,
            ),
            epoch="",
            previous=previous,
        )
        if n_strata == 1 or _fits(allocation.policy):
            break
        n_strata //= 2
    return PolicyDraft(
        allocation=allocation, demands=demands, slices=traffic.slices, n_items=len(recent.weight)
    )


def recent_of(traffic: TrafficRecord, strata: Sequence[HeaderStratum]) -> Recent:
    """Return the recent items as arrays; items of header strata that no longer exist are left out."""
    items = traffic.items
    index_of = {stratum.name: index for index, stratum in enumerate(strata)}
    item_indices = [index for index, name in enumerate(items.header_stratum) if name in index_of]
    demand = {row.id: index for index, row in enumerate(traffic.slices)}
    pairs = [
        (at, demand[slice_id])
        for at, index in enumerate(item_indices)
        for slice_id in items.slice_ids[index]
        if slice_id in demand
    ]
    memberships = np.array(pairs, dtype=np.intp).reshape(-1, 2)
    return Recent(
        weight=1.0 / np.array([items.pi[index] for index in item_indices], dtype=np.float64),
        n_items=np.array([items.n_items[index] for index in item_indices], dtype=np.float64),
        header=np.array([index_of[items.header_stratum[index]] for index in item_indices], dtype=np.intp),
        margin=_numbers(items.margin, item_indices),
        flip=_numbers(items.flip, item_indices),
        item=memberships[:, 0],
        slice=memberships[:, 1],
        offered_per_s=np.array([traffic.offered.per_s.get(stratum.name, 0.0) for stratum in strata]),
    )


def edges_of(margin: FloatArray, weight: FloatArray) -> tuple[float, ...]:
    """Return the edges of the margin bins, all on the grid that baselines use, so that they do not drift."""
    wanted = margin_edges(margin, weight)
    below = {max((edge for edge in EDGES if edge <= edge_wanted), default=0.0) for edge_wanted in wanted}
    return tuple(sorted(below - {0.0}))


def summary_of(
    policy_draft: PolicyDraft, *, epoch: str, made_at: datetime, budget_per_s: float
) -> PolicySummary:
    """Return the summary of a policy, under the epoch that it has on the wire."""
    allocation = policy_draft.allocation
    evidence = np.array([demand.evidence for demand in policy_draft.demands])
    total = float(evidence.sum()) or 1.0
    listed = np.argsort(-allocation.per_slice_per_s, kind="stable")[:_MOST_LISTED]
    return PolicySummary(
        epoch=epoch,
        made_at=made_at,
        budget_per_s=budget_per_s,
        replays_per_s=allocation.replays_per_s,
        taken_per_s=allocation.taken_per_s,
        n_items=policy_draft.n_items,
        n_unboosted=allocation.n_unboosted,
        n_slices=len(policy_draft.slices),
        slices=tuple(
            PlannedSlice(
                model=policy_draft.slices[index].model,
                name=policy_draft.slices[index].name,
                traffic_per_s=policy_draft.demands[index].traffic_per_s,
                replays_per_s=float(allocation.per_slice_per_s[index]),
                evidence_share=float(evidence[index]) / total,
            )
            for index in listed
        ),
    )


def surged(before: dict[int, float], now: dict[int, float]) -> bool:
    """Return whether some slice has over 100 times its former evidence, and over 100 times the former average.

    Evidence is a likelihood ratio with mean one where nothing drifts, times the same small factor for all slices: by
    chance this happens to at most one slice in a hundred.

    Parameters
    ----------
    before, now
        Evidence per slice.
    """
    mean = sum(before.values()) / len(before) if before else 0.0
    return any(value > _SURGE * max(before.get(key, 0.0), mean) for key, value in now.items())


def _fits(policy: Policy) -> bool:
    named = msgspec.structs.replace(policy, epoch=name_of(policy))
    try:
        encode(PolicyMessage(policy=named, issued_at=datetime(2000, 1, 1, tzinfo=UTC), valid_s=0.0))
    except ValueError:
        return False
    return True


def _demands(traffic: TrafficRecord, recent: Recent) -> tuple[Demand, ...]:
    """Return the demand of each slice; its traffic is its share of a day's traffic, times what the fleet is offered now.

    If there are several models, a boost names its model, so that slices with the same conditions do not share one.
    """
    everything = sum(row.weight for row in traffic.slices if row.everything)
    items_per_s = float(recent.items_per_s().sum())
    evidence = _urgencies(traffic.signals)
    models = {row.model for row in traffic.slices}
    return tuple(
        Demand(
            name=row.name if len(models) == 1 else f"{row.model}: {row.name}",
            where=row.where if len(models) == 1 else of_model(row.where, row.model),
            traffic_per_s=min(row.weight / everything, 1.0) * items_per_s if everything > 0 else 0.0,
            evidence=evidence.get(row.id, 0.0),
        )
        for row in traffic.slices
    )


def _urgencies(signals: Sequence[SignalEvidence]) -> dict[int, float]:
    """Return per slice its largest urgency over all versions; a firing slice needs no more samples and has none."""
    sums: dict[tuple[int, int], tuple[float, float]] = {}
    for row in signals:
        detector = DETECTORS.get(row.kind)
        if detector is None or row.verdict is Verdict.FIRING:
            continue
        mass = detector.page_mass(load_state(row.kind, row.state, detector.size))
        key = (row.slice_id, row.model_version_id)
        before = sums.get(key, (0.0, 0.0))
        sums[key] = (before[0] + row.evidence, before[1] + mass)
    urgencies: dict[int, float] = {}
    for (slice_id, _), (evidence, mass) in sums.items():
        urgencies[slice_id] = max(urgencies.get(slice_id, 0.0), min(urgency(evidence, mass), _MOST_URGENT))
    return urgencies


def _numbers(values: Sequence[float | None], item_indices: Sequence[int]) -> FloatArray:
    return np.array([np.nan if values[i] is None else values[i] for i in item_indices], dtype=np.float64)

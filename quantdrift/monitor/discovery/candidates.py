"""Decisions about slices found by searches: tests, confirmation, expiry, new candidates. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Final

import msgspec
import numpy as np

from quantdrift.core.config.schema import Budget
from quantdrift.core.notation import count_of
from quantdrift.core.records import Policy
from quantdrift.core.signals import cap_of, signal_of
from quantdrift.core.slices import SliceKey, slice_of
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.discovery.confirmation import N_BETS, ConfirmationTrial
from quantdrift.drift.discovery.items import SearchItems
from quantdrift.drift.discovery.search import SAME, FoundSlice, overlap
from quantdrift.drift.watch import SignalKey
from quantdrift.monitor.discovery.limits import LIMITS, DiscoveryLimits
from quantdrift.monitor.fold.groups import Columns, Observation, slice_groups
from quantdrift.monitor.fold.inclusion import RememberedRates
from quantdrift.storage.fold_rows import Catalog, ComparisonRow, SliceRow, to_us
from quantdrift.storage.schema.slice_tables import DiscoveryStatus
from quantdrift.storage.slices.discovery import DiscoveryRow, SearchedVersion, StoredRow

EXPIRE_DAYS: Final = 14
"""A candidate that two weeks of traffic did not confirm is given up: another search may find it again."""


class MatchedCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A slice that a search found, and the stored discovery or slice that it matches.

    Parameters
    ----------
    slices_found
        The result of the search.
    key
        Its text and name; those of a stored slice with the same items, where there is one.
    known
        The stored discovery with the same predicate, in any status; None where it is new.
    watched
        Whether it is already a slice or under test.
    """

    found: FoundSlice
    key: SliceKey
    known: DiscoveryRow | None
    watched: bool


def with_traffic(
    candidates: Sequence[DiscoveryRow],
    rows: Iterable[ComparisonRow],
    policies: Mapping[int, Policy],
    budget: Budget,
    *,
    session_us: int,
    until: datetime,
) -> tuple[list[DiscoveryRow], int]:
    """Return the candidates after more traffic, and how many items were left out because their policy is unknown.

    Parameters
    ----------
    candidates
        Candidates of one version.
    rows
        The version's items captured from each candidate's `tested_at` to `until`, whose `slice_ids` are indices in
        `candidates`; items before a candidate's own `tested_at` are skipped.
    policies
        By id. Without its policy an item has no inclusion probability and cannot be used.
    budget
        Budget of the model. Each candidate keeps the cap that it was frozen with, even if the model's has changed.
    session_us
        The items of one session within this time are one observation.
    until
        Captures before this time are tested afterwards. A multiple of `session_us` since 1970: no session is cut.
    """
    groups: dict[tuple[int, str], list[ComparisonRow]] = {}
    n_unknown = 0
    for row in rows:
        if row.policy_id not in policies:
            n_unknown += 1
            continue
        key = (row.captured_us // session_us, row.group_key or row.exchange_id)
        groups.setdefault(key, []).append(row)
    catalog = Catalog(
        versions={},
        slices={
            index: SliceRow(
                id=index, model=row.model, name=row.name, predicate=row.predicate, where=row.where
            )
            for index, row in enumerate(candidates)
        },
        policies=dict(policies),
    )
    values = [np.zeros((0, 2))] * len(candidates)
    if groups:
        observed = [
            Observation(order, items, items[0].captured_us, closed=bool(items[0].group_key))
            for order, (_, items) in enumerate(sorted(groups.items(), key=lambda group: group[0]))
        ]
        columns, rates = Columns(observed), RememberedRates()
        first_us = columns.captured_us[columns.item[np.append(0, columns.ends)[:-1]]]
        later = first_us >= np.array([to_us(row.tested_at) for row in candidates])[columns.slice_id]
        # The null mean is relative to the cap of that day: under another cap the test would be of another hypothesis.
        caps = [budget.cap if signal_of(row.metric).is_share else row.scale for row in candidates]
        for cap in set(caps):
            places = [slice_id for slice_id, of in enumerate(caps) if of == cap]
            which = later & np.isin(columns.slice_id, places)
            cap_groups = slice_groups(
                observed, columns, which, np.full(len(columns.rows), cap), partial(rates.of, catalog)
            )
            for number, (_, slice_id) in enumerate(cap_groups.keys):
                signal = SignalKey(candidates[slice_id].metric.value, BUDGET.kind)
                values[slice_id], _ = cap_groups.values(number, signal)
    after = [_after(row, seen, until) for row, seen in zip(candidates, values, strict=True)]
    return after, n_unknown


def decide(
    rows: Sequence[DiscoveryRow], retiring: Mapping[int, str], now: datetime, limits: DiscoveryLimits = LIMITS
) -> tuple[list[StoredRow], dict[str, int]]:
    """Return the discoveries after retirements, expiries and confirmations, and per model how many wait for a place.

    A retired slice frees its place at once. A candidate that passed its test without a free place waits `EXPIRE_DAYS`.

    Parameters
    ----------
    rows
        All discoveries, after their tests.
    retiring
        The reason to retire a confirmed slice, by the id of the discovery; empty: it is not retired.
    limits
        For `most_slices`.
    """
    decided = [_over(row, retiring, now) for row in rows]
    n_slices: dict[str, int] = {}
    for row in (stored.row for stored in decided):
        n_slices[row.model] = n_slices.get(row.model, 0) + (row.status is DiscoveryStatus.CONFIRMED)
    waiting: dict[str, int] = {}
    order = sorted(range(len(decided)), key=lambda index: (-rows[index].evidence_ratio, rows[index].id))
    for index in order:
        row = decided[index].row
        if row.status is not DiscoveryStatus.CANDIDATE or row.log_evidence < row.log_threshold:
            continue
        if n_slices[row.model] < limits.most_slices:
            n_slices[row.model] += 1
            decided[index] = _confirmed(row, now)
        elif row.waits_since is not None and now - row.waits_since >= timedelta(days=EXPIRE_DAYS):
            decided[index] = _ended(
                row,
                now,
                f"no place among the {limits.most_slices} monitored slices became free within {EXPIRE_DAYS} days",
            )
        else:
            waiting[row.model] = waiting.get(row.model, 0) + 1
            row = msgspec.structs.replace(row, waits_since=row.waits_since or now)
            decided[index] = StoredRow(row=row)
    return decided, waiting


def origins(
    model: str,
    slices_found: Sequence[FoundSlice],
    items: SearchItems,
    slices: Sequence[SliceKey],
    discoveries: Sequence[DiscoveryRow],
) -> list[MatchedCandidate]:
    """Return, for each slice that a search found, the stored slice or discovery that it matches.

    It matches where it contains the same items: bins and their edges move from search to search, but a slice keeps its
    id.

    Parameters
    ----------
    slices_found
        Results of the search.
    items
        The items that were searched.
    slices
        The model's slices, without ended discoveries.
    discoveries
        The model's discoveries.
    """
    watching = [*slices, *(row.key for row in discoveries if not row.ended)]
    # A slice without conditions contains everything; one for `other` values has no condition to evaluate.
    watched = [(key, items.members(key.where)) for key in watching if _searchable(key)]
    ended = [(row, items.members(row.where)) for row in discoveries if row.ended]
    by_predicate = {row.predicate: row for row in discoveries}
    result = []
    for slice_ in slices_found:
        holds, key = items.members(slice_.where), slice_of(model, slice_.where)
        same = [other for other, members in watched if overlap(holds, members) >= SAME]
        gone = [row for row, members in ended if overlap(holds, members) >= SAME]
        if same:
            key = same[0]
        elif gone and key.predicate not in by_predicate:
            key = gone[0].key
        result.append(
            MatchedCandidate(found=slice_, key=key, known=by_predicate.get(key.predicate), watched=bool(same))
        )
    return result


def new_candidate(
    origin: MatchedCandidate,
    version: SearchedVersion,
    budget: Budget,
    *,
    threshold: float,
    now: datetime,
    frozen_at: datetime,
) -> DiscoveryRow:
    """Return a new candidate, or a stored discovery as a candidate again; its test starts empty at `frozen_at`."""
    slice_, stored = origin.found, origin.known
    scale = cap_of(slice_.metric, budget)
    return DiscoveryRow(
        id=stored.id if stored else 0,
        model=version.model,
        predicate=origin.key.predicate,
        name=origin.key.name,
        where=origin.key.where,
        status=DiscoveryStatus.CANDIDATE,
        slice_id=stored.slice_id if stored else None,
        model_version_id=version.id,
        metric=slice_.metric,
        found_mean=slice_.mean * scale,
        overall_mean=slice_.overall * scale,
        found_share=slice_.share,
        null_mean=slice_.bound * scale,
        scale=scale,
        log_threshold=math.log(threshold),
        log_wealth=(0.0,) * N_BETS,
        n_found=stored.n_found + 1 if stored else 1,
        first_found_at=stored.first_found_at if stored else now,
        frozen_at=frozen_at,
        tested_at=frozen_at,
        confirmed_at=stored.confirmed_at if stored else None,
        expired_at=stored.expired_at if stored else None,
    )


def _after(row: DiscoveryRow, values: np.ndarray, until: datetime) -> DiscoveryRow:
    trial = ConfirmationTrial(
        m=row.null_mean / row.scale,
        log_wealth=row.log_wealth,
        highest=row.log_evidence,
        n_groups=row.n_groups,
    ).after(values[:, 0], np.minimum(values[:, 1], 1.0))
    return msgspec.structs.replace(
        row,
        log_wealth=trial.log_wealth,
        log_evidence=trial.highest,
        n_groups=trial.n_groups,
        tested_at=max(row.tested_at, until),
    )


def _over(row: DiscoveryRow, retiring: Mapping[int, str], now: datetime) -> StoredRow:
    """Return a confirmed slice as retired, or a candidate as expired, where that is due; else the row unchanged."""
    if row.status is DiscoveryStatus.CONFIRMED and (reason := retiring.get(row.id)):
        return StoredRow(row=msgspec.structs.replace(row, status=DiscoveryStatus.RETIRED), reason=reason)
    unproven = row.status is DiscoveryStatus.CANDIDATE and row.log_evidence < row.log_threshold
    if unproven and now - row.frozen_at >= timedelta(days=EXPIRE_DAYS):
        return _ended(row, now, f"not confirmed within {EXPIRE_DAYS} days")
    return StoredRow(row=row)


def _ended(row: DiscoveryRow, now: datetime, reason: str) -> StoredRow:
    return StoredRow(
        row=msgspec.structs.replace(row, status=DiscoveryStatus.EXPIRED, expired_at=now, waits_since=None),
        reason=reason,
    )


def _confirmed(row: DiscoveryRow, now: datetime) -> StoredRow:
    return StoredRow(
        row=msgspec.structs.replace(
            row,
            status=DiscoveryStatus.CONFIRMED,
            confirmed_at=now,
            seen_at=now,
            expired_at=None,
            waits_since=None,
        ),
        reason=f"confirmed on {count_of(row.n_groups, 'exchange')} captured since {row.frozen_at:%Y-%m-%d %H:%M} UTC",
    )


def _searchable(key: SliceKey) -> bool:
    return bool(key.where) and all(
        condition.equals is not None or condition.low is not None or condition.high is not None
        for condition in key.where
    )

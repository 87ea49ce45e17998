"""A round of discovery: test candidates on new traffic, retire quiet slices, and search the newest traffic.

It reads at most `DiscoveryLimits.most_rows` items per version for the tests and as many for the search. Its changes are
written in one transaction, and only if no other round was written in the meantime.
"""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

import msgspec
import numpy as np

from quantdrift.core.config.schema import Budget, Config
from quantdrift.core.records import Metric, Policy
from quantdrift.core.signals import WATCHED, budget_of, cap_of, is_judged
from quantdrift.core.slices import TIME, is_declared
from quantdrift.drift.discovery.confirmation import allowance, null_mean, threshold
from quantdrift.drift.discovery.information import KeyChoice
from quantdrift.drift.discovery.items import SearchItems
from quantdrift.drift.discovery.search import (
    N_BINS,
    FoundSlice,
    GivenUpError,
    SearchLimits,
    SearchResult,
    search,
)
from quantdrift.monitor.discovery.candidates import (
    MatchedCandidate,
    decide,
    new_candidate,
    origins,
    with_traffic,
)
from quantdrift.monitor.discovery.limits import LIMITS, DiscoveryLimits
from quantdrift.monitor.discovery.retirement import reason_to_retire
from quantdrift.monitor.fold.groups import clipped
from quantdrift.storage.database import Database
from quantdrift.storage.fold_rows import ComparisonRow
from quantdrift.storage.schema.slice_tables import DiscoveryStatus
from quantdrift.storage.slices.confirmed import watched_slices
from quantdrift.storage.slices.discovery import (
    DiscoveryRow,
    DiscoveryState,
    SearchedVersion,
    SearchRow,
    StoredRow,
    load_state,
    store_round,
)
from quantdrift.storage.slices.search_rows import (
    SearchWindow,
    n_items,
    policies_of,
    searched_items,
    tested_items,
)

EVERY_S: Final = 86_400.0
"""Time between two searches of the leading monitor: a day of traffic then confirms or refutes what the night found."""
LIMIT_S: Final = 900.0
"""Longest that a round may take. 50,000 items take some ten seconds: after a quarter of an hour something is wrong."""
SEARCH_DAYS: Final = 7
"""How far back a search looks: a whole week, so that no day of the week counts twice."""
MOST_CANDIDATES: Final = 20
"""Candidates of a model that are tested at a time: they share the allowance of false confirmations."""


_NORMAL: Final = 1.959964  # the normal distribution's 97.5 % quantile


class VersionSearch(msgspec.Struct, frozen=True, kw_only=True):
    """The search of one version.

    Parameters
    ----------
    origins
        The stored slice or discovery that each found slice matches, in the same order.
    """

    version: SearchedVersion
    search: SearchResult
    origins: tuple[MatchedCandidate, ...]

    def new(self) -> list[MatchedCandidate]:
        """Return the found slices that are neither watched nor under test yet."""
        return [origin for origin in self.origins if not origin.watched]


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a round.

    Parameters
    ----------
    at
        Time of the round.
    allowed
        Its allowance of false confirmations.
    tested
        Candidates that were tested, after their tests.
    settled
        The discoveries that were confirmed, expired or retired.
    reasons
        The reasons as text, by id of the discovery.
    searches
        One for each version.
    frozen
        New candidates.
    waiting
        Per model, the number of confirmed candidates without a free place, and of new ones that cannot be tested yet.
    unknown
        Per model, the number of items that were not tested because their sampling policy is unknown.
    """

    at: datetime
    allowed: float
    tested: tuple[DiscoveryRow, ...]
    settled: tuple[DiscoveryRow, ...]
    reasons: dict[int, str]
    searches: tuple[VersionSearch, ...]
    frozen: tuple[DiscoveryRow, ...]
    waiting: dict[str, int]
    unknown: dict[str, int]


async def discover(
    database: Database,
    config: Config,
    now: datetime,
    *,
    give_up: Callable[[], bool] = lambda: False,
    dry_run: bool = False,
    most_candidates: int = MOST_CANDIDATES,
    limits: DiscoveryLimits = LIMITS,
) -> Round:
    """Test the candidates, search for more, and store what changed.

    Parameters
    ----------
    give_up
        Called often; the round ends when it returns true.
    dry_run
        Write nothing.
    most_candidates
        Most candidates of a model that are tested at a time.

    Raises
    ------
    GivenUpError
        `give_up` returned true; nothing is written.
    RetryError
        Postgres is not available, or another round was written since this one began.
    """
    async with database.begin() as connection:
        state = await load_state(connection, now)
        since = now - timedelta(days=limits.retire_days)
        watched = await watched_slices(connection, since)
    work = _Work(database, config, state, now, give_up, most_candidates=most_candidates, limits=limits)
    after_tests = await work.test()
    compared = {version.model for version in state.versions}
    retiring = {
        row.id: reason_to_retire(
            row,
            watched.get(row.id),
            config,
            config.budget(row.model),
            now,
            compared=row.model in compared,
            limits=limits,
        )
        for row in after_tests
        if row.status is DiscoveryStatus.CONFIRMED
    }
    stored, waiting = decide(after_tests, retiring, now, limits)
    discoveries = [change.row for change in stored]
    searches = [await work.search(version, discoveries) for version in state.versions]
    elapsed_s = (now - state.searched_at).total_seconds() if state.searched_at else EVERY_S
    allowed = allowance(config.monitor.pages_per_30_days, elapsed_s)
    new, waiting_by_model = _freeze(
        config, discoveries, searches, allowed, now, most_candidates=most_candidates
    )
    for model, count in waiting_by_model.items():
        waiting[model] = waiting.get(model, 0) + count
    before = {row.id: row for row in state.discoveries}
    if not dry_run and (searches or discoveries):
        # A discovery that ended in this round and was found again is written twice: its history has both changes.
        changed = [change for change in stored if change.row != before[change.row.id]]
        async with database.begin() as connection:
            await store_round(
                connection,
                after=state.mark,
                discoveries=[*changed, *(StoredRow(row=row, reason="found by a search") for row in new)],
                searches=[_row(version_search, new, allowed, now) for version_search in searches],
            )
    return Round(
        at=now,
        allowed=allowed,
        tested=tuple(
            row
            for row in discoveries
            if before[row.id].status is DiscoveryStatus.CANDIDATE and row.tested_at > before[row.id].tested_at
        ),
        settled=tuple(row for row in discoveries if row.status is not before[row.id].status),
        reasons={change.row.id: change.reason for change in stored if change.reason},
        searches=tuple(searches),
        frozen=tuple(new),
        waiting=waiting,
        unknown=work.unknown,
    )


class _Work:
    """The tests and searches of one round."""

    def __init__(
        self,
        database: Database,
        config: Config,
        state: DiscoveryState,
        now: datetime,
        give_up: Callable[[], bool],
        *,
        most_candidates: int,
        limits: DiscoveryLimits,
    ) -> None:
        self._database, self._config, self._state = database, config, state
        self._now, self._give_up, self._most_candidates = now, give_up, most_candidates
        self._limits = limits
        self._zone = ZoneInfo(config.capture.time_zone)
        self.unknown: dict[str, int] = {}

    async def test(self) -> list[DiscoveryRow]:
        """Return all discoveries, the candidates after tests on the items captured since their last test."""
        session_s = self._config.monitor.session_s
        # Younger exchanges may still wait in the stream.
        until = _floor(self._now - timedelta(seconds=self._config.stream.max_age_s), session_s)
        by_version: dict[int, list[DiscoveryRow]] = {}
        for row in self._state.discoveries:
            # A candidate that waits for a free place has passed its test: more traffic adds nothing.
            if row.status is DiscoveryStatus.CANDIDATE and row.waits_since is None and row.tested_at < until:
                by_version.setdefault(row.model_version_id, []).append(row)
        after = {row.id: row for row in self._state.discoveries}
        for version_id, candidates in by_version.items():
            model = candidates[0].model
            rows, policies = await self._rows(version_id, candidates, until)
            tested, n_unknown = with_traffic(
                candidates,
                rows,
                policies,
                self._config.budget(model),
                session_us=round(session_s * 1e6),
                until=until,
            )
            if n_unknown:
                self.unknown[model] = self.unknown.get(model, 0) + n_unknown
            after |= {row.id: row for row in tested}
        return list(after.values())

    async def search(self, version: SearchedVersion, discoveries: list[DiscoveryRow]) -> VersionSearch:
        """Return the search of the newest traffic of `version`.

        Within one week a day of the week cannot be told from a fault that has just begun. A slice by time is therefore only
        returned if it was as bad in the week before.
        """
        limits, budget = self._limits, self._config.budget(version.model)
        of_model = [row for row in discoveries if row.model == version.model]
        # A discovery that has ended but is declared is still watched.
        slices = [
            *self._state.slices.get(version.model, ()),
            *(row.key for row in of_model if row.ended and is_declared(self._config, row.key)),
        ]
        # Slices that are watched or tested must be recognised when they are found.
        watched = [*slices, *(row.key for row in of_model)]
        used = {condition.key for slice_ in watched for condition in slice_.where}
        week = timedelta(days=SEARCH_DAYS)
        items = await self._items(version, budget, used, self._now)
        bounds = {
            metric: null_mean(budget_of(metric, budget), high, limits.least_ratio)
            for metric in WATCHED
            if is_judged(metric, budget) and (high := aggregate_high(items, metric)) is not None
        }
        wanted = SearchLimits(
            least_share=limits.least_share,
            most_found=self._most_candidates,
        )
        result = search(items.without(TIME), bounds, wanted, self._give_up)
        if len(earlier := await self._items(version, budget, used, self._now - week)):
            again = search(items, bounds, wanted, self._give_up)
            by_time = tuple(slice_ for slice_ in again.found if _is_weekly(slice_, earlier))
            result = msgspec.structs.replace(
                result,
                found=(result.found + by_time)[: self._most_candidates],
                n_scored=result.n_scored + again.n_scored,
            )
        return VersionSearch(
            version=version,
            search=result,
            origins=tuple(origins(version.model, result.found, items, slices, of_model)),
        )

    async def _rows(
        self, version_id: int, candidates: list[DiscoveryRow], until: datetime
    ) -> tuple[list[ComparisonRow], dict[int, Policy]]:
        most = self._limits.most_rows
        window = SearchWindow(
            version_id=version_id, begin=min(row.tested_at for row in candidates), end=until
        )
        rows: list[ComparisonRow] = []
        async with self._database.begin() as connection:
            # Where candidates overlap, fewer rows are read than would be possible.
            share = min(sum(row.found_share for row in candidates), 1.0)
            expected = await n_items(connection, window) * share
            window = msgspec.structs.replace(window, share=_kept(most, expected))
            async for item in tested_items(
                connection, window, [row.where for row in candidates], 2 * most, self._zone
            ):
                rows.append(item)
                self._go_on()
            # After the rows: a policy is written before the first of its rows, so all of them are visible now.
            return rows, await policies_of(connection, {row.policy_id for row in rows})

    async def _items(
        self, version: SearchedVersion, budget: Budget, used: set[str], end: datetime
    ) -> SearchItems:
        """Return the items of the week before `end`."""
        limits = self._limits
        window = SearchWindow(version_id=version.id, begin=end - timedelta(days=SEARCH_DAYS), end=end)
        choice = KeyChoice(limits.least_share, N_BINS, used)
        caps = {metric: cap_of(metric, budget) for metric in WATCHED}
        async with self._database.begin() as connection:
            share = _kept(limits.most_rows, await n_items(connection, window))
            window = msgspec.structs.replace(window, share=share)
            async for row in searched_items(connection, window, 2 * limits.most_rows, self._zone):
                self._go_on()
                signals = {
                    metric: None
                    if (value := clipped(metric, row, caps[metric])) is None
                    else value / caps[metric]
                    for metric in WATCHED
                }
                choice.add(row.exchange_id, row.pi, row.attributes, row.features, signals)
        return choice.items()

    def _go_on(self) -> None:
        if self._give_up():
            raise GivenUpError


def aggregate_high(items: SearchItems, metric: Metric) -> float | None:
    """Return the upper 97.5 % bound of the mean over everything, over the metric's cap; None without items.

    That of a score interval (Wilson 1927) for the effective number of exchanges. The order of the items does not matter:
    they may come from a week whose weekend is bad.
    """
    signal = items.signals.get(metric)
    if signal is None or not len(items):
        return None
    seen = ~np.isnan(signal)
    if not seen.any():
        return None
    weight = np.bincount(items.group, weights=np.where(seen, items.weight, 0.0), minlength=items.n_groups)
    total = float(weight.sum())
    mean = float((items.weight[seen] * signal[seen]).sum()) / total
    n = total**2 / float((weight**2).sum())
    square = _NORMAL**2 / n
    # Wilson's: a variable in [0, 1] varies at most as much as a yes or no with the same mean.
    return (mean + square / 2 + math.sqrt(square * (mean * (1 - mean) + square / 4))) / (1 + square)


def _is_weekly(found: FoundSlice, earlier: SearchItems) -> bool:
    """Return whether a slice is one by time, and its mean was above the bound in the week before, too."""
    if not any(condition.key.startswith(TIME) for condition in found.where):
        return False
    signal = earlier.signals.get(found.metric)
    if signal is None:
        return False
    inside = earlier.members(found.where) & ~np.isnan(signal)
    return (
        bool(inside.any()) and float(np.average(signal[inside], weights=earlier.weight[inside])) > found.bound
    )


def _freeze(
    config: Config,
    discoveries: list[DiscoveryRow],
    searches: list[VersionSearch],
    allowed: float,
    now: datetime,
    *,
    most_candidates: int,
) -> tuple[list[DiscoveryRow], dict[str, int]]:
    """Return the new candidates, up to the limit, and per model how many were above it."""
    n_tested: dict[str, int] = {}
    for row in discoveries:
        if row.status is DiscoveryStatus.CANDIDATE and row.waits_since is None:
            n_tested[row.model] = n_tested.get(row.model, 0) + 1
    chosen: list[tuple[VersionSearch, MatchedCandidate]] = []
    n_above_limit: dict[str, int] = {}
    frozen = set()
    for version_search in searches:
        model = version_search.version.model
        for origin in version_search.new():
            if (model, origin.key.predicate) in frozen:
                continue  # found in two versions: it is tested on the first
            if n_tested.get(model, 0) >= most_candidates:
                n_above_limit[model] = n_above_limit.get(model, 0) + 1
                continue
            n_tested[model] = n_tested.get(model, 0) + 1
            frozen.add((model, origin.key.predicate))
            chosen.append((version_search, origin))
    if not chosen or allowed <= 0:
        return [], n_above_limit
    at_stake = threshold(len(chosen), allowed)
    frozen_at = _floor(now, config.monitor.session_s) + timedelta(seconds=config.monitor.session_s)
    return [
        new_candidate(
            origin,
            version_search.version,
            config.budget(version_search.version.model),
            threshold=at_stake,
            now=now,
            frozen_at=frozen_at,
        )
        for version_search, origin in chosen
    ], n_above_limit


def _row(version_search: VersionSearch, new: list[DiscoveryRow], allowed: float, now: datetime) -> SearchRow:
    return SearchRow(
        model_version_id=version_search.version.id,
        searched_at=now,
        allowance=allowed,
        n_items=version_search.search.n_items,
        n_scored=version_search.search.n_scored,
        n_found=len(version_search.search.found),
        n_frozen=sum(row.model_version_id == version_search.version.id for row in new),
        n_left_out=version_search.search.n_left_out,
    )


def _kept(most: int, expected: float) -> float:
    return min(1.0, most / expected) if expected > 0 else 1.0


def _floor(at: datetime, session_s: float) -> datetime:
    return datetime.fromtimestamp(at.timestamp() // session_s * session_s, UTC)

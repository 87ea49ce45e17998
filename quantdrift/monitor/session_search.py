"""The search for sessions that nobody declared, in the leading monitor.

Once a minute it reads the exchanges stored since, and tests each version after every `LOOK` of them, on every recorded attribute
that could be a session. What it finds is a doubt about slices, and is logged with what to do.
"""

import asyncio
import hashlib
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, TypeVar

import numpy as np

from quantdrift.core.clock import Clock
from quantdrift.core.logs import of_model
from quantdrift.core.process.run import Stop
from quantdrift.core.slices import EVERYTHING
from quantdrift.drift.dependence import (
    BLOCK,
    LEAST_EXCHANGES,
    LOOK,
    MOST_KEYS,
    MOST_SLICES,
    burst_gap,
    come_back,
    could_be_session,
    least_seen,
    log_evidence,
    log_threshold,
)
from quantdrift.facts.words.verdict import looks_like_sessions
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import read_catalog
from quantdrift.storage.fold.undeclared_sessions import (
    ExchangeOutcome,
    SessionEvidence,
    exchanges_between,
    newest_batch,
    session_evidence,
    write_session_evidence,
)
from quantdrift.storage.fold_rows import Catalog
from quantdrift.storage.leader import Fence, unfenced

EVERY_S: Final = 60.0
_MOST_READ: Final = 20_000  # exchanges in a turn; of more, the rest is not tested
_MOST_WAITING: Final = (
    100_000  # exchanges of versions that have fewer than a look needs: then all of them are dropped
)
_MOST_REMEMBERED: Final = 200_000  # exchanges in the blocks of all versions: then all of these begin again
_LOG = logging.getLogger(__name__)
_Tested = TypeVar("_Tested", int, str)


class SessionSearch:
    """The search. One task calls `turn` repeatedly.

    Parameters
    ----------
    leads
        Returns whether this process leads.
    fence
        Begins each transaction that writes evidence: two monitors must not count the same exchanges.
    """

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        stop: Stop,
        leads: Callable[[], bool],
        wait_s: float,
        fence: Fence = unfenced,
    ) -> None:
        self._fence = fence
        self._database = database
        self._clock = clock
        self._stop = stop
        self._leads = leads
        self._wait_s = wait_s
        self._batch: int | None = None
        self._due_s = 0.0
        self._waiting: dict[int, list[ExchangeOutcome]] = {}
        self._blocks: dict[int, list[ExchangeOutcome]] = {}

    async def turn(self) -> None:
        """Search once a minute while this process leads, then wait for `wait_s`.

        Raises
        ------
        RetryError
            Postgres is not available.
        """
        if not self._leads():
            self._batch = None
            self._waiting.clear()
            self._blocks.clear()
        elif self._clock.monotonic_s() >= self._due_s:
            self._due_s = self._clock.monotonic_s() + EVERY_S
            await self.look()
        await self._stop.wait(self._wait_s)

    async def look(self) -> None:
        """Read what was stored since the last call, and test the versions with enough of it.

        The first call only notes where to begin: what was tested before a restart is not tested twice.
        """
        async with self._database.begin() as connection:
            until = await newest_batch(connection)
            after, self._batch = self._batch, until
            if after is None or after == until:
                return
            rows = await exchanges_between(connection, after, until, _MOST_READ)
            for row in rows:
                self._waiting.setdefault(row.model_version_id, []).append(row)
            ready = {version: rows for version, rows in self._waiting.items() if len(rows) >= LOOK}
            if sum(map(len, self._waiting.values())) > _MOST_WAITING:
                self._waiting.clear()
            if not ready:
                return
            catalog = await read_catalog(connection, wanted=())
        for version_id, rows in ready.items():
            n = len(rows) - len(rows) % LOOK
            self._waiting[version_id] = rows[n:]
            for first in range(0, n, LOOK):
                block, begin = self._block(version_id, rows[first : first + LOOK])
                await self._test(version_id, block, begin, catalog)

    def _block(self, version_id: int, look: Sequence[ExchangeOutcome]) -> tuple[list[ExchangeOutcome], int]:
        """Add a look to the block of its version; return the block, and where the look begins in it."""
        if sum(map(len, self._blocks.values())) >= _MOST_REMEMBERED:
            self._blocks.clear()
        block = self._blocks.setdefault(version_id, [])
        if len(block) >= BLOCK * LOOK:
            block.clear()
        begin = len(block)
        block += look
        return block, begin

    async def _test(
        self, version_id: int, rows: Sequence[ExchangeOutcome], begin: int, catalog: Catalog
    ) -> None:
        everything = {row.id for row in catalog.slices.values() if row.predicate == EVERYTHING}
        async with self._database.begin() as connection:
            await self._fence(connection)
            before = {
                (row.slice_id, row.attribute): row for row in await session_evidence(connection, version_id)
            }
            attributes = {attribute for _, attribute in before}
            after = await asyncio.to_thread(
                lambda: list(evidence_after(rows, before, attributes, everything, begin=begin))
            )
            await write_session_evidence(connection, after)
        version = catalog.versions[version_id]
        for row in after:
            if row.found_at == row.tested_at:
                _LOG.warning(
                    "model %s, version %s, slice %s: %s",
                    version.model,
                    version.candidate_version,
                    catalog.slices[row.slice_id].name,
                    looks_like_sessions(row.attribute),
                    extra=of_model(version.model),
                )


def evidence_after(
    rows: Sequence[ExchangeOutcome],
    before: Mapping[tuple[int, str], SessionEvidence],
    known: set[str],
    everything: set[int],
    *,
    begin: int = 0,
) -> Iterator[SessionEvidence]:
    """Yield the evidence after one look at a version.

    Where the values of an attribute turn out to come back, the evidence begins from nothing: until then it counted sources that differ.

    Parameters
    ----------
    rows
        The block so far, in the order of storing.
    before
        The evidence so far, by slice and attribute.
    known
        Attributes that have some.
    everything
        The slices `all`.
    begin
        Where the look begins.
    """
    look = rows[begin:]
    named = sorted({key for row in look for key in row.attributes}, key=lambda key: (key not in known, key))
    keys = [key for key in named if could_be_session([row.attributes.get(key, "") for row in rows], begin)]
    keys = _admitted(keys, known, MOST_KEYS)
    members: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        for slice_id in row.slice_ids:
            members.setdefault(slice_id, []).append(index)
    outcome = np.array([row.outcome for row in rows])
    ties = np.array([_uniform(row.exchange_id) for row in rows])
    n_new = {slice_id: len(places) - bisect_left(places, begin) for slice_id, places in members.items()}
    large = [slice_id for slice_id, n in sorted(n_new.items()) if n >= LEAST_EXCHANGES]
    slice_ids = _admitted(large, {slice_id for slice_id, _ in before}, MOST_SLICES)
    of_sources = {key for (_, key), row in before.items() if row.comes_back}
    for key in keys:
        values = [row.attributes.get(key, "") for row in rows]
        sources, gap = key in of_sources or come_back(values), burst_gap(values)
        for slice_id in slice_ids:
            places = members[slice_id] if sources else members[slice_id][-n_new[slice_id] :]
            gained = log_evidence(
                [values[index] for index in places],
                outcome[places],
                ties[places],
                begin=len(places) - n_new[slice_id],
                gap=gap,
                sources=sources,
            )
            last, now = before.get((slice_id, key)), rows[-1].captured_at
            if last is not None and last.comes_back is not sources:
                last = None
            total = gained + (last.log_evidence if last else 0.0)
            threshold = log_threshold(everything=slice_id in everything)
            found_at = last.found_at if last else None
            is_found = total >= threshold and (sources or len(rows) >= least_seen(gap))
            yield SessionEvidence(
                model_version_id=rows[0].model_version_id,
                slice_id=slice_id,
                attribute=key,
                n_exchanges=n_new[slice_id] + (last.n_exchanges if last else 0),
                log_evidence=total,
                log_threshold=threshold,
                tested_at=now,
                found_at=found_at or (now if is_found else None),
                comes_back=sources,
            )


def _admitted(wanted: Sequence[_Tested], known: AbstractSet[_Tested], most: int) -> list[_Tested]:
    """Return what is tested: what was tested before, and others while there are fewer than `most` of all looks together.

    The bound is shared out over so many tests of a version, not of a look.
    """
    free = most - len(known)
    new = [subject for subject in wanted if subject not in known]
    return [subject for subject in wanted if subject in known] + new[: max(free, 0)]


def _uniform(exchange_id: str) -> float:
    """Return a number in (0, 1) that is always the same for an exchange and says nothing else about it."""
    digest = hashlib.blake2b(exchange_id.encode(), digest_size=8, person=b"ties").digest()
    return (int.from_bytes(digest) + 0.5) / 2**64

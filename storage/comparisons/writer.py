"""The shadow's writer: one transaction per batch, as rows by COPY or as a block, safe to repeat.

Nothing is acknowledged to the stream before the transaction has committed, so every function here may be called again
with rows that are stored already: rows, quarantined messages and tallies are stored exactly once.

It also stores doubts: where the outputs of references contradict the configuration.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from itertools import chain, zip_longest
from typing import Any, Final

import asyncpg
import msgspec
from sqlalchemy import delete, insert, select, text, tuple_, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import MIB, Config
from quantdrift.core.errors import OperatorError, QuarantineReason, RetryError
from quantdrift.core.keys import KeyFile
from quantdrift.core.records import Loss, Tally
from quantdrift.core.sealing import is_sealed, seal
from quantdrift.core.slices import ValueRules
from quantdrift.core.text import plain
from quantdrift.storage.account.expiries import (
    NOTE_NEW,
    arrival_rows,
    finished_before,
    note_numbers,
    note_tallies,
)
from quantdrift.storage.comparisons.blocks import (
    BETWEEN,
    LEAST,
    N_VALUES,
    Blocks,
    NotAsBlocksError,
    insertion,
    without_stored,
)
from quantdrift.storage.comparisons.copy import (
    COLUMNS,
    MOST_ALONE,
    N_COLUMNS,
    Columns,
    InsertRows,
    column_values,
    comparison_columns,
    copy_comparisons,
    day_of,
    insert_comparisons,
    rows_insertion,
    rows_of,
)
from quantdrift.storage.comparisons.places import Places
from quantdrift.storage.comparisons.rows import (
    ComparedExchange,
    ConfigWarningRow,
    NoiseItem,
    Quarantined,
    StoreBatch,
    VersionKey,
    Written,
)
from quantdrift.storage.database import Database
from quantdrift.storage.process_reports import SIDECAR, store_reports
from quantdrift.storage.schema import tables


async def write_doubts(connection: AsyncConnection, doubts: Sequence[ConfigWarningRow], at: datetime) -> None:
    """Replace the stored doubts about references by the new ones."""
    # In one order everywhere, so that two workers never wait for each other.
    for doubt in sorted(doubts, key=lambda doubt: (doubt.model, doubt.reference_digest)):
        values = {"option": doubt.option, "doubt": doubt.doubt.replace("\0", ""), "found_at": at}
        await connection.execute(
            upsert(tables.ConfigWarningTable)
            .values(model=doubt.model, reference_digest=doubt.reference_digest, **values)
            .on_conflict_do_update(index_elements=["model", "reference_digest"], set_=values)
        )


_LOG = logging.getLogger(__name__)
PAYLOAD_BYTES_PER_HOUR: Final = 256 * MIB
_HOUR_S: Final = 3600.0
# Yesterday, today and tomorrow have a partition as long as maintenance runs.
_MAINTAINED: Final = timedelta(days=1)
_UNDEFINED_TABLE: Final = "42P01"
_NO_REFERENCE: Final = "no_reference"


class _FinishedError(Exception):
    """A worker has finished some of these exchanges before: they may be stored already."""


class Writer:
    """The writer of compared exchanges. Any number of tasks of one event loop may use it.

    Parameters
    ----------
    database
        Database to write to.
    clock
        Tells what is captured in the future, and measures the allowance of payloads: a wrong configuration sets
        everything aside, and must not fill the disk.
    rules
        The slices that are made of values which clients choose; None: there are none.
    keys
        Encrypt what goes to the quarantine and is not encrypted yet; None: it is stored as it came.
    as_blocks
        Whether a batch is stored in one row of `condensed_block`, if their numbers tell which of its exchanges were stored before.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock,
        rules: ValueRules | None = None,
        keys: KeyFile | None = None,
        *,
        as_blocks: bool = False,
    ) -> None:
        self._as_blocks = as_blocks
        self._ids: _Ids = ({}, {}, {})
        self._learned: set[str] = set()
        self._blocks_failed = False
        self._places = Places(rules or ValueRules(Config()))
        self._database = database
        self._clock = clock
        self._reports_failed = False
        self._payloads = _Payloads(PAYLOAD_BYTES_PER_HOUR, clock, keys)

    async def store(self, batch: StoreBatch) -> Written:
        """Store a batch in one transaction: the rows that it refers to, one `batch` row, its comparisons.

        A batch of which nothing is new leaves no `batch` row. Exchanges without a reference are counted every
        time they come: nothing of them is kept that would tell a second time from the first.

        Raises
        ------
        RetryError
            Postgres is not available, or lacks the partition of today: nothing is stored, the same call may succeed
            later.
        OperatorError
            The address, a right or the schema is wrong: the same call succeeds once that is repaired.
        """
        # The savepoint costs two round trips, and is needed only where rows exist already, or a partition is missing. What is
        # quarantined counts against the allowance of payloads: that is done once.
        # In a block nothing but its number tells that an exchange is stored: without it, it is looked for.
        if batch.compared and not batch.quarantined and (batch.known_by_number or not self._as_blocks):
            n_items = _n_items(batch)
            as_blocks = self._as_blocks and batch.known_by_number and n_items >= LEAST
            with suppress(
                asyncpg.UniqueViolationError, asyncpg.CheckViolationError, NotAsBlocksError, _FinishedError
            ):
                if as_blocks or n_items <= MOST_ALONE:
                    alone = await self._store_alone(batch, n_items, as_blocks=as_blocks)
                    if alone is not None:
                        return alone
                if as_blocks:
                    return await self._store_blocks(batch)
                return await self._store(batch, copy_comparisons)
        return await self._store(batch, insert_comparisons, again=True)

    async def _store(self, batch: StoreBatch, insert_rows: InsertRows, *, again: bool = False) -> Written:
        """Store a batch; `again` says that some of its exchanges may be stored already.

        Raises
        ------
        _FinishedError
            Some may be, without `again`.
        """
        async with self._database.begin() as connection:
            versions, policies, slices, others = await _ids(connection, batch, self._places)
            quarantined = await _unfinished(connection, batch.quarantined)
            skipped = Counter(await _quarantine(connection, quarantined, self._payloads))
            if batch.unreferenced:
                skipped[_NO_REFERENCE] = len(batch.unreferenced)
            expected = _n_items(batch)
            unreferenced = sorted({versions[exchange.version] for exchange in batch.unreferenced})
            batch_id = await _open_batch(connection, batch, expected, skipped, unreferenced)
            rows = rows_of(_columns(batch, _Referenced(batch), batch_id, (versions, policies, slices)))
            if again and (await note_numbers(connection, batch.numbered) or not batch.known_by_number):
                # What is in a block has no key of its own that would refuse it. The numbers are locked: nobody else stores it meanwhile.
                rows = await without_stored(connection, rows)
            n_rows, days = await insert_rows(connection, rows)
            now = self._clock.now()
            unplaced = {
                index: _unplaced(compared, now)
                for index, compared in enumerate(batch.compared if days else ())
                if day_of(compared.exchange.captured_at) in days
            }
            skipped.update(await _quarantine(connection, list(unplaced.values()), self._payloads))
            await write_doubts(connection, batch.doubts, batch.at)
            n_noise = await insert_noise(connection, batch.noise, batch_id, (versions, policies, slices))
            if n_rows != expected or not (n_rows or skipped or n_noise):
                await _correct_batch(connection, batch_id, n_rows, skipped, keep=bool(n_noise))
            # Last, so that workers with exchanges of one sidecar wait for each other as shortly as possible.
            if not again and await note_numbers(connection, batch.numbered):
                raise _FinishedError
        self._places.count(batch)
        return Written(
            n_rows=n_rows,
            unplaced={index: failure.reason for index, failure in unplaced.items()},
            n_other=_count_others(batch, others),
            without_place=frozenset(others),
        )

    async def _store_alone(self, batch: StoreBatch, n_items: int, *, as_blocks: bool) -> Written | None:
        """Store a batch by one statement, with ids that earlier ones had; return None where that is not enough, whatever the reason."""
        if batch.doubts or batch.unreferenced:
            return None
        referenced = _Referenced(batch)
        try:
            async with self._database.statement() as driver:
                await self._learn(driver, referenced)
                ids = self._ids
                if not referenced.are_in(ids):
                    ids = await _known(partial(driver.fetch, _KNOWN_NUMBERED), referenced, self._places)
                    self._remember(ids)
                if (values := self._values_alone(batch, referenced, ids, as_blocks=as_blocks)) is None:
                    return None
                await driver.fetchval(_ALONE[as_blocks, bool(batch.noise)], *values)
        except (asyncpg.PostgresError, RetryError, OperatorError):
            self._ids = ({}, {}, {})
            return None
        self._places.count(batch)
        return Written(n_rows=n_items)

    def _values_alone(
        self, batch: StoreBatch, referenced: "_Referenced", ids: "_Ids", *, as_blocks: bool
    ) -> list[Any] | None:
        """Return the values of a statement of `_ALONE`, or None where ids are missing, or the batch is not one block."""
        if not referenced.are_in(ids):
            return None
        columns = _columns(batch, referenced, 0, ids)
        try:
            blocks, with_ids = Blocks(columns) if as_blocks else None, referenced.with_ids(ids)
        except NotAsBlocksError:
            return None
        head = [*_batch_values(batch, _n_items(batch), Counter(), ()).values(), *arrival_rows(batch.numbered)]
        tail = [*with_ids, *(_noise_columns(batch.noise, ids) if batch.noise else ())]
        if blocks is None:
            return [*head, *column_values(columns), *tail]
        if len(blocks.blocks) > 1 or blocks.few:
            return None
        return [*head, blocks.days, *blocks.blocks[0], *tail]

    async def _store_blocks(self, batch: StoreBatch) -> Written:
        """Store a batch of which nothing is quarantined and numbers tell what was stored before, in few statements.

        Raises
        ------
        NotAsBlocksError, asyncpg.UniqueViolationError, asyncpg.CheckViolationError
            It can only be stored as rows.
        """
        async with self._database.begin() as connection:
            driver: asyncpg.Connection = (await connection.get_raw_connection()).driver_connection
            referenced = _Referenced(batch)
            ids = await _known(partial(driver.fetch, _KNOWN_NUMBERED), referenced, self._places)
            others: set[tuple[str, str]] = set()
            is_alone = referenced.are_in(ids) and not (batch.doubts or batch.noise)
            self._remember(ids)
            if not is_alone:  # from here on a transaction is open
                versions, policies, slices, others = await _ids(connection, batch, self._places)
                ids = versions, policies, slices
            blocks = Blocks(_columns(batch, referenced, 0, ids))
            if is_alone and (len(blocks.blocks) > 1 or blocks.few):
                await connection.execute(text("select 1"))  # opens a transaction
            skipped = Counter({_NO_REFERENCE: len(batch.unreferenced)} if batch.unreferenced else {})
            unreferenced = sorted({ids[0][exchange.version] for exchange in batch.unreferenced})
            n_items = _n_items(batch)
            values = _batch_values(batch, n_items, skipped, unreferenced)
            try:
                batch_id = await driver.fetchval(
                    _STORE_BLOCK,
                    *values.values(),
                    *arrival_rows(batch.numbered),
                    blocks.days,
                    *blocks.blocks[0],
                )
            except asyncpg.PostgresError as error:
                if driver.is_closed() or (error.sqlstate or "").startswith(_LOST):
                    raise
                # If anything else is wrong, the statements for rows find it as well, and know what to do.
                if error.sqlstate != _REFUSED and not self._blocks_failed:
                    _LOG.warning(
                        "comparisons are stored as rows, although storage.write_blocks is set: %s", error
                    )
                    self._blocks_failed = True
                raise NotAsBlocksError from error
            await blocks.insert(driver, batch_id, first=1)
            if blocks.few:
                place = COLUMNS.index("batch_id")
                few = [(*row[:place], batch_id, *row[place + 1 :]) for row in blocks.few]
                await copy_comparisons(connection, few)
            await write_doubts(connection, batch.doubts, batch.at)
            await insert_noise(connection, batch.noise, batch_id, ids)
        self._places.count(batch)
        return Written(n_rows=n_items, n_other=_count_others(batch, others), without_place=frozenset(others))

    async def _learn(self, driver: asyncpg.Connection, referenced: "_Referenced") -> None:
        """Remember the ids of the slices of models that come for the first time: each batch with a new slice would ask for its ids."""
        if models := {key.model for key in referenced.versions} - self._learned:
            self._learned |= models
            rows = await driver.fetch(_PLACED, list(models), _REMEMBERED // 2)
            self._remember(({}, {}, {(model, predicate): slice_id for model, predicate, slice_id in rows}))

    def _remember(self, ids: "_Ids") -> None:
        if len(self._ids[1]) + len(self._ids[2]) > _REMEMBERED:
            self._ids = ({}, {}, {})
        self._ids[0].update(ids[0])
        self._ids[1].update(ids[1])
        self._ids[2].update(ids[2])

    async def store_shares(self) -> None:
        """Store the weights of the values in the batches since the last call. Called about once a minute.

        Raises
        ------
        RetryError, OperatorError
            As for a batch; the weights are stored with the next call.
        """
        await self._places.flush(self._database)

    async def store_tallies(
        self, worker: str, tallies: Sequence[Tally], streamed_at: Sequence[datetime] = ()
    ) -> Written:
        """Store tallies, each once, in one transaction with one `batch` row.

        Parameters
        ----------
        worker
            Name of the worker.
        tallies
            As they came.
        streamed_at
            When the stream took each; without it, what expires of theirs is not counted.

        Raises
        ------
        RetryError
            Postgres is not available: nothing is stored, the same call may succeed later.
        """
        await self._store_reports(tallies, streamed_at)
        if not any(tally.strata for tally in tallies):
            return Written(n_rows=0)
        expected = sum(len(tally.strata) for tally in tallies)
        async with self._database.begin() as connection:
            batch_id = await connection.scalar(
                insert(tables.BatchTable)
                .values(
                    kind="tally",
                    worker=worker,
                    captured_from=min(tally.at for tally in tallies),
                    captured_to=max(tally.at for tally in tallies),
                    n_rows=expected,
                )
                .returning(tables.BatchTable.id)
            )
            assert batch_id is not None
            # Passed separately from the statement, so that the driver sends them in parts that Postgres can accept.
            stored = await connection.scalars(
                upsert(tables.TallyTable).on_conflict_do_nothing().returning(tables.TallyTable.sequence),
                [
                    row
                    for tally, at in zip_longest(tallies, streamed_at)
                    for row in _tally_rows(tally, batch_id, at)
                ],
            )
            n_rows = len(stored.all())
            if n_rows != expected:
                await _correct_batch(connection, batch_id, n_rows, Counter())
            if streamed_at:
                await note_tallies(connection, tallies)
        return Written(n_rows=n_rows)

    async def _store_reports(self, tallies: Sequence[Tally], streamed_at: Sequence[datetime]) -> None:
        """Store what sidecars report of themselves. If that fails, the counts must still be stored, and later tallies repeat it."""
        # By the stream's clock, not by the sidecar's: a report from the future would hide all later ones.
        reports = [
            (tally.source, tally.state, at or self._clock.now())
            for tally, at in zip_longest(tallies, streamed_at)
            if tally.state is not None
        ]
        try:
            await store_reports(self._database, SIDECAR, reports)
        except (RetryError, OperatorError) as error:
            if not self._reports_failed:
                _LOG.warning("configurations and pauses of sidecars do not reach the audit: %s", error)
            self._reports_failed = True
        else:
            self._reports_failed = False


_KNOWN: Final = """
    select 0 as kind, place, v.id, v.lapsed_at is null as has_place
    from unnest(cast({version_models} as text[]), cast({candidates} as text[]), cast({digests} as text[]))
        with ordinality wanted (model, candidate_version, reference_digest, place)
    join model_version v using (model, candidate_version, reference_digest)
    union all
    select 1, place, p.id, true
    from unnest(cast({epochs} as text[])) with ordinality wanted (epoch, place) join policy p using (epoch)
    union all
    select 2, place, s.id, s.lapsed_at is null
    from unnest(cast({slice_models} as text[]), cast({predicates} as text[])) with ordinality wanted (model, predicate, place)
    join slice s using (model, predicate)
"""
_PLACED: Final = "select model, predicate, id from slice where model = any($1::text[]) and lapsed_at is null order by id desc limit $2"
_WANTED: Final = ("version_models", "candidates", "digests", "epochs", "slice_models", "predicates")
_KNOWN_NAMED: Final = text(_KNOWN.format(**{name: f":{name}" for name in _WANTED}))
_KNOWN_NUMBERED: Final = _KNOWN.format(**{name: f"${n}" for n, name in enumerate(_WANTED, 1)})
_OPEN: Final = """
    insert into batch (kind, worker, captured_from, captured_to, n_rows, provenance, skipped, unreferenced, replay_s, compared_model)
    values ('comparison', {worker}, {captured_from}, {captured_to}, {n_rows}, cast({provenance} as jsonb), cast({skipped} as jsonb),
        cast({unreferenced} as integer[]), {replay_s}, {model})
    returning id
"""
_BATCH_VALUES: Final = (
    *(
        "worker",
        "captured_from",
        "captured_to",
        "n_rows",
        "provenance",
        "skipped",
        "unreferenced",
        "replay_s",
    ),
    "model",
)
_OPEN_BATCH: Final = text(_OPEN.format(**{name: f":{name}" for name in _BATCH_VALUES}))
_N_OPEN: Final = len(_BATCH_VALUES)
_STORED: Final = f"""
    with opened as ({_OPEN.format(**{name: f"${n}" for n, name in enumerate(_BATCH_VALUES, 1)})}),
    noted as (
        {NOTE_NEW.format(boots=f"${_N_OPEN + 1}", rows=f"${_N_OPEN + 2}", numbers=f"${_N_OPEN + 3}")} returning 1
    ),
    stored as ({{insertion}}) {{noise}}
    select case {{refused}}
        when (select count(*) from noted) < cardinality(${_N_OPEN + 1}::text[]) then block_refused('finished before')
        else id
    end from opened
"""  # noqa: S608 - constants
"""Stores a batch. Where a transaction is this statement alone, an error rolls all of it back."""
_FIRST: Final = _N_OPEN + 4
# Without the partition of its day a comparison has no place, in a block either: retention drops both together.
_NO_PARTITION: Final = f"""
    when exists (
        select from unnest(${_FIRST}::date[]) as of (day) where to_regclass('comparison_' || to_char(day, 'YYYYMMDD')) is null
    ) then block_refused('no partition')
"""
_BLOCK: Final = insertion("opened.id", _FIRST + 1, "from opened")
_STORE_BLOCK: Final = _STORED.format(insertion=_BLOCK, refused=_NO_PARTITION, noise="")
# A failover may have lost what an earlier transaction made, and hand its id out again for something else.
_OTHER_IDS: Final = f"""
    when exists (
        select from unnest({{0}}::int[], {{1}}::text[], {{2}}::text[], {{3}}::text[]) as named (id, model, candidate, digest)
        where not exists (
            select from model_version v where v.id = named.id and v.model = named.model and v.candidate_version = named.candidate
                and v.reference_digest = named.digest and v.lapsed_at is null
        )
    ) or exists (
        select from unnest({{4}}::int[], {{5}}::text[]) as named (id, epoch)
        where not exists (select from policy p where p.id = named.id and p.epoch = named.epoch)
    ) or {{7}}::text is distinct from (
        select coalesce(string_agg(s.model || chr({ord(BETWEEN)}) || s.predicate, chr({ord(BETWEEN)}) order by s.id), '')
        from slice s where s.id = any({{6}}::text::int[]) and s.lapsed_at is null
    ) then block_refused('other ids')
"""  # noqa: S608 - constants


_N_OTHER_IDS: Final = 8


def _refused(first: int) -> str:
    return _OTHER_IDS.format(*(f"${n}" for n in range(first, first + _N_OTHER_IDS)))


_NOISE: Final = {
    "exchange_id": "uuid",
    "item": "smallint",
    "side": "text",
    "captured_at": "timestamptz",
    "model_version_id": "integer",
    "policy_id": "integer",
    "pi1": "float8",
    "pi2": "float8",
    "flip": "boolean",
    "divergence": "float8",
    "slice_ids": "text",  # arrays of arrays have equal lengths
}


def _noise(first: int) -> str:
    arrays = ", ".join(f"${number}::{kind}[]" for number, kind in enumerate(_NOISE.values(), first))
    names = ", ".join(_NOISE)
    values = names.replace("slice_ids", "slice_ids::integer[]")
    return f"""
        , repeated as (
            insert into noise (batch_id, {names}) select opened.id, {values}
            from opened, unnest({arrays}) as one ({names}) on conflict do nothing
        )
    """  # noqa: S608 - constants


def _alone(*, as_blocks: bool, with_noise: bool) -> str:
    first = _FIRST + (1 + N_VALUES if as_blocks else N_COLUMNS)
    return _STORED.format(
        insertion=_BLOCK if as_blocks else rows_insertion("opened.id", _FIRST, "opened"),
        refused=(_NO_PARTITION if as_blocks else "") + _refused(first),
        noise=_noise(first + _N_OTHER_IDS) if with_noise else "",
    )


_ALONE: Final = {
    (as_blocks, with_noise): _alone(as_blocks=as_blocks, with_noise=with_noise)
    for as_blocks in (False, True)
    for with_noise in (False, True)
}
"""Statements that store a batch, by whether as a block and whether with noise; `_values_alone` makes their parameters."""
_REMEMBERED: Final = 20_000
"""Policies and slices whose ids are remembered."""
_REFUSED: Final = "QD001"
_LOST: Final = ("08", "57P")
"""Classes of SQLSTATE of a connection that is lost, or that the server ends."""


_Ids = tuple[dict[VersionKey, int], dict[str, int], dict[tuple[str, str], int]]


def _n_items(batch: StoreBatch) -> int:
    return sum(len(compared.items) for compared in batch.compared)


def _columns(batch: StoreBatch, referenced: "_Referenced", batch_id: int, ids: _Ids) -> Columns:
    """Return the columns of the comparisons of a batch; `ids` are those of what it refers to."""
    versions, policies, slices = ids
    # By identity, which is quicker than by content.
    of_key = {place: slices[key.model, key.predicate] for place, key in referenced.keys.items()}
    slice_ids = {
        name: sorted(set(map(of_key.__getitem__, map(id, of_item))))
        for name, of_item in referenced.combinations.items()
    }
    return comparison_columns(batch.compared, batch_id, versions, policies, slice_ids)


async def _ids(
    connection: AsyncConnection, batch: StoreBatch, places: Places
) -> tuple[dict[VersionKey, int], dict[str, int], dict[tuple[str, str], int], set[tuple[str, str]]]:
    """Return the ids of all rows that the batch refers to, after inserting those that were missing.

    The last set has the slices whose items are stored under `(other)`, by model and predicate.

    They are asked for each time: a failover may have lost what an earlier transaction made, and hand the same ids
    out again for something else. One statement finds all that are there and have a place, which is nearly always all.
    """
    referenced = _Referenced(batch)
    keys, epochs, wanted = referenced.versions, referenced.policies, referenced.slices

    async def fetch(*values: list[str]) -> Any:
        return await connection.execute(_KNOWN_NAMED, dict(zip(_WANTED, values, strict=True)))

    versions, policies, slices = await _known(fetch, referenced, places)
    missing = set(keys) - versions.keys()
    stored_as = await places.versions(connection, missing) if missing else {}
    version_ids = await _ids_of(
        connection,
        tables.ModelVersionTable.__table__,
        ("model", "candidate_version", "reference_digest"),
        {
            msgspec.structs.astuple(key): {
                "reference": msgspec.json.decode(batch.references.get(key.reference_digest, "{}"))
            }
            for key in stored_as.values()
        },
    )
    versions |= {key: version_ids[msgspec.structs.astuple(of)] for key, of in stored_as.items()}
    policy_ids = await _ids_of(
        connection,
        tables.PolicyTable.__table__,
        ("epoch",),
        {
            (epoch,): {"definition": msgspec.to_builtins(policy)}
            for epoch, policy in epochs.items()
            if epoch not in policies
        },
    )
    policies |= {epoch: policy_id for (epoch,), policy_id in policy_ids.items()}
    unplaced = [key for name, key in wanted.items() if name not in slices]
    stored_under = await places.slices(connection, unplaced) if unplaced else {}
    others = await _ids_of(
        connection,
        tables.SliceTable.__table__,
        ("model", "predicate"),
        {
            (row.model, row.predicate): {
                "name": row.name,
                "definition": {"where": msgspec.to_builtins(row.where)},
            }
            for row in stored_under.values()
        },
    )
    slices |= {name: others[row.model, row.predicate] for name, row in stored_under.items()}
    return (
        versions,
        policies,
        slices,
        {name for name, row in stored_under.items() if row.predicate != name[1]},
    )


class _Referenced:
    """What a batch refers to: versions, policies by their epoch, and slices by model and predicate; `keys` has those of its items by `id`."""

    def __init__(self, batch: StoreBatch) -> None:
        # By identity first, which is quicker than by content.
        versions: dict[int, VersionKey] = {}
        for one in (batch.compared, batch.unreferenced, batch.noise):
            versions |= {id(entry.version): entry.version for entry in one}
        self.versions = sorted(set(versions.values()), key=msgspec.structs.astuple)
        self.policies = {
            policy.epoch: policy
            for policy in (
                *(compared.exchange.sampling.policy for compared in batch.compared),
                *(item.policy for item in batch.noise),
            )
        }
        self.combinations = batch.combinations
        self.keys = {id(key): key for of_item in self.combinations.values() for key in of_item}
        self.slices = {(key.model, key.predicate): key for key in self.keys.values()}
        self.slices |= {(s.model, s.predicate): s for item in batch.noise for s in item.slices}

    def are_in(self, ids: _Ids) -> bool:
        """Return whether the ids of all of it are known."""
        versions, policies, slices = ids
        return (
            all(key in versions for key in self.versions)
            and policies.keys() >= self.policies.keys()
            and slices.keys() >= self.slices.keys()
        )

    def with_ids(self, ids: _Ids) -> list[Any]:
        """Return all of it with its ids, as `_OTHER_IDS` takes it.

        Raises
        ------
        NotAsBlocksError
            A name has the character that separates names.
        """
        versions, policies, slices = ids
        keys = self.versions
        placed = sorted((slices[name], name) for name in self.slices)
        names = BETWEEN.join(chain.from_iterable([name for _, name in placed]))
        if names.count(BETWEEN) != max(2 * len(placed) - 1, 0):
            raise NotAsBlocksError
        return [
            [versions[key] for key in keys],
            [key.model for key in keys],
            [key.candidate_version for key in keys],
            [key.reference_digest for key in keys],
            [policies[epoch] for epoch in self.policies],
            list(self.policies),
            f"{{{','.join([str(slice_id) for slice_id, _ in placed])}}}",
            names,
        ]


async def _known(
    fetch: Callable[..., Awaitable[Iterable[Any]]], referenced: _Referenced, places: Places
) -> _Ids:
    """Return the ids of the versions, policies and slices that have a row, and a place if they need one.

    Parameters
    ----------
    fetch
        Executes `_KNOWN` with its values in their order.
    """
    versions, epochs, slices = referenced.versions, list(referenced.policies), referenced.slices
    names = list(slices)
    rows = await fetch(
        [key.model for key in versions],
        [key.candidate_version for key in versions],
        [key.reference_digest for key in versions],
        epochs,
        [model for model, _ in names],
        [predicate for _, predicate in names],
    )
    ids: _Ids = ({}, {}, {})
    for kind, position, row_id, has_place in rows:
        if kind == 0 and has_place:
            ids[0][versions[position - 1]] = row_id
        elif kind == 1:
            ids[1][epochs[position - 1]] = row_id
        elif kind == 2 and (has_place or not places.is_ruled(slices[names[position - 1]])):
            ids[2][names[position - 1]] = row_id
    return ids


def _count_others(batch: StoreBatch, others: AbstractSet[tuple[str, str]]) -> dict[str, int]:
    """Return by model how many items are stored under a slice `(other)`."""
    if not others:
        return {}
    return Counter(
        key.model
        for compared in batch.compared
        for item in compared.items
        for key in item.slices
        if (key.model, key.predicate) in others
    )


async def _ids_of(
    connection: AsyncConnection,
    table: Any,
    names: tuple[str, ...],
    wanted: Mapping[tuple[str, ...], dict[str, Any]],
) -> dict[tuple[str, ...], int]:
    """Return the ids of the rows with these keys, after inserting those that were missing with their other values."""
    if not wanted:
        return {}
    columns = [table.c[name] for name in names]
    known_rows = select(*columns, table.c.id).where(tuple_(*columns).in_(list(wanted)))
    ids = {tuple(row[:-1]): int(row[-1]) for row in await connection.execute(known_rows)}
    # In one order everywhere, so that two workers never wait for each other.
    for key in sorted(set(wanted) - set(ids)):
        row = dict(zip(names, key, strict=True))
        new_id = await connection.scalar(
            upsert(table).values(**row, **wanted[key]).on_conflict_do_nothing().returning(table.c.id)
        )
        if new_id is None:  # another worker was faster, and has committed by now
            new_id = await connection.scalar(select(table.c.id).filter_by(**row))
        assert isinstance(new_id, int)
        ids[key] = new_id
    return ids


class _Payloads:
    """What is kept of quarantined messages: so many bytes per hour, and encrypted if there are keys."""

    def __init__(self, bytes_per_hour: int, clock: Clock, keys: KeyFile | None) -> None:
        self._keys = keys
        self._bytes_per_hour = bytes_per_hour
        self._clock = clock
        self._left = bytes_per_hour
        self._since_s = clock.monotonic_s()

    def kept(self, message: Quarantined) -> bytes | None:
        """Return what is stored of a message, or None: the allowance is used up, or it cannot be encrypted."""
        payload = message.payload
        if self._keys is not None and not is_sealed(payload):
            key = self._keys.current
            if key is None:
                return None
            payload = seal(payload, key, model=message.model, exchange_id=message.exchange_id or "")
        return payload if self._grants(len(payload)) else None

    def _grants(self, n_bytes: int) -> bool:
        now_s = self._clock.monotonic_s()
        if now_s - self._since_s >= _HOUR_S:
            self._left, self._since_s = self._bytes_per_hour, now_s
        granted = n_bytes <= self._left
        if granted:
            self._left -= n_bytes
        return granted


async def _unfinished(connection: AsyncConnection, messages: Sequence[Quarantined]) -> list[Quarantined]:
    """Leave out what is called poison but was stored before: only its acknowledgements were lost."""
    poison = [message for message in messages if message.reason is QuarantineReason.POISON]
    numbers = [message.numbered for message in poison if message.numbered is not None]
    finished = await finished_before(connection, numbers)
    return [
        message
        for message in messages
        if message.reason is not QuarantineReason.POISON or message.numbered not in finished
    ]


async def _quarantine(
    connection: AsyncConnection, messages: Sequence[Quarantined], payloads: _Payloads
) -> list[str]:
    """Store quarantined messages; return the reasons of those that are new."""
    if not messages:
        return []
    stored = await connection.scalars(
        upsert(tables.QuarantineTable).on_conflict_do_nothing().returning(tables.QuarantineTable.reason),
        [
            {
                "stream_sequence": message.stream_sequence,
                "digest": hashlib.sha256(message.payload).digest(),
                "exchange_id": message.exchange_id,
                "model": message.model,
                "captured_at": message.captured_at,
                "reason": message.reason.value,
                "detail": plain(message.detail.replace("\0", "")),
                "payload": payloads.kept(message),
            }
            for message in messages
        ],
    )
    return list(stored)


async def _open_batch(
    connection: AsyncConnection,
    batch: StoreBatch,
    n_rows: int,
    skipped: Counter[str],
    unreferenced: Sequence[int],
) -> int:
    """Insert the `batch` row. COPY needs a statement before it, because the adapter begins the transaction lazily."""
    batch_id = await connection.scalar(_OPEN_BATCH, _batch_values(batch, n_rows, skipped, unreferenced))
    assert isinstance(batch_id, int)
    return batch_id


def _batch_values(
    batch: StoreBatch, n_rows: int, skipped: Counter[str], unreferenced: Sequence[int]
) -> dict[str, Any]:
    """Return the values of `_BATCH_VALUES`, in this order."""
    times = [
        *(c.exchange.captured_at for c in batch.compared),
        *(u.captured_at for u in batch.unreferenced),
        *(q.captured_at for q in batch.quarantined if q.captured_at is not None),
    ] or [batch.at]
    models = {compared.exchange.model for compared in batch.compared}
    return {
        "worker": batch.worker,
        "captured_from": min(times),
        "captured_to": max(times),
        "n_rows": n_rows,
        "provenance": batch.provenance,
        "skipped": msgspec.json.encode(skipped).decode(),
        "unreferenced": list(unreferenced),
        "replay_s": batch.replay_s,
        # A reader has one model. If ever there were two, they would have no common order.
        "model": models.pop() if len(models) == 1 else None,
    }


async def _correct_batch(
    connection: AsyncConnection, batch_id: int, n_rows: int, skipped: Counter[str], *, keep: bool = False
) -> None:
    """Update the `batch` row to the rows that were stored, or delete it where there are none."""
    same = tables.BatchTable.id == batch_id
    if n_rows or skipped or keep:
        await connection.execute(
            update(tables.BatchTable).where(same).values(n_rows=n_rows, skipped=dict(skipped))
        )
    else:
        await connection.execute(delete(tables.BatchTable).where(same))


def _tally_rows(tally: Tally, batch_id: int, streamed_at: datetime | None) -> list[dict[str, Any]]:
    return [
        {
            "source": tally.source,
            "boot": tally.boot,
            "stratum": stratum.stratum,
            "sequence": tally.sequence,
            "at": tally.at,
            "batch_id": batch_id,
            "offered": stratum.offered,
            "taken": stratum.taken,
            "thinned": stratum.thinned,
            "published": stratum.published,
            "lost": _by_reason(stratum.lost),
            "models": {
                name: {
                    "taken": model.taken,
                    "lost": _by_reason(model.lost),
                    "published": model.published,
                    "row": model.row,
                    "numbered": model.numbered,
                    "thinned": model.thinned,
                }
                | ({"unknown": model.unknown} if model.unknown else {})
                | ({"configured": True} if model.configured else {})
                for name, model in stratum.models.items()
            },
            "blind_connections": tally.blind_connections,
            "streamed_at": streamed_at,
            "final": tally.final,
            "relay_cpu_s": tally.relay_cpu_s,
        }
        for stratum in tally.strata
    ]


def _by_reason(lost: Mapping[Loss, int]) -> dict[str, int]:
    return {reason.value: n for reason, n in lost.items()}


def _unplaced(compared: ComparedExchange, now: datetime) -> Quarantined:
    """Set aside an exchange whose day has no partition.

    Raises
    ------
    RetryError
        Maintenance makes that day's: it is not the exchange that is wrong, and it waits.
    """
    exchange = compared.exchange
    ahead = day_of(exchange.captured_at) - day_of(now)
    if abs(ahead) <= _MAINTAINED:
        raise RetryError(
            f"the database has no partition for {day_of(exchange.captured_at)}: the monitor makes them every day, "
            "is it running? `quantdrift db upgrade` makes them too"
        )
    reason = QuarantineReason.TOO_EARLY if ahead > _MAINTAINED else QuarantineReason.TOO_LATE
    why = f", {ahead.days} days ahead of this worker's clock" if ahead > _MAINTAINED else ""
    return Quarantined(
        stream_sequence=compared.stream_sequence,
        payload=compared.payload,
        reason=reason,
        detail=f"no partition takes {exchange.captured_at.isoformat()}{why}",
        exchange_id=exchange.id,
        model=exchange.model,
        captured_at=exchange.captured_at,
    )


async def insert_noise(
    connection: AsyncConnection,
    items: Sequence[NoiseItem],
    batch_id: int,
    ids: _Ids,
) -> int:
    """Insert items, each once; return how many were new.

    Parameters
    ----------
    ids
        Those of the versions, policies and slices that the items refer to.
    """
    if not items:
        return 0
    stored = await connection.scalars(
        upsert(tables.NoiseTable).on_conflict_do_nothing().returning(tables.NoiseTable.item),
        [
            dict(zip(_NOISE, row, strict=True)) | {"batch_id": batch_id}
            for row in (_noise_row(item, ids) for item in items)
        ],
    )
    return len(stored.all())


def _noise_row(item: NoiseItem, ids: _Ids) -> tuple[Any, ...]:
    """Return the values of `_NOISE` of an item."""
    versions, policies, slices = ids
    return (
        item.exchange_id,
        item.item,
        item.side.value,
        item.captured_at,
        versions[item.version],
        policies[item.policy.epoch],
        item.pi1,
        item.pi2,
        item.flip,
        item.divergence,
        sorted({slices[key.model, key.predicate] for key in item.slices}),
    )


def _noise_columns(items: Sequence[NoiseItem], ids: _Ids) -> list[Sequence[Any]]:
    """Return items as `_noise` takes them."""
    *columns, slice_ids = zip(*(_noise_row(item, ids) for item in items), strict=True)
    return [*columns, [f"{{{','.join(map(str, of_item))}}}" for of_item in slice_ids]]

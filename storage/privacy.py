"""What the database holds about a person or an exchange, and its erasure.

An exchange is found by its id, by its trace or by an attribute. Its own rows are deleted. Texts elsewhere that contain its
ids, or the value of the attribute, stay without them: a random word, the same in the whole pass, takes the place of the value.
Sums, counts and states of detectors stay: they contain no value, and nobody can take one observation out of them.

Every table is in one of three sets here; a test compares them with the schema.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final

import msgspec
from sqlalchemy import ARRAY, Row, RowMapping, Text, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.clusters import dump_clustering, load_clustering
from quantdrift.core.codec import decode_exchange, decode_exemplar
from quantdrift.core.errors import QuarantineError
from quantdrift.core.records import Exchange
from quantdrift.storage.database import Database
from quantdrift.storage.fold_rows import ComparisonRow
from quantdrift.storage.schema.partitions import partition_days
from quantdrift.storage.schema.tables import Base

EXCHANGE: Final = "exchange"
TRACE: Final = "trace"
ANY: Final = "any"
STATEMENT_TIMEOUT_S: Final = 3600.0
"""A search reads whole tables: one day of comparisons at a time."""

OF_AN_EXCHANGE: Final = (
    "comparison",
    "condensed_block",
    "noise",
    "embedding",
    "label",
    "quarantine",
    "session",
)
"""Tables with rows of an exchange, which are deleted; of `session`, its items."""
REDACTED: Final = (
    "alert",
    "alert_action",
    "baseline",
    "clustering",
    "discovery",
    "discovery_change",
    "doubt",
    "gate_run",
    "gate_verdict",
    "incident_change",
    "model_version",
    "noise_change",
    "outbox",
    "report_run",
    "slice",
    "slice_change",
    "transition",
    "value_share",
    "verdict",
)
"""Tables whose texts may contain a value or an id, which is replaced in every column of type text, text[] or jsonb, except
those in `CLOSED`."""
CLOSED: Final = frozenset(
    {
        "action",
        "content",
        "ended",
        "from_verdict",
        "identity",
        "kind",
        "made_by",
        "metric",
        "mitigation",
        "model",
        "option",
        "reference",
        "reference_digest",
        "severity",
        "side",
        "source",
        "space",
        "state",
        "status",
        "to_verdict",
        "verdict",
    }
)
"""Columns of these tables with words of the code, names of the configuration and of users of the database, or numbers."""
WITHOUT_VALUES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "arrival": "numbers of exchanges at their sidecar",
        "audit": "can only grow; commands write ids and counts into it",
        "batch": "counts of a transaction of a worker",
        "compatibility": "revisions of the schema",
        "detector": "sums and histograms of divergences",
        "discovery_search": "counts of a search",
        "expiry": "counts of exchanges that expired",
        "fold": "numbers of the last batches",
        "incident": "times and counts",
        "leader": "the process that leads",
        "model_fold": "names of models",
        "model_span": "names of models",
        "monitor_process": "the processes that fold",
        "shard": "the processes that fold",
        "noise_floor": "sums of divergences",
        "noise_slice": "sums of divergences",
        "noise_test": "sums of divergences",
        "policy": "rates and strata of the configuration",
        "process_report": "options of processes and what is paused, as in the audit",
        "rollup_day": "sums of divergences",
        "rollup_hour": "sums of divergences",
        "serving": "times of the exchanges of a version",
        "tally": "counts of a header stratum",
        "undeclared_session": "evidence about an attribute",
    }
)
"""Tables that an erasure leaves as they are, and what they contain instead."""

_PAGE: Final = 500
_IDS: Final = 5_000
_SHORT: Final = 4
_ID: Final = re.compile(r"[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}")
_FIELD: Final = re.compile(r"[a-z_]+")
_ITEMS: Final = msgspec.msgpack.Decoder(list[ComparisonRow])
_ERASE_COMPARISONS: Final = """
    select comparison_erase(cast(:times as timestamptz[]), cast(:ids as uuid[]))
"""
"""Runs with the rights of a role that may delete comparisons and nothing else: the table belongs to another role than the schema."""
_QUARANTINE: Final = """
    select id, exchange_id, quarantined_at, detail, payload from quarantine where id > :last order by id limit 100
"""
_SESSIONS: Final = "select model_version_id as version, policy_id as policy, group_key from session"
_OF_SESSION: Final = "where model_version_id = :version and policy_id = :policy and group_key = :group"
_ITEMS_OF: Final = f"select opened_at, items from session {_OF_SESSION} for update"  # noqa: S608
_KEEP_ITEMS: Final = f"update session set items = :items {_OF_SESSION}"  # noqa: S608
_DELETE_SESSION: Final = f"delete from session {_OF_SESSION}"  # noqa: S608
_OF_IDS: Final = "from {table} where exchange_id = any(cast(:ids as uuid[]))"
_COUNT: Final = f"select count(*) as n, min(captured_at) as first, max(captured_at) as last {_OF_IDS}"
_DELETE: Final = f"delete {_OF_IDS}"


class WantedData(msgspec.Struct, frozen=True, kw_only=True):
    """What is searched.

    Parameters
    ----------
    key
        `exchange`, `trace`, an attribute such as `header.x-request-id`, or `any` for every attribute.
    values
        The id, the trace id, or each form in which the attribute's value may be stored: as it is, and hashed.
    groups
        Hashes of the value as a session, if the attribute is `sampling.sticky_header`.
    """

    key: str
    values: tuple[str, ...]
    groups: tuple[str, ...] = ()

    @property
    def is_value(self) -> bool:
        """Whether the values are those of an attribute, and not ids."""
        return self.key not in {EXCHANGE, TRACE}

    def matches(self, exchange: Exchange) -> bool:
        """Return whether this exchange is one of those that are searched."""
        if self.key == EXCHANGE:
            return exchange.id in self.values
        if self.key == TRACE:
            return _trace_id(exchange.trace) in self.values
        if exchange.group and exchange.group in self.groups:
            return True
        attributes = exchange.attributes
        return any(
            value in self.values
            for value in (attributes.values() if self.key == ANY else [attributes.get(self.key)])
        )


class Exchanges:
    """The exchanges that were found, with the ids under which other places know them.

    Parameters
    ----------
    ids
        32 hexadecimal digits each.
    traces
        Ids of their traces.
    """

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.traces: set[str] = set()

    def add(self, exchange_id: str, trace: str) -> None:
        """Add an exchange by its id and `traceparent`."""
        self.ids.add(exchange_id.replace("-", ""))
        if trace_id := _trace_id(trace):
            self.traces.add(trace_id)

    @property
    def tokens(self) -> set[str]:
        """Ids of exchanges and traces, without hyphens."""
        return self.ids | self.traces


class StoredPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What one place holds.

    Parameters
    ----------
    place
        Table, or stream.
    n
        Rows, or messages.
    first_at, last_at
        Times of the oldest and the newest; None where rows have no time.
    """

    place: str
    n: int
    first_at: datetime | None = None
    last_at: datetime | None = None


Opened = Callable[[bytes], bytes]
Progress = Callable[[str], None]


class Search:
    """One search, and with `erase` the erasure of what it finds. Idempotent; in short transactions.

    Parameters
    ----------
    database
        As the owner of the schema, with `STATEMENT_TIMEOUT_S`.
    wanted
        What is searched.
    opened
        Makes a stored message readable; raises `QuarantineError` if that is impossible.
    progress
        Called with what is being read.
    """

    def __init__(
        self,
        database: Database,
        wanted: WantedData,
        *,
        opened: Opened = bytes,
        progress: Progress = lambda _: None,
    ) -> None:
        self._database = database
        self._wanted = wanted
        self._opened = opened
        self._progress = progress
        self.exchanges = Exchanges()
        self.files: set[str] = set()  # of reports that show something of it
        if wanted.key == EXCHANGE:
            self.exchanges.ids.update(wanted.values)
        elif wanted.key == TRACE:
            self.exchanges.traces.update(wanted.values)
        self._token = f"erased-{secrets.token_hex(6)}"

    async def run(self, *, erase: bool) -> list[StoredPlace]:
        """Search every table, and delete or redact what is found if `erase` is set; return the places with something.

        Raises
        ------
        RetryError, OperatorError
            As `Database.begin`.
        """
        self._token = f"erased-{secrets.token_hex(6)}"  # another one each time: names of slices are unique
        places = [await self._comparisons(erase=erase), await self._quarantine(erase=erase)]
        for table in ("noise", "embedding", "label"):
            self._progress(f"searching {table}")
            places.append(await self._by_id(table, erase=erase))
        self._progress("searching session")
        places.append(await self._sessions(erase=erase))
        for table in REDACTED:
            self._progress(f"searching {table}")
            places.append(await self._texts(table, erase=erase))
        return [holding for holding in places if holding.n]

    def is_one(self, message: bytes) -> bool:
        """Return whether a message of the stream, or of the quarantine, is searched; an exchange of it is noted."""
        try:
            exchange = decode_exchange(self._opened(message))
        except QuarantineError:
            return self._in_bytes(message)
        return self._is_searched(exchange)

    def is_exemplar(self, message: bytes) -> bool:
        """Return whether an exemplar is of an exchange that is searched; an exchange of it is noted."""
        try:
            exchange = decode_exemplar(self._opened(message)).exchange
        except QuarantineError:
            return self._in_bytes(message)
        return self._is_searched(exchange)

    def _is_searched(self, exchange: Exchange) -> bool:
        if exchange.id not in self.exchanges.ids and not self._wanted.matches(exchange):
            return False
        self.exchanges.add(exchange.id, exchange.trace)
        return True

    def _in_bytes(self, message: bytes) -> bool:
        return any(form.encode() in message for form in (*self._wanted.values, *self._wanted.groups))

    async def _rows(self, statement: str, **values: Any) -> Sequence[Row[Any]]:
        """Execute a statement of constants, in a transaction of its own."""
        async with self._database.begin() as connection:
            result = await connection.execute(text(statement), values)
            return result.all() if result.returns_rows else ()

    async def _comparisons(self, *, erase: bool) -> StoredPlace:
        condition, values = self._condition()
        async with self._database.begin() as connection:
            days = await partition_days(connection)
        holding = StoredPlace(place="comparison", n=0)
        for day in days:
            self._progress(f"searching comparison, {day}")
            midnight = datetime(day.year, day.month, day.day, tzinfo=UTC)
            rows = await self._rows(
                "select captured_at, cast(exchange_id as text) as id, max(trace) as trace, count(*) as n"  # noqa: S608
                f" from comparisons(:begin, :end) where {condition} group by 1, 2",
                begin=midnight,
                end=midnight + timedelta(days=1),
                **values,
            )
            for row in rows:
                self.exchanges.add(row.id, row.trace)
                holding = _with(holding, row.n, row.captured_at, row.captured_at)
            if erase:
                await self._delete_comparisons([(row.captured_at, row.id) for row in rows])
        return holding

    def _condition(self) -> tuple[str, dict[str, Any]]:
        values = list(self._wanted.values)
        # An exchange that another place has shown is searched as well: a worker may have stored it since then.
        ids = {"ids": [_dashed(exchange_id) for exchange_id in self.exchanges.ids]}
        by_id = "exchange_id = any(cast(:ids as uuid[]))"
        if self._wanted.key == EXCHANGE:
            return by_id, ids
        if self._wanted.key == TRACE:
            return f"({by_id} or split_part(trace, '-', 2) = any(:texts))", {**ids, "texts": values}
        by_group = "group_key = any(:groups)"
        more = {**ids, "texts": values, "groups": list(self._wanted.groups)}
        if self._wanted.key == ANY:
            by_value = "exists (select from jsonb_each_text(attributes) a where a.value = any(:texts))"
            return f"({by_id} or {by_group} or {by_value})", more
        return f"({by_id} or {by_group} or attributes ->> :key = any(:texts))", {
            **more,
            "key": self._wanted.key,
        }

    async def _delete_comparisons(self, rows: Sequence[tuple[datetime, str]]) -> None:
        for first in range(0, len(rows), _IDS):
            chunk = rows[first : first + _IDS]
            await self._rows(
                _ERASE_COMPARISONS,
                times=[at for at, _ in chunk],
                ids=[exchange_id for _, exchange_id in chunk],
            )

    async def _by_id(self, table: str, *, erase: bool) -> StoredPlace:
        holding = StoredPlace(place=table, n=0)
        for ids in _chunks(self.exchanges.ids):
            (row,) = await self._rows(_COUNT.format(table=table), ids=ids)
            holding = _with(holding, row.n, row.first, row.last)
            if erase and row.n:
                await self._rows(_DELETE.format(table=table), ids=ids)
        return holding

    async def _quarantine(self, *, erase: bool) -> StoredPlace:
        holding, last = StoredPlace(place="quarantine", n=0), 0
        while rows := await self._rows(_QUARANTINE, last=last):
            last = rows[-1].id
            self._progress(f"searching quarantine, {last}")
            hits = [row for row in rows if self._is_quarantined(row)]
            for row in hits:
                holding = _with(holding, 1, row.quarantined_at, row.quarantined_at)
                if row.exchange_id is not None:
                    self.exchanges.add(str(row.exchange_id), "")
            if erase and hits:
                await self._rows("delete from quarantine where id = any(:ids)", ids=[row.id for row in hits])
        return holding

    def _is_quarantined(self, row: Any) -> bool:
        if row.exchange_id is not None and str(row.exchange_id).replace("-", "") in self.exchanges.ids:
            return True
        if row.payload is not None and self.is_one(bytes(row.payload)):
            return True
        return bool(self._redactor().found(row.detail))

    async def _sessions(self, *, erase: bool) -> StoredPlace:
        """Search the open sessions: one of the person goes, and of another one the items of the exchanges go."""
        holding = StoredPlace(place="session", n=0)
        for key in await self._rows(_SESSIONS):
            values: dict[str, Any] = {"version": key.version, "policy": key.policy, "group": key.group_key}
            async with self._database.begin() as connection:
                row = (await connection.execute(text(_ITEMS_OF), values)).one_or_none()
                if row is None:
                    continue  # it has closed meanwhile
                items = _ITEMS.decode(row.items)
                kept = [item for item in items if item.exchange_id.replace("-", "") not in self.exchanges.ids]
                if values["group"] in self._wanted.groups:
                    kept = []
                elif len(kept) == len(items):
                    continue
                holding = _with(holding, 1, row.opened_at, row.opened_at)
                if erase and kept:
                    values["items"] = msgspec.msgpack.encode(kept)
                    await connection.execute(text(_KEEP_ITEMS), values)
                elif erase:
                    await connection.execute(text(_DELETE_SESSION), values)
        return holding

    async def _texts(self, table: str, *, erase: bool) -> StoredPlace:
        """Search the texts of a table, and replace in them what is found."""
        redactor, columns, conditions = self._redactor(), text_columns(table), []
        row_text = f"concat_ws(' ', {', '.join(columns)})"
        values: dict[str, Any] = {}
        if table == "clustering":  # few rows, whose content the database cannot read
            columns, conditions = [*columns, "content"], ["true"]
        else:
            if redactor.forms:
                conditions.append(
                    f"exists (select from unnest(cast(:forms as text[])) f where strpos({row_text}, f) > 0)"
                )
                values["forms"] = redactor.forms
            if redactor.tokens:
                conditions.append(
                    f"exists (select from regexp_matches({row_text}, '({_ID.pattern})', 'g') m"
                    " where replace(m[1], '-', '') = any(cast(:tokens as text[])))"
                )
                values["tokens"] = sorted(redactor.tokens)
        holding, last = StoredPlace(place=table, n=0), "(0,0)"
        statement = (
            f"select cast(ctid as text) as row_id, {', '.join(columns)} from {table}"  # noqa: S608 - constants
            f" where ctid > cast(cast(:last as text) as tid) and ({' or '.join(conditions) or 'false'})"
            f" order by ctid limit {_PAGE}{' for update' if erase else ''}"
        )
        while True:
            async with self._database.begin() as connection:
                result = await connection.execute(text(statement), {**values, "last": last})
                rows = result.mappings().all()
                for row in rows:
                    changed = self._changed(table, row, redactor)
                    holding = _with(holding, int(bool(changed)), None, None)
                    if erase and changed:
                        await self._update(connection, table, str(row["row_id"]), changed)
            if len(rows) < _PAGE:
                return holding
            last = str(rows[-1]["row_id"])

    def _changed(self, table: str, row: RowMapping, redactor: "Redactor") -> dict[str, Any]:
        """Return the columns of a row that must change, with their new values."""
        changed: dict[str, Any] = {}
        for column in text_columns(table):
            if row[column] is None:
                continue
            new = redactor.without(row[column], drop=table == "value_share")
            if new != row[column]:
                changed[column] = new
        if table == "report_run" and changed:
            self.files.add(str(row["path"]))
        if table == "clustering":
            clustering = load_clustering(bytes(row["content"]))
            vocabulary = {
                key: frozenset(value for value in values if value not in self._wanted.values)
                for key, values in clustering.vocabulary.items()
            }
            if self._wanted.is_value and vocabulary != clustering.vocabulary:
                changed["content"] = dump_clustering(
                    msgspec.structs.replace(clustering, vocabulary=vocabulary)
                )
        return changed

    async def _update(
        self, connection: AsyncConnection, table: str, row_id: str, changed: Mapping[str, Any]
    ) -> None:
        kinds = {column.name: column.type for column in Base.metadata.tables[table].columns}
        sets, values = [], {}
        for column, new in changed.items():
            is_json = isinstance(kinds[column], JSONB)
            kind = "jsonb" if is_json else "text[]" if isinstance(kinds[column], ARRAY) else None
            sets.append(f"{column} = cast(:{column} as {kind})" if kind else f"{column} = :{column}")
            values[column] = json.dumps(new) if is_json else new
        if table == "slice":  # its value has no place any more: its detectors end
            sets.append("lapsed_at = coalesce(lapsed_at, now())")
            await connection.execute(
                text("""
                    insert into slice_change (slice_id, status, made_by, reason)
                    select id, 'lapsed', session_user, 'its value was erased' from slice
                    where ctid = cast(cast(:row_id as text) as tid) and lapsed_at is null
                """),
                {"row_id": row_id},
            )
        await connection.execute(
            text(
                f"update {table} set {', '.join(sets)} where ctid = cast(cast(:row_id as text) as tid)"  # noqa: S608
            ),
            {**values, "row_id": row_id},
        )

    def _redactor(self) -> "Redactor":
        values = (*self._wanted.values, *self._wanted.groups) if self._wanted.is_value else ()
        return Redactor(values, self.exchanges.tokens, self._token)


class Redactor:
    """Takes values and ids out of texts and JSON.

    A value is found as a whole word: `ada` is not found in `adam`. One of fewer than four characters is found in a text only
    after `=` or in quotation marks, or as the whole text.

    Parameters
    ----------
    values
        Values of an attribute.
    tokens
        Ids of exchanges and traces, without hyphens.
    replacement
        What takes their place.
    """

    def __init__(self, values: Iterable[str], tokens: set[str], replacement: str) -> None:
        self.tokens = tokens
        self._replacement = replacement
        self._whole = frozenset(values)
        written = {form for value in self._whole for form in _written(value)}
        # As the database shows JSON, strings of JSON are escaped once more.
        self.forms = sorted({escaped for form in written for escaped in (form, _escaped(form))})
        words = sorted((re.escape(form) for form in written), key=len, reverse=True)
        short = [word for word in words if len(word) < _SHORT]
        long = [word for word in words if len(word) >= _SHORT]
        alternatives = []
        if long:
            alternatives.append(rf"(?<![\w.@-])(?:{'|'.join(long)})(?!\.?[\w@-])")
        if short:
            alternatives.append(rf"(?:(?<==)|(?<=\"))(?:{'|'.join(short)})(?!\.?[\w@-])")
        self._pattern = re.compile("|".join(alternatives)) if alternatives else None

    def found(self, value: Any) -> bool:
        """Return whether anything of it is in a text or in JSON."""
        return bool(self.without(value) != value)

    def without(self, value: Any, *, drop: bool = False) -> Any:
        """Return a text, list or JSON without it.

        Parameters
        ----------
        drop
            Leave out whole entries of a list, in place of a replacement inside them.
        """
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            # Keys such as `key` and `equals` are names of fields, whatever the value is.
            return {
                key if _FIELD.fullmatch(key) else self._text(key): self.without(entry)
                for key, entry in value.items()
            }
        if isinstance(value, list | tuple):
            return [
                self.without(entry, drop=drop)
                for entry in value
                if not self._is_of_an_exchange(entry) and not (drop and self.found(entry))
            ]
        return value

    def _is_of_an_exchange(self, entry: Any) -> bool:
        """Return whether an entry of a list is about an exchange: it is its id, or has it as a value."""
        texts = entry.values() if isinstance(entry, Mapping) else [entry]
        return any(isinstance(member, str) and self._ids(member) for member in texts)

    def _ids(self, value: str) -> bool:
        return any(match[0].replace("-", "") in self.tokens for match in _ID.finditer(value))

    def _text(self, value: str) -> str:
        if value in self._whole:
            return self._replacement
        if self._pattern is not None:
            value = self._pattern.sub(self._replacement, value)
        if self.tokens:
            value = _ID.sub(
                lambda match: self._replacement if match[0].replace("-", "") in self.tokens else match[0],
                value,
            )
        return value


def text_columns(table: str) -> list[str]:
    """Return the columns of a table that can contain a value: text, text[] and jsonb, without those in `CLOSED`."""
    return [
        column.name
        for column in Base.metadata.tables[table].columns
        if column.name not in CLOSED
        and (
            isinstance(column.type, Text | JSONB)
            or (isinstance(column.type, ARRAY) and isinstance(column.type.item_type, Text))
        )
    ]


async def slices_wait(connection: AsyncConnection, since: timedelta = timedelta(minutes=5)) -> bool:
    """Return whether the monitor has still to end the detectors of slices whose value was erased lately."""
    return bool(
        await connection.scalar(
            text("""
                select exists (select from slice_change where fold_seq is null and status = 'lapsed'
                    and reason = 'its value was erased' and made_at > now() - cast(:since as interval))
            """),
            {"since": since},
        )
    )


def _written(value: str) -> tuple[str, str]:
    """Return a value as it is in a name, and as it is in a predicate."""
    return value, value.replace("\\", "\\\\").replace('"', '\\"')


def _escaped(form: str) -> str:
    return json.dumps(form, ensure_ascii=False)[1:-1]


def _trace_id(trace: str) -> str:
    parts = trace.split("-")
    return parts[1] if len(parts) == 4 else ""


def _dashed(exchange_id: str) -> str:
    return (
        f"{exchange_id[:8]}-{exchange_id[8:12]}-{exchange_id[12:16]}-{exchange_id[16:20]}-{exchange_id[20:]}"
    )


def _chunks(ids: Iterable[str]) -> list[list[str]]:
    dashed = sorted(map(_dashed, ids))
    return [dashed[first : first + _IDS] for first in range(0, len(dashed), _IDS)]


def added(first: StoredPlace, second: StoredPlace) -> StoredPlace:
    """Return what two passes have found of one place."""
    return _with(_with(first, second.n, second.first_at, None), 0, None, second.last_at)


def _with(place: StoredPlace, n: int, first: datetime | None, last: datetime | None) -> StoredPlace:
    """Return a place with more rows."""
    firsts = [at for at in (place.first_at, first) if at is not None]
    lasts = [at for at in (place.last_at, last) if at is not None]
    return StoredPlace(
        place=place.place,
        n=place.n + n,
        first_at=min(firsts, default=None),
        last_at=max(lasts, default=None),
    )

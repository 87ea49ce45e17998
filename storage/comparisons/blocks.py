"""Blocks: the comparisons of a batch in one row of `condensed_block`, with an array of values for each column."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import date
from operator import itemgetter
from typing import Any, Final

import asyncpg
import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.storage.comparisons.copy import COLUMNS, Row, day_of

LEAST: Final = 8
"""Comparisons of one version and day below which a row for each takes no more space than a block."""
BETWEEN: Final = "\x01"
_NOTHING: Final = "\x02"
# Each array is one parameter: the driver spends as much time on an element of an array as Postgres on the text of a few.
_READ: Final = {
    "text": f"string_to_array({{}}::text, chr({ord(BETWEEN)}), chr({ord(_NOTHING)}))",
    "float8": "{}::float8[]",
    "timestamptz": "{}::timestamptz[]",
}
_KINDS: Final = {
    "captured_at": "timestamptz",
    "exchange_id": "uuid",
    "item": "smallint",
    "policy_id": "integer",
    "slice_ids": "text",
    "n_items": "smallint",
    "in_slices": "text",
    "source": "text",
    "header_stratum": "text",
    "body_stratum": "text",
    "pi1": "float8",
    "pi2": "float8",
    "u1": "float8",
    "u2": "float8",
    "group_id": "uuid",
    "group_text": "text",
    "flip": "boolean",
    "topk": "boolean",
    "js": "float8",
    "divergence": "float8",
    "margin": "float8",
    "candidate_margin": "float8",
    "reference_margin": "float8",
    "detail": "text",
    "request_id": "uuid",
    "attributes": "text",
    "features": "text",
    "trace_id": "uuid",
    "span_id": "bigint",
    "trace_text": "text",
    "tie": "boolean",
    "origin": "text",
    "latency_s": "float8",
    "first_token_s": "float8",
    "per_token_s": "float8",
}
_HEAD: Final = {
    "model_version_id": "{}::integer",
    "captured_from": "{}::timestamptz",
    "captured_to": "{}::timestamptz",
    "n": "{}::integer",
    "n_changed": "{}::integer",
    "slices": "{}::text::integer[]",
    "changed": "{}::text::integer[]",
    "worst_changed": "{}::float8[]",
    "worst_other": "{}::float8[]",
}
_READS: Final = {
    **_HEAD,
    **{name: _READ.get(kind, f"{{}}::text::{kind}[]") for name, kind in _KINDS.items()},
}
N_VALUES: Final = len(_READS)


def insertion(batch: str, first: int, source: str = "") -> str:
    """Return the statement that inserts a block.

    Parameters
    ----------
    batch
        Expression: the id of the batch.
    first
        Number of the first of its `N_VALUES` parameters.
    source
        What comes after the values: from where, and on which condition.
    """
    values = ", ".join(read.format(f"${number}") for number, read in enumerate(_READS.values(), first))
    return f"insert into condensed_block (of_batch, {', '.join(_READS)}) select {batch}, {values} {source}"


_INSERT: Final = insertion("$1::bigint", 2)
# A block has comparisons of one UTC day.
_STORED: Final = text("""
    select key.place from unnest(cast(:times as timestamptz[]), cast(:ids as uuid[])) with ordinality as key (at, id, place)
    where exists (
        select from comparison c where c.captured_at = key.at and c.exchange_id = key.id
    ) or exists (
        select from condensed_block b
        where b.captured_to >= key.at and b.captured_to < date_trunc('day', key.at, 'UTC') + interval '24 hours'
            and b.captured_from <= key.at and key.id = any(b.exchange_id)
    )
""")
_PLACE: Final = {name: place for place, name in enumerate(COLUMNS)}
_VERSION: Final = _PLACE["model_version_id"]
_KEY: Final = itemgetter(_PLACE["captured_at"], _PLACE["exchange_id"], _PLACE["item"])
_HASH: Final = re.compile(r"[0-9a-f]{32}")
_TRACE: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-01")
_REQUEST: Final = re.compile(r'"header\.x-request-id":\s*"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"')
# Valid JSON that Postgres does not take: in a block it would be found by whoever reads it.
_NOT_IN_JSONB: Final = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
_RAW: Final = msgspec.json.Decoder(list[msgspec.Raw])


class NotAsBlocksError(Exception):
    """These comparisons cannot be stored as blocks: store them as rows."""


class Blocks:
    """The blocks of the comparisons of a batch, ready to be inserted.

    Parameters
    ----------
    rows
        As `comparison_rows` makes them, of one batch, each exchange whole; the id of their batch is not read.

    Attributes
    ----------
    few
        Comparisons of versions and days with fewer than `LEAST`: they are no blocks.
    days
        UTC days of all comparisons.
    blocks
        The values of each block.

    Raises
    ------
    NotAsBlocksError
        A comparison is there twice, or has a value that Postgres may refuse; or none is in a block.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        if len(set(map(_KEY, rows))) < len(rows):
            raise NotAsBlocksError
        groups = _groups(rows)
        self.few = [row for rows_of in groups.values() if len(rows_of) < LEAST for row in rows_of]
        self.days = sorted({day for _, day in groups})
        self.blocks = [_values(of_block) for of_block in groups.values() if len(of_block) >= LEAST]
        if not self.blocks:
            raise NotAsBlocksError

    async def insert(self, driver: asyncpg.Connection, batch_id: int, *, first: int = 0) -> None:
        """Insert the blocks of a batch from `first` on; `few` stay."""
        for values in self.blocks[first:]:
            await driver.execute(_INSERT, batch_id, *values)


async def without_stored(connection: AsyncConnection, rows: list[Row]) -> list[Row]:
    """Leave out the comparisons of exchanges that are stored, as rows or in blocks."""
    if not rows:
        return rows
    keys = sorted({_KEY(row)[:2] for row in rows})
    values = {"times": [at for at, _ in keys], "ids": [str(exchange_id) for _, exchange_id in keys]}
    stored = {keys[place - 1] for place in await connection.scalars(_STORED, values)}
    return [row for row in rows if _KEY(row)[:2] not in stored] if stored else rows


def _values(rows: Sequence[Row]) -> list[Any]:
    """Return the values of a block of comparisons of one version and UTC day, each exchange whole."""
    of: dict[str, Sequence[Any]] = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    _check(of)
    by_slice: dict[int, list[Any]] = {}
    for slice_ids, flip, divergence in zip(of["slice_ids"], of["flip"], of["divergence"], strict=True):
        for slice_id in slice_ids:
            sums = by_slice.get(slice_id)
            if sums is None:
                sums = by_slice[slice_id] = [0, None, None]
            place = 2
            if flip:
                sums[0] += 1
                place = 1
            # As Postgres orders them: NaN is larger than infinity.
            if divergence is not None and (
                sums[place] is None or divergence > sums[place] or divergence != divergence  # noqa: PLR0124
            ):
                sums[place] = divergence
    slices = sorted(by_slice)
    texts: dict[int, str] = {}
    for slice_ids in of["slice_ids"]:
        if id(slice_ids) not in texts:
            texts[id(slice_ids)] = _written(slice_ids)
    hashes = [key if _HASH.fullmatch(key) else None for key in of["group_key"]]
    traces = [_TRACE.fullmatch(trace) for trace in of["trace"]]
    requests, attributes = zip(*map(_apart, of["attributes"]), strict=True)
    of |= {
        "slice_ids": [texts[id(slice_ids)] for slice_ids in of["slice_ids"]],
        "in_slices": _in_slices(of),
        "group_id": hashes,
        "group_text": [
            None if digest else key or None for key, digest in zip(of["group_key"], hashes, strict=True)
        ],
        "request_id": requests,
        "attributes": attributes,
        "trace_id": [None if match is None else match[1] for match in traces],
        "span_id": [None if match is None else _signed(match[2]) for match in traces],
        "trace_text": [
            trace or None if match is None else None for trace, match in zip(of["trace"], traces, strict=True)
        ],
    }
    return [
        of["model_version_id"][0],
        min(of["captured_at"]),
        max(of["captured_at"]),
        len(rows),
        sum(flip is True for flip in of["flip"]),
        _written(slices),
        _written([by_slice[slice_id][0] for slice_id in slices]),
        [by_slice[slice_id][1] for slice_id in slices],
        [by_slice[slice_id][2] for slice_id in slices],
        *(_column(kind, of[name]) for name, kind in _KINDS.items()),
    ]


def _groups(rows: Sequence[Row]) -> dict[tuple[int, date], list[Row]]:
    """Return the comparisons of each version and UTC day."""
    times = [row[0] for row in rows]
    first, last = day_of(min(times)), day_of(max(times))
    groups: dict[tuple[int, date], list[Row]] = {}
    for row in rows:
        groups.setdefault((row[_VERSION], first if first == last else day_of(row[0])), []).append(row)
    return groups


def _check(of: dict[str, Sequence[Any]]) -> None:
    """Refuse what a row of `comparison` could not have."""
    if not all(0 < pi <= 1 for name in ("pi1", "pi2") for pi in of[name]):
        raise NotAsBlocksError
    for name in ("attributes", "features", "detail"):
        joined = f"[{','.join(value for value in of[name] if value is not None)}]"
        if "\\u" in joined and _NOT_IN_JSONB.search(joined):
            raise NotAsBlocksError
        try:
            _RAW.decode(joined)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise NotAsBlocksError from error


def _in_slices(of: dict[str, Sequence[Any]]) -> list[str | None]:
    """Return of each item whose exchange has several how many of these are in each of its slices, as text."""
    if all(n == 1 for n in of["n_items"]):
        return [None] * len(of["n_items"])
    counts: dict[Any, Counter[int]] = {}
    for exchange_id, slice_ids in zip(of["exchange_id"], of["slice_ids"], strict=True):
        counts.setdefault(exchange_id, Counter()).update(slice_ids)
    return [
        None
        if n == 1 or not slice_ids
        else _written([counts[exchange_id][slice_id] for slice_id in slice_ids])
        for exchange_id, slice_ids, n in zip(of["exchange_id"], of["slice_ids"], of["n_items"], strict=True)
    ]


def _apart(attributes: str) -> tuple[str | None, str]:
    """Return the request id of attributes where it is a UUID, and the JSON text of the others."""
    match = _REQUEST.search(attributes)
    if match is None:
        return None, attributes
    before, after = attributes[: match.start()].rstrip(), attributes[match.end() :].lstrip()
    if before.endswith(","):
        before = before[:-1]
    elif after.startswith(","):
        after = after[1:]
    return match[1], before + after


def _column(kind: str, values: Sequence[Any]) -> Sequence[Any] | str | None:
    """Return the array of a column as `_READ` reads it, or None where all values are null."""
    if values[0] is None and values.count(None) == len(values):
        return None
    if kind in {"float8", "timestamptz"}:
        return values
    if kind != "text":
        return _written(
            ["NULL" if value is None else value for value in values] if None in values else values
        )
    joined = BETWEEN.join(
        [_NOTHING if value is None else value for value in values] if None in values else values
    )
    if joined.count(BETWEEN) != len(values) - 1 or joined.count(_NOTHING) != values.count(None):
        raise NotAsBlocksError
    return joined


def _written(values: Iterable[Any]) -> str:
    """Return an array as Postgres reads it, of values without commas, quotation marks and spaces."""
    return f"{{{','.join(map(str, values))}}}"


def _signed(digits: str) -> int:
    """Return 64 bits as Postgres' bigint."""
    number = int(digits, 16)
    return number - (1 << 64) if number >= 1 << 63 else number

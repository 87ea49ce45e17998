"""Blocks: the comparisons of a batch in one row of `condensed_block`, with an array of values for each column."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from operator import itemgetter
from struct import unpack
from typing import Any, Final

import asyncpg
import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.storage.comparisons.copy import COLUMNS, Columns, Row, day_of, json_lines, rows_of

LEAST: Final = 8
"""Comparisons of one version and day below which a row for each takes no more space than a block."""
BETWEEN: Final = "\x01"
_NOTHING: Final = "\x02"
# Each array is one parameter: the driver spends as much time on an element of an array as Postgres on the text of a few.
_READ: Final = {
    "text": f"string_to_array({{0}}::text, chr({ord(BETWEEN)}), chr({ord(_NOTHING)}))",
    "joined": "case when {0}::text is not null then array[{0}::text] end",
    "timestamptz": "{0}::timestamptz[]",
}
# Values of the column `form`.
_JOINED: Final = 1
_WITHOUT_MARGIN: Final = 2
_LARGE: Final = 1e300
_KINDS: Final = {
    "captured_at": "timestamptz",
    "exchange_id": "uuid",
    "item": "smallint",
    "policy_id": "integer",
    "slice_ids": "joined",
    "n_items": "smallint",
    "in_slices": "joined",
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
    "detail": "joined",
    "request_id": "uuid",
    "attributes": "joined",
    "features": "joined",
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
    "worst_changed": "{}::text::float8[]",
    "worst_other": "{}::text::float8[]",
    "form": "{}::smallint",
}
_READS: Final = {
    **_HEAD,
    **{name: _READ.get(kind, f"{{0}}::text::{kind}[]") for name, kind in _KINDS.items()},
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
_KEY: Final = itemgetter(COLUMNS.index("captured_at"), COLUMNS.index("exchange_id"))
_HASH: Final = re.compile(r"[0-9a-f]{32}")
_TRACE: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-01")
_HASH_LENGTH: Final = 32
_TRACE_LENGTH: Final = 55
_OF_TRACE: Final = {0: "0", 1: "0", 2: "-", 35: "-", 52: "-", 53: "0", 54: "1"}
_UUID_LENGTH: Final = 36
_HYPHENS: Final = (8, 13, 18, 23)
_REQUEST_ID: Final = "header.x-request-id"
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# Valid JSON that Postgres does not take: in a block it would be found by whoever reads it.
_NOT_IN_JSONB: Final = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
_RAW: Final = msgspec.json.Decoder(msgspec.Raw)
_ENCODE: Final = msgspec.json.Encoder().encode
_ARRAY: Final = str.maketrans("[]", "{}")


class NotAsBlocksError(Exception):
    """These comparisons cannot be stored as blocks: store them as rows."""


class Blocks:
    """The blocks of the comparisons of a batch, ready to be inserted.

    Parameters
    ----------
    columns
        As `comparison_columns` makes them, of one batch, each exchange whole; the id of their batch is not read.

    Attributes
    ----------
    few
        Comparisons of versions and days with fewer than `LEAST`, as rows: they are no blocks.
    days
        UTC days of all comparisons.
    blocks
        The values of each block.

    Raises
    ------
    NotAsBlocksError
        A comparison is there twice, or has a value that Postgres may refuse; or none is in a block.
    """

    def __init__(self, columns: Columns) -> None:
        n = len(columns["item"])
        keys = (columns[name] for name in ("captured_at", "exchange_id", "item"))
        if len(set(columns["exchange_id"])) < n and len(set(zip(*keys, strict=True))) < n:
            raise NotAsBlocksError
        groups = _groups(columns)
        self.few = [row for group in groups.values() if len(group["item"]) < LEAST for row in rows_of(group)]
        self.days = sorted({day for _, day in groups})
        self.blocks = [_values(group) for group in groups.values() if len(group["item"]) >= LEAST]
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
    keys = sorted(set(map(_KEY, rows)))
    values = {"times": [at for at, _ in keys], "ids": [str(exchange_id) for _, exchange_id in keys]}
    stored = {keys[place - 1] for place in await connection.scalars(_STORED, values)}
    return [row for row in rows if _KEY(row) not in stored] if stored else rows


def _groups(columns: Columns) -> dict[tuple[int, date], Columns]:
    """Return the comparisons of each version and UTC day."""
    times, versions = columns["captured_at"], columns["model_version_id"]
    first, last = day_of(min(times)), day_of(max(times))
    if first == last and len(set(versions)) == 1:
        return {(versions[0], first): columns}
    places: dict[tuple[int, date], list[int]] = {}
    for place, (version, at) in enumerate(zip(versions, times, strict=True)):
        places.setdefault((version, day_of(at)), []).append(place)
    return {
        group: {name: [values[place] for place in of_group] for name, values in columns.items()}
        for group, of_group in places.items()
    }


def _values(of: Columns) -> list[Any]:
    """Return the values of a block of comparisons of one version and UTC day, each exchange whole."""
    if not all(0 < pi <= 1 for name in ("pi1", "pi2") for pi in set(of[name])):
        raise NotAsBlocksError
    slices, changed, worst_changed, worst_other = _of_slices(of)
    group_ids, other_groups = _groups_of(of["group_key"])
    trace_ids, span_ids, other_traces = _traces(of["trace"])
    request_ids, attributes = _requests(of["attributes"])
    values: Columns = of | {
        "in_slices": _in_slices(of),
        "group_id": group_ids,
        "group_text": other_groups,
        "request_id": request_ids,
        "attributes": attributes,
        "trace_id": trace_ids,
        "span_id": span_ids,
        "trace_text": other_traces,
    }
    texts = {name: _column(name, kind, values[name]) for name, kind in _KINDS.items()}
    form = _JOINED
    if texts["margin"] and _is_difference(of, texts["margin"]):
        form, texts["margin"] = _WITHOUT_MARGIN, None
    times = of["captured_at"]
    return [
        of["model_version_id"][0],
        min(times),
        max(times),
        len(times),
        of["flip"].count(True),
        slices,
        changed,
        worst_changed,
        worst_other,
        form,
        *texts.values(),
    ]


def _of_slices(of: Columns) -> tuple[str, str, str, str]:
    """Return the slices, and of each how many decisions differ, the largest divergence of these and that of the others, as arrays."""
    changed: dict[int, int] = {}
    worst: tuple[dict[int, float], dict[int, float]] = {}, {}
    for slice_ids, flip, divergence in zip(of["slice_ids"], of["flip"], of["divergence"], strict=True):
        if flip:
            for slice_id in slice_ids:
                changed[slice_id] = changed.get(slice_id, 0) + 1
        if divergence is not None:
            of_these = worst[bool(flip)]
            for slice_id in slice_ids:
                known = of_these.get(slice_id)
                # As Postgres orders them: NaN is larger than infinity.
                if known is None or divergence > known or divergence != divergence:  # noqa: PLR0124
                    of_these[slice_id] = divergence
    slices = sorted(set().union(*of["slice_ids"]))
    return (
        _numbers(slices),
        _numbers([changed.get(slice_id, 0) for slice_id in slices]),
        _numbers(list(map(worst[True].get, slices))),
        _numbers(list(map(worst[False].get, slices))),
    )


def _in_slices(of: Columns) -> list[list[int] | None]:
    """Return of each item whose exchange has several how many of these are in each of its slices."""
    if of["n_items"].count(1) == len(of["n_items"]):
        return [None] * len(of["n_items"])
    counts: dict[Any, Counter[int]] = {}
    for exchange_id, slice_ids in zip(of["exchange_id"], of["slice_ids"], strict=True):
        counts.setdefault(exchange_id, Counter()).update(slice_ids)
    return [
        None if n == 1 or not slice_ids else [counts[exchange_id][slice_id] for slice_id in slice_ids]
        for exchange_id, slice_ids, n in zip(of["exchange_id"], of["slice_ids"], of["n_items"], strict=True)
    ]


def _are_hexadecimal(joined: str, n: int) -> bool:
    """Return whether a text has just `n` hexadecimal digits, in lower case."""
    try:
        # Spaces are skipped there, so that fewer digits are left.
        return len(bytes.fromhex(joined)) * 2 == n == len(joined) and joined == joined.lower()
    except ValueError:
        return False


def _are_at(joined: str, length: int, places: Mapping[int, str]) -> bool:
    """Return whether each of the texts that were joined, of `length` each, has these characters at these places."""
    n = len(joined) // length
    return all(joined[place::length] == character * n for place, character in places.items())


def _groups_of(keys: Sequence[str]) -> tuple[Sequence[str | None], Sequence[str | None]]:
    """Return the keys of groups that are hashes, and the others."""
    # Nearly always all are. That is found for all together, in a fraction of the time.
    if set(map(len, keys)) == {_HASH_LENGTH} and _are_hexadecimal("".join(keys), _HASH_LENGTH * len(keys)):
        return keys, [None] * len(keys)
    hashes = [key if _HASH.fullmatch(key) else None for key in keys]
    return hashes, [None if digest else key or None for key, digest in zip(keys, hashes, strict=True)]


def _requests(
    attributes: Sequence[Mapping[str, str]],
) -> tuple[Sequence[str | None], Sequence[Mapping[str, str]]]:
    """Return the request ids that are UUIDs, and the other attributes."""
    requests = [of.get(_REQUEST_ID) for of in attributes]
    if not _are_uuids(requests):
        requests = [
            request if request is not None and _UUID.fullmatch(request) else None for request in requests
        ]
    others = []
    for of, request in zip(attributes, requests, strict=True):
        if request is None:
            others.append(of)
        else:
            other = dict(of)
            del other[_REQUEST_ID]
            others.append(other)
    return requests, others


def _are_uuids(texts: Sequence[str | None]) -> bool:
    """Return whether all are UUIDs in lower case with hyphens."""
    if None in texts:
        return False
    known = [text for text in texts if text is not None]
    joined = "".join(known)
    return (
        set(map(len, known)) == {_UUID_LENGTH}
        and _are_at(joined, _UUID_LENGTH, dict.fromkeys(_HYPHENS, "-"))
        and _are_hexadecimal(joined.replace("-", ""), _HASH_LENGTH * len(known))
    )


def _is_difference(of: Columns, margins: str) -> bool:
    """Return whether each margin is what Postgres computes of the two others, bit for bit."""
    return "-0.0" not in margins and all(
        margin is None
        if candidate is None or reference is None
        else margin == abs(candidate - reference) and margin < _LARGE
        for margin, candidate, reference in zip(
            of["margin"], of["candidate_margin"], of["reference_margin"], strict=True
        )
    )


def _column(name: str, kind: str, values: Sequence[Any]) -> Any:
    """Return the values of a column as `_READ` reads them, or None where all are null.

    Raises
    ------
    NotAsBlocksError
        A text has the character that separates texts, or JSON one that Postgres does not take.
    """
    if values[0] is None and values.count(None) == len(values):
        return None
    if kind == "timestamptz":
        return values
    if kind == "text" or name == "detail":
        joined = BETWEEN.join(
            [_NOTHING if value is None else value for value in values] if None in values else values
        )
        if joined.count(BETWEEN) != len(values) - 1 or joined.count(_NOTHING) != values.count(None):
            raise NotAsBlocksError
        if name == "detail":
            _check(joined)
        return joined
    if kind == "joined":
        lines = json_lines(values)[:-1]
        if name in {"slice_ids", "in_slices"}:
            lines = lines.translate(_ARRAY).replace("null", _NOTHING)
        elif "\\u" in lines and _NOT_IN_JSONB.search(lines):
            raise NotAsBlocksError
        return lines.replace("\n", BETWEEN)
    if kind == "uuid":
        texts = (
            ["NULL" if value is None else str(value) for value in values]
            if None in values
            else map(str, values)
        )
        return f"{{{','.join(texts)}}}"
    return _numbers(values)


def _numbers(values: Sequence[Any]) -> str:
    """Return an array of numbers or truth values as Postgres reads it; each is the same when it is read again."""
    text = _ENCODE(values).decode()
    if text.count("null") == values.count(None):
        return f"{{{text[1:-1]}}}"
    # JSON has neither NaN nor infinities.
    return f"{{{','.join(['NULL' if value is None else repr(value) for value in values])}}}"


def _check(joined: str) -> None:
    """Refuse details that Postgres might not read as JSON."""
    if "\\u" in joined and _NOT_IN_JSONB.search(joined):
        raise NotAsBlocksError
    try:
        _RAW.decode(f"[{joined.replace(BETWEEN, ',').replace(_NOTHING, 'null')}]")
    except (msgspec.DecodeError, UnicodeError) as error:
        raise NotAsBlocksError from error


def _traces(traces: Sequence[str]) -> tuple[Sequence[str | None], Sequence[int | None], Sequence[str | None]]:
    """Return trace and span of those that are sampled traceparents of version 00, as a UUID and as Postgres' bigint, and the others."""
    joined = "".join(traces)
    if (
        set(map(len, traces)) == {_TRACE_LENGTH}
        and _are_at(joined, _TRACE_LENGTH, _OF_TRACE)
        and _are_hexadecimal(joined.replace("-", ""), (_TRACE_LENGTH - 3) * len(traces))
    ):
        parts = joined.split("-")  # version, trace, span, flags and the version of the next
        spans = bytes.fromhex("".join(parts[2::3]))
        return parts[1::3], unpack(f">{len(traces)}q", spans), [None] * len(traces)
    matches = list(map(_TRACE.fullmatch, traces))
    return (
        [None if match is None else match[1] for match in matches],
        [None if match is None else unpack(">q", bytes.fromhex(match[2]))[0] for match in matches],
        [trace or None if match is None else None for trace, match in zip(traces, matches, strict=True)],
    )

"""A seeded stream with an onset: overlapping slices, known margins and a known cause, as rows in Postgres."""

import random
from datetime import timedelta
from typing import Protocol

import asyncpg
import msgspec

from quantdrift.storage.fold_rows import from_us
from tests.support.monitor.fold_stream import BEGIN, BEGIN_US, POLICY, SECOND_US
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons

ALL, FAINT, DARK, CLEAR = 1, 2, 3, 4
VERSION, SUCCESSOR = 1, 2
NAMES = {ALL: "all", FAINT: "faint", DARK: "dark", CLEAR: "clear"}
ONSET_S = 400
CPU = {"runtime": "onnxruntime", "version": "1.31.0", "provider": "CPUExecutionProvider", "device": "cpu"}
CUDA = {**CPU, "provider": "CUDAExecutionProvider", "device": "NVIDIA H200"}


class Draw(Protocol):
    """What an item is like."""

    def __call__(self, rng: random.Random, slices: set[int], *, since: bool) -> tuple[float, float]:
        """Return its margin and its chance of a flip, before or `since` the onset."""
        ...


def damage(rng: random.Random, slices: set[int], *, since: bool) -> tuple[float, float]:
    """Return an item that flips in `dark` since the onset, whatever its margin."""
    return rng.uniform(0.05, 1.0), 0.35 if since and DARK in slices else 0.002


def input_shift(rng: random.Random, slices: set[int], *, since: bool) -> tuple[float, float]:
    """Return an item that flips where its margin is small, which most of `faint` are since the onset."""
    close = rng.random() < (0.5 if since and FAINT in slices else 0.02)
    return (rng.uniform(0.001, 0.04), 0.2) if close else (rng.uniform(0.3, 1.0), 0.0005)


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One item of its own exchange."""

    at_us: int
    exchange: str
    slices: tuple[int, ...]
    margin: float
    flip: bool
    divergence: float


def items(draw: Draw, *, seconds: int = 540, per_s: int = 10, seed: int = 1) -> list[Item]:
    """Return a stream in which 40 % is `faint`, a third of that `dark`; the onset is at 400 s."""
    rng = random.Random(seed)
    found = []
    for number in range(seconds * per_s):
        at_us = BEGIN_US + number * SECOND_US // per_s
        slices = {ALL, FAINT if rng.random() < 0.4 else CLEAR}
        if FAINT in slices and rng.random() < 1 / 3:
            slices.add(DARK)
        margin, chance = draw(rng, slices, since=at_us >= BEGIN_US + ONSET_S * SECOND_US)
        flip = rng.random() < chance
        found.append(
            Item(
                at_us=at_us,
                exchange=f"{rng.getrandbits(128):032x}",
                slices=tuple(sorted(slices)),
                margin=margin,
                flip=flip,
                divergence=rng.expovariate(1 / (0.2 if flip else 0.001)),
            )
        )
    return found


async def store_names(connection: asyncpg.Connection) -> None:
    """Insert version, slices, policy and the partition."""
    await connection.execute(
        "insert into model_version (id, model, candidate_version, reference_digest, first_seen_at)"
        " overriding system value values ($1, 'digits', '1', repeat('d', 64), $2)",
        VERSION,
        BEGIN - timedelta(days=30),
    )
    for number, name in NAMES.items():
        where = [] if number == ALL else [{"key": "header.x-scanner", "equals": name}]
        await connection.execute(
            "insert into slice (id, model, predicate, name, definition) overriding system value"
            " values ($1, 'digits', $2, $3, $4)",
            number,
            "true" if number == ALL else f'header.x-scanner = "{name}"',
            name,
            msgspec.json.encode({"where": where}).decode(),
        )
    await connection.execute(
        "insert into policy (id, epoch, definition) overriding system value values (1, 'e1', $1)",
        msgspec.json.encode(POLICY).decode(),
    )
    await make_partitions(connection, [BEGIN.date()])


async def store_successor(connection: asyncpg.Connection) -> None:
    """Insert the version that is first seen at the onset."""
    await connection.execute(
        "insert into model_version (id, model, candidate_version, reference_digest, first_seen_at)"
        " overriding system value values ($1, 'digits', '2', repeat('d', 64), $2)",
        SUCCESSOR,
        from_us(BEGIN_US + ONSET_S * SECOND_US),
    )


async def store_items(
    connection: asyncpg.Connection,
    stream: list[Item],
    *,
    per_batch: int = 50,
    engine: bool = False,
    successor: bool = False,
) -> int:
    """Insert the stream in batches; return how many.

    With `engine` another provider replays since the onset, with `successor` another version answers.
    """
    onset_us = BEGIN_US + ONSET_S * SECOND_US
    for first in range(0, len(stream), per_batch):
        part = stream[first : first + per_batch]
        since = part[0].at_us >= onset_us
        provenance = CUDA if engine and since else CPU
        version = SUCCESSOR if successor and since else VERSION
        batch = await connection.fetchval(
            "insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows, provenance)"
            " values ('comparison', 'w', $2, $1, $2, $3, $4) returning id",
            from_us(part[0].at_us),
            from_us(part[-1].at_us),
            len(part),
            msgspec.json.encode(provenance).decode(),
        )
        await store_comparisons(
            connection,
            [
                Comparison(
                    captured_at=from_us(one.at_us),
                    exchange_id=one.exchange,
                    batch_id=batch,
                    model_version_id=version,
                    slice_ids=one.slices,
                    flip=one.flip,
                    js=0.0,
                    divergence=one.divergence,
                    candidate_margin=one.margin,
                    reference_margin=one.margin,
                )
                for one in part
            ],
        )
    return -(-len(stream) // per_batch)

"""Messages that a stolen key of a sidecar can publish, read by a real shadow worker from a real stream."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest

from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Capture, Config, Model, Reference, Slice
from quantdrift.core.records import (
    BodyStratum,
    Exchange,
    HeaderStratum,
    ModelCount,
    Policy,
    Predicate,
    StratumCount,
    Tally,
    Tensor,
)
from quantdrift.core.stream.connection import Queue
from quantdrift.shadow.pipeline import reader
from tests.support.shadow.onnx_models import exchange_of, inputs_of, linear_model, saved
from tests.support.shadow.shadow_workers import serving, worker_config

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0
HASHED = "0123456789abcdef" * 2


@pytest.fixture
def config(tmp_path: Path, nats_url: str) -> Config:
    """Return a configuration with two models, that records two headers, one of them hashed."""
    path = saved(linear_model(), tmp_path / "linear.onnx")
    models = [
        Model(name=name, references=(Reference(path=str(path), versions=("int8*",)),))
        for name in ("digits", "letters")
    ]
    return msgspec.structs.replace(
        worker_config(nats_url, models, ack_wait_s=2.0, max_deliveries=2),
        capture=Capture(headers=("x-scanner", "x-user"), hmac=("header.x-user",)),
        slices=(Slice(name="scanner", header="x-scanner"), Slice(name="user", header="x-user")),
    )


async def _until(ask: Callable[[], Awaitable[bool]], what: str) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not await ask():
        assert time.monotonic() < until_s, what
        await asyncio.sleep(0.02)


def _with(**changes: Any) -> Exchange:
    return msgspec.structs.replace(exchange_of(inputs_of(1)), **changes)


def _sampled(**changes: Any) -> Exchange:
    one = exchange_of(inputs_of(1))
    return msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, **changes))


def _ruled(
    rate: float = 1.0, name: str = "default", n: int = 1, where: tuple[Predicate, ...] = ()
) -> Exchange:
    policy = Policy(
        epoch="forged",
        header_strata=(HeaderStratum(name=name, rate=rate),) * n,
        body_strata=(BodyStratum(name="default", rate=1.0, where=where),),
    )
    return _sampled(policy=policy)


def _shaped(*shape: int) -> Exchange:
    return _with(inputs=(Tensor(name="x", datatype="FP32", shape=shape, data=b""),))


def _hostile() -> list[tuple[str, Exchange]]:
    """Return what to publish under the subject of `digits`, with the reason that it is refused for."""
    now = datetime.now(UTC)
    return [
        ("subject", _with(model="letters")),
        ("subject", _with(model="")),
        ("too_early", _with(captured_at=now + timedelta(days=2))),
        ("limits", _with(version="v" * 100_000)),
        ("limits", _with(source="s" * 100_000)),
        ("limits", _with(group="g" * 100_000)),
        ("limits", _with(trace="t" * 100_000)),
        ("limits", _with(attributes={f"header.x-{n}": "a" for n in range(1000)})),
        ("limits", _with(attributes={"header.x-scanner": "a" * 5000})),
        ("limits", _with(attributes={"header." + "x" * 5000: "a"})),
        ("limits", _with(inputs=exchange_of(inputs_of(1)).inputs * 300)),
        ("limits", _shaped(0, 2**62)),
        ("limits", _shaped(*(1,) * 60)),
        ("limits", _sampled(pi1=1e-300, u1=0.0)),
        ("limits", _ruled(n=2000)),
        ("limits", _ruled(name="n" * 100_000)),
        ("decode", _ruled(rate=float("nan"))),
        ("decode", _ruled(rate=-1.0)),
        ("decode", _ruled(rate=1e300)),
        ("decode", _ruled(name="a\0b")),
        ("decode", _ruled(where=(Predicate(key="feature.x", low=float("inf")),))),
    ]


async def test_a_hostile_message_is_refused_with_a_reason_and_no_other_is_affected(
    config: Config, postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """Each is quarantined under the model of its subject; an honest exchange after it is compared."""
    hostile = _hostile()
    honest = [exchange_of(inputs_of(1, seed)) for seed in range(3)]
    async with serving(config, postgres_dsn) as queue:
        for _, one in hostile:
            await queue.publish_exchange("digits", one.id, encode(one))
        for one in honest:
            await queue.publish_exchange("digits", one.id, encode(one))

        async def finished() -> bool:
            counts = await record.fetchrow(
                "select (select count(*) from quarantine) as refused, (select count(*) from comparison) as compared"
            )
            return bool(counts["refused"] + counts["compared"] >= len(hostile) + len(honest))

        await _until(finished, "all are quarantined or compared")
    rows = await record.fetch("select reason, model from quarantine order by stream_sequence")
    assert [row["reason"] for row in rows] == [reason for reason, _ in hostile]
    assert {row["model"] for row in rows} == {"digits"}
    compared = await record.fetch("select exchange_id from comparison")
    assert {row["exchange_id"].hex for row in compared} == {one.id for one in honest}
    assert await record.fetchval("select count(*) from policy where epoch = 'forged'") == 0
    assert await record.fetchval("select count(*) from model_version where model <> 'digits'") == 0


async def test_attributes_that_the_shadow_does_not_record_are_dropped(
    config: Config, postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """An attribute outside the list, and a value in the clear that must be a hash, make no slice; the rest is compared."""
    name = "anna@example.org"
    given = [
        _with(attributes={"header.x-scanner": "faint", "header.cookie": name, "header.x-user": name}),
        _with(attributes={"header.x-scanner": "faint", "header.x-user": HASHED}),
    ]
    async with serving(config, postgres_dsn) as queue:
        for one in given:
            await queue.publish_exchange("digits", one.id, encode(one))

        async def compared() -> bool:
            return bool(await record.fetchval("select count(*) from comparison") == len(given))

        await _until(compared, "both are compared")
    names = [row["name"] for row in await record.fetch("select name from slice order by name")]
    assert names == ["all", "scanner=faint", f"user={HASHED}"]


async def test_a_hostile_tally_is_dropped_and_the_next_one_is_stored(
    config: Config, postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """Counts that the database has no room for, another sidecar's name, and names of any size are not stored."""

    def tally(source: str, **changes: Any) -> Tally:
        stratum = StratumCount(stratum="default", offered=9, taken=5, thinned=1, published=3)
        return Tally(
            source=source,
            boot="f" * 32,
            sequence=1,
            at=datetime.now(UTC),
            strata=(msgspec.structs.replace(stratum, **changes),),
            blind_connections=0,
        )

    hostile = {
        "huge": tally("huge", offered=2**63),
        "negative": tally("negative", taken=-5),
        "forged": tally("honest", offered=1_000_000),
        "long": tally("long", stratum="s" * 100_000),
        "many": tally("many", models={f"m{n}": ModelCount(taken=1) for n in range(20_000)}),
    }
    async with serving(config, postgres_dsn) as queue:
        for source, one in hostile.items():
            await queue.publish_tally(source, one.boot, 1, encode(one))
        honest = tally("honest")
        await queue.publish_tally("honest", honest.boot, 1, encode(honest))

        async def stored() -> bool:
            return bool(await record.fetchval("select count(*) from tally where source = 'honest'"))

        await _until(stored, "the honest tally is stored")
    rows = await record.fetch("select source, offered from tally")
    assert [tuple(row) for row in rows] == [("honest", 9)]


async def test_models_that_nobody_configured_are_read_up_to_a_number(
    config: Config,
    postgres_dsn: str,
    record: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each needs a reader and a consumer at the server: a flood of names makes no more than some, and says so once."""
    monkeypatch.setattr(reader, "MOST_OTHER_MODELS", 3)
    async with serving(config, postgres_dsn) as queue:
        for number in range(8):
            one = _with(model=f"forged-{number}")
            await queue.publish_exchange(one.model, one.id, encode(one))

        async def warned() -> bool:
            return "are not read" in caplog.text

        await _until(warned, "the worker says that it does not read them all")
        honest = exchange_of(inputs_of(1))
        await queue.publish_exchange("digits", honest.id, encode(honest))

        async def compared() -> bool:
            return bool(await record.fetchval("select count(*) from comparison") == 1)

        await _until(compared, "the honest one is compared")
        assert await _consumers(queue) <= 2 + 3
    assert await record.fetchval("select count(distinct model) from model_version") <= 1 + 3


async def _consumers(queue: Queue) -> int:
    jetstream = (await queue.live()).jetstream()
    return int((await jetstream.stream_info(queue.stream_name("exchange"))).state.consumer_count)

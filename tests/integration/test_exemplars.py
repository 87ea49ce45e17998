"""Exemplars with a real stream and a real database: what is kept, encrypted, bounded, shown and erased."""

import asyncio
import json
import secrets
import stat
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import msgspec
import numpy as np
import pytest

from quantdrift.core.clock import SystemClock
from quantdrift.core.codec import encode
from quantdrift.core.config.schema import MIB, Budget, Capture, Config, Model, Reference, Slice
from quantdrift.core.keys import Key, KeyRing, write_keys
from quantdrift.core.process.nats_server import ENCRYPTION, NatsServer, make_encryption
from quantdrift.core.records import Exchange, Exemplar, ExemplarItem, ExemplarKind, Tensor
from quantdrift.core.sealing import is_sealed
from quantdrift.core.stream import config as stream_config
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.config import EXEMPLAR_AGE_S, EXEMPLARS_EACH
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.exemplars import KeptExemplar, kept_exemplars
from quantdrift.release.diagnose.exemplars import exemplars, opener, waiting
from quantdrift.shadow.pipeline.exemplars import ExemplarKeeper, Offer
from quantdrift.show.page.exemplars import PageExemplars
from tests.support.commands import invoked
from tests.support.shadow.compared_exchanges import compared_of, item_of
from tests.support.shadow.onnx_models import exchange_of, inputs_of, linear_model, logits_of, saved
from tests.support.shadow.shadow_workers import published, serving, work_off, worker_config

pytestmark = pytest.mark.integration

MARKER = b"what-a-patient-sent-7f31"
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Return a server that encrypts its disk."""
    directory = tmp_path_factory.mktemp("encrypted") / "nats"
    make_encryption(directory)
    with NatsServer(directory, store_bytes=1 << 50) as made:
        yield made


@pytest.fixture
def config(tmp_path: Path, server: NatsServer) -> Config:
    """Return a configuration with a model that keeps exemplars, and a stream of its own."""
    path = saved(linear_model(), tmp_path / "fp32.onnx")
    model = Model(
        name="digits",
        exemplars=True,
        budget=Budget(divergence=0.5),
        references=(Reference(path=str(path)),),
    )
    found = worker_config(server.url, [model])
    return msgspec.structs.replace(
        found,
        capture=Capture(headers=("x-scanner", "x-user")),
        slices=(Slice(name="scanner", header="x-scanner"),),
    )


def of_scanner(scanner: str, seed: int, *, flips: bool = False, user: str = "ada") -> Exchange:
    """Return an exchange of one item, with the marker in an input that the reference takes as a number."""
    x = inputs_of(1, seed)
    outputs = logits_of(x)
    attributes = {"header.x-scanner": scanner, "header.x-user": user}
    return exchange_of(x, -outputs if flips else outputs, attributes=attributes)


def written(config: Config, directory: Path) -> Path:
    """Write the configuration for commands, and return the directory."""
    (directory / "config.toml").write_text(f"""
[stream]
url = "{config.stream.url}"
name = "{config.stream.name}"
payload_key_file = "{config.stream.payload_key_file}"
exemplar_bytes = {config.stream.exemplar_bytes}
[capture]
headers = ["x-scanner", "x-user"]
[[models]]
name = "digits"
exemplars = true
[[models.references]]
path = "fp32.onnx"
[[slices]]
name = "scanner"
header = "x-scanner"
""")
    return directory


async def _until(ask: Callable[[], Awaitable[bool]]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not await ask():
        assert time.monotonic() < until_s, "it did not happen in time"
        await asyncio.sleep(0.01)


async def kept_of(queue: Queue, slice_name: str = "", *, payload: bool = False) -> list[KeptExemplar]:
    """Return what is kept."""
    return [one async for one in kept_exemplars(queue, slice_name=slice_name, payload=payload)]


async def compared(config: Config, dsn: str, given: list[Exchange], n_kept: int) -> None:
    """Publish exchanges, and run a worker until they are compared and so many exemplars of all slices are kept."""
    async with serving(config, dsn) as queue:
        await queue.ensure()
        for exchange in given:
            await queue.publish_exchange(exchange.model, exchange.id, encode(exchange))

        async def done() -> bool:
            return not (await read_backlog(queue)).n_messages and len(await kept_of(queue)) >= n_kept

        await _until(done)


async def test_an_exemplar_has_what_was_compared(config: Config, postgres_dsn: str) -> None:
    """Inputs, served and reference outputs, ids, probabilities; a healthy exchange is random only."""
    fine, flipped = of_scanner("office", 1), of_scanner("archive", 2, flips=True)
    # of both: `all` and its scanner, at random; the flipped one as damaged, too
    await compared(config, postgres_dsn, [fine, flipped], 6)
    queue = await Queue.connect(config.stream, client_name="test")
    found = [one async for one in exemplars(queue, "digits", "scanner=archive", opened=opener(config.stream))]
    healthy = [
        one async for one in exemplars(queue, "digits", "scanner=office", opened=opener(config.stream))
    ]
    info = await (await queue.live()).jetstream().stream_info(queue.stream_name("exemplar"))
    await queue.close()
    assert {one.kind for one in healthy} == {ExemplarKind.RANDOM}
    by_kind = {one.kind: one for one in found}
    assert by_kind.keys() == {ExemplarKind.DAMAGED, ExemplarKind.RANDOM}
    damaged, drawn = by_kind[ExemplarKind.DAMAGED], by_kind[ExemplarKind.RANDOM]
    assert damaged.exchange == drawn.exchange == flipped
    assert [item.flip for item in damaged.items] == [True]
    assert (damaged.pi, drawn.pi) == (None, 0.5)
    (reference,) = damaged.reference
    np.testing.assert_allclose(
        np.frombuffer(reference.data, np.float32),
        logits_of(inputs_of(1, 2))[0],
        rtol=1e-5,
    )
    assert info.config.max_age == EXEMPLAR_AGE_S
    assert info.config.max_bytes == config.stream.exemplar_bytes
    assert info.config.max_msgs_per_subject == EXEMPLARS_EACH


async def test_at_most_64_of_a_kind_are_kept_and_nothing_is_readable_on_disk(
    config: Config, postgres_dsn: str, server: NatsServer
) -> None:
    """Of more than 128 flipped exchanges 64 stay, and neither a payload nor the key's file is open to others."""
    async with serving(config, postgres_dsn) as queue:
        await queue.ensure()
        n_given = 0

        async def full() -> bool:
            nonlocal n_given
            one = of_scanner("archive", n_given, flips=True, user=MARKER.decode())
            await queue.publish_exchange(one.model, one.id, encode(one))
            n_given += 1
            damaged = kept_exemplars(queue, slice_name="scanner=archive", kind="damaged")
            n_damaged = len([one async for one in damaged])
            return n_given > 2 * EXEMPLARS_EACH and n_damaged == EXEMPLARS_EACH

        await _until(full)
        for number in range(EXEMPLARS_EACH):
            await queue.publish_exemplar("digits", "scanner=archive", "random", f"{number}", b"older")
        found = await kept_of(queue, "scanner=archive", payload=True)
        oldest = {one.data for one in found if one.kind is ExemplarKind.RANDOM}
        assert oldest == {b"older"}  # 64 newer ones have displaced all before them
        found = [one for one in found if one.data != b"older"]
    assert all(MARKER in one.data for one in found)
    counts = {kind: sum(one.kind is kind for one in found) for kind in ExemplarKind}
    assert counts[ExemplarKind.DAMAGED] == EXEMPLARS_EACH
    files = [path for path in (server.directory / "store").rglob("*") if path.is_file()]
    assert any(path.suffix == ".blk" for path in files)
    assert not [path for path in files if MARKER in path.read_bytes()]
    key = server.directory / ENCRYPTION
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert key.read_text().split('"')[1] not in server.log.read_text()


async def test_a_server_whose_disk_was_plain_encrypts_it_and_loses_nothing(tmp_path: Path) -> None:
    """Exemplars can be switched on in an installation that runs, and after that every start reads what was stored."""
    server = NatsServer(tmp_path / "nats", store_bytes=1 << 40)
    config = worker_config("nats://unused", [Model(name="digits")])
    for start in range(3):
        server.start()
        stream = msgspec.structs.replace(config.stream, url=server.url)
        queue = await published(
            msgspec.structs.replace(config, stream=stream),
            [exchange_of(inputs_of(1), attributes={"header.x-user": MARKER.decode()})],
        )
        await queue.publish_tally("pod", "boot", start, MARKER)
        assert (await read_backlog(queue)).n_messages == start + 1
        await queue.close()
        server.stop()
        on_disk = [
            path
            for path in (tmp_path / "nats" / "store").rglob("*")
            if path.is_file() and MARKER in path.read_bytes()
        ]
        assert bool(on_disk) == (start == 0)
        make_encryption(tmp_path / "nats")


async def test_comparisons_go_on_while_the_stream_of_exemplars_is_refused(
    config: Config, postgres_dsn: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server without room for the stream costs exemplars alone, and the log says so once."""
    with NatsServer(tmp_path / "small", store_bytes=128 << 20) as small:
        stream = msgspec.structs.replace(config.stream, url=small.url, max_bytes=16 << 20)
        full = msgspec.structs.replace(config, stream=stream)
        await work_off(full, postgres_dsn, [of_scanner("archive", seed, flips=True) for seed in range(40)])
    connection = await asyncpg.connect(postgres_dsn)
    assert await connection.fetchval("select count(*) from comparison") == 40
    await connection.close()
    warned = [one for one in caplog.records if "exemplars are not kept" in one.getMessage()]
    assert len(warned) == 1


async def test_while_nats_is_away_offers_return_at_once_and_exemplars_are_dropped_and_counted(
    config: Config, tmp_path: Path
) -> None:
    """Nothing waits for the stream, nothing piles up, and once it is back exemplars are kept again."""
    counts: Counter[str] = Counter()

    def count(_model: str, outcome: str, number: int) -> None:
        counts[outcome] += number

    given = [compared_of(item_of(flip=True)) for _ in range(10)]
    offer = Offer(compared=given, outputs={1: {}}, without_place=frozenset(), at=datetime.now(UTC))
    with NatsServer(tmp_path / "away", store_bytes=1 << 40) as away:
        stream = msgspec.structs.replace(config.stream, url=away.url)
        queue = await Queue.connect(stream, client_name="test")
        keeper = ExemplarKeeper(config, queue, SystemClock(), count=count)
        away.kill()
        for _ in range(5):
            keeper.offer(offer)
        assert counts["busy"] == 40  # one batch waits, four are left out
        await asyncio.wait_for(keeper.keep_one(), DEADLINE_S)
        assert counts.keys() == {"busy", "unavailable"}
        assert counts["unavailable"] >= 10
        away.start()
        await asyncio.wait_for(queue.wait_connected(), DEADLINE_S)
        again = msgspec.structs.replace(offer, compared=[compared_of(item_of(flip=True))])
        keeper.offer(again)
        await asyncio.wait_for(keeper.keep_one(), DEADLINE_S)
        assert counts["stored"] >= 1
        await queue.close()


async def test_without_the_option_nothing_is_kept(config: Config, postgres_dsn: str) -> None:
    """Not even the stream is created."""
    off = tuple(msgspec.structs.replace(model, exemplars=False) for model in config.models)
    given = [of_scanner("archive", seed, flips=True) for seed in range(5)]
    await work_off(msgspec.structs.replace(config, models=off), postgres_dsn, given)
    queue = await Queue.connect(config.stream, client_name="test")
    info = await (await queue.live()).jetstream().streams_info()
    await queue.close()
    assert queue.stream_name("exemplar") not in {one.config.name for one in info}


async def test_with_a_payload_key_exemplars_are_encrypted_before_they_reach_nats(
    config: Config, postgres_dsn: str, tmp_path: Path
) -> None:
    """Whoever administers NATS cannot read them, and who has the key can."""
    file = tmp_path / "payload.key"
    write_keys(file, KeyRing(keys=(Key.create(datetime.now(UTC)),)), is_new=True)
    sealed = msgspec.structs.replace(
        config, stream=msgspec.structs.replace(config.stream, payload_key_file=str(file))
    )
    await compared(sealed, postgres_dsn, [of_scanner("archive", 1, flips=True)], 4)
    queue = await Queue.connect(config.stream, client_name="test")
    found = await kept_of(queue, payload=True)
    read = [one async for one in exemplars(queue, "digits", "all", opened=opener(sealed.stream))]
    problems: list[str] = []
    unread = [
        one
        async for one in exemplars(
            queue, "digits", "all", opened=opener(config.stream), unreadable=problems.append
        )
    ]
    await queue.close()
    assert all(is_sealed(one.data) for one in found)
    assert len(read) == 2
    assert (unread, len(problems)) == ([], 2)


async def test_the_command_lists_shows_and_erases_without_a_payload(
    config: Config, postgres_dsn: str, tmp_path: Path
) -> None:
    """`quantdrift exemplars`, as typed; an erasure of a slice leaves the others, and is in the audit."""
    given = [of_scanner("archive", 1, flips=True), of_scanner("office", 2)]
    await compared(config, postgres_dsn, given, 6)
    directory = written(config, tmp_path)
    listed = await asyncio.to_thread(invoked, "exemplars", "list", "--json", directory=directory)
    assert listed.returncode == 0, listed.stderr
    groups = {(one["slice"], one["kind"]): one for one in json.loads(listed.stdout)["exemplars"]}
    assert groups["scanner=archive", "damaged"]["count"] == 1
    assert groups["all", "random"]["count"] == 2
    assert all(one["bytes"] > 100 for one in groups.values())
    table = await asyncio.to_thread(invoked, "exemplars", "list", directory=directory)
    assert "scanner=archive" in table.stdout
    for more in ((), ("--json",)):
        shown = await asyncio.to_thread(
            invoked, "exemplars", "show", "digits", "scanner=archive", *more, directory=directory
        )
        assert shown.returncode == 0, shown.stderr
        assert given[0].id in shown.stdout
        assert "x FP32[1, 4]" in shown.stdout
    erased = await asyncio.to_thread(
        invoked,
        *("exemplars", "erase", "--slice", "scanner=archive", "--yes", "--json", "--reason", "ticket 7"),
        directory=directory,
        QUANTDRIFT_DSN=postgres_dsn,
    )
    assert erased.returncode == 0, erased.stderr
    assert json.loads(erased.stdout) == {"erased": 2}
    queue = await Queue.connect(config.stream, client_name="test")
    assert {one.slice for one in await kept_of(queue)} == {"all", "scanner=office"}
    await queue.close()
    connection = await asyncpg.connect(postgres_dsn)
    row = await connection.fetchrow("select * from audit where action = 'exemplars erase'")
    await connection.close()
    assert row is not None
    assert (row["subject"], row["note"]) == ("scanner=archive", "ticket 7")


async def test_large_exemplars_displace_those_of_other_slices_and_the_command_says_so(
    config: Config, tmp_path: Path
) -> None:
    """The disk space of all is `stream.exemplar_bytes`; a shadow that starts with more of it raises the limit."""
    small = msgspec.structs.replace(config.stream, exemplar_bytes=MIB)
    for stream, n_busy, n_quiet in ((small, 7, 0), (config.stream, 7 + 15, 1)):
        queue = await Queue.connect(stream, client_name="test")
        await queue.ensure_exemplars()
        for name in ("quiet", *["busy"] * 15):
            await queue.publish_exemplar("digits", name, "random", secrets.token_hex(16), bytes(140_000))
        assert len(await kept_of(queue, "busy")) == n_busy
        assert len(await kept_of(queue, "quiet")) == n_quiet
        await queue.close()
        directory = written(msgspec.structs.replace(config, stream=stream), tmp_path)
        listed = await asyncio.to_thread(invoked, "exemplars", "list", directory=directory)
        said = "The stream is full, with 1.0 of 1.0 MB" in listed.stderr
        assert said == (stream is small)


async def test_a_request_of_a_person_finds_and_erases_exemplars(
    config: Config, postgres_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`privacy erase` deletes those of one user from every slice, and of nobody else."""
    monkeypatch.setattr(stream_config, "LONGEST_S", 0.0)  # no worker runs any more
    given = [of_scanner("archive", seed, flips=True, user=user) for seed, user in ((1, "ada"), (2, "grace"))]
    await compared(config, postgres_dsn, given, 8)
    directory = written(config, tmp_path)

    async def privacy(*words: str) -> dict[str, int]:
        done = await asyncio.to_thread(
            invoked, "privacy", *words, "--json", directory=directory, QUANTDRIFT_DSN=postgres_dsn
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        return {one["place"]: one["n"] for one in answer.get("found", answer.get("erased"))}

    assert (await privacy("find", "header.x-user", "ada"))["exemplars"] == 4
    assert (await privacy("erase", "header.x-user", "ada", "--yes"))["exemplars"] == 4
    assert "exemplars" not in await privacy("find", "header.x-user", "ada")
    assert (await privacy("find", "header.x-user", "grace"))["exemplars"] == 4


async def test_without_exemplars_those_that_wait_can_be_read(config: Config) -> None:
    """They stay for the workers, in the order in which they were stored."""
    given = [of_scanner("archive", seed) for seed in range(3)]
    queue = await published(config, given)
    found = [one async for one in waiting(queue, "digits", opened=opener(config.stream))]
    assert [one.id for one in found] == [one.id for one in given]
    assert (await read_backlog(queue)).n_messages == 3
    nothing = [one async for one in exemplars(queue, "digits", "all", opened=opener(config.stream))]
    assert nothing == []
    await queue.close()


async def test_the_page_draws_exemplars_that_are_images(config: Config) -> None:
    """The most damaged one first, of this version alone; other kinds and other slices are not read."""
    image = np.eye(16, dtype=np.float32)[np.newaxis]
    tensor = Tensor(name="image", datatype="FP32", shape=image.shape, data=image.tobytes())
    queue = await Queue.connect(config.stream, client_name="test")
    ids = []
    for divergence, version, kind in (
        (0.1, "int8", ExemplarKind.DAMAGED),
        (0.9, "int8", ExemplarKind.DAMAGED),
        (0.5, "other", ExemplarKind.DAMAGED),
        (0.0, "int8", ExemplarKind.RANDOM),
    ):
        exchange = msgspec.structs.replace(exchange_of(inputs_of(1)), inputs=(tensor,), version=version)
        exemplar = Exemplar(
            kind=kind,
            slice="scanner=archive",
            exchange=exchange,
            items=(ExemplarItem(index=0, divergence=divergence),),
            reference=(),
            reference_digest="",
            probability=None,
            compared_at=exchange.captured_at,
        )
        await queue.publish_exemplar("digits", "scanner=archive", kind.value, exchange.id, encode(exemplar))
        ids.append(exchange.id)
    await queue.close()
    page = PageExemplars(config.stream)
    shown = await page.shown("digits", ["scanner=archive"], "int8", ExemplarKind.DAMAGED)
    assert [picture.exchange_id for picture in shown.pictures] == [ids[1], ids[0]]
    assert shown.tokens == []
    assert not (await page.shown("digits", ["scanner=office"], "int8", ExemplarKind.DAMAGED)).pictures

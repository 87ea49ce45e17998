"""The rights of each role at a real NATS server: what it can do, and what a stolen key cannot."""

import asyncio
import base64
import logging
import shutil
import subprocess
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from deploy.kustomize import documents
from quantdrift.cli.run.setup import configuration, keys
from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Stream
from quantdrift.core.errors import RetryError
from quantdrift.core.process.child import ending_with_parent
from quantdrift.core.process.nats_server import find_program
from quantdrift.core.records import Loss, ModelCount, StratumCount, Tally
from quantdrift.core.sampling.pause import KEY as PAUSE
from quantdrift.core.sampling.rates import POLICY_VALID_S
from quantdrift.core.stream.backlog import are_tallies_read, read_backlog, read_waiting
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.exemplars import kept_exemplars
from quantdrift.core.stream.keyvalue import KeyValue
from quantdrift.core.stream.rights import NatsRole, inbox
from quantdrift.core.stream.search import search_stream, wait_for_workers
from quantdrift.core.stream.tallies import read_tally
from quantdrift.release.diagnose.exemplars import waiting
from tests.support import custom_resources
from tests.support.commands import invoked, started

pytestmark = pytest.mark.integration

SECRET = b"what a patient sent"


@asynccontextmanager
async def server_with(users: str, directory: Path) -> AsyncIterator[str]:
    """Run a server with these users in its authorization, and return its address."""
    (directory / "nats.conf").write_text(
        f'host: "127.0.0.1"\nport: -1\nhttp: "127.0.0.1:-1"\nports_file_dir: "{directory}"\n'
        f'jetstream {{ store_dir: "{directory / "store"}" }}\nauthorization {{\n{users}\n}}\n'
    )
    process = subprocess.Popen(  # noqa: ASYNC220 - a moment
        ending_with_parent([str(find_program()), "-c", str(directory / "nats.conf")]),
        stderr=subprocess.DEVNULL,
    )
    try:
        ports = directory / f"nats-server_{process.pid}.ports"
        async with asyncio.timeout(30):
            while not (ports.exists() and ports.read_bytes().rstrip().endswith(b"}")):
                await asyncio.sleep(0.01)
        yield msgspec.json.decode(ports.read_bytes())["nats"][0]
    finally:
        process.kill()
        process.wait()


@pytest.fixture
async def stream(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stream]:
    """Run a server with the users that `quantdrift setup nats` prints, and let the command create the streams.

    A parameter has more words for the command.
    """
    config_path = tmp_path / "config.toml"
    config_path.write_text("[sidecar]\n")
    printed = invoked("setup", "nats", *getattr(request, "param", ()), directory=tmp_path)
    assert printed.returncode == 0, printed.stderr
    async with server_with(printed.stdout, tmp_path) as address:
        config_path.write_text(f'[stream]\nurl = "{address}"\n')
        applied = await asyncio.to_thread(started, "setup", "nats", "--apply", directory=tmp_path)
        assert applied.returncode == 0, applied.stderr
        yield Stream(url=address)


def of(stream: Stream, role: NatsRole, tmp_path: Path) -> Stream:
    """Return the configuration of a role, with its key."""
    return msgspec.structs.replace(stream, credentials_file=str(tmp_path / "nats-keys" / f"{role}.nk"))


async def test_each_role_can_do_its_work(
    stream: Stream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From capture to acknowledgement, with policy and pause, and the server refuses nothing."""
    caplog.set_level(logging.WARNING)
    queues = {
        role: await Queue.connect(of(stream, role, tmp_path), client_name=role, role=role)
        for role in NatsRole
        if role is not NatsRole.ADMIN
    }
    sidecar, shadow = queues[NatsRole.SIDECAR], queues[NatsRole.SHADOW]
    monitor, operator = queues[NatsRole.MONITOR], queues[NatsRole.OPERATOR]
    try:
        await sidecar.publish_exchange("tumour", "e1", SECRET)
        await sidecar.publish_tally("pod", "boot", 1, b"{}")
        assert await are_tallies_read(monitor) is False
        unread = await monitor.consumer("tally", ack_wait_s=10.0)
        (tally,) = await unread.fetch(1, max_bytes=1 << 20, timeout_s=10.0)
        await tally.ack()
        await sidecar.publish_tally("pod", "boot", 2, b"{}")
        await shadow.ensure()
        assert await shadow.models() == {"tumour"}
        for queue in (monitor, operator):
            assert (await read_backlog(queue)).n_messages == 1
            assert (await read_waiting(queue, ["tumour"]))["tumour"].n_messages == 1
        for kind in ("exchange", "tally"):
            consumer = await shadow.consumer(
                kind, ack_wait_s=10.0, model="tumour" if kind == "exchange" else None
            )
            (delivery,) = await consumer.fetch(1, max_bytes=1 << 20, timeout_s=10.0)
            await delivery.in_progress()
            await delivery.ack()
            assert await consumer.pending() == 0
        await shadow.ensure_exemplars()
        await shadow.publish_exemplar("tumour", "all", "random", "e1", SECRET)
        for queue in (shadow, queues[NatsRole.PAGE]):
            assert [one.data async for one in kept_exemplars(queue, payload=True)] == [SECRET]
        await KeyValue(monitor, stream, POLICY_VALID_S).put("directive", b"policy")
        await KeyValue(operator, stream, purpose=PAUSE).put(PAUSE, b"pause")
        for purpose, key, value in (("policy", "directive", b"policy"), (PAUSE, PAUSE, b"pause")):
            entry = await anext(KeyValue(sidecar, stream, purpose=purpose).watch(key))
            assert entry is not None
            assert entry.value == value
        async with shadow.copies("tumour") as copies, asyncio.timeout(60):
            copy, n_published = None, 1
            while copy is None:  # the server may lose the first ones
                n_published += 1
                await sidecar.publish_exchange("tumour", f"e{n_published}", SECRET)
                copy = await copies.next(1.0)
            assert copy == SECRET
        assert not caplog.records
    finally:
        for queue in queues.values():
            await queue.close()


async def _answer(client: Client, subject: str, payload: bytes = b"") -> bytes | None:
    """Return what the server answers to a request; None where it refuses it."""
    try:
        return bytes((await client.request(subject, payload, timeout=1.0)).data)
    except nats.errors.TimeoutError:
        return None


async def test_the_key_of_a_sidecar_reads_and_removes_nothing_that_was_captured(
    stream: Stream, tmp_path: Path
) -> None:
    """Every way to a captured exchange that JetStream has is refused, and so are forged policies and pauses."""
    publisher = await Queue.connect(
        of(stream, NatsRole.SIDECAR, tmp_path), client_name="sidecar", role=NatsRole.SIDECAR
    )
    await publisher.publish_exchange("tumour", "e1", SECRET)
    await publisher.close()
    name = stream.name
    leak = f"_INBOX.{name}.sidecar.leak"
    push = {"stream_name": name, "config": {"deliver_subject": leak, "ack_policy": "none"}}
    copied = {"name": "copy", "subjects": ["mine.>"], "sources": [{"name": name}], "storage": "memory"}
    denied: list[Exception] = []

    async def note(problem: Exception) -> None:
        denied.append(problem)

    client = await nats.connect(
        stream.url,
        nkeys_seed=str(tmp_path / "nats-keys" / "sidecar.nk"),
        inbox_prefix=inbox(name, NatsRole.SIDECAR),
        error_cb=note,
    )
    heard: list[Msg] = []

    async def hear(message: Msg) -> None:
        heard.append(message)

    try:
        for subject in (
            ">",
            f"{name}.exchange.>",
            f"{name}.copy.>",
            f"_INBOX.{name}.shadow.>",
            "_INBOX.>",
            leak,
        ):
            await client.subscribe(subject, cb=hear)
        await client.request(f"{name}.exchange.tumour", SECRET, timeout=10.0)
        attacks = {
            f"$JS.API.STREAM.MSG.GET.{name}": b'{"seq":1}',
            f"$JS.API.DIRECT.GET.{name}": b'{"seq":1}',
            f"$JS.API.CONSUMER.CREATE.{name}": msgspec.json.encode(push),
            f"$JS.API.CONSUMER.MSG.NEXT.{name}.shadow-tumour": b"1",
            "$JS.API.STREAM.CREATE.copy": msgspec.json.encode(copied),
            f"$JS.API.STREAM.UPDATE.{name}": msgspec.json.encode({"name": name, "republish": {"dest": leak}}),
            f"$JS.API.STREAM.PURGE.{name}": b"",
            f"$JS.API.STREAM.DELETE.{name}": b"",
            f"$JS.API.STREAM.MSG.DELETE.{name}": b'{"seq":1}',
            f"$JS.ACK.{name}.shadow-tumour.1.1.1.1.1": b"+ACK",
            f"$KV.{name}-policy.directive": b"forged",
            f"$KV.{name}-pause.pause": b"forged",
        }
        answers = await asyncio.gather(*(_answer(client, *attack) for attack in attacks.items()))
        refused = "\n".join(str(problem) for problem in denied)
        assert set(answers) == {None}
        assert all(subject.lower() in refused.lower() for subject in attacks)
        assert not heard
    finally:
        await client.close()
    monitor = await Queue.connect(
        of(stream, NatsRole.MONITOR, tmp_path), client_name="m", role=NatsRole.MONITOR
    )
    assert (await read_backlog(monitor)).n_messages == 2
    await monitor.close()


@pytest.mark.parametrize("stream", [("--model", "tumour", "--model", "a.b,words")], indirect=True)
async def test_a_sidecars_key_is_bound_to_its_models_by_the_command(
    stream: Stream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It can publish no exchange of another one, and there is no key for all of them."""
    caplog.set_level(logging.WARNING)
    folder = tmp_path / "nats-keys"
    bound = sorted(path.name for path in folder.glob("sidecar*"))
    assert "sidecar-tumour.nk" in bound
    assert len(bound) == 2
    for name, models in zip(
        sorted(bound, key=lambda name: "tumour" in name), (("a.b", "words"), ("tumour",)), strict=True
    ):
        own = msgspec.structs.replace(stream, credentials_file=str(folder / name))
        queue = await Queue.connect(own, client_name="test", role=NatsRole.SIDECAR, publish_timeout_s=1.0)
        try:
            for model in ("a.b", "words", "tumour"):
                if model in models:
                    await queue.publish_exchange(model, f"{name}-{model}", SECRET)
                else:
                    with pytest.raises(RetryError):
                        await queue.publish_exchange(model, f"{name}-{model}", SECRET)
            await queue.publish_tally("pod", name, 1, b"{}")
        finally:
            await queue.close()


@pytest.mark.parametrize("stream", [("--model", "tumour", "--model", "a.b,words")], indirect=True)
async def test_a_forged_tally_of_another_teams_model_counts_for_ones_own_alone(
    stream: Stream, tmp_path: Path
) -> None:
    """With a bound key no subject but that of its models is open, and what the counts say of other models, or of none, is not theirs."""
    boot = "f" * 32
    lost = ModelCount(taken=500, lost={Loss.HELD_BYTES: 500})
    forged = Tally(
        source="pod-of-team-faces",
        boot=boot,
        sequence=1,
        at=datetime.now(UTC),
        strata=(
            StratumCount(
                stratum="named",
                offered=500,
                taken=500,
                thinned=0,
                published=0,
                models={"faces": lost, "tumour": lost},
            ),
            StratumCount(
                stratum="nameless",
                offered=500,
                taken=500,
                thinned=0,
                published=0,
                lost={Loss.HELD_BYTES: 500},
            ),
        ),
        blind_connections=0,
    )
    own = msgspec.structs.replace(stream, credentials_file=str(tmp_path / "nats-keys/sidecar-tumour.nk"))
    sidecar = await Queue.connect(own, client_name="test", role=NatsRole.SIDECAR)
    shadow = await Queue.connect(of(stream, NatsRole.SHADOW, tmp_path), client_name="s", role=NatsRole.SHADOW)
    try:
        client = await sidecar.live()
        for subject in (
            "pod.boot",
            "faces.pod.boot",
            "a%2Eb+words.pod.boot",
            "tumour.pod.boot.x",
            "tumour+words.pod.boot",
        ):
            assert await _answer(client, f"{stream.name}.tally.{subject}", encode(forged)) is None, subject
        await sidecar.publish_tally(forged.source, boot, 1, encode(forged))
        consumer = await shadow.consumer("tally", ack_wait_s=10.0)
        (delivery,) = await consumer.fetch(1, max_bytes=1 << 20, timeout_s=10.0)
    finally:
        await sidecar.close()
        await shadow.close()
    named, nameless = read_tally(delivery.data, delivery.subject).strata
    assert named.models == {"tumour": lost}
    assert nameless.models == {"tumour": ModelCount(taken=0, configured=True)}


@pytest.mark.parametrize("stream", [("--model", "tumour")], indirect=True)
async def test_a_tally_under_the_rights_of_the_release_before_is_stored(
    stream: Stream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where `setup nats` was not run again, NATS does not say what a key may do: the tally is bound to no model, without a warning."""
    caplog.set_level(logging.WARNING)
    users = (tmp_path / "nats.conf").read_text()
    older = users.replace('"$SYS.REQ.USER.INFO", ', "").replace("tally.tumour.*.*", "tally.>")
    assert older != users
    own = msgspec.structs.replace(stream, credentials_file=str(tmp_path / "nats-keys/sidecar-tumour.nk"))
    (tmp_path / "older").mkdir()
    async with server_with(older[older.index("users: [") : older.rindex("}")], tmp_path / "older") as address:
        admin = await Queue.connect(
            msgspec.structs.replace(of(stream, NatsRole.ADMIN, tmp_path), url=address), client_name="a"
        )
        await admin.ensure()
        await admin.close()
        sidecar = await Queue.connect(
            msgspec.structs.replace(own, url=address), client_name="test", role=NatsRole.SIDECAR
        )
        await sidecar.publish_tally("pod", "boot", 1, b"{}")
        await sidecar.close()
    assert not caplog.records


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--sidecar", "team-a"), "write the name of a model"),
        (("--sidecar", "=digits"), "write NAME=MODEL"),
        (("--sidecar", "../a=digits"), "write NAME=MODEL"),
        (("--sidecar", "a=digits,"), "write the name of a model"),
        (("--sidecar", "digits=words", "--model", "digits"), "two keys would have one name"),
        (("--sidecar", "a=" + ",".join(f"m{n}" for n in range(600))), "make several keys"),
    ],
)
def test_a_key_that_cannot_be_is_refused(tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    """No file is made, and the message says what to write."""
    (tmp_path / "config.toml").touch()
    done = invoked("setup", "nats", *words, directory=tmp_path)
    assert (done.returncode, told in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "nats-keys").exists()


@pytest.mark.parametrize("role", [NatsRole.MONITOR, NatsRole.PAGE, NatsRole.OPERATOR])
async def test_who_only_looks_cannot_read_what_was_captured(
    stream: Stream, tmp_path: Path, role: NatsRole
) -> None:
    """Monitor, page and operator cannot read an exchange, nor copy the stream into one that they may read."""
    client = await nats.connect(
        stream.url,
        nkeys_seed=str(tmp_path / "nats-keys" / f"{role}.nk"),
        inbox_prefix=inbox(stream.name, role),
        error_cb=_ignore,
    )
    bucket = f"KV_{stream.name}-policy"
    source = {"name": bucket, "subjects": [f"$KV.{stream.name}-policy.>"], "sources": [{"name": stream.name}]}
    attacks = {
        f"$JS.API.STREAM.MSG.GET.{stream.name}": b'{"seq":1}',
        f"$JS.API.CONSUMER.CREATE.{stream.name}": b"{}",
        f"$JS.API.STREAM.UPDATE.{bucket}": msgspec.json.encode(source),
        f"{stream.name}.exchange.tumour": b"forged",
    }
    try:
        answers = await asyncio.gather(*(_answer(client, *attack) for attack in attacks.items()))
    finally:
        await client.close()
    assert set(answers) == {None}


async def _ignore(_: Exception) -> None:
    """Do nothing: the test waits for the refusals."""


async def test_a_refused_right_is_named_in_the_log(
    stream: Stream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the subject, and the command that prints the rights, once."""
    caplog.set_level(logging.WARNING)
    queue = await Queue.connect(
        of(stream, NatsRole.SIDECAR, tmp_path), client_name="sidecar", role=NatsRole.SIDECAR
    )
    live = await queue.live()
    for _ in range(2):
        await live.publish(f"$KV.{stream.name}-policy.directive", b"forged")
        await live.flush()
    async with asyncio.timeout(10):
        while not caplog.records:
            await asyncio.sleep(0.01)
    await queue.close()
    (record,) = caplog.records
    assert "directive" in record.getMessage()
    assert "quantdrift setup nats" in record.getMessage()


def _lag(directory: Path) -> int:
    """Return what KEDA's `nats-jetstream` scaler computes for the trigger in the manifest."""
    (scaled,) = documents(Path(__file__).parents[2] / "deploy/kubernetes/scaling/scaledobject.yaml")
    (trigger,) = scaled["spec"]["triggers"]
    asked = msgspec.convert(trigger, custom_resources.Trigger).metadata
    (ports,) = directory.glob("nats-server_*.ports")
    monitoring = msgspec.json.decode(ports.read_bytes())["monitoring"][0]
    url = f"{monitoring}/jsz?acc={asked.account}&consumers=true&config=true"
    with urllib.request.urlopen(url, timeout=10) as answer:
        content = answer.read()
    assert SECRET not in content
    assert base64.b64encode(SECRET) not in content
    (account,) = msgspec.json.decode(content)["account_details"]
    assert account["name"] == asked.account
    (found,) = [one for one in account["stream_detail"] if one["name"] == asked.stream]
    consumers = {one["name"]: one for one in found.get("consumer_detail") or ()}
    if asked.consumer not in consumers:
        return int(found["state"]["last_seq"])
    consumer = consumers[asked.consumer]
    return int(consumer["num_pending"] + consumer["num_ack_pending"])


async def test_keda_finds_the_lag_of_each_model(stream: Stream, tmp_path: Path) -> None:
    """By the account, stream and consumer of the manifest, at the server's monitoring port, which shows no content.

    KEDA adds what waits for a consumer and what it has not acknowledged; if the consumer does not exist, it takes the
    stream's last sequence number instead.
    """
    sidecar = await Queue.connect(
        of(stream, NatsRole.SIDECAR, tmp_path), client_name="sidecar", role=NatsRole.SIDECAR
    )
    shadow = await Queue.connect(
        of(stream, NatsRole.SHADOW, tmp_path), client_name="shadow", role=NatsRole.SHADOW
    )
    try:
        for number in range(5):
            await sidecar.publish_exchange("digits", f"d{number}", SECRET)
        await sidecar.publish_exchange("another", "a0", SECRET)
        assert await asyncio.to_thread(_lag, tmp_path) == 6, (
            "no consumer yet: the stream's last sequence number"
        )
        consumer = await shadow.consumer("exchange", ack_wait_s=30.0, model="digits")
        assert await asyncio.to_thread(_lag, tmp_path) == 5
        deliveries = await consumer.fetch(2, max_bytes=1 << 20, timeout_s=10.0)
        assert await asyncio.to_thread(_lag, tmp_path) == 5, "what a worker has in its hands counts"
        for delivery in deliveries:
            await delivery.ack()
        async with asyncio.timeout(10):
            while await asyncio.to_thread(_lag, tmp_path) != 3:
                await asyncio.sleep(0.01)
    finally:
        await sidecar.close()
        await shadow.close()


async def test_a_sidecar_asks_for_no_right_that_it_lacks_while_there_are_no_streams(
    stream: Stream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says what creates them, tries again, and publishes once they are there."""
    admin = await nats.connect(
        stream.url,
        nkeys_seed=str(tmp_path / "nats-keys" / "admin.nk"),
        inbox_prefix=inbox(stream.name, NatsRole.ADMIN).encode(),
    )
    await admin.jetstream().delete_stream(stream.name)
    await admin.close()
    caplog.set_level(logging.WARNING)
    queue = await Queue.connect(
        of(stream, NatsRole.SIDECAR, tmp_path), client_name="test", role=NatsRole.SIDECAR
    )
    try:
        with pytest.raises(
            RetryError, match="no stream for exchange messages yet: `quantdrift setup nats --apply`"
        ):
            await queue.publish_exchange("tumour", "e1", SECRET)
        assert not caplog.messages
        applied = await asyncio.to_thread(started, "setup", "nats", "--apply", directory=tmp_path)
        assert applied.returncode == 0, applied.stderr
        await queue.publish_exchange("tumour", "e1", SECRET)
    finally:
        await queue.close()
    assert not caplog.messages


async def test_the_administrators_key_is_enough_to_create_the_streams(stream: Stream, tmp_path: Path) -> None:
    """A Job that has this key only, in a directory that it cannot write, creates no keys for the other roles."""
    job = tmp_path / "job"
    job.mkdir()
    shutil.copy(tmp_path / "nats-keys" / "admin.nk", job)
    job.chmod(0o500)
    applied = await asyncio.to_thread(
        started, "setup", "nats", "--apply", "--keys", str(job), directory=tmp_path
    )
    assert applied.returncode == 0, applied.stderr
    assert stream.name in applied.stdout
    assert [file.name for file in job.iterdir()] == ["admin.nk"]


def test_keys_are_created_once_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    """A second run prints the same configuration."""
    first = keys(tmp_path / "nats-keys")
    assert keys(tmp_path / "nats-keys") == first
    assert configuration("quantdrift", first) == configuration("quantdrift", keys(tmp_path / "nats-keys"))
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "nats-keys").iterdir()} == {0o600}
    assert len(set(first.values())) == len(NatsRole)


async def test_the_administrator_alone_reads_and_deletes_single_messages(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`quantdrift privacy` needs that right; another role learns which one is missing, and deletes nothing."""
    sidecar = await Queue.connect(
        of(stream, NatsRole.SIDECAR, tmp_path), client_name="s", role=NatsRole.SIDECAR
    )
    operator = await Queue.connect(
        of(stream, NatsRole.OPERATOR, tmp_path), client_name="o", role=NatsRole.OPERATOR
    )
    shadow = await Queue.connect(of(stream, NatsRole.SHADOW, tmp_path), client_name="h", role=NatsRole.SHADOW)
    admin = await Queue.connect(of(stream, NatsRole.ADMIN, tmp_path), client_name="a")
    try:
        for number in range(3):
            await sidecar.publish_exchange("tumour", f"e{number}", b"%d" % number)
        with monkeypatch.context() as patch:
            patch.setattr("quantdrift.core.stream.search.REQUEST_S", 0.5)
            patch.setattr("quantdrift.release.diagnose.exemplars.REQUEST_S", 0.5)
            with pytest.raises(RetryError, match=r"not that of the administrator"):
                [one async for one in waiting(shadow, "tumour", opened=lambda message, _: message)]
            with pytest.raises(RetryError, match="not that of the administrator"):
                await search_stream(operator, lambda _: True, delete=True, progress=lambda _: None)
        found = await search_stream(admin, lambda data: data == b"1", delete=True, progress=lambda _: None)
        assert found.n == 1
        assert (await read_backlog(operator)).n_messages == 2
        assert await wait_for_workers(admin, 5.0)
    finally:
        for queue in (sidecar, operator, shadow, admin):
            await queue.close()

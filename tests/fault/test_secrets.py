"""Passwords, tokens and credentials that are replaced while the processes run: the files are read again."""

import asyncio
import base64
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import grpc
import msgspec
import nkeys
import pytest
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.sdk.resources import Resource

from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import Model, Reference, Stream, TelemetryOptions
from quantdrift.core.errors import OperatorError
from quantdrift.core.process.nats_server import find_program
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Verdict
from quantdrift.core.stream.connection import Queue
from quantdrift.monitor.outbox import OtlpEvents
from quantdrift.shadow.worker import serve
from quantdrift.storage.alerts.outbox import WaitingEvent
from quantdrift.storage.database import Database
from quantdrift.storage.leader import Leadership
from tests.support.monitor.fold_stream import batches, store_batch, store_catalog
from tests.support.monitor.monitor_processes import folded, until
from tests.support.shadow.onnx_models import exchange_of, inputs_of, linear_model, saved
from tests.support.shadow.shadow_workers import published, worker_config
from tests.support.sidecar.relay_process import free_port, running_backend, sidecar, wait

pytestmark = pytest.mark.fault
FIRST, SECOND = "the-first-of-two-tokens", "the-second-of-two-tokens"


class Login:
    """A user of a real Postgres, its password, and the file with the address that a process reads."""

    def __init__(self, record: asyncpg.Connection, dsn: str, file: Path) -> None:
        self._record = record
        self._dsn = urlsplit(dsn)
        self.file = file
        self.name = f"login_{os.getpid()}_{self._dsn.path.strip('/')}"

    def address(self, password: str) -> str:
        """Return the address with a password."""
        server = f"{self.name}:{password}@{self._dsn.hostname}:{self._dsn.port}"
        return urlunsplit(self._dsn._replace(netloc=server))

    def write(self, password: str) -> None:
        """Write the address into the file."""
        self.file.write_text(self.address(password))

    @property
    def secrets(self) -> Secrets:
        """The secrets of a process that reads the file."""
        return Secrets(dsn=self.file.read_text(), dsn_file=str(self.file))

    async def rotate(self, password: str) -> None:
        """Set another password, and end every connection of the user."""
        await self._record.execute(f"alter role {self.name} password '{password}'")
        await self._record.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where usename = $1", self.name
        )


@pytest.fixture
async def login(record: asyncpg.Connection, postgres_dsn: str, tmp_path: Path) -> AsyncIterator[Login]:
    """Return a user with the password `first`, which is in its file."""
    user = Login(record, postgres_dsn, tmp_path / "dsn")
    await record.execute(f"create role {user.name} superuser login password 'first'")
    user.write("first")
    yield user
    await record.execute(f"drop role {user.name}")


async def test_a_new_postgres_password_is_read_from_its_file(login: Login) -> None:
    """The pool and the leader's connection use it from the next connection on, and say what to do until then."""
    secrets = login.secrets
    async with Database(secrets.current_dsn) as database, Leadership(secrets.current_dsn) as leadership:
        await database.ping()
        assert await leadership.acquire()
        await login.rotate("second")
        with pytest.raises(OperatorError, match="check user and password"):
            await database.ping()
        await leadership.release()
        with pytest.raises(OperatorError, match="check user and password"):
            await leadership.acquire()
        login.write("second")
        await database.ping()
        assert await leadership.acquire()


async def test_a_postgres_file_that_is_gone_for_a_moment_is_named(login: Login) -> None:
    """The message names the file, and once the file is back nothing else is needed."""
    async with Database(login.secrets.current_dsn) as database:
        text = login.file.read_text()
        login.file.unlink()
        with pytest.raises(OperatorError, match=str(login.file)):
            await database.ping()
        login.file.write_text("")
        with pytest.raises(OperatorError, match="is empty"):
            await database.ping()
        login.file.write_text(text)
        await database.ping()


async def test_a_shadow_worker_goes_on_after_a_new_password(
    login: Login, record: asyncpg.Connection, nats_url: str, tmp_path: Path
) -> None:
    """It starts with a wrong password and waits, works with the right one, and again after the password has changed."""
    path = saved(linear_model(), tmp_path / "linear.onnx")
    model = Model(name="digits", top_k=2, references=(Reference(path=str(path), versions=("int8*",)),))
    config = worker_config(nats_url, [model])
    login.write("wrong")
    queue, stop = await published(config, [exchange_of(inputs_of(1))]), Stop()
    worker = asyncio.create_task(serve(config, login.secrets, stop))

    async def stored(n_rows: int) -> bool:
        assert not worker.done()
        return bool(await record.fetchval("select count(*) from comparison") == n_rows)

    login.write("first")
    await until(lambda: stored(1), "the first exchange is stored")
    await login.rotate("second")
    await (await published(config, [exchange_of(inputs_of(1, seed=1))])).close()
    login.write("second")
    await until(lambda: stored(2), "the second exchange is stored")
    stop.set()
    await queue.close()
    assert await asyncio.wait_for(worker, 60) == 0


@pytest.mark.release
async def test_a_monitor_goes_on_after_a_new_password(
    login: Login, record: asyncpg.Connection, tmp_path: Path
) -> None:
    """The same process folds before and after; it does not end while its password is refused."""
    await store_catalog(record)
    stream = list(batches(40))
    for rows in stream[:20]:
        await store_batch(record, rows)
    login.write("wrong")
    (tmp_path / "config.toml").write_text(
        f'[storage]\ndsn_file = "{login.file}"\nretention_days = 3650\n[monitor]\nadmin = "127.0.0.1:0"\n'
        '[[models]]\nname = "digits"\n'
    )
    log = (tmp_path / "log").open("wb")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "quantdrift", "monitor", "-c", str(tmp_path / "config.toml"), stderr=log
    )

    async def refused() -> bool:
        assert process.returncode is None
        return (tmp_path / "log").read_text().count("check user and password") > n_refused

    try:
        n_refused = 0
        await until(refused, "the wrong password is refused")
        login.write("first")
        await until(lambda: _folded(record, process, 20), "the first batches are folded")
        await login.rotate("second")
        for rows in stream[20:]:
            await store_batch(record, rows)
        n_refused = (tmp_path / "log").read_text().count("check user and password")
        await until(refused, "the old password is refused")
        login.write("second")
        await until(lambda: _folded(record, process, 40), "the others are folded")
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        log.close()
    text = (tmp_path / "log").read_text()
    assert "Traceback" not in text
    assert "second" not in text


async def _folded(record: asyncpg.Connection, process: asyncio.subprocess.Process, n_batches: int) -> bool:
    assert process.returncode is None
    return await folded(record) == n_batches


class Nats:
    """A real NATS server with JetStream, whose configuration can be replaced while it runs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, access: str) -> None:
        """Start it with this part of its configuration."""
        self._write(access)
        self._process = subprocess.Popen(  # noqa: ASYNC220 - a moment
            [str(find_program()), "-c", str(self._directory / "nats.conf")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        await until(self._answers, "the server answers")

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        line = await reader.readline()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return b'"jetstream":true' in line

    def reload(self, access: str) -> None:
        """Replace its configuration while it runs."""
        assert self._process is not None
        self._write(access)
        self._process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _write(self, access: str) -> None:
        (self._directory / "nats.conf").write_text(
            f'host: "127.0.0.1"\nport: {self.port}\njetstream {{ store_dir: "{self._directory}" }}\n{access}\n'
        )


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[Nats]:
    """Return a server that is not started yet."""
    (tmp_path / "server").mkdir()
    server = Nats(tmp_path / "server")
    yield server
    server.stop()


@asynccontextmanager
async def connected(stream: Stream) -> AsyncIterator[Queue]:
    """Connect until the end of the block."""
    queue = await Queue.connect(stream, client_name="test")
    try:
        yield queue
    finally:
        await queue.close()


async def stores(queue: Queue, message: str) -> None:
    """Store an exchange, however long the connection takes."""
    async with asyncio.timeout(60):
        await queue.wait_connected()
        await queue.publish_exchange("digits", message, b"content")


@pytest.mark.parametrize("way", [pytest.param("restart", marks=pytest.mark.release), "reload"])
async def test_a_new_nats_password_is_read_from_its_file(
    nats: Nats, tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection is restored with it, whether the server was restarted or has ended the connection itself."""

    def access(password: str) -> str:
        return f'authorization {{ user: "quant", password: "{password}" }}'

    file = tmp_path / "nats.url"
    file.write_text(f"nats://quant:first@127.0.0.1:{nats.port}\n")
    await nats.start(access("first"))
    async with connected(Stream(url_file=str(file), name="rotated")) as queue:
        await stores(queue, "one")
        if way == "restart":
            nats.stop()
            await nats.start(access("second"))
            await until(lambda: _logged(caplog, "stream.url_file"), "the refusal is logged")
        else:
            nats.reload(access("second"))
            await until(lambda: _away(queue), "the connection is refused")
        assert not queue.connected
        file.write_text(f"nats://quant:second@127.0.0.1:{nats.port}\n")
        await stores(queue, "two")
    assert "first@" not in caplog.text
    assert "second@" not in caplog.text


async def _logged(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return text in caplog.text


async def _away(queue: Queue) -> bool:
    return not queue.connected


def _jwt(kind: str, subject: str, nats: dict[str, Any], signed_by: tuple[Any, str], expires: int = 0) -> str:
    """Return a signed token as the servers of NATS understand them."""
    signer, issuer = signed_by
    claims: dict[str, Any] = {
        "iat": int(time.time()),
        "iss": issuer,
        "sub": subject,
        "name": kind,
        "nats": {**nats, "type": kind, "version": 2},
    }
    if expires:
        claims["exp"] = expires
    claims["jti"] = (
        base64.b32encode(hashlib.sha256(msgspec.json.encode(claims)).digest()).decode().rstrip("=")
    )
    parts = [
        base64.urlsafe_b64encode(msgspec.json.encode(part)).decode().rstrip("=")
        for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, claims)
    ]
    signature = signer.sign(".".join(parts).encode())
    return ".".join([*parts, base64.urlsafe_b64encode(signature).decode().rstrip("=")])


def _key(kind: int) -> tuple[Any, str]:
    """Return a new key pair of the kind that a prefix byte names, and its public key."""
    pair = nkeys.from_seed(nkeys.encode_seed(os.urandom(32), kind))
    return pair, pair.public_key.decode()


async def test_new_nats_credentials_are_read_from_their_file(nats: Nats, tmp_path: Path) -> None:
    """Credentials that run out end the connection; those in the file by then restore it."""
    operator, operator_id = _key(nkeys.PREFIX_BYTE_OPERATOR)
    account, account_id = _key(nkeys.PREFIX_BYTE_ACCOUNT)
    user, user_id = _key(nkeys.PREFIX_BYTE_USER)
    unlimited = {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "conn": -1, "leaf": -1}
    disk = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    of_account = {"limits": {**unlimited, "wildcards": True, **disk}}
    account_token = _jwt("account", account_id, of_account, (operator, operator_id))
    _, system_id = _key(nkeys.PREFIX_BYTE_ACCOUNT)
    system_token = _jwt(
        "account", system_id, {"limits": {**unlimited, "wildcards": True}}, (operator, operator_id)
    )
    file = tmp_path / "nats.creds"

    def write(lasts_s: int) -> None:
        limits = {"subs": -1, "data": -1, "payload": -1}
        token = _jwt("user", user_id, limits, (account, account_id), int(time.time()) + lasts_s)
        file.write_text(
            f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
        )

    write(3)
    operator_token = _jwt("operator", operator_id, {"system_account": system_id}, (operator, operator_id))
    await nats.start(
        f'operator: "{operator_token}"\nsystem_account: {system_id}\nresolver: MEMORY\n'
        f'resolver_preload: {{ {account_id}: "{account_token}", {system_id}: "{system_token}" }}'
    )
    stream = Stream(url=f"nats://127.0.0.1:{nats.port}", credentials_file=str(file), name="rotated")
    async with connected(stream) as queue:
        await stores(queue, "one")
        await until(lambda: _away(queue), "the credentials have run out")
        write(3600)
        await stores(queue, "two")


class Collector(logs_service_pb2_grpc.LogsServiceServicer):
    """A collector that accepts events with the right token alone."""

    def __init__(self) -> None:
        self.token = "first"

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - gRPC's name
        """Accept or refuse."""
        if dict(context.invocation_metadata()).get("x-token") != self.token:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")
        return logs_service_pb2.ExportLogsServiceResponse()


@contextmanager
def running(collector: Collector) -> Iterator[int]:
    """Run a collector; yield its port."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


def test_a_new_token_of_the_collector_is_read_from_its_file(tmp_path: Path) -> None:
    """The next event is sent with it; while the file cannot be read the last token stays."""
    file, collector = tmp_path / "headers", Collector()
    file.write_text("X-Token=first\n")
    secrets = Secrets(otlp_headers={"X-Token": "first"}, otlp_headers_file=str(file))
    event = WaitingEvent(
        id=1, attempts=0, at_us=1, from_verdict=Verdict.OK, to_verdict=Verdict.FIRING, details={}
    )
    with running(collector) as port:
        telemetry = TelemetryOptions(otlp_endpoint=f"http://127.0.0.1:{port}")
        exporter = OtlpEvents(telemetry, secrets, Resource.create({}))
        assert not exporter.send(event)
        collector.token = "second"
        assert exporter.send(event)
        file.write_text("X-Token=second\n")
        assert not exporter.send(event)
        collector.token = "first"
        file.unlink()
        assert not exporter.send(event)
        exporter.close()


@pytest.mark.release
def test_a_new_token_of_the_intake_is_read_from_its_file(tmp_path: Path) -> None:
    """Calls with it are accepted within seconds, and calls with the old one are refused; nothing is restarted."""
    file, port = tmp_path / "token", free_port()
    file.write_text(f"{FIRST}\n")

    def answered(token: str) -> int:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/exchanges", b"[]", {"Authorization": f"Bearer {token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    options = {
        "SIDECAR__LISTEN": "",
        "SIDECAR__BACKEND": "127.0.0.1:1",
        "INTAKE__LISTEN": f"127.0.0.1:{port}",
        "INTAKE__TOKEN_FILE": str(file),
    }
    with sidecar(tmp_path, 0, **options) as process:
        wait(process.is_ready, "the intake is up")
        assert (answered(FIRST), answered(SECOND)) == (415, 401)
        file.write_text(f"{SECOND}\n")
        wait(lambda: answered(SECOND) == 415, "the new token is accepted")
        assert answered(FIRST) == 401
        file.unlink()
        wait(lambda: answered(SECOND) == 415, "the last token stays while the file is away")


def test_a_sidecar_serves_without_its_secrets(tmp_path: Path) -> None:
    """Its credentials, keys and authority are not there: it starts, relays, and says what is missing."""
    missing = tmp_path / "secrets"
    options = {
        "STREAM__URL": "tls://127.0.0.1:4222",
        "STREAM__CA_FILE": missing / "ca.crt",
        "STREAM__CREDENTIALS_FILE": missing / "nats.nk",
        "STREAM__PAYLOAD_KEY_FILE": missing / "payload-keys.json",
        "CAPTURE__HEADERS": '["x-user"]',
        "CAPTURE__HMAC": '["header.x-user"]',
        "CAPTURE__HMAC_KEY_FILE": missing / "hmac-key",
    }
    with (
        (tmp_path / "log").open("w+") as log,
        running_backend() as backend,
        sidecar(tmp_path, backend.port, stderr=log.fileno(), **options) as running,
    ):
        answer = running.talk(
            b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"
        )
        assert answer.endswith(b"to body")
        wait(lambda: str(missing) in (tmp_path / "log").read_text(), "the log names what is missing")

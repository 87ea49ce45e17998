"""TLS to Postgres, seen from the server's end: whom we speak to on every way, and whom we tell nothing.

The embedded Postgres is built without OpenSSL. The end of TLS stands before it: it answers the request for TLS, does the
handshake, writes down what comes after it, and hands that on to the real server.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

import asyncpg
import pytest
from sqlalchemy import text

from quantdrift.core.config.load import Role, load, load_secrets
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.run import Stop
from quantdrift.core.telemetry import Telemetry
from quantdrift.frames import arrow
from quantdrift.monitor.server_certificates import ServerCertificates
from quantdrift.storage.address import PostgresAddress
from quantdrift.storage.admin.migrate import current, head, upgrade
from quantdrift.storage.database import Database
from quantdrift.storage.leader import Leadership
from tests.support.certificates import Authority, Pair
from tests.support.recording_relay import RecordingRelay

pytestmark = pytest.mark.integration

SSL_REQUEST = bytes.fromhex("0000000804d2162f")
PASSWORD = "hunter2-hunter2"


class TlsEnd(RecordingRelay):
    """The end of TLS before a real Postgres; without a certificate it answers as a server that has none."""

    def __init__(self, to: int, pair: Pair | None, *, clients: Path | None = None) -> None:
        super().__init__(to)
        self._context: ssl.SSLContext | None = None
        if pair is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(pair.certificate, pair.key)
        if self._context is not None and clients is not None:
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(clients)
        self.asked = b""  # before the handshake; `sent` is what comes after it

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Do the handshake of Postgres first."""
        self.asked += await reader.readexactly(len(SSL_REQUEST))
        if self._context is None:
            writer.write(b"N")
            while data := await reader.read(65536):
                self.asked += data
            return
        writer.write(b"S")
        await writer.start_tls(self._context)
        await super().forward(reader, writer)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return the authority that we trust."""
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return another one."""
    return Authority(tmp_path_factory.mktemp("theirs"))


def port_of(dsn: str) -> int:
    """Return the port in an address."""
    return int(dsn.rpartition("@")[2].partition("/")[0].rpartition(":")[2])


def through(dsn: str, end: TlsEnd, query: str) -> str:
    """Return the address that leads through the end of TLS."""
    return f"{dsn.replace(f':{port_of(dsn)}/', f':{end.port}/')}?{query}"


async def by_pool(dsn: str) -> None:
    """Connect as all commands and processes do."""
    async with Database(dsn) as database:
        await database.ping()


async def by_leader(dsn: str) -> None:
    """Connect as the monitor does, past the pool."""
    async with Leadership(dsn) as leadership:
        assert await leadership.acquire()


async def by_migration(dsn: str) -> None:
    """Connect as `quantdrift db` does."""
    await current(dsn)


WAYS = pytest.mark.parametrize("way", [by_pool, by_leader, by_migration])
Way = Callable[[str], Awaitable[None]]


async def refused(way: Way, end: TlsEnd, query: str) -> str:
    """Connect in vain, and return what is said; after the handshake the server has heard nothing."""
    with pytest.raises(OperatorError) as raised:
        async with asyncio.timeout(30):
            await way(f"postgresql://quant:{PASSWORD}@127.0.0.1:{end.port}/record?{query}")
    said = str(raised.value)
    assert said.startswith(f"Postgres at 127.0.0.1:{end.port}: ")
    assert "\n" not in said
    assert PASSWORD not in said
    assert end.n_connections > 0
    assert end.asked == SSL_REQUEST * end.n_connections
    assert end.sent == b""
    return said


@WAYS
@pytest.mark.parametrize("mode", ["require", "verify-full"])
async def test_a_server_without_tls_hears_the_question_alone(way: Way, mode: str) -> None:
    """Whatever leads to it, it learns no name and no password, and the message says what to do."""
    async with TlsEnd(9, None) as end:
        said = await refused(way, end, f"sslmode={mode}")
    assert "the server offers none; no user name or password was sent" in said
    assert "Set `ssl = on` at the server" in said


@WAYS
async def test_a_server_with_another_name_is_sent_nothing(way: Way, ours: Authority) -> None:
    """`verify-full` asks for the name; it is what a file alone means too."""
    pair = ours.sign("misnamed", names="DNS:other.example")
    async with TlsEnd(9, pair) as end:
        said = await refused(way, end, f"sslrootcert={ours.file}")
        assert "IP address mismatch" in said
        assert "connect with a name in the certificate" in said
        await refused(way, end, f"sslmode=verify-full&sslrootcert={ours.file}")


@WAYS
@pytest.mark.parametrize("mode", ["require", "verify-ca", "verify-full"])
async def test_a_server_of_another_authority_is_sent_nothing(
    way: Way, mode: str, ours: Authority, theirs: Authority
) -> None:
    """Where an authority is named, every mode asks for it, and the message names option and file."""
    async with TlsEnd(9, theirs.sign("server")) as end:
        said = await refused(way, end, f"sslmode={mode}&sslrootcert={ours.file}")
        assert f"sslrootcert in the Postgres address ({ours.file}) must contain" in said
        if mode == "verify-full":
            assert "set sslrootcert in the Postgres address" in await refused(way, end, f"sslmode={mode}")


@WAYS
async def test_a_server_whose_certificate_has_expired_is_sent_nothing(way: Way, ours: Authority) -> None:
    """The message says so."""
    async with TlsEnd(9, ours.sign("expired", expired=True)) as end:
        said = await refused(way, end, f"sslmode=verify-ca&sslrootcert={ours.file}")
    assert "certificate has expired): renew it at the server" in said


async def test_a_server_that_never_answers_is_given_up_in_time(ours: Authority) -> None:
    """One that accepts the connection and is silent holds nobody up."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts for it
        port = silent.getsockname()[1]
        dsn = f"postgresql://u:p@127.0.0.1:{port}/d?sslmode=verify-full&sslrootcert={ours.file}"
        address = PostgresAddress.of(dsn)
        async with asyncio.timeout(30):
            with pytest.raises(RetryError, match=f"at 127.0.0.1:{port} is not available: no answer in time"):
                await address.connect(**address.arguments, timeout=0.2)
            with pytest.raises(RetryError, match="not available"):
                await by_leader(dsn)


@pytest.mark.parametrize("mode", ["", "require", "verify-ca", "verify-full"])
@WAYS
async def test_every_connection_uses_tls(way: Way, mode: str, ours: Authority, postgres_dsn: str) -> None:
    """With the right authority all of them reach the real server, and the server's end sees it in TLS."""
    query = f"sslrootcert={ours.file}" + (f"&sslmode={mode}" if mode else "")
    async with TlsEnd(port_of(postgres_dsn), ours.sign("server")) as end:
        await way(through(postgres_dsn, end, query))
        assert end.sent
        assert end.asked == SSL_REQUEST * end.n_connections


async def test_require_without_an_authority_encrypts_alone(theirs: Authority, postgres_dsn: str) -> None:
    """As libpq has it: who the server is is not asked."""
    async with TlsEnd(port_of(postgres_dsn), theirs.sign("server")) as end:
        await by_leader(through(postgres_dsn, end, "sslmode=require"))
        assert end.sent


async def test_rows_are_copied_and_the_schema_is_made_through_tls(ours: Authority, postgres_dsn: str) -> None:
    """The connection under the pool, which COPY uses, is the same; an upgrade needs no other way."""
    async with TlsEnd(port_of(postgres_dsn), ours.sign("server")) as end:
        dsn = through(postgres_dsn, end, f"sslmode=verify-full&sslrootcert={ours.file}")
        assert await upgrade(dsn, progress=lambda _: None) == []
        assert await current(dsn) == head()
        n_before = end.n_connections
        async with Database(dsn) as database, database.begin() as connection:
            await connection.execute(text("create temp table t (x int)"))
            driver: asyncpg.Connection = (await connection.get_raw_connection()).driver_connection
            await driver.copy_records_to_table("t", records=[(n,) for n in range(10_000)], columns=["x"])
            assert (await connection.execute(text("select count(*) from t"))).scalar() == 10_000
        assert end.n_connections == n_before + 1


@WAYS
async def test_a_client_certificate_opens_a_server_that_asks_for_one(
    way: Way, ours: Authority, postgres_dsn: str
) -> None:
    """Certificate and key are named in the address, or by options that become part of it."""
    client = ours.sign("client")
    async with TlsEnd(port_of(postgres_dsn), ours.sign("server"), clients=ours.file) as end:
        query = f"sslmode=verify-full&sslrootcert={ours.file}"
        with pytest.raises((OperatorError, RetryError)):
            await way(through(postgres_dsn, end, query))
        assert end.sent == b""
        await way(through(postgres_dsn, end, f"{query}&sslcert={client.certificate}&sslkey={client.key}"))
        assert end.sent


async def test_every_way_to_postgres_presents_the_client_certificate(
    ours: Authority, postgres_dsn: str, tmp_path: Path
) -> None:
    """Authority, certificate and key are named in the address; a space in a file's name is written as %20."""
    client = ours.sign("client")
    for name, file in (("ca.pem", ours.file), ("us.pem", client.certificate), ("us key.pem", client.key)):
        (tmp_path / name).write_bytes(file.read_bytes())
    async with TlsEnd(port_of(postgres_dsn), ours.sign("server"), clients=ours.file) as end:
        config = tmp_path / "config.toml"
        config.write_text('[storage]\ndsn_file = "dsn"\n')
        files = f"sslrootcert={tmp_path}/ca.pem&sslcert={tmp_path}/us.pem&sslkey={tmp_path}/us%20key.pem"
        (tmp_path / "dsn").write_text(through(postgres_dsn, end, files))
        secrets = load_secrets(load(config, {}), Role.MONITOR, {})
        for way in (by_pool, by_leader, by_migration):
            await way(secrets.dsn)
        assert end.sent


async def test_files_are_read_again_for_each_connection(
    ours: Authority, theirs: Authority, postgres_dsn: str, tmp_path: Path
) -> None:
    """An authority that is replaced while the process runs is in force from the next connection on."""
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(ours.file.read_bytes())
    async with (
        TlsEnd(port_of(postgres_dsn), theirs.sign("server")) as end,
        Database(through(postgres_dsn, end, f"sslrootcert={trusted}")) as database,
    ):
        with pytest.raises(OperatorError, match="must contain the authority"):
            await database.ping()
        trusted.write_bytes(theirs.file.read_bytes())
        await database.ping()
        trusted.unlink()
        await database.ping()  # the pool's connection is there still


@WAYS
async def test_disable_does_not_even_ask(way: Way, postgres_dsn: str) -> None:
    """Plaintext that was asked for is plaintext, on every way."""
    await way(f"{postgres_dsn}?sslmode=disable")


async def by_frames(dsn: str) -> None:
    """Connect as a data scientist's notebook does, by libpq."""
    with await asyncio.to_thread(arrow, dsn) as tables:
        await asyncio.to_thread(tables.sql, "select 1")


async def test_frames_use_tls_and_tell_no_other_server_anything(
    ours: Authority, theirs: Authority, postgres_dsn: str
) -> None:
    """The driver gets the same servers, authority, certificate and mode from the address as every other way."""
    client = ours.sign("client")
    query = f"sslrootcert={ours.file}&sslcert={client.certificate}&sslkey={client.key}"
    async with TlsEnd(port_of(postgres_dsn), ours.sign("server"), clients=ours.file) as end:
        await by_frames(through(postgres_dsn, end, query))
        assert end.sent
        assert end.asked == SSL_REQUEST * end.n_connections
    for pair in (ours.sign("misnamed", names="DNS:other.example"), theirs.sign("server"), None):
        async with TlsEnd(9, pair) as end:
            with pytest.raises((OperatorError, RetryError)) as raised:
                await by_frames(f"postgresql://quant:{PASSWORD}@127.0.0.1:{end.port}/record?{query}")
            assert PASSWORD not in str(raised.value)
            assert end.asked == SSL_REQUEST * end.n_connections
            assert end.sent == b""


async def test_the_monitor_sees_when_the_certificate_of_the_server_ends(
    ours: Authority, postgres_dsn: str
) -> None:
    """Not of one that has none."""
    telemetry = Telemetry("test")
    try:
        for pair, n in ((None, 0), (ours.sign("watched"), 1)):
            async with TlsEnd(port_of(postgres_dsn), pair) as end:
                dsn = through(postgres_dsn, end, f"sslmode=verify-full&sslrootcert={ours.file}")
                await ServerCertificates(config=Config(), dsn=dsn, telemetry=telemetry, stop=Stop()).look()
                ends = telemetry._server_certificates
                assert list(ends) == ["server of storage.dsn_file"] * n
        assert timedelta(days=1) < ends["server of storage.dsn_file"] - datetime.now(UTC) <= timedelta(days=2)
    finally:
        telemetry.close()

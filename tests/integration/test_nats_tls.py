"""TLS to real NATS servers, seen from the wire: whom the client speaks to, and whom it tells nothing."""

import asyncio
import logging
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quantdrift.core.config.schema import Config, Stream
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.child import ending_with_parent
from quantdrift.core.process.nats_server import find_program
from quantdrift.core.process.run import Stop
from quantdrift.core.stream.connection import Queue
from quantdrift.core.telemetry import Telemetry
from quantdrift.monitor.server_certificates import ServerCertificates
from tests.support.certificates import Authority, Pair, openssl
from tests.support.recording_relay import RecordingRelay

pytestmark = pytest.mark.integration

PASSWORD = "hunter2-hunter2"
PLAIN = ""


class Server:
    """A real NATS server with a configuration of the test's own, which writes down all that clients say."""

    def __init__(self, directory: Path, *, stores: bool) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self.extra = ""
        self._store = f'jetstream {{ store_dir: "{directory / "store"}" }}' if stores else ""
        self._process: subprocess.Popen[bytes] | None = None
        self._n_starts = 0
        self.port = -1
        self.cluster_port = 0
        self.websocket_port = 0

    @property
    def log(self) -> str:
        """What it wrote, every command of its clients among it."""
        log = self._directory / "log"
        return log.read_text(errors="replace") if log.exists() else ""

    async def start(self) -> None:
        """Start it, on the port it had before, and return when it is ready."""
        config = self._directory / "nats.conf"
        config.write_text(
            f'host: "127.0.0.1"\nport: {self.port}\nports_file_dir: "{self._directory}"\n'
            f'log_file: "{self._directory / "log"}"\ntrace: true\ndebug: true\n'
            f'authorization {{ user: "quant", password: "{PASSWORD}", timeout: 5 }}\n'
            f"{self._store}\n{self.extra}\n"
        )
        for stale in self._directory.glob("*.ports"):
            stale.unlink()
        self._process = subprocess.Popen(  # noqa: ASYNC220 - a moment
            ending_with_parent([str(find_program()), "-c", str(config)]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        ports = self._directory / f"nats-server_{self._process.pid}.ports"
        self._n_starts += 1
        await until(lambda: self.log.count("Server is ready") == self._n_starts)
        await until(lambda: ports.exists() and ports.read_bytes().rstrip().endswith(b"}"))
        found = msgspec.json.decode(ports.read_bytes())
        self.port = int(found["nats"][0].rpartition(":")[2])
        self.cluster_port = int(found.get("cluster", ["0"])[0].rpartition(":")[2])
        self.websocket_port = int(found.get("websocket", ["0"])[0].rpartition(":")[2])

    def stop(self) -> None:
        """End it; what it stored stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


async def until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return the authority that clients trust."""
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return another one."""
    return Authority(tmp_path_factory.mktemp("theirs"))


class Rig:
    """Makes servers, each behind a wire, and ends them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: list[tuple[Server, RecordingRelay]] = []
        self._queues: list[Queue] = []

    async def serve(self, extra: str, *, stores: bool = True) -> tuple[Server, RecordingRelay]:
        """Start a server behind a wire; WIRE in its configuration is the wire's port."""
        wire = RecordingRelay()
        directory = self._directory / f"server{len(self._made)}"
        server = Server(directory, stores=stores)
        self._made.append((server, wire))
        await wire.start()
        server.extra = extra.replace("WIRE", str(wire.port))
        await server.start()
        wire.to = server.port
        return server, wire

    async def connect(self, stream: Stream) -> Queue:
        """Connect until the test ends."""
        self._queues.append(await Queue.connect(stream, client_name="test"))
        return self._queues[-1]

    async def close(self) -> None:
        """End all of it."""
        for queue in self._queues:
            await queue.close()
        for server, wire in self._made:
            await wire.stop()
            server.stop()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Return what makes servers of this test's own."""
    made = Rig(tmp_path / "servers")
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def no_secret_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Look through every line that was logged, whatever its level."""
    caplog.set_level(logging.DEBUG)
    yield
    assert PASSWORD not in caplog.text


def tls(pair: Pair, more: str = "") -> str:
    """Return a server's configuration for this certificate."""
    return f'tls {{ cert_file: "{pair.certificate}", key_file: "{pair.key}", timeout: 5\n{more} }}'


def stream(wire: RecordingRelay, scheme: str = "tls", **options: Any) -> Stream:
    """Return the section that leads to the server behind the wire, with a password in its address."""
    files: dict[str, Any] = {name: str(value) for name, value in options.items()}
    return Stream(url=f"{scheme}://quant:{PASSWORD}@127.0.0.1:{wire.port}", name="t", **files)


async def refused(rig: Rig, server: Server, wire: RecordingRelay, section: Stream) -> str:
    """Connect in vain, and return what is said; the server has heard nothing."""
    with pytest.raises(RetryError) as raised:
        async with asyncio.timeout(20):
            await rig.connect(section)
    said = str(raised.value)
    assert said.startswith(f"NATS at {section.address} is not reachable: ")
    assert "\n" not in said
    assert PASSWORD not in said
    assert wire.n_connections > 0
    assert PASSWORD.encode() not in wire.sent
    assert b"CONNECT" not in wire.sent
    assert "CONNECT" not in server.log
    return said


async def stored(queue: Queue) -> None:
    """Store an exchange and fetch it again."""
    await queue.publish_exchange("m", "id", b"payload")
    consumer = await queue.consumer("exchange", ack_wait_s=30)
    (delivery,) = await consumer.fetch(1, max_bytes=1000, timeout_s=10)
    assert delivery.data == b"payload"


async def test_a_server_without_tls_gets_not_one_byte(rig: Rig, ours: Authority) -> None:
    """Where tls:// or a certificate file asks for TLS, a server in plaintext is told nothing at all."""
    server, wire = await rig.serve(PLAIN)
    sections = stream(wire, "tls"), stream(wire, "nats", ca_file=ours.file)
    for said in await asyncio.gather(*(refused(rig, server, wire, section) for section in sections)):
        assert "the server offers none; nothing was sent to it" in said
        assert "Set `tls` in the server's configuration" in said
    assert wire.sent == b""


async def test_one_address_with_tls_makes_it_the_rule_for_all(rig: Rig) -> None:
    """Beside a tls:// server that is away, one in plaintext is no way out."""
    server, wire = await rig.serve(PLAIN)
    section = stream(wire, "nats")
    section = msgspec.structs.replace(section, url=f"{section.url},tls://127.0.0.1:9")
    with pytest.raises(RetryError, match="not reachable"):
        await rig.connect(section)
    assert wire.n_connections > 0
    assert wire.sent == b""
    assert "CONNECT" not in server.log


async def test_a_server_with_another_name_is_sent_nothing(rig: Rig, ours: Authority) -> None:
    """The message says that the name does not match, and how to go on."""
    server, wire = await rig.serve(tls(ours.sign("misnamed", names="DNS:other.example")))
    said = await refused(rig, server, wire, stream(wire, ca_file=ours.file))
    assert "IP address mismatch" in said
    assert "connect with a name in the certificate" in said


async def test_a_server_of_another_authority_is_sent_nothing(
    rig: Rig, ours: Authority, theirs: Authority
) -> None:
    """The message names the option and the file, or what to set where there is none."""
    server, wire = await rig.serve(tls(theirs.sign("server")))
    said = await asyncio.gather(
        refused(rig, server, wire, stream(wire, ca_file=ours.file)),
        refused(rig, server, wire, stream(wire)),
    )
    assert f"stream.ca_file ({ours.file}) must contain the authority that signed it" in said[0]
    assert "set stream.ca_file to the authority that signed it" in said[1]


async def test_a_server_whose_certificate_has_expired_is_sent_nothing(rig: Rig, ours: Authority) -> None:
    """The message says so."""
    server, wire = await rig.serve(tls(ours.sign("expired", expired=True)))
    said = await refused(rig, server, wire, stream(wire, ca_file=ours.file))
    assert "certificate has expired): renew it at the server" in said


async def test_a_server_that_is_silent_is_given_up_in_time(ours: Authority) -> None:
    """One that accepts and says nothing holds nobody up."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts for it
        section = Stream(url=f"tls://127.0.0.1:{silent.getsockname()[1]}", ca_file=str(ours.file))
        async with asyncio.timeout(30):
            with pytest.raises(RetryError, match="not reachable"):
                await Queue.connect(section, client_name="test")


@pytest.mark.parametrize(
    ("scheme", "more"),
    [
        ("tls", ""),
        ("tls", "handshake_first: true"),
        ("tls", 'handshake_first: "100ms"'),
        ("nats", ""),
    ],
)
async def test_what_is_stored_goes_through_tls(rig: Rig, ours: Authority, scheme: str, more: str) -> None:
    """The authority's file is enough, whether the server begins with INFO or with the handshake."""
    _, wire = await rig.serve(tls(ours.sign("server"), more))
    await stored(await rig.connect(stream(wire, scheme, ca_file=ours.file)))
    assert PASSWORD.encode() not in wire.sent
    assert b"CONNECT" not in wire.sent
    assert b"payload" not in wire.sent


async def test_a_server_that_allows_plaintext_too_is_spoken_to_in_tls(rig: Rig, ours: Authority) -> None:
    """That it does not ask for TLS is no reason to go without."""
    _, wire = await rig.serve(tls(ours.sign("server")) + "\nallow_non_tls: true")
    await stored(await rig.connect(stream(wire, ca_file=ours.file)))
    assert PASSWORD.encode() not in wire.sent


async def test_a_client_certificate_opens_a_server_that_asks_for_one(rig: Rig, ours: Authority) -> None:
    """Without it the message names the two options; the key may stand in the certificate's file."""
    verify = f'verify: true, ca_file: "{ours.file}"'
    server, wire = await rig.serve(tls(ours.sign("server"), verify))
    client = ours.sign("client")
    with pytest.raises(RetryError, match=r"set stream\.certificate_file and stream\.key_file"):
        await rig.connect(stream(wire, ca_file=ours.file))
    assert "CONNECT" not in server.log
    await stored(
        await rig.connect(
            stream(wire, ca_file=ours.file, certificate_file=client.certificate, key_file=client.key)
        )
    )
    both = client.certificate.with_name("both.pem")
    both.write_bytes(client.certificate.read_bytes() + client.key.read_bytes())
    await rig.connect(stream(wire, ca_file=ours.file, certificate_file=both))


async def test_a_client_certificate_that_the_server_does_not_trust_is_named(
    rig: Rig, ours: Authority, theirs: Authority
) -> None:
    """The message names its option."""
    _, wire = await rig.serve(tls(ours.sign("server"), f'verify: true, ca_file: "{ours.file}"'))
    client = theirs.sign("client")
    with pytest.raises(RetryError, match=r"refuses our certificate.*stream\.certificate_file"):
        await rig.connect(
            stream(wire, ca_file=ours.file, certificate_file=client.certificate, key_file=client.key)
        )


@pytest.mark.filterwarnings(
    "ignore:parameter 'timeout' of type:DeprecationWarning"
)  # nats-py asks aiohttp so
async def test_websockets_follow_the_same_rule(rig: Rig, ours: Authority) -> None:
    """`wss://` checks the certificate, and `ws://` is refused where a file asks for TLS."""
    own = tls(ours.sign("server"))
    server, wire = await rig.serve(f'websocket {{ host: "127.0.0.1", port: -1, {own} }}')
    wire.port = server.websocket_port
    with pytest.raises(RetryError, match=r"set stream\.ca_file to the authority"):
        await rig.connect(stream(wire, "wss"))
    with pytest.raises(RetryError, match="TLS is asked for, and ws:// is plaintext"):
        await rig.connect(stream(wire, "ws", ca_file=ours.file))
    assert "CONNECT" not in server.log
    await stored(await rig.connect(stream(wire, "wss", ca_file=ours.file)))


def test_the_loop_of_production_does_the_same(tmp_path: Path, ours: Authority) -> None:
    """Under uvloop, too, a client certificate opens a server, and one in plaintext hears nothing."""
    uvloop = pytest.importorskip("uvloop")
    client = ours.sign("client")

    async def both() -> None:
        rig = Rig(tmp_path / "servers")
        try:
            _, wire = await rig.serve(tls(ours.sign("server"), f'verify: true, ca_file: "{ours.file}"'))
            section = stream(
                wire, ca_file=ours.file, certificate_file=client.certificate, key_file=client.key
            )
            await stored(await rig.connect(section))
            plain, beside = await rig.serve(PLAIN)
            await refused(rig, plain, beside, stream(beside, ca_file=ours.file))
            assert beside.sent == b""
        finally:
            await rig.close()

    uvloop.run(both())


async def test_a_reconnect_follows_the_same_rule_and_reads_the_files_again(
    rig: Rig, ours: Authority, theirs: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that comes back in plaintext, or with an authority unknown so far, is told nothing until it is trusted."""
    server, wire = await rig.serve(tls(ours.sign("server")))
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(ours.file.read_bytes())
    queue = await rig.connect(stream(wire, ca_file=trusted))
    server.stop()
    wire.sent, wire.n_connections = b"", 0
    server.extra = PLAIN
    await server.start()
    await until(lambda: "the server offers none" in caplog.text)
    assert (wire.sent, queue.connected) == (b"", False)
    assert "CONNECT" not in server.log.rpartition("Starting nats-server")[2]
    server.stop()
    server.extra = tls(theirs.sign("server"))
    await server.start()
    await until(lambda: "must contain the authority that signed it" in caplog.text)
    assert not queue.connected
    assert "CONNECT" not in server.log.rpartition("Starting nats-server")[2]
    trusted.write_bytes(theirs.file.read_bytes())
    await until(lambda: queue.connected)
    await stored(queue)


async def test_a_server_named_by_another_follows_the_same_rule(rig: Rig, ours: Authority) -> None:
    """INFO in plaintext names nobody that counts, and who is named inside TLS is told nothing without it."""
    cluster = 'cluster {{ name: c, listen: "127.0.0.1:-1", routes: [{}] }}\n'
    server, wire = await rig.serve(cluster.format("") + tls(ours.sign("server")), stores=False)
    queue = await rig.connect(stream(wire, ca_file=ours.file))
    _, beside = await rig.serve(
        cluster.format(f'"nats://127.0.0.1:{server.cluster_port}"') + 'client_advertise: "127.0.0.1:WIRE"',
        stores=False,
    )
    await until(lambda: beside.port in ports_of(queue))  # the first server tells it inside TLS
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    assert f"127.0.0.1:{beside.port}" in (await reader.readline()).decode()
    writer.transport.abort()
    assert ports_of(await rig.connect(stream(wire, ca_file=ours.file))) == {wire.port}
    server.stop()
    await until(lambda: beside.n_connections > 0)
    await server.start()
    await until(lambda: queue.connected)
    assert beside.sent == b""


def ports_of(queue: Queue) -> set[int]:
    """Return where the client would connect to."""
    return {server.uri.port or 0 for server in queue._client._server_pool}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"ca_file": "gone.pem"}, r"stream\.ca_file: gone\.pem cannot be read: No such file"),
        ({"ca_file": __file__}, r"stream\.ca_file: .* has no certificate in PEM format"),
        (
            {"certificate_file": __file__},
            r"stream\.certificate_file: .* cannot be used: .*stream\.key_file",
        ),
    ],
)
async def test_a_file_that_cannot_be_used_is_named(files: dict[str, Any], said: str) -> None:
    """It is a person's to mend, and said before anything is connected to."""
    with pytest.raises(OperatorError, match=said):
        await Queue.connect(Stream(url="tls://127.0.0.1:9", **files), client_name="test")


async def test_a_key_with_a_passphrase_is_refused_and_asks_nobody(tmp_path: Path, ours: Authority) -> None:
    """The library would ask on the terminal, and wait."""
    client = ours.sign("client")
    locked = tmp_path / "locked.key"
    openssl("ec", "-in", str(client.key), "-aes256", "-passout", "pass:secret", "-out", str(locked))
    section = Stream(url="nats://127.0.0.1:9", certificate_file=str(client.certificate), key_file=str(locked))
    with pytest.raises(OperatorError, match="without a passphrase"):
        await Queue.connect(section, client_name="test")


async def test_the_monitor_sees_when_the_certificate_of_the_server_ends(rig: Rig, ours: Authority) -> None:
    """Of a server that speaks first and of one that waits for the handshake; what was seen stays while it is away."""
    seen: dict[str, datetime] = {}

    class Noted(Telemetry):
        def note_server_certificate(self, option: str, end: datetime) -> None:
            seen[option] = end

    pair = ours.sign("watched")
    for more in ("", "handshake_first: true"):
        server, wire = await rig.serve(tls(pair, more))
        config = Config(stream=stream(wire, ca_file=str(ours.file)))
        look = ServerCertificates(
            config=config, dsn="postgresql://u:p@127.0.0.1:1/none", telemetry=Noted("test"), stop=Stop()
        ).look
        await look()
        end = seen.pop("server of stream.url")
        assert timedelta(days=1) < end - datetime.now(UTC) <= timedelta(days=2)
        server.stop()
        await look()
        assert seen == {}

"""What every client sends to a server that it must not trust: nothing but the beginning of a TLS handshake."""

import asyncio
import contextlib
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc
import msgspec
import pytest
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.resources import Resource

from quantdrift.core import open_inference_pb2 as wire
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import (
    Config,
    Model,
    Recheck,
    Reference,
    Runtime,
    Shadow,
    Stream,
    TelemetryOptions,
)
from quantdrift.core.errors import QuantdriftError, RetryError
from quantdrift.core.records import Verdict
from quantdrift.core.stream.connection import Queue
from quantdrift.core.telemetry import otlp_exporter
from quantdrift.core.tls import Tls
from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference, runtime_request
from quantdrift.models.runtimes.remote.http_client import HttpServer
from quantdrift.models.runtimes.remote.oip_grpc import OipGrpcTransport
from quantdrift.monitor.outbox import OtlpEvents
from quantdrift.shadow.replay.candidate_noise import _open
from quantdrift.storage.admin.migrate import upgrade
from quantdrift.storage.alerts.outbox import WaitingEvent
from quantdrift.storage.database import Database
from quantdrift.storage.leader import Leadership
from tests.support.certificates import Authority, Pair

pytestmark = pytest.mark.integration

SECRET: Final = "hunter2-hunter2"
LIMIT_S: Final = 0.5
CLIENT_HELLO: Final = b"\x16\x03"
REQUEST_FOR_TLS: Final = struct.pack(">II", 8, 80877103)  # of Postgres


class Listener:
    """A server that speaks no protocol but TLS, and records what clients send.

    Parameters
    ----------
    pair
        Its certificate; None: it has no TLS.
    kind
        `nats` sends INFO first, `postgres` answers the request for TLS, and `silent` waits for the client.
    authority
        The client must have a certificate of this authority.
    announced
        Servers that its INFO names.

    Attributes
    ----------
    in_plaintext : bytes
        What came outside TLS; of TLS, only the first bytes of the handshake.
    inside : bytes
        What came inside TLS.
    """

    def __init__(
        self,
        pair: Pair | None,
        kind: str = "silent",
        *,
        authority: Authority | None = None,
        announced: tuple[str, ...] = (),
    ) -> None:
        self._kind = kind
        self._announced = announced
        self._context: ssl.SSLContext | None = None
        if pair is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(pair.certificate, pair.key)
            self._context.set_alpn_protocols(["h2"])
            if authority is not None:
                self._context.verify_mode = ssl.CERT_REQUIRED
                self._context.load_verify_locations(authority.file)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self.n_connections = 0
        self.in_plaintext = b""
        self.inside = b""
        self.has_inside = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._open: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for one in (self._socket, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self.n_connections += 1
                self._open.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # errors of TLS too
            self._greet(connection)
            if self._context is None:
                self._listen(connection)
                return
            self.in_plaintext += connection.recv(2, socket.MSG_PEEK)
            with self._context.wrap_socket(connection, server_side=True) as encrypted:
                self._open.append(encrypted)
                if data := encrypted.recv(65536):  # then the connection ends: nobody waits for an answer
                    self.inside += data
                    self.has_inside.set()

    def _listen(self, connection: socket.socket) -> None:
        while data := connection.recv(65536):
            self.in_plaintext += data
            if self._kind == "nats" and b"PING" in data:
                connection.sendall(b"PONG\r\n")
                if self._announced:  # the client has to go to another server
                    connection.shutdown(socket.SHUT_RDWR)

    def _greet(self, connection: socket.socket) -> None:
        has_tls = self._context is not None
        if self._kind == "nats":
            info: dict[str, Any] = {
                "server_id": "x",
                "version": "2.10.0",
                "max_payload": 2**20,
                "headers": True,
            }
            info |= {"tls_required": has_tls, "connect_urls": list(self._announced)}
            connection.sendall(b"INFO " + msgspec.json.encode(info) + b"\r\n")
        if self._kind == "postgres":
            assert connection.recv(8, socket.MSG_WAITALL) == REQUEST_FOR_TLS
            connection.sendall(b"S" if has_tls else b"N")


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a client."""

    ca: Path
    client: Pair | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The three options."""
        files = {"ca_file": str(self.ca)}
        if self.client is not None:
            files |= {
                "certificate_file": str(self.client.certificate),
                "key_file": str(self.client.key),
            }
        return files

    def dsn(self, port: int) -> str:
        """Return the address of Postgres."""
        address = f"postgresql://quant:{SECRET}@127.0.0.1:{port}/q?sslmode=verify-full&sslrootcert={self.ca}"
        if self.client is not None:
            address += f"&sslcert={self.client.certificate}&sslkey={self.client.key}"
        return address


def nats(port: int, trust: Trust) -> None:
    """Connect to NATS."""

    async def connect() -> None:
        stream = Stream(url=f"tls://quant:{SECRET}@127.0.0.1:{port}", **trust.options)
        queue = await Queue.connect(stream, client_name="test")
        await queue.close()

    asyncio.run(connect())


def engine(port: int, trust: Trust) -> None:
    """Connect the engine of a process, which COPY uses too."""

    async def connect() -> None:
        async with Database(trust.dsn(port)) as database:
            await database.ping()

    asyncio.run(connect())


def leader(port: int, trust: Trust) -> None:
    """Take the leader's lock."""

    async def connect() -> None:
        async with Leadership(trust.dsn(port)) as leadership:
            await leadership.acquire()

    asyncio.run(connect())


def migrations(port: int, trust: Trust) -> None:
    """Migrate."""
    asyncio.run(upgrade(trust.dsn(port), progress=lambda _: None))


def _export(exporter: type[Any], data: object, port: int, trust: Trust) -> None:
    telemetry = TelemetryOptions(otlp_endpoint=f"https://127.0.0.1:{port}", **trust.options)
    client = otlp_exporter(exporter, telemetry, Secrets(otlp_headers={"x-token": SECRET}), timeout_s=LIMIT_S)
    done = client.export(data)
    client.shutdown()
    if done.name != "SUCCESS":
        raise RetryError("not accepted")


def events(port: int, trust: Trust) -> None:
    """Send alert events to the collector."""
    _export(OTLPLogExporter, [], port, trust)


def metrics(port: int, trust: Trust) -> None:
    """Send metrics to the collector."""
    _export(OTLPMetricExporter, MetricsData(resource_metrics=[]), port, trust)


def spans(port: int, trust: Trust) -> None:
    """Send spans to the collector."""
    _export(OTLPSpanExporter, [], port, trust)


def _refer(runtime: Runtime, scheme: str, port: int, trust: Trust, *, timeout_s: float = LIMIT_S) -> None:
    task = {"task": "embedding"} if runtime is Runtime.OPENAI else {}
    reference = Reference(runtime=runtime, url=f"{scheme}://127.0.0.1:{port}", timeout_s=timeout_s)
    model = msgspec.convert({"name": "digits", **task}, Model)
    config = Config(shadow=Shadow(**trust.options))
    open_reference(runtime_request(config, model, reference, SECRET)).close()


def oip_http(port: int, trust: Trust) -> None:
    """Open a reference by the Open Inference Protocol over HTTP."""
    _refer(Runtime.OIP_HTTP, "https", port, trust)


def oip_grpc(port: int, trust: Trust) -> None:
    """Open a reference by the Open Inference Protocol over gRPC."""
    _refer(Runtime.OIP_GRPC, "grpcs", port, trust)


def openai(port: int, trust: Trust) -> None:
    """Open a reference at an OpenAI-compatible server."""
    _refer(Runtime.OPENAI, "https", port, trust)


def _recheck(scheme: str, port: int, trust: Trust) -> None:
    model = Model(name="digits", recheck=Recheck(url=f"{scheme}://127.0.0.1:{port}", versions=("*",)))
    transport = _open(model, LIMIT_S, Tls.of_shadow(Shadow(**trust.options)))
    try:
        transport.ready()
    finally:
        transport.close()


def recheck_http(port: int, trust: Trust) -> None:
    """Ask a replica over HTTP."""
    _recheck("https", port, trust)


def recheck_grpc(port: int, trust: Trust) -> None:
    """Ask a replica over gRPC."""
    _recheck("grpcs", port, trust)


CLIENTS: Final[dict[Callable[[int, Trust], None], str]] = {
    nats: "nats",
    engine: "postgres",
    leader: "postgres",
    migrations: "postgres",
    events: "silent",
    metrics: "silent",
    spans: "silent",
    oip_http: "silent",
    oip_grpc: "silent",
    openai: "silent",
    recheck_http: "silent",
    recheck_grpc: "silent",
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return the authority that clients trust."""
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def servers(ours: Authority, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair | None]:
    """Return the certificates of servers that no client may speak to, by what is wrong with them."""
    theirs = Authority(tmp_path_factory.mktemp("theirs"))
    return {
        "plaintext": None,
        "misnamed": ours.sign("misnamed", names="DNS:other.example"),
        "untrusted": theirs.sign("server"),
        "expired": ours.sign("expired", expired=True),
    }


@pytest.fixture
def clients(ours: Authority) -> Trust:
    """Return the files of a client with a certificate of its own."""
    return Trust(ca=ours.file, client=ours.sign("client"))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_nothing_but_the_handshake_reaches_a_server_that_must_not_be_trusted(
    client: Callable[[int, Trust], None], ours: Authority, servers: dict[str, Pair | None]
) -> None:
    """It has no TLS, another name, an unknown authority, or an expired certificate.

    No user name, password, token or payload is sent, in plaintext or inside TLS, and the attempt fails.
    """
    with ThreadPoolExecutor(len(servers)) as pool, contextlib.ExitStack() as stack:
        listeners = {
            wrong: stack.enter_context(Listener(pair, CLIENTS[client])) for wrong, pair in servers.items()
        }
        attempts = {
            wrong: pool.submit(client, listener.port, Trust(ca=ours.file))
            for wrong, listener in listeners.items()
        }
        for wrong, attempt in attempts.items():
            with pytest.raises((QuantdriftError, TimeoutError)) as raised:
                attempt.result()
            assert SECRET not in str(raised.value)
            assert listeners[wrong].n_connections > 0, wrong
    for wrong, listener in listeners.items():
        assert listener.inside == b"", wrong
        for hello in _split(listener.in_plaintext, encrypted=servers[wrong] is not None):
            assert hello.startswith(CLIENT_HELLO), wrong
            assert SECRET.encode() not in hello, wrong


def _split(sent: bytes, *, encrypted: bool) -> Iterator[bytes]:
    """Return the records of TLS that were sent in plaintext, or the first bytes of each handshake."""
    while sent:
        length = 2 if encrypted else 5 + int.from_bytes(sent[3:5], "big")
        yield sent[:length]
        sent = sent[length:]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_a_server_that_is_trusted_is_spoken_to_inside_tls_with_the_clients_certificate(
    client: Callable[[int, Trust], None], ours: Authority, clients: Trust
) -> None:
    """The control of the test above: the same client sends what it has to say, once both sides have proven who they are."""
    with Listener(ours.sign("server"), CLIENTS[client], authority=ours) as listener:
        deadline_s = time.monotonic() + 30
        while not listener.has_inside.is_set() and time.monotonic() < deadline_s:
            with contextlib.suppress(QuantdriftError, TimeoutError):  # the listener answers nothing
                client(listener.port, clients)
    assert listener.inside
    for hello in _split(listener.in_plaintext, encrypted=True):
        assert hello == CLIENT_HELLO


@pytest.fixture
def every_name_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve every name to 127.0.0.1, as a name server of an attacker might."""
    real = socket.getaddrinfo

    def resolve(host: Any, *arguments: Any, **options: Any) -> Any:
        return real("127.0.0.1" if str(host).endswith(".example") else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def _without_tls(client: Callable[[int, Trust], None], port: int) -> None:
    """Run a client with an address as it was common: without any word of TLS, and to a name."""
    where, headers = f"server.example:{port}", Secrets(otlp_headers={"x-token": SECRET})
    if client is nats:
        asyncio.run(Queue.connect(Stream(url=f"nats://quant:{SECRET}@{where}"), client_name="test"))
    elif client is engine:
        asyncio.run(Database(f"postgresql://quant:{SECRET}@{where}/q").ping())
    elif client is leader:
        asyncio.run(Leadership(f"postgresql://quant:{SECRET}@{where}/q").acquire())
    elif client is events:
        telemetry = TelemetryOptions(otlp_endpoint=f"http://{where}")
        otlp_exporter(OTLPLogExporter, telemetry, headers, timeout_s=LIMIT_S).export([])
    else:
        runtimes = {
            oip_http.__name__: Runtime.OIP_HTTP,
            oip_grpc.__name__: Runtime.OIP_GRPC,
            openai.__name__: Runtime.OPENAI,
        }
        runtime = runtimes[client.__name__]
        scheme = "grpc" if runtime is Runtime.OIP_GRPC else "http"
        reference = Reference(runtime=runtime, url=f"{scheme}://{where}", timeout_s=LIMIT_S)
        open_reference(runtime_request(Config(), Model(name="digits"), reference, SECRET))


@pytest.mark.usefixtures("every_name_is_this_machine")
@pytest.mark.parametrize(
    "client", [nats, engine, leader, events, oip_http, oip_grpc, openai], ids=lambda client: client.__name__
)
def test_an_address_without_tls_to_another_machine_sends_nothing(
    client: Callable[[int, Trust], None],
) -> None:
    """Even a client that was made without the checks of the configuration refuses it, and says why."""
    with (
        Listener(None, CLIENTS[client]) as listener,
        pytest.raises(QuantdriftError, match=r"plaintext over a network|TLS is asked for|has no sslmode"),
    ):
        _without_tls(client, listener.port)
    assert listener.in_plaintext == b""


@pytest.mark.usefixtures("every_name_is_this_machine")
def test_a_server_that_another_one_announces_gets_nothing_in_plaintext() -> None:
    """A NATS server on this machine names one elsewhere; the password does not follow."""
    with Listener(None, "nats") as elsewhere:
        announced = (f"elsewhere.example:{elsewhere.port}",)
        with Listener(None, "nats", announced=announced) as listener:

            async def connect() -> None:
                stream = Stream(url=f"nats://quant:{SECRET}@127.0.0.1:{listener.port}")
                async with asyncio.timeout(30):
                    queue = await Queue.connect(stream, client_name="test")
                    while not elsewhere.in_plaintext and not (
                        elsewhere.n_connections and listener.n_connections > 1
                    ):
                        await asyncio.sleep(0.01)
                await queue.close()

            asyncio.run(connect())
    assert SECRET.encode() in listener.in_plaintext
    assert elsewhere.in_plaintext == b""


def test_a_proxy_of_the_environment_gets_nothing_that_is_meant_for_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gRPC library would ask a proxy for 127.0.0.1, and tell it everything in plaintext."""
    with Listener(None) as proxy, Listener(None) as listener:
        for name in ("http_proxy", "grpc_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        reference = Reference(
            runtime=Runtime.OIP_GRPC, url=f"grpc://127.0.0.1:{listener.port}", timeout_s=LIMIT_S
        )
        transport = OipGrpcTransport(
            RuntimeRequest(model=Model(name="digits"), reference=reference, token=SECRET)
        )
        with pytest.raises((RetryError, TimeoutError)):
            transport.ready()
        transport.close()
        telemetry = TelemetryOptions(otlp_endpoint=f"http://127.0.0.1:{listener.port}")
        exporter = otlp_exporter(OTLPLogExporter, telemetry, Secrets(), timeout_s=LIMIT_S)
        exporter.export([])
        exporter.shutdown()
    assert (proxy.n_connections, proxy.in_plaintext) == (0, b"")
    assert listener.n_connections > 1


def test_a_redirection_to_another_server_is_not_followed() -> None:
    """The token and the payload stay with the server that is configured."""
    with Listener(None) as elsewhere, socket.create_server(("127.0.0.1", 0)) as server:

        def redirect() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(
                    b"HTTP/1.1 307 Temporary Redirect\r\nContent-Length: 0\r\n"
                    + f"Location: http://127.0.0.1:{elsewhere.port}/\r\n\r\n".encode()
                )

        thread = threading.Thread(target=redirect)
        thread.start()
        reference = Reference(
            runtime=Runtime.OIP_HTTP, url=f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=30
        )
        client = HttpServer(RuntimeRequest(model=Model(name="digits"), reference=reference, token=SECRET))
        status, _, _ = client.ask("POST", "/v2", b"payload")
        client.close()
        thread.join()
    assert status == 307
    assert elsewhere.n_connections == 0


@pytest.mark.usefixtures("every_name_is_this_machine")
def test_the_token_of_the_environment_is_not_sent_in_plaintext_over_a_network(tmp_path: Path) -> None:
    """It goes to every server of the worker; one that is reached in plaintext gets only a token of its own file."""
    file = tmp_path / "token"
    file.write_text("own-token\n")
    for token_file, expected in (("", ""), (str(file), "Bearer own-token")):
        reference = Reference(
            runtime=Runtime.OIP_HTTP, url="http+plaintext://server.example:1", token_file=token_file
        )
        client = HttpServer(RuntimeRequest(model=Model(name="digits"), reference=reference, token=SECRET))
        assert client._token.headers().get("authorization", "") == expected


def test_a_grpc_client_says_what_is_wrong_with_the_handshake(
    ours: Authority, servers: dict[str, Pair | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library says `failed to connect`; the message names the cause and the option, for a reference and for an event."""
    monkeypatch.setattr("quantdrift.monitor.outbox.TIMEOUT_S", LIMIT_S)
    event = WaitingEvent(
        id=1, attempts=0, at_us=1, from_verdict=Verdict.OK, to_verdict=Verdict.FIRING, details={}
    )
    wrong = {
        "misnamed": (servers["misnamed"], None, "connect with a name in the certificate"),
        "untrusted": (servers["untrusted"], None, "ca_file .* must contain the authority that signed it"),
        "expired": (servers["expired"], None, "renew it at the server"),
        "no client certificate": (
            ours.sign("strict"),
            ours,
            r"set (shadow|telemetry)\.certificate_file and (shadow|telemetry)\.key_file",
        ),
    }
    for pair, authority, said in wrong.values():
        with Listener(pair, authority=authority) as listener:
            with pytest.raises(RetryError, match=said):
                _refer(Runtime.OIP_GRPC, "grpcs", listener.port, Trust(ca=ours.file), timeout_s=20)
            telemetry = TelemetryOptions(
                otlp_endpoint=f"https://127.0.0.1:{listener.port}", ca_file=str(ours.file)
            )
            exporter = OtlpEvents(telemetry, Secrets(), Resource.create({}))
            assert re.search(said, exporter.send(event))
            exporter.close()


def test_a_renewed_certificate_is_used_without_a_restart(ours: Authority, tmp_path: Path) -> None:
    """A gRPC channel is opened again with the files of now, once the server was not accepted."""
    trusted, pair = tmp_path / "ca.pem", ours.sign("server")
    trusted.write_bytes(Authority(tmp_path / "theirs").file.read_bytes())

    def ready(_request: object, _context: object) -> Any:
        return wire.ModelReadyResponse(ready=True)

    handler = grpc.unary_unary_rpc_method_handler(
        ready,
        request_deserializer=wire.ModelReadyRequest.FromString,
        response_serializer=wire.ModelReadyResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelReady": handler})
    server = grpc.server(ThreadPoolExecutor(1), handlers=[service])
    credentials = grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.certificate.read_bytes())])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    reference = Reference(runtime=Runtime.OIP_GRPC, url=f"grpcs://127.0.0.1:{port}", timeout_s=20)
    tls = Tls.of_shadow(Shadow(ca_file=str(trusted)))
    transport = OipGrpcTransport(RuntimeRequest(model=Model(name="digits"), reference=reference, tls=tls))
    try:
        with pytest.raises(RetryError, match=r"certificate|handshake"):
            transport.ready()
        trusted.write_bytes(ours.file.read_bytes())
        assert transport.ready()
    finally:
        transport.close()
        server.stop(0).wait()

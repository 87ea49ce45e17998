"""TLS at the ports of the intake: a token never travels in plaintext, and a renewed certificate needs no restart."""

import asyncio
import contextlib
import hashlib
import json
import shutil
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.certificates import Authority, Pair
from tests.support.sidecar.envoy_messages import METHOD, exchange
from tests.support.sidecar.raw_exchanges import REQUEST, RESPONSE
from tests.support.sidecar.relay_process import DEADLINE_S, SidecarProcess, free_port, sidecar, wait

pytestmark = pytest.mark.integration

TOKEN = "a-token-of-sixteen"
BATCH = {"exchanges": [{"target": "/v2/models/digits/infer", "request": REQUEST, "response": RESPONSE}]}


class Ports:
    """A sidecar whose three ports speak TLS, with files of a certificate that a test may replace."""

    def __init__(self, running: SidecarProcess, ports: tuple[int, int, int], files: Pair) -> None:
        self.running, self.files = running, files
        self.batches, self.events, self.envoy = ports

    def renew(self, pair: Pair) -> None:
        """Put another certificate in place."""
        for source, target in ((pair.key, self.files.key), (pair.certificate, self.files.certificate)):
            new = target.with_suffix(".new")
            shutil.copy(source, new)
            new.replace(target)


@contextlib.contextmanager
def listening(directory: Path, pair: Pair, callers: str = TOKEN, **options: object) -> Iterator[Ports]:
    """Run a sidecar with these ways in."""
    files = Pair(certificate=directory / "tls.crt", key=directory / "tls.key")
    shutil.copy(pair.certificate, files.certificate)
    shutil.copy(pair.key, files.key)
    (directory / "token").write_text(callers)
    batches, events, envoy = free_port(), free_port(), free_port()
    with sidecar(
        directory,
        0,
        SIDECAR__LISTEN="",
        INTAKE__LISTEN=f"127.0.0.1:{batches}",
        INTAKE__KSERVE_LOGGER=f"127.0.0.1:{events}",
        INTAKE__EXT_PROC=f"127.0.0.1:{envoy}",
        INTAKE__CERTIFICATE_FILE=files.certificate,
        INTAKE__KEY_FILE=files.key,
        INTAKE__TOKEN_FILE=directory / "token",
        SAMPLING__RATE=1.0,
        MODELS='[{"name": "digits"}]',
        **options,
    ) as running:
        yield Ports(running, (batches, events, envoy), files)


def post(
    port: int, path: str, context: ssl.SSLContext, token: str = f"Bearer {TOKEN}", **headers: str
) -> int:
    """Send a batch or an event; return the status."""
    sent = {"Authorization": token, "Content-Type": "application/json", **headers}
    request = urllib.request.Request(
        f"https://127.0.0.1:{port}{path}", data=json.dumps(BATCH).encode(), headers=sent
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S, context=context) as answer:
        return int(answer.status)


async def envoy(port: int, authority: bytes, pair: Pair | None = None) -> grpc.StatusCode:
    """Send an exchange as Envoy does, over TLS, with a token or a certificate; return how the stream was closed."""
    own = () if pair is None else (pair.key.read_bytes(), pair.certificate.read_bytes())
    credentials = grpc.ssl_channel_credentials(authority, *own)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        call = channel.stream_stream(METHOD)(
            metadata=(("authorization", f"Bearer {TOKEN}"),) if pair is None else ()
        )
        for message in exchange([json.dumps(REQUEST).encode()], [json.dumps(RESPONSE).encode()], {}):
            with contextlib.suppress(
                grpc.aio.AioRpcError, asyncio.InvalidStateError
            ):  # it may be refused before
                await call.write(message)
        return await call.code()


def answer_in_plaintext(port: int, request: bytes) -> bytes:
    """Send bytes without TLS; return what comes back."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as client:
        client.sendall(request)
        with contextlib.suppress(ConnectionError):
            return client.recv(1024)
    return b""


def serial(port: int, authority: Path) -> str:
    """Return the serial number of a port's certificate."""
    context = ssl.create_default_context(cafile=authority)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as client,
        context.wrap_socket(client, server_hostname="127.0.0.1") as secure,
    ):
        certificate = secure.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


def test_all_ports_speak_tls_only_and_take_over_a_renewed_certificate(tmp_path: Path) -> None:
    """Exchanges arrive over TLS and none in plaintext; a wrong pair of files leaves the certificate as it is."""
    authority = Authority(tmp_path / "authority")
    first, second = authority.sign("first"), authority.sign("second")
    with listening(tmp_path, first) as ports:
        context = ssl.create_default_context(cafile=authority.file)
        assert post(ports.batches, "/v1/exchanges", context) == 200
        assert post(ports.events, "/", context, **{"Ce-Type": "other"}) == 200
        assert asyncio.run(envoy(ports.envoy, authority.file.read_bytes())) is grpc.StatusCode.OK
        wait(
            lambda: ports.running.count("quantdrift_sidecar_offered_total") == 2,
            "batch and stream have come in",
        )
        head = f"POST /v1/exchanges HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 2\r\n\r\n{{}}"
        for port in (ports.batches, ports.events):
            assert not answer_in_plaintext(port, head.encode()).startswith(b"HTTP/")
        assert not answer_in_plaintext(ports.envoy, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").startswith(b"\0\0")
        before = serial(ports.batches, authority.file)
        ports.files.key.write_bytes(second.key.read_bytes())  # not the key of this certificate
        ports.files.key.touch()
        ports.renew(second)
        listening_at = (ports.batches, ports.events, ports.envoy)
        wait(
            lambda: all(serial(port, authority.file) != before for port in listening_at),
            "the new certificate is used",
        )
        assert ports.running.count("quantdrift_sidecar_offered_total") == 2


def test_files_that_are_no_pair_are_refused_at_the_start(tmp_path: Path) -> None:
    """With the names of both options."""
    authority = Authority(tmp_path / "authority")
    first, second = authority.sign("first"), authority.sign("second")
    log = tmp_path / "log"
    with log.open("w") as stderr:
        running = SidecarProcess(
            tmp_path,
            str(tmp_path),
            0,
            SIDECAR__LISTEN="",
            INTAKE__LISTEN=f"127.0.0.1:{free_port()}",
            INTAKE__CERTIFICATE_FILE=first.certificate,
            INTAKE__KEY_FILE=second.key,
            stderr=stderr.fileno(),
        )
        try:
            assert running.process.wait(DEADLINE_S) == 2
        finally:
            running.process.kill()
    assert "intake.certificate_file" in log.read_text()
    assert "are no certificate with its key" in log.read_text()


def _status(ports: Ports, authority: Path, pair: Pair | None, token: str = "") -> int:
    """Send a batch with a certificate; return the status, 0 where the handshake fails."""
    context = ssl.create_default_context(cafile=authority)
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    try:
        return post(ports.batches, "/v1/exchanges", context, token)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_a_certificate_is_an_identity_as_a_token_is(tmp_path: Path) -> None:
    """It reports on its models; an untrusted, expired or misnamed one on nothing, and nor does a call without any."""
    authority, stranger = Authority(tmp_path / "authority"), Authority(tmp_path / "stranger")
    server = authority.sign("server")
    right = authority.sign("right", names="DNS:gateway.example")
    other = authority.sign("other", names="URI:spiffe://example/other")
    misnamed = authority.sign("gateway.example", names="DNS:gateway.example.evil")
    expired = authority.sign("expired", names="DNS:gateway.example", expired=True)
    untrusted = stranger.sign("untrusted", names="DNS:gateway.example")
    trusted = tmp_path / "callers-ca.pem"
    shutil.copy(authority.file, trusted)
    token = "batch sha256:" + hashlib.sha256(TOKEN.encode()).hexdigest()
    callers = f"gateway cert:gateway.example digits\nother cert:spiffe://example/other words\n{token}"
    refused, offered = "quantdrift_sidecar_intake_refused_total", "quantdrift_sidecar_offered_total"
    with listening(tmp_path, server, callers, INTAKE__CLIENT_CA_FILE=trusted) as ports:
        count, ca = ports.running.count, authority.file.read_bytes()
        assert _status(ports, authority.file, right) == 200
        assert asyncio.run(envoy(ports.envoy, ca, right)) is grpc.StatusCode.OK
        assert _status(ports, authority.file, None, f"Bearer {TOKEN}") == 200
        wait(lambda: count(offered) == 3, "by certificate twice, and by token")

        assert (
            _status(ports, authority.file, other) == 200
        )  # the batch is understood, and its exchange is refused
        asyncio.run(envoy(ports.envoy, ca, other))
        wait(lambda: count(refused, reason="model") == 2, "the certificate is for another model")
        assert _status(ports, authority.file, misnamed) == 401
        asyncio.run(envoy(ports.envoy, ca, misnamed))
        wait(lambda: count(refused, reason="wrong_certificate") == 2, "no caller has this name")
        assert _status(ports, authority.file, right, "Bearer wrong") == 401
        assert _status(ports, authority.file, None) == 401
        for pair in (expired, untrusted):
            assert _status(ports, authority.file, pair) == 0
            assert asyncio.run(envoy(ports.envoy, ca, pair)) is grpc.StatusCode.UNAVAILABLE
        assert count(offered) == 3

        new = trusted.with_suffix(".new")
        shutil.copy(stranger.file, new)
        new.replace(trusted)
        wait(lambda: _status(ports, authority.file, untrusted) == 200, "the new authority is trusted")
        assert _status(ports, authority.file, right) == 0

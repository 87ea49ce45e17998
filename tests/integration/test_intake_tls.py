"""TLS at the ports of the intake: a token never travels in plaintext, and a renewed certificate needs no restart."""

import asyncio
import contextlib
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

TOKEN = "t0ken"
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
def listening(directory: Path, pair: Pair) -> Iterator[Ports]:
    """Run a sidecar with these ways in."""
    files = Pair(certificate=directory / "tls.crt", key=directory / "tls.key")
    shutil.copy(pair.certificate, files.certificate)
    shutil.copy(pair.key, files.key)
    (directory / "token").write_text(TOKEN)
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
    ) as running:
        yield Ports(running, (batches, events, envoy), files)


def post(port: int, path: str, context: ssl.SSLContext, **headers: str) -> int:
    """Send a batch or an event; return the status."""
    sent = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", **headers}
    request = urllib.request.Request(
        f"https://127.0.0.1:{port}{path}", data=json.dumps(BATCH).encode(), headers=sent
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S, context=context) as answer:
        return int(answer.status)


async def envoy(port: int, authority: bytes) -> grpc.StatusCode:
    """Send an exchange as Envoy does, over TLS; return how the stream was closed."""
    credentials = grpc.ssl_channel_credentials(authority)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        call = channel.stream_stream(METHOD)(metadata=(("authorization", f"Bearer {TOKEN}"),))
        for message in exchange([json.dumps(REQUEST).encode()], [json.dumps(RESPONSE).encode()], {}):
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

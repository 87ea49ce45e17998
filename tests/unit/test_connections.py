"""Which addresses of servers are allowed without TLS: this machine, and those that say so by name."""

from pathlib import Path

import pytest

from quantdrift.core.config.address import is_loopback, read_server_url
from quantdrift.core.config.connections import connections
from quantdrift.core.config.load import load
from quantdrift.core.config.schema import Stream
from quantdrift.core.errors import OperatorError
from quantdrift.core.stream.config import current_stream

pytestmark = pytest.mark.unit

REFERENCE = '[[models]]\nname = "m"\n[[models.references]]\nruntime = "{runtime}"\nurl = "{url}"\n'
RECHECK = '[[models]]\nname = "m"\n[models.recheck]\nversions = ["7"]\nurl = "{url}"\n'
COPY = (
    '[[models]]\nname = "m"\ntask = "generation"\n[[models.references]]\nruntime = "transformers"\npath = "p"\n'
    '[models.references.copy]\nversions = ["7"]\nurl = "{url}"\n'
)
OPTIONS = {
    "stream.url": ('[stream]\nurl = "{url}"\n', "nats", "tls"),
    "stream.url ": ('[stream]\nurl = "{url}"\n', "ws", "wss"),
    "telemetry.otlp_endpoint": ('[telemetry]\notlp_endpoint = "{url}"\n', "http", "https"),
    "references.url": (REFERENCE.replace("{runtime}", "oip-http"), "http", "https"),
    "references.url ": (REFERENCE.replace("{runtime}", "oip-grpc"), "grpc", "grpcs"),
    "recheck.url": (RECHECK, "http", "https"),
    "recheck.url ": (RECHECK, "grpc", "grpcs"),
    "references.copy.url": (COPY, "http", "https"),
}


def _write(directory: Path, text: str) -> Path:
    path = directory / "config.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("option", OPTIONS)
def test_plaintext_over_a_network_is_refused_unless_the_address_names_it(tmp_path: Path, option: str) -> None:
    """The message says both things that may be written instead, and either of them is accepted."""
    text, plain, encrypted = OPTIONS[option]

    def protection(url: str) -> str:
        config = load(_write(tmp_path, text.replace("{url}", url)), {})
        (found,) = [one for one in connections(config) if url in one.to]
        return found.protection

    advice = (
        rf"write {encrypted}://h\.example:1, or {plain}\+plaintext://h\.example:1 if something else encrypts"
    )
    with pytest.raises(OperatorError, match=rf"{option.strip()} is `{plain}://h\.example:1`.*: {advice}"):
        protection(f"{plain}://h.example:1")
    assert protection(f"{encrypted}://h.example:1").startswith("encrypted, server verified by")
    assert protection(f"{plain}+plaintext://h.example:1") == "PLAINTEXT over a network, as the address says"
    for host in ("127.0.0.1", "127.8.8.8", "[::1]", "localhost"):
        assert protection(f"{plain}://{host}:1") == "plaintext on this machine"
    for host in ("127.0.0.1.example", "localhost.example", "0.0.0.0", "10.0.0.1", "[::2]"):
        with pytest.raises(OperatorError, match="plaintext over a network"):
            protection(f"{plain}://{host}:1")


@pytest.mark.parametrize(
    ("text", "environment", "said"),
    [
        (
            "",
            {"QUANTDRIFT__STREAM__URL": "nats://u:hunter2@h:1"},
            "QUANTDRIFT__STREAM__URL: stream.url is `nats://h:1`",
        ),
        (
            "",
            {"QUANTDRIFT__TELEMETRY__OTLP_ENDPOINT": "http://h:1"},
            "OTLP_ENDPOINT: telemetry.otlp_endpoint is",
        ),
        ('[stream]\nurl = "nats://127.0.0.1:1,nats://h:1"', {}, "stream.url is `nats://h:1`"),
        ('[stream]\nurl = "h:1"', {}, "write tls://h:1, or"),
        (
            '[stream]\nurl = "http://u:hunter2@h:1"',
            {},
            "must begin with nats:// or tls:// or ws:// or wss://",
        ),
        ('[stream]\nurl = "tls+plaintext://h:1"', {}, "contradicts itself: write tls://h:1"),
        (
            '[stream]\nurl = "nats+plaintext://h:1,tls://i:1"',
            {},
            "requires TLS for every server: write tls://h:1",
        ),
        ('[stream]\nurl = "nats+plaintext://h:1"\nca_file = "c"', {}, "requires TLS for every server"),
        ('[telemetry]\notlp_endpoint = "grpc://h:1"', {}, "must begin with https:// or http://"),
        (
            '[telemetry]\notlp_endpoint = "http://localhost:1"\nca_file = "c"',
            {},
            "contradicts telemetry.ca_file",
        ),
        ('[telemetry]\nkey_file = "k"', {}, "telemetry.key_file is set without telemetry.certificate_file"),
        ('[shadow]\nkey_file = "k"', {}, "shadow.key_file is set without shadow.certificate_file"),
    ],
)
def test_what_contradicts_the_rule_is_refused_from_wherever_it_comes(
    tmp_path: Path, text: str, environment: dict[str, str], said: str
) -> None:
    """The message names the option, and shows no password."""
    with pytest.raises(OperatorError) as raised:
        load(_write(tmp_path, text), environment)
    assert said in str(raised.value)
    assert "hunter2" not in str(raised.value)


def test_an_address_in_a_file_follows_the_same_rule(tmp_path: Path) -> None:
    """It is checked whenever the file is read; the option beside it is not used and not checked."""
    file = tmp_path / "nats.url"
    stream = Stream(url="nats://unused.example:1", url_file=str(file))
    for url in ("nats+plaintext://u:p@h:1", "tls://u:p@h:1", "nats://u:p@localhost:1"):
        file.write_text(f"{url}\n")
        assert current_stream(stream).url == url
    file.write_text("nats://u:hunter2@h:1\n")
    with pytest.raises(OperatorError, match=r"stream\.url_file \(.*nats\.url\) is `nats://h:1`") as raised:
        current_stream(stream)
    assert "hunter2" not in str(raised.value)


def test_one_address_or_file_with_tls_makes_it_the_rule_for_every_server(tmp_path: Path) -> None:
    """So an address without a scheme for TLS is allowed beside it, and the client encrypts both."""
    for text in ('url = "tls://h:1,nats://i:1"', 'url = "nats://h:1,nats://i:1"\nca_file = "/ca.pem"'):
        config = load(_write(tmp_path, f"[stream]\n{text}"), {})
        assert all(one.protection.startswith("encrypted") for one in connections(config))


@pytest.mark.parametrize("host", ["", "127.0.0.1.", "localhost.", "127.1", "0x7f000001", "::ffff:10.0.0.1"])
def test_a_host_that_only_looks_like_this_machine_counts_as_remote(host: str) -> None:
    """No name is resolved, because an attacker may answer."""
    assert not is_loopback(host)


def test_the_library_gets_the_address_without_the_mark() -> None:
    """Credentials stay in it, and no message shows them."""
    server = read_server_url("NATS+plaintext://user:hunter2@h:1", "nats", "tls")
    assert (server.url, server.host) == ("nats://user:hunter2@h:1", "h")
    assert server.shown == "nats+plaintext://h:1"

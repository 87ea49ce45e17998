"""The connections to servers that a configuration names: which of them are encrypted, and which are refused.

One rule applies to NATS, the collector and the servers of references, copies and rechecks: a connection is encrypted and the
server's certificate is checked, unless the server is on this machine or the address says `+plaintext`. Postgres has
the same rule in `quantdrift.storage.address`, with `sslmode=disable` in place of `+plaintext`.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from quantdrift.core.config.address import AddressError, ServerUrl, read_server_url
from quantdrift.core.config.schema import Config, Model, Notify, Reference, Shadow, Stream, TelemetryOptions
from quantdrift.core.config.watching import WebhookFormat

_HTTP: Final = ("https", "http")
_ANY: Final = (*_HTTP, "grpcs", "grpc")


class ConfiguredConnection(msgspec.Struct, frozen=True, kw_only=True):
    """A connection of `quantdrift config check`.

    Parameters
    ----------
    to
        Option and address, without credentials.
    protection
        How it is protected, in words.
    """

    to: str
    protection: str


def connection_problems(config: Config) -> Iterator[str]:
    """Return what is not allowed, each as a sentence that says what to write."""
    for section, name in (
        (config.stream, "stream"),
        (config.shadow, "shadow"),
        (config.telemetry, "telemetry"),
        (config.notify, "notify"),
    ):
        if section.key_file and not section.certificate_file:
            yield f"{name}.key_file is set without {name}.certificate_file: name the certificate of this key"
    is_for_programs = config.notify.webhook_format is WebhookFormat.JSON
    if config.notify.webhook_url and is_for_programs and not config.notify.webhook_key_file:
        yield (
            "notify.webhook_url is set without notify.webhook_key_file: create a key file with `quantdrift keys new FILE`, so"
            " that the receiver can check who sends"
        )
    if not config.stream.url_file:
        yield from stream_problems(config.stream, "stream.url")
    for option, text, schemes in _urls(config):
        try:
            server = read_server_url(text, *schemes)
        except AddressError as error:
            yield f"{option} is not the address of a server: {error}"
            continue
        if problem := server.problem(option):
            yield problem
        elif option.startswith("telemetry.") and not server.is_encrypted and _has_files(config.telemetry):
            yield f"{option} is plaintext, which contradicts telemetry.ca_file and telemetry.certificate_file: write https://"


def stream_problems(stream: Stream, option: str) -> Iterator[str]:
    """Return what is not allowed in the addresses of NATS.

    Parameters
    ----------
    option
        The option that they come from.
    """
    try:
        servers = stream.servers
    except AddressError as error:
        yield f"{option} is not the address of a NATS server: {error}"
        return
    for server in servers:
        if not stream.requires_tls:
            problem = server.problem(option)
            if problem:
                yield problem
        elif server.is_plaintext_by_name:
            yield (
                f"{option} is `{server.shown}`, but another address, stream.ca_file or stream.certificate_file requires TLS "
                f"for every server: write tls://{server.shown.partition('://')[2]}, or remove the others"
            )


def connections(config: Config) -> list[ConfiguredConnection]:
    """Return every connection whose address is in the configuration itself, and not in a file or a secret."""
    stream, telemetry = config.stream, config.telemetry
    all_connections = [
        ConfiguredConnection(
            to=f"NATS {server.shown}",
            protection=_protection(server, stream, is_encrypted=stream.requires_tls),
        )
        for server in ([] if stream.url_file else stream.servers)
    ]
    for option, text, schemes in _urls(config):
        section: TelemetryOptions | Shadow | Notify = config.shadow
        if option.startswith(("telemetry.", "notify.")):
            section = telemetry if option.startswith("telemetry.") else config.notify
        server = read_server_url(text, *schemes)
        all_connections.append(
            ConfiguredConnection(
                to=f"{option} {server.shown_in(option)}",
                protection=_protection(server, section, is_encrypted=server.is_encrypted),
            )
        )
    return all_connections


def encrypted_words(*, ca_file: str, certificate_file: str) -> str:
    """Return the words for a connection with a verified server."""
    by = ca_file or "the public authorities"
    own = ", with a client certificate" if certificate_file else ""
    return f"encrypted, server verified by {by}{own}"


def _has_files(section: TelemetryOptions) -> bool:
    return bool(section.ca_file or section.certificate_file)


def _protection(
    server: ServerUrl, section: Stream | Shadow | TelemetryOptions | Notify, *, is_encrypted: bool
) -> str:
    if is_encrypted:
        return encrypted_words(ca_file=section.ca_file, certificate_file=section.certificate_file)
    return (
        "plaintext on this machine" if server.is_loopback else "PLAINTEXT over a network, as the address says"
    )


def _urls(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Return option, URL and allowed schemes of every server but NATS."""
    if config.telemetry.otlp_endpoint:
        yield "telemetry.otlp_endpoint", config.telemetry.otlp_endpoint, _HTTP
    for url in config.notify.alertmanager:
        yield "notify.alertmanager", url, _HTTP
    if config.notify.webhook_url:
        yield "notify.webhook_url", config.notify.webhook_url, _HTTP
    for model in config.models:
        if model.recheck.url:
            yield f"models `{model.name}`: recheck.url", model.recheck.url, _ANY
        for reference in model.references:
            yield from _urls_of(model, reference)


def _urls_of(model: Model, reference: Reference) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    if reference.url:
        yield f"models `{model.name}`: references.url", reference.url, _ANY
    if reference.copy.url:
        yield f"models `{model.name}`: references.copy.url", reference.copy.url, _HTTP

"""The command `quantdrift config`."""

import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from quantdrift.cli.options import CONFIG, JSON, emit
from quantdrift.cli.output import explained
from quantdrift.core.config.address import read_address
from quantdrift.core.config.connections import Connection
from quantdrift.core.config.load import Role, load, load_secrets
from quantdrift.core.config.schema import Config, Model, Provider, Reference, Runtime
from quantdrift.core.config.wrong_values import nearest
from quantdrift.core.errors import OperatorError
from quantdrift.core.keys import is_key_file, load_keys
from quantdrift.core.passed_secrets import variables

if TYPE_CHECKING:
    from quantdrift.shadow.runtimes.protocol import Artefact

_CONNECT_S = 1.0


@click.group("config")
def config_() -> None:
    """Check the configuration, and print it."""


@config_.command("check")
@CONFIG
@click.option(
    "--requests-per-s", type=float, help="Inference traffic of one pod; adds the expected replay rate."
)
@click.option(
    "--references",
    is_flag=True,
    help="Open each reference and check, as the shadow does, that it is FP32 and has the configured `embedding`.",
)
@JSON
def config_check(config_path: Path, requests_per_s: float | None, references: bool, as_json: bool) -> None:
    """Check the configuration and show its effects: references, slices, sampling rates, memory.

    It lists the connections to servers, and which of them are encrypted.

    Exit code 2 if it is invalid; all errors are listed at once. The command imports your own adapters, which runs
    their code. If the backend is on this machine it tries to connect, and adds a note if nothing listens there.

    \b
    Example:
      quantdrift config check --requests-per-s 300 --references
    """
    from quantdrift.cli.config_summary import explain
    from quantdrift.sidecar.protocols.adapters import load_adapter
    from quantdrift.sidecar.supervisor import missing_packages

    config = load(config_path)
    for model in config.models:
        if model.adapter:
            load_adapter(model.adapter)
    config, missing = _with_nats_address(config)
    explanation = explain(config, requests_per_s)
    explanation = msgspec.structs.replace(
        explanation, connections=[*explanation.connections, *_postgres(config)]
    )
    missing += [
        f"reference file {path} of model `{model.name}` does not exist here (the shadow needs it)"
        for model in config.models
        for path in dict.fromkeys(
            path for reference in model.references for path in (reference.path, reference.copy.path) if path
        )
        if not Path(path).exists()
    ]
    missing += [f"{what} (the sidecar needs it)" for what in missing_packages(config)]
    missing += _key_file_notes(config)
    missing += _unanswered(config)
    explanation = msgspec.structs.replace(explanation, notes=explanation.notes + missing)
    if references:
        found = [
            artefact
            for model in config.models
            for reference in model.references
            for artefact in _opened(config, model, reference)
        ]
        checked = {one.path: _said(one) for one in found}
        explanation = msgspec.structs.replace(explanation, checked=checked)
    if as_json:
        emit(explanation)
    else:
        click.echo(explained(explanation, config_path))


def _with_nats_address(config: Config) -> tuple[Config, list[str]]:
    """Return the configuration with the address that `stream.url_file` contains, and a note if it is not on this machine."""
    from quantdrift.core.stream.config import current_stream

    file = config.stream.url_file
    if file and not Path(file).exists():
        return config, [f"stream.url_file {file} does not exist here: the connection to NATS is not checked"]
    stream = msgspec.structs.replace(current_stream(config.stream), url_file="")
    return msgspec.structs.replace(config, stream=stream), []


def _postgres(config: Config) -> list[Connection]:
    """Return the connection to Postgres, if its address is known here; a wrong address raises `OperatorError`."""
    from quantdrift.storage.address import Address

    try:
        secrets = load_secrets(config, Role.MIGRATE)
    except OperatorError:  # only the shadow and the monitor have the address
        return []
    address = Address.of(secrets.dsn)
    return [Connection(to=f"Postgres {address.where}", protection=address.protection)]


def _key_file_notes(config: Config) -> list[str]:
    """Return a note about each key file that cannot be used here, or that other users can read."""
    notes = []
    for option, name in (
        ("stream.payload_key_file", config.stream.payload_key_file),
        ("capture.hmac_key_file", config.capture.hmac_key_file),
    ):
        path = Path(name)
        if not name or (option.startswith("capture") and _is_plain_key(path)):
            continue
        try:
            load_keys(path, option)
        except OperatorError as error:
            notes.append(f"{error} (the sidecar needs it)")
            continue
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) and path.stat().st_uid == os.getuid():
            notes.append(f"{option}: other users can read {path}: chmod 600 {path}")
    return notes


def _is_plain_key(path: Path) -> bool:
    """Return whether a file has a key as plain text, which is no key file."""
    try:
        return not is_key_file(path.read_bytes())
    except OSError:
        return False


def _unanswered(config: Config) -> list[str]:
    """Return a note if the backend is on this machine and nothing listens there; no other machine is contacted."""
    backend = read_address(config.sidecar.backend)
    if not config.sidecar.listen or not backend.is_loopback:
        return []
    try:
        socket.create_connection((backend.host, backend.port), timeout=_CONNECT_S).close()
    except OSError:
        note = f"nothing accepts connections at {backend} on this machine now (sidecar.backend)"
        return [f"{note}: until a server does, clients of the sidecar are disconnected"]
    return []


def _said(artefact: "Artefact") -> str:
    opset = f"opset {artefact.opset}, " if artefact.opset else ""
    return f"{artefact.precision}, {opset}sha256 {artefact.digest}"


def _opened(config: Config, model: Model, reference: Reference) -> "tuple[Artefact, ...]":
    """Return the artefact of a reference, and of its copy if it has one, after the checks that the shadow makes.

    An ONNX graph is loaded only for an embedding.
    """
    from quantdrift.shadow.comparators.registry import comparator_of
    from quantdrift.shadow.runtimes.canaries.check import checked_canaries
    from quantdrift.shadow.runtimes.onnx.runtime import inspect
    from quantdrift.shadow.runtimes.protocol import check_pin
    from quantdrift.shadow.runtimes.registry import check_mapping, open_reference, runtime_request
    from quantdrift.shadow.runtimes.text.candidate_replica import open_replica, replica_request

    opening = msgspec.structs.replace(
        runtime_request(config, model, reference, variables().get("QUANTDRIFT_REFERENCE_TOKEN", "")),
        provider=Provider.CPU,
        threads=1,
    )
    compared = comparator_of(model).outputs
    named = (
        opening.embedding
        or reference.inputs
        or reference.output
        or reference.canaries
        or model.output
        or compared
    )
    if reference.runtime is Runtime.ONNX and not named:
        artefact = inspect(Path(reference.path), reference.allow_reduced_precision)
        check_pin(reference.path, artefact.digest, reference.digest)
        return (artefact,)
    runtime = open_reference(opening)
    try:
        check_mapping(model, reference, runtime, compared)
        _check_outputs(model, reference, [spec.name for spec in runtime.outputs], compared)
        checked_canaries(model, reference, runtime)
    finally:
        runtime.close()
    told = replica_request(opening)
    if told is None:
        return (runtime.artefact,)
    copy = open_replica(told)
    copy.close()
    return runtime.artefact, copy.artefact


def _check_outputs(model: Model, reference: Reference, known: Sequence[str], compared: Sequence[str]) -> None:
    """Refuse names of outputs that the reference does not have, unless it has a name of its own."""
    if reference.output:
        return
    for name in compared or [one for one in (model.output,) if one]:
        if known and name not in known:
            raise OperatorError(
                f"models `{model.name}`: the output `{name}` is not one of the reference "
                f"{reference.where(model.name)}: {nearest(name, known)}"
            )


@config_.command("show")
@CONFIG
@click.option(
    "--defaults", is_flag=True, help="Print the annotated defaults instead of the current configuration."
)
def config_show(config_path: Path, defaults: bool) -> None:
    """Print the current configuration as JSON, or the annotated defaults as TOML.

    The current configuration is the file with models.d/ and all environment overrides.

    \b
    Example:
      quantdrift config show --defaults > config.toml
    """
    from quantdrift.core.config.render import default_toml

    if defaults:
        click.echo(default_toml(), nl=False)
    else:
        config = load(config_path)
        stream = msgspec.structs.replace(config.stream, url=config.stream.address)
        emit(msgspec.structs.replace(config, stream=stream))

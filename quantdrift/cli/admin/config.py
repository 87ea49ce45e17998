"""The command `quantdrift config`."""

import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from quantdrift.cli.options import CONFIG, JSON, emit
from quantdrift.cli.output import explained, waiting
from quantdrift.core.config.address import read_address
from quantdrift.core.config.connections import ConfiguredConnection
from quantdrift.core.config.load import Role, hmac_key, load, load_secrets
from quantdrift.core.config.schema import Config
from quantdrift.core.config.state import shown_config
from quantdrift.core.config.wrong_values import similar_file
from quantdrift.core.errors import OperatorError
from quantdrift.core.keys import is_key_file, load_keys

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
    "--references/--no-references",
    default=None,
    help="Open every reference, also those of 1 GiB or more and those at servers; or open none and miss none.  [default: open the smaller files]",
)
@click.option(
    "--candidate",
    "candidates",
    multiple=True,
    metavar="[MODEL=]FILE",
    help="A quantised ONNX file that serves, or is to serve: its weights are compared with those of the references. Repeatable.",
)
@JSON
def config_check(
    config_path: Path,
    requests_per_s: float | None,
    *,
    references: bool | None,
    candidates: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check the configuration and show its effects: references, slices, sampling rates, memory.

    The references are opened, as the shadow does it, and compared with the configuration: precision, names and types of outputs,
    output_kind, embedding, inputs of slices. It lists the connections to servers, and which of them are encrypted.

    Exit code 2 if something is wrong, such as a reference file that is not here; all errors are listed at once. The command runs the code of your own adapters and of
    references that are code. If the backend is on this machine it tries to connect, and adds a note if nothing listens there.

    \b
    Examples:
      quantdrift config check --requests-per-s 300
      quantdrift config check --references
      quantdrift config check --references --candidate models/digits-int8.onnx
    """
    from quantdrift.cli.config_summary import explain
    from quantdrift.cli.release.reference_check import CheckedReferences, check_references
    from quantdrift.models.comparators.registry import comparator_of
    from quantdrift.models.runtimes.registry import runtime_options
    from quantdrift.sidecar.protocols import decoder_of
    from quantdrift.sidecar.protocols.adapters import load_adapter
    from quantdrift.sidecar.supervisor import missing_packages

    config = load(config_path)
    for model in config.models:
        if model.adapter:
            load_adapter(model.adapter)
        if not model.task.is_built_in:
            comparator_of(model)
        for reference in model.references:
            if not reference.runtime.is_built_in:
                runtime_options(model, reference)
    for protocol in config.capture.protocols:
        decoder_of(protocol)
    config, missing = _with_nats_address(config)
    explanation = explain(config, requests_per_s)
    explanation = msgspec.structs.replace(
        explanation, connections=[*explanation.connections, *_postgres(config)]
    )
    missing += _missing_key(config)
    absent = _absent(config)
    if references is False:
        missing += absent
    missing += [f"{what} (the sidecar needs it)" for what in missing_packages(config)]
    missing += _key_file_notes(config)
    missing += _unanswered(config)
    with waiting("opening the references", quiet=as_json):
        checked = (
            CheckedReferences()
            if references is False
            else check_references(config, everything=bool(references))
        )
    origins = _origins(config, candidates)
    if references is not False and (problems := [*absent, *checked.problems]):
        listed = "\n".join(f"  - {problem}" for problem in problems)
        where = (
            "\nWhere no reference is needed, as on the host of a sidecar alone: --no-references"
            if absent
            else ""
        )
        raise OperatorError(f"the configuration does not fit its references:\n{listed}{where}")
    explanation = msgspec.structs.replace(
        explanation,
        missing=missing,
        notes=[*missing, *checked.notes, *origins, *explanation.notes],
        checked=checked.artefacts,
    )
    if as_json:
        emit(explanation)
    else:
        click.echo(explained(explanation, config_path))


def _absent(config: Config) -> list[str]:
    """Return a sentence about each file of a reference that is not here."""
    return [
        f"reference file {path} of model `{model.name}` does not exist here (the shadow needs it){similar_file(Path(path))}"
        for model in config.models
        for path in dict.fromkeys(
            path for reference in model.references for path in (reference.path, reference.copy.path) if path
        )
        if not Path(path).exists()
    ]


def _origins(config: Config, candidates: Sequence[str]) -> list[str]:
    """Return notes about faulty weights of candidates; one of another checkpoint raises `OperatorError`."""
    from quantdrift.release.origin import check_origin

    notes: list[str] = []
    for candidate in candidates:
        named, _, file = ("", "", candidate) if Path(candidate).is_file() else candidate.partition("=")
        models = [model for model in config.models if named in ("", model.name)]
        if not Path(file).is_file() or not models:
            raise OperatorError(
                f"--candidate {candidate}: write FILE or MODEL=FILE, with a file that is there and a model of the configuration"
            )
        if len(models) > 1:
            raise OperatorError(
                f"--candidate {candidate}: the configuration has {len(models)} models: write MODEL={file}"
            )
        for reference in models[0].references:
            notes += check_origin(Path(file), reference)
    return notes


def _with_nats_address(config: Config) -> tuple[Config, list[str]]:
    """Return the configuration with the address that `stream.url_file` contains, and a note if it is not on this machine."""
    from quantdrift.core.stream.config import current_stream

    file = config.stream.url_file
    if file and not Path(file).exists():
        return config, [f"stream.url_file {file} does not exist here: the connection to NATS is not checked"]
    stream = msgspec.structs.replace(current_stream(config.stream), url_file="")
    return msgspec.structs.replace(config, stream=stream), []


def _postgres(config: Config) -> list[ConfiguredConnection]:
    """Return the connection to Postgres, if its address is known here; a wrong address raises `OperatorError`."""
    from quantdrift.storage.address import PostgresAddress

    try:
        secrets = load_secrets(config, Role.MIGRATE)
    except OperatorError:  # only the shadow and the monitor have the address
        return []
    address = PostgresAddress.of(secrets.dsn)
    return [ConfiguredConnection(to=f"Postgres {address.where}", protection=address.protection)]


def _missing_key(config: Config) -> list[str]:
    """Return a note if attributes are to be hashed and no key is here."""
    try:
        key = hmac_key(config)
    except OperatorError:  # a note about the file says so
        return []
    if key or not config.capture.hashed:
        return []
    option = "capture.hmac" if config.capture.hmac else "capture.text"
    note = f"{option} names {', '.join(config.capture.hashed)}, and there is no key here"
    remedy = "without QUANTDRIFT_HMAC_KEY or capture.hmac_key_file (`quantdrift keys new FILE`) the sidecar does not start"
    return [f"{note}: {remedy}"]


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


@config_.command("show")
@CONFIG
@click.option(
    "--defaults", is_flag=True, help="Print the annotated defaults instead of the current configuration."
)
def config_show(config_path: Path, defaults: bool) -> None:
    """Print the current configuration as JSON, or the annotated defaults as TOML.

    The current configuration is the file with models.d/ and all environment overrides, without credentials and other secrets.

    \b
    Example:
      quantdrift config show --defaults > config.toml
    """
    from quantdrift.core.config.render import default_toml

    if defaults:
        click.echo(default_toml(), nl=False)
    else:
        emit(shown_config(load(config_path)))

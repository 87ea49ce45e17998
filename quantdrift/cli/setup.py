"""The command `quantdrift setup`: rights and keys at the servers that quantdrift uses."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec
import nkeys

from quantdrift.cli.options import CONFIG, JSON, audit_dsn, emit
from quantdrift.core.config.load import load
from quantdrift.core.errors import OperatorError, os_error_text
from quantdrift.core.stream.rights import PURPOSES, NatsRole, rights

if TYPE_CHECKING:
    from quantdrift.core.config.schema import Stream

SUFFIX: Final = ".nk"
_SEED_BYTES = 32


@click.group()
def setup() -> None:
    """Set up users with the least rights at NATS."""


@setup.command("nats")
@CONFIG
@click.option(
    "--keys",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("nats-keys"),
    show_default=True,
    help="Folder of the keys, one file for each role. Missing ones are created.",
)
@click.option(
    "--apply",
    "apply_",
    is_flag=True,
    help="Connect as the administrator, and create or update streams and buckets.",
)
@JSON
def nats(config_path: Path, directory: Path, apply_: bool, as_json: bool) -> None:
    """Create a key for each role, and print the users and their rights for the configuration of nats-server.

    Put the printed part into the `authorization` of the server, or of an account with JetStream. Then run the command with
    --apply, and give each role its own key: `stream.credentials_file = "sidecar.nk"` beside the model's server, and so on. No
    role can read what another one gets; a sidecar can neither read nor delete what was captured.

    \b
    Example:
      quantdrift setup nats --keys nats-keys > quantdrift-users.conf
      quantdrift setup nats --keys nats-keys --apply
    """
    config = load(config_path)
    public_keys = keys(directory)
    if apply_:
        admin_key = directory / f"{NatsRole.ADMIN}{SUFFIX}"
        changed = asyncio.run(_audited(audit_dsn(config, None), config.stream, admin_key))
        if as_json:
            emit({"streams": changed})
        else:
            click.echo(f"up to date: {', '.join(changed)}")
    elif as_json:
        allowed = {role: rights(config.stream.name, role) for role in NatsRole}
        emit({role: {"nkey": key, "permissions": allowed[role]} for role, key in public_keys.items()})
    else:
        click.echo(configuration(config.stream.name, public_keys), nl=False)
        click.echo(f"the keys are in {directory}: give each role its own file only", err=True)


def configuration(name: str, public_keys: Mapping[NatsRole, str]) -> str:
    """Return the users of one installation, as a part of a configuration file of nats-server.

    Parameters
    ----------
    name
        `stream.name`.
    public_keys
        The public key of each role.
    """
    users = []
    for role, key in public_keys.items():
        allowed = rights(name, role)
        users.append(
            f"  # {role}: {PURPOSES[role]}\n"
            f"  {{ nkey: {key}\n"
            f"    permissions: {{\n"
            f"      publish: {{ allow: {_listed(allowed.publish)} }}\n"
            f"      subscribe: {{ allow: {_listed(allowed.subscribe)} }}\n"
            f"    }} }}\n"
        )
    return f"users: [\n{''.join(users)}]\n"


def keys(directory: Path) -> dict[NatsRole, str]:
    """Return the public key of each role; a missing key is created in `directory`, readable only by its owner.

    Raises
    ------
    OperatorError
        A file cannot be written, or has no key.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OperatorError(f"{directory}: it cannot be created: {os_error_text(error)}") from error
    return {role: _public_key(directory / f"{role}{SUFFIX}") for role in NatsRole}


def _public_key(path: Path) -> str:
    try:
        if not path.exists():
            seed = nkeys.encode_seed(os.urandom(_SEED_BYTES), nkeys.PREFIX_BYTE_USER)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(bytes(seed) + b"\n")
        key: bytes = nkeys.from_seed(bytearray(path.read_bytes().strip())).public_key
        return key.decode()
    except OSError as error:
        raise OperatorError(f"{path}: {os_error_text(error)}") from error
    except (nkeys.NkeysError, ValueError) as error:
        raise OperatorError(
            f"{path} has no key of a NATS user: remove it, and a new key is created"
        ) from error


def _listed(subjects: tuple[str, ...]) -> str:
    return f"[{', '.join(msgspec.json.encode(subject).decode() for subject in subjects)}]"


async def _audited(dsn: str, stream: "Stream", admin_key: Path) -> list[str]:
    """Apply with an entry in the audit; where there is no address of Postgres, without one."""
    if not dsn:
        click.echo("warning: not in the audit: there is no Postgres address (QUANTDRIFT_DSN)", err=True)
        return await _apply(stream, admin_key)
    from quantdrift.storage.audit import Action, add
    from quantdrift.storage.database import Database

    async with Database(dsn) as database, database.begin() as connection:
        await add(connection, Action.SETUP_NATS, after={"stream": stream.name})
        return await _apply(stream, admin_key)


async def _apply(stream: "Stream", admin_key: Path) -> list[str]:
    """Create or update the two streams and the two buckets; return their names."""
    from quantdrift.core.sampling.pause import KEY
    from quantdrift.core.sampling.rates import POLICY_VALID_S
    from quantdrift.core.stream.connection import Queue
    from quantdrift.core.stream.keyvalue import KeyValue

    as_admin = msgspec.structs.replace(stream, credentials_file=str(admin_key))
    queue = await Queue.connect(as_admin, client_name="quantdrift-setup", role=NatsRole.ADMIN)
    try:
        await queue.ensure()
        buckets = KeyValue(queue, stream, POLICY_VALID_S), KeyValue(queue, stream, purpose=KEY)
        for bucket in buckets:
            await bucket.ensure()
    finally:
        await queue.close()
    return [queue.stream_name("exchange"), queue.stream_name("tally"), *(bucket.name for bucket in buckets)]

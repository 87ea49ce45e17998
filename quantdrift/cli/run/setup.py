"""The command `quantdrift setup`: rights and keys at the servers that quantdrift uses."""

import asyncio
import contextlib
import os
import re
import secrets as random_secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec
import nkeys

from quantdrift.cli.options import CONFIG, DATA, JSON, audit_dsn, emit, load_under_up, prepare
from quantdrift.core.config.load import Role
from quantdrift.core.data_directory import SUFFIX
from quantdrift.core.errors import OperatorError, os_error_text
from quantdrift.core.process.child import INSTANCE
from quantdrift.core.process.nats_server import make_encryption
from quantdrift.core.stream.rights import PURPOSES, NatsRole, Rights, rights
from quantdrift.core.stream.subjects import model_set, subject_token
from quantdrift.core.text import plain

if TYPE_CHECKING:
    from quantdrift.core.config.schema import Stream

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SEED_BYTES = 32
_MOST_MODELS: Final = 2000  # characters; NATS reads 4,096 of a subject and what goes with it


@click.group()
def setup() -> None:
    """Set up roles and users with the least rights at NATS and Postgres."""


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
    "--model",
    "models",
    multiple=True,
    help="Create a key for the sidecars of this model, which can publish its exchanges only, in place of one for all models."
    " Several names with commas between them share a key. May be repeated.",
)
@click.option(
    "--sidecar",
    "named",
    multiple=True,
    metavar="NAME=MODEL,...",
    help="As --model, with a name for the key: of a namespace, or of an intake. May be repeated.",
)
@click.option(
    "--apply",
    "apply_",
    is_flag=True,
    help="Connect as the administrator, and create or update streams and buckets.",
)
@JSON
def nats(
    config_path: Path,
    *,
    directory: Path,
    models: tuple[str, ...],
    named: tuple[str, ...],
    apply_: bool,
    as_json: bool,
) -> None:
    """Create a key for each role, and print the users and their rights for the configuration of nats-server.

    Put the printed part into the `authorization` of the server, or of an account with JetStream. Then run the command with
    --apply, and give each role its own key: `stream.credentials_file = "sidecar.nk"` beside the model's server, and so on. No
    role can read what another one gets; a sidecar can neither read nor delete what was captured.

    \b
    Example:
      quantdrift setup nats --keys nats-keys > quantdrift-users.conf
      quantdrift setup nats --keys nats-keys --model digits --model words > quantdrift-users.conf
      quantdrift setup nats --keys nats-keys --sidecar team-a=digits,words --sidecar team-b=faces > quantdrift-users.conf
      quantdrift setup nats --keys nats-keys --apply
    """
    config, _ = load_under_up(config_path)
    if apply_:
        admin_key = directory / f"{NatsRole.ADMIN}{SUFFIX}"
        exemplars = any(model.exemplars for model in config.models)
        changed = asyncio.run(
            _audited(audit_dsn(config, None), config.stream, admin_key, exemplars=exemplars)
        )
        if as_json:
            emit({"streams": changed})
        else:
            click.echo(f"streams and buckets at NATS are up to date: {', '.join(changed)}")
        return
    bound = [*(_of_models(written) for written in models), *(_of_name(written) for written in named)]
    if len({name for name, _ in bound}) < len(bound):
        raise OperatorError("two keys would have one name: give each --model and each name of --sidecar once")
    for own, of_key in bound:
        if len(model_set(of_key)) > _MOST_MODELS:
            raise OperatorError(
                f"sidecar-{own}{SUFFIX}: the names of its models have more than {_MOST_MODELS} characters together, and NATS takes no"
                " longer subject: make several keys"
            )
    roles = [role for role in NatsRole if role is not NatsRole.SIDECAR or not bound]
    users = _users(config.stream.name, keys(directory, roles)) + _sidecars(
        config.stream.name, directory, bound
    )
    if as_json:
        emit({user.name: {"nkey": user.key, "permissions": user.rights} for user in users})
    else:
        click.echo(_configuration(users), nl=False)
        click.echo(f"the keys are in {directory}: give each role its own file only", err=True)
    if any(model.exemplars for model in config.models):
        try:
            encryption = make_encryption(directory)
        except OSError as error:
            raise OperatorError(f"{directory}: {os_error_text(error)}") from error
        click.echo(
            f"models.exemplars keeps payloads: put `include {encryption.name}` into the `jetstream` block of nats-server, with a copy"
            f" of {encryption} beside its configuration, so that it encrypts its disk",
            err=True,
        )


@setup.command("postgres")
@CONFIG
@DATA
@click.option(
    "--apply",
    "apply_",
    is_flag=True,
    help="Connect as the administrator, and create or update the roles.",
)
@click.option(
    "--users",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --apply: create a user in each role, and write its address to a file in this folder.",
)
@click.option(
    "--rotate",
    multiple=True,
    help="With --users: give the user of this role a new password, and write it to its file. May be repeated.",
)
@JSON
def postgres(
    config_path: Path,
    data: Path | None,
    apply_: bool,
    directory: Path | None,
    rotate: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print or apply SQL roles with the least rights, for each process and for people.

    --users adds a user to each role, with a random password, and writes its complete address to a file that only its owner can
    read: shadow.dsn, monitor.dsn and so on, for storage.dsn_file. A second run keeps users and passwords. Run it again after
    each `quantdrift db upgrade`.

    \b
    Examples:
      quantdrift setup postgres | psql "$QUANTDRIFT_DSN"
      quantdrift setup postgres --apply --users postgres-users
      quantdrift setup postgres --apply --users postgres-users --rotate shadow
    """
    from quantdrift.storage.schema.roles import ROLES, apply, statements

    if directory is not None and not apply_:
        raise OperatorError("--users needs --apply: a printed password would be seen by others")
    if rotate and directory is None:
        raise OperatorError("--rotate needs --users: the folder of the files with the addresses")
    short = {role.removeprefix("quantdrift_"): role for role in ROLES}
    if unknown := sorted(set(rotate) - short.keys()):
        raise OperatorError(f"--rotate {unknown[0]}: there is no such role; roles: {', '.join(short)}")
    if not apply_:
        if as_json:
            emit({"statements": statements()})
        else:
            click.echo("\n".join(f"{statement};" for statement in statements()))
        return
    _, secrets = prepare(config_path, Role.MIGRATE, data)
    files = {} if directory is None else {name: directory / f"{name}.dsn" for name in short}
    if directory is None:
        asyncio.run(apply(secrets.dsn))
    else:
        _make_users(secrets.dsn, directory, {short[name]: path for name, path in files.items()}, rotate)
    if as_json:
        emit({"roles": list(ROLES), "users": {name: str(path) for name, path in files.items()}})
    else:
        click.echo("\n".join(str(path) for path in files.values()) or "roles applied")


def _make_users(dsn: str, directory: Path, files: Mapping[str, Path], rotate: tuple[str, ...]) -> None:
    """Create the users that are missing, and write the addresses of those that got a password."""
    from quantdrift.storage.address import with_user
    from quantdrift.storage.schema.roles import apply, login_of, logins

    existing_roles = asyncio.run(logins(dsn))
    passwords = {}
    for role, path in files.items():
        if path.stem in rotate or role not in existing_roles:
            passwords[role] = random_secrets.token_hex(24)
        elif path.exists():
            passwords[role] = ""
        else:
            raise OperatorError(
                f"the user {login_of(role)} exists, and {path} does not: give the folder of the first run, or"
                f" `--rotate {path.stem}` for a new password"
            )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Written before the password changes, and under the real name only afterwards: no password is lost.
        new = {role: files[role].with_suffix(".dsn.new") for role, password in passwords.items() if password}
        for role, path in new.items():
            path.unlink(missing_ok=True)
            _write(path, with_user(dsn, login_of(role), passwords[role]).encode())
        try:
            asyncio.run(apply(dsn, passwords))
            for role, path in new.items():
                path.replace(files[role])
        finally:
            for path in new.values():
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
    except OSError as error:
        raise OperatorError(f"{error.filename or directory}: {os_error_text(error)}") from error


def _write(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content + b"\n")


def configuration(name: str, public_keys: Mapping[NatsRole, str]) -> str:
    """Return the users of one installation, as a part of a configuration file of nats-server.

    Parameters
    ----------
    name
        `stream.name`.
    public_keys
        The public key of each role.
    """
    return _configuration(_users(name, public_keys))


class _User(msgspec.Struct, frozen=True, kw_only=True):
    """A user of NATS: its name and purpose for people, its public key, and its rights."""

    name: str
    purpose: str
    key: str
    rights: Rights


def _users(name: str, public_keys: Mapping[NatsRole, str]) -> list[_User]:
    return [
        _User(name=role.value, purpose=PURPOSES[role], key=key, rights=rights(name, role))
        for role, key in public_keys.items()
    ]


def _of_models(written: str) -> tuple[str, list[str]]:
    """Return name and models of a key that is named by its models."""
    models = _split(written, "--model")
    return "+".join(subject_token(model) for model in models), models


def _of_name(written: str) -> tuple[str, list[str]]:
    """Return name and models of a key, from NAME=MODEL,..."""
    name, _, models = written.partition("=")
    if not _NAME.fullmatch(name):
        raise OperatorError(
            f"--sidecar {written!r}: write NAME=MODEL,..., with a name of lower-case letters, digits and dashes"
        )
    return name, _split(models, "--sidecar")


def _split(written: str, option: str) -> list[str]:
    models = sorted({model.strip() for model in written.split(",")})
    if not all(models):
        raise OperatorError(
            f"{option} {written!r}: write the name of a model, or several with commas between them"
        )
    return models


def _sidecars(name: str, directory: Path, bound: Iterable[tuple[str, list[str]]]) -> list[_User]:
    """Return a user for each key with its models; a missing key is created."""
    return [
        _User(
            name=f"{NatsRole.SIDECAR}-{own}",
            purpose=f"{PURPOSES[NatsRole.SIDECAR]}, of {', '.join(models)} only",
            key=_public_key(directory / f"{NatsRole.SIDECAR}-{own}{SUFFIX}"),
            rights=rights(name, NatsRole.SIDECAR, models),
        )
        for own, models in bound
    ]


def _configuration(users: Iterable[_User]) -> str:
    written = "".join(
        f"  # {user.name}: {plain(user.purpose)}\n"
        f"  {{ nkey: {user.key}\n"
        f"    permissions: {{\n"
        f"      publish: {{ allow: {_listed(user.rights.publish)} }}\n"
        f"      subscribe: {{ allow: {_listed(user.rights.subscribe)} }}\n"
        f"    }} }}\n"
        for user in users
    )
    return f"users: [\n{written}]\n"


def keys(directory: Path, roles: Iterable[NatsRole] = tuple(NatsRole)) -> dict[NatsRole, str]:
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
    return {role: _public_key(directory / f"{role}{SUFFIX}") for role in roles}


def _public_key(path: Path) -> str:
    try:
        if not path.exists():
            seed = nkeys.encode_seed(os.urandom(_SEED_BYTES), nkeys.PREFIX_BYTE_USER)
            _write(path, bytes(seed))
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


async def _audited(dsn: str, stream: "Stream", admin_key: Path, *, exemplars: bool) -> list[str]:
    """Apply with an entry in the audit; where there is no address of Postgres, without one."""
    if not dsn:
        if (
            INSTANCE not in os.environ
        ):  # `quantdrift up` applies them at each start: nobody has decided anything
            click.echo("warning: not in the audit: there is no Postgres address (QUANTDRIFT_DSN)", err=True)
        return await _apply(stream, admin_key, exemplars=exemplars)
    from quantdrift.storage.audit import Action, add
    from quantdrift.storage.database import Database

    async with Database(dsn) as database, database.begin() as connection:
        await add(connection, Action.SETUP_NATS, after={"stream": stream.name})
        return await _apply(stream, admin_key, exemplars=exemplars)


async def _apply(stream: "Stream", admin_key: Path, *, exemplars: bool) -> list[str]:
    """Create or update the streams and the two buckets; return their names."""
    from quantdrift.core.sampling.pause import KEY
    from quantdrift.core.sampling.rates import POLICY_VALID_S
    from quantdrift.core.stream.connection import Queue
    from quantdrift.core.stream.keyvalue import KeyValue

    as_admin = msgspec.structs.replace(stream, credentials_file=str(admin_key))
    queue = await Queue.connect(as_admin, client_name="quantdrift-setup", role=NatsRole.ADMIN)
    try:
        await queue.ensure()
        if exemplars:
            await queue.ensure_exemplars()
        buckets = KeyValue(queue, stream, POLICY_VALID_S), KeyValue(queue, stream, purpose=KEY)
        for bucket in buckets:
            await bucket.ensure()
    finally:
        await queue.close()
    streams = [queue.stream_name("exchange"), queue.stream_name("tally")]
    streams += [queue.stream_name("exemplar")] if exemplars else []
    return [*streams, *(bucket.name for bucket in buckets)]

"""The command `quantdrift keys`: key files that encrypt exchanges and hash attributes."""

import sys
from datetime import datetime
from pathlib import Path

import click
import msgspec

from quantdrift.cli.options import JSON, emit, span_of
from quantdrift.core.clock import SystemClock
from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.core.keys import Key, KeyRing, load_keys, write_keys
from quantdrift.core.text import columns

_FILE = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
_ARGUMENT = "FILE"
_HEX_ESCAPE = b"\\x"


class ListedKey(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown of a key.

    Parameters
    ----------
    id, created, used_from
        As in the file.
    state
        `in use`: it makes what is new; `waiting`: it will; `old`: it only reads what it has made.
    """

    id: str
    created: datetime
    used_from: datetime
    state: str


@click.group()
def keys() -> None:
    """Create and rotate key files; no command prints a key.

    One file can serve `stream.payload_key_file` and `capture.hmac_key_file`: each use derives a key of its own.
    """


@keys.command("new")
@_FILE
@JSON
def new(file: Path, as_json: bool) -> None:
    """Create a key file with one key, readable by its owner only.

    \b
    Example:
      quantdrift keys new payload-keys.json
    """
    ring = KeyRing(keys=(Key.create(SystemClock().now()),))
    write_keys(file, ring, is_new=True)
    _show(ring, as_json=as_json)


@keys.command("rotate")
@_FILE
@click.option(
    "--after",
    default="10m",
    show_default=True,
    help="When the new key replaces the one in use. By then every process must have the file.",
)
@JSON
def rotate(file: Path, after: str, as_json: bool) -> None:
    """Add a key, which is used after a while; the older ones still read what they have made.

    Give the file to all sidecars and shadow workers within that time. They read it again by themselves.

    \b
    Example:
      quantdrift keys rotate payload-keys.json --after 30m
    """
    ring = load_keys(file, _ARGUMENT)
    if any(key.public for key in ring.keys):
        raise OperatorError(
            f"{file} has public keys: rotate the file with their secrets, and write the public one again with `quantdrift keys public`"
        )
    now = SystemClock().now()
    key = Key.create(now, span_of("--after", after).total_seconds())
    ring = KeyRing(keys=(*ring.keys, key))
    write_keys(file, ring)
    _show(ring, as_json=as_json)


@keys.command("join")
@_FILE
@click.argument("others", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@JSON
def join(file: Path, others: tuple[Path, ...], as_json: bool) -> None:
    """Add the keys of OTHERS to FILE, so that it opens what they have made; its own key goes on making what is new.

    For a shadow, or for `quantdrift privacy`, where the sidecars of each namespace have a key of their own. Run it again when one of them
    was rotated.

    \b
    Example:
      quantdrift keys join shadow-keys.json team-a/payload-keys.json team-b/payload-keys.json
    """
    ring = load_keys(file, _ARGUMENT)
    for other in others:
        ring = ring.joined(load_keys(other, "OTHERS"))
    write_keys(file, ring)
    _show(ring, as_json=as_json)


@keys.command("public")
@_FILE
@click.argument("public_file", metavar="PUBLIC", type=click.Path(dir_okay=False, path_type=Path))
@JSON
def public(file: Path, public_file: Path, as_json: bool) -> None:
    """Write the public halves of FILE's keys to PUBLIC, for sidecars: with these they encrypt for the shadow, and open nothing.

    FILE stays with the shadow, and with `quantdrift privacy`. Run it again after `keys rotate`, and bring PUBLIC to the sidecars before the
    new key is used.

    \b
    Example:
      quantdrift keys public shadow-keys.json payload-keys.json
    """
    from quantdrift.core.sealing import public_half

    ring = public_half(load_keys(file, _ARGUMENT))
    write_keys(public_file, ring, is_new=not public_file.exists())
    _show(ring, as_json=as_json)


@keys.command("list")
@_FILE
@JSON
def list_(file: Path, as_json: bool) -> None:
    """Show the keys of a file: id, age and use.

    \b
    Example:
      quantdrift keys list payload-keys.json
    """
    _show(load_keys(file, _ARGUMENT), as_json=as_json)


@keys.command("remove")
@_FILE
@click.argument("key_id")
@JSON
def remove(file: Path, key_id: str, as_json: bool) -> None:
    """Remove an old key. What it encrypted can never be read again.

    Keep a key for as long as the stream, the quarantine and exemplars may hold what it encrypted: `stream.max_age_s`,
    `storage.quarantine_days`, and 7 days if a model keeps exemplars. The key in use cannot be removed; rotate first.

    \b
    Example:
      quantdrift keys remove payload-keys.json k3f9a2c1b
    """
    ring = load_keys(file, _ARGUMENT)
    if ring.find(key_id) is None:
        raise OperatorError(f"{file} has no key {key_id}: `quantdrift keys list {file}` shows the ids")
    if ring.current(SystemClock().now()).id == key_id:
        raise OperatorError(
            f"{key_id} is in use: `quantdrift keys rotate {file}` first, and wait for the new key"
        )
    ring = KeyRing(keys=tuple(key for key in ring.keys if key.id != key_id))
    write_keys(file, ring)
    _show(ring, as_json=as_json)


@keys.command("open")
@_FILE
def open_(file: Path) -> None:
    """Decrypt a quarantined message from stdin, and write it to stdout: production data.

    The input is the column `payload` as it is, or in hexadecimal.

    \b
    Example:
      psql -Atc "select payload from quarantine where id = 7" | quantdrift keys open payload-keys.json > exchange.msgpack
    """
    from quantdrift.core.sealing import envelope_of, unseal

    ring = load_keys(file, _ARGUMENT)
    wire = sys.stdin.buffer.read()
    if wire.startswith(_HEX_ESCAPE):
        try:
            wire = bytes.fromhex(wire[len(_HEX_ESCAPE) :].decode("ascii").strip())
        except ValueError as error:
            raise OperatorError("the input is neither a message nor hexadecimal") from error
    try:
        plain = unseal(wire, ring, envelope_of(wire).model)
    except QuarantineError as error:
        raise OperatorError(f"{error.detail} (keys of {file})") from error
    sys.stdout.buffer.write(plain)


def _show(ring: KeyRing, *, as_json: bool) -> None:
    now = SystemClock().now()
    current = ring.current(now)
    listed = [
        ListedKey(
            id=key.id,
            created=key.created,
            used_from=key.used_from,
            state="in use" if key is current else "waiting" if key.used_from > now else "old",
        )
        for key in ring.keys
    ]
    if as_json:
        emit(listed)
        return
    rows = [
        (key.id, _age(now, key.created), key.state, f"{key.used_from:%Y-%m-%d %H:%M:%S} UTC")
        for key in listed
    ]
    click.echo(columns(("key", "age", "state", "used from"), rows))


def _age(now: datetime, created: datetime) -> str:
    hours = max((now - created).total_seconds(), 0.0) / 3600
    return f"{hours / 24:.0f} d" if hours >= 48 else f"{hours:.1f} h"

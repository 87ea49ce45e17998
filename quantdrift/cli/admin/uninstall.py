"""The command `quantdrift uninstall`."""

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import msgspec

from quantdrift.cli.options import JSON, emit
from quantdrift.core.data_directory import UP_DATA
from quantdrift.core.errors import OperatorError, RetryError, os_error_text
from quantdrift.core.process.kept_config import KEPT
from quantdrift.core.process.states import up_runs

_MADE: Final = ("dsn", "nats.url", "postgres", "nats", KEPT)
"""By one of these, beside its lock, a data directory is known, so that no other folder is deleted."""
_SIDECAR: Final = "quantdrift-*"
_SOCKETS: Final = ("handoff", "switch")


class Uninstalled(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed, and what stays for a person to remove."""

    removed: tuple[str, ...]
    stays: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"removed {path}" for path in self.removed] or ["There is nothing to remove."]
        return "\n".join([*lines, "", "What stays:", *(f"  - {line}" for line in self.stays)])


@click.command("uninstall")
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    default=UP_DATA,
    show_default=True,
    envvar="QUANTDRIFT_DATA",
    help="Data directory of `quantdrift up`.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@JSON
def uninstall(data: Path, *, yes: bool, as_json: bool) -> None:
    """Remove what `quantdrift up` keeps on this host: its data directory, with everything that was compared.

    Stop `quantdrift up` first. The command also removes folders that sidecars of this user left behind when they were killed. It
    says what stays: the configuration, reports, what is in a Postgres or NATS of your own, and the package.

    \b
    Examples:
      quantdrift uninstall
      quantdrift uninstall --data /var/lib/quantdrift --yes
    """
    folders = _folders(data)
    if folders and not yes:
        click.echo("\n".join(f"{folder}  ({_mib(folder)} MiB)" for folder in folders), err=as_json)
        click.confirm(
            "Delete these folders, with all comparisons and alerts? This cannot be undone.",
            abort=True,
            err=as_json,
        )
    for folder in folders:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise RetryError(f"{folder} could not be removed: {os_error_text(error)}") from error
    done = Uninstalled(removed=tuple(map(str, folders)), stays=_stays())
    if as_json:
        emit(done)
    else:
        click.echo(str(done))


def _folders(data: Path) -> Sequence[Path]:
    """Return the folders to remove: the data directory, if there is one, and those of sidecars that have ended."""
    if data.exists():
        if not (data / "lock").exists() or not any((data / name).exists() for name in _MADE):
            raise OperatorError(f"{data} is no data directory of `quantdrift up`: it is left as it is")
        if up_runs(data):
            raise OperatorError(f"`quantdrift up` runs with {data}: stop it first (Ctrl-C, or SIGTERM)")
    return [*([data] if data.exists() else []), *_left_behind(Path(tempfile.gettempdir()))]


def _left_behind(temporary: Path) -> list[Path]:
    """Return the folders of sidecars of this user that run no more: nobody listens at a socket in them."""
    return [
        folder
        for folder in sorted(temporary.glob(_SIDECAR))
        if folder.is_dir()
        and not folder.is_symlink()
        and folder.stat().st_uid == os.geteuid()
        and any((folder / name).is_socket() for name in _SOCKETS)
        and not any(_is_used(folder / name) for name in _SOCKETS)
    ]


def _is_used(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except OSError as error:
            # Of another kind, full, or not ours to ask: somebody has it all the same.
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


def _mib(folder: Path) -> str:
    n = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return f"{n / 2**20:,.0f}"


def _stays() -> tuple[str, ...]:
    return (
        "the configuration (config.toml, models.d) and reports that were written",
        "clients: point them at the server again, and take the tap out of its code",
        "what is in a Postgres and NATS of your own: drop the database and the streams, or the users of `quantdrift setup`",
        "the package: `pip uninstall quantdrift`, and compiled code in ~/.cache/quantdrift",
    )

"""Options, groups, start-up and JSON output that the commands share."""

import importlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import msgspec

from quantdrift.core.config.load import Role, Secrets, UnreadableSecretError, load, load_secrets
from quantdrift.core.config.schema import Config
from quantdrift.core.data_directory import UP_DATA, default_data, embedded_address, secrets_at
from quantdrift.core.errors import OperatorError
from quantdrift.core.logs import setup_logs
from quantdrift.core.passed_secrets import variables
from quantdrift.core.process.kept_config import DIRECTORY_VARIABLE, kept, load_or_kept

_LOG = logging.getLogger(__name__)
Command = TypeVar("Command", bound=Callable[..., Any])

CONFIG = click.option(
    "--config",
    "-c",
    "config_path",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("config.toml"),
    show_default=True,
    envvar="QUANTDRIFT_CONFIG",
    help="Configuration file.",
)
WITHOUT_MODELS: Final = (
    "requests would be relayed, and nothing would be compared. The config.toml of a checkout is the list of all options: have a file"
    " of your own written by `quantdrift init` (docs/how-to/init.md), and name it with --config"
)
"""What a configuration without a model does, and what to do."""


def _default_data(context: click.Context, _: click.Parameter, given: Path | None) -> Path | None:
    """Return the data directory that was given, or the one that `quantdrift up` has made in this folder."""
    return given or default_data(context.params.get("config_path") or Path("config.toml"))


def data_option(uses: str, *, is_found: bool = True) -> Callable[[Command], Command]:
    """Return the option `--data`, which follows `CONFIG` on a command.

    Parameters
    ----------
    uses
        What the command uses of a running `quantdrift up`.
    is_found
        Whether it is found in this folder without being given: not by a server that runs for long.
    """
    default_text = f"  [default: {UP_DATA}, if `quantdrift up` made it here and no Postgres is configured]"
    return click.option(
        "--data",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="QUANTDRIFT_DATA",
        callback=_default_data if is_found else None,
        help=f"Data directory of a running `quantdrift up`; the command uses its {uses}.{default_text if is_found else ''}",
    )


DATA = data_option("Postgres")
_SPAN = re.compile(r"(\d+)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


class LazyGroup(click.Group):
    """A group that imports a command when it is asked for, so that each process loads its own command alone.

    Parameters
    ----------
    lazy
        Name of a command: its module in `quantdrift.cli`, a colon, and its function.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*super().list_commands(ctx), *self._lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name; None: there is none."""
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module, _, function = self._lazy[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(f"quantdrift.cli.{module}"), function)
        return command


def span_of(option: str, text: str) -> timedelta:
    """Return the duration that a person wrote as 30m, 2h, 1d or 1h30m.

    Raises
    ------
    OperatorError
        It is not a duration of up to a year.
    """
    parts = _SPAN.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise OperatorError(f"{option} {text} is not a duration: write 30m, 2h, 1d or 1h30m")
    seconds = sum(int(number) * _SECONDS[unit] for number, unit in parts)
    if not 0 < seconds <= 365 * 86_400:
        raise OperatorError(f"{option} takes a duration of up to a year")
    return timedelta(seconds=seconds)


REASON = click.option("--reason", default="", help="Reason; it is stored, in the audit for ever.")


def prepare(
    config_path: Path, role: Role, data: Path | None = None, *, address: str = "dsn"
) -> tuple[Config, Secrets]:
    """Set up logging under the command's name; return the configuration and the secrets of `role`.

    Parameters
    ----------
    data
        Data directory of a running `quantdrift up` whose Postgres is used, unless another one is configured.
    address
        The file in it with the address of Postgres.
    """
    config, why = load_under_up(config_path)
    set_up_logs(config)
    _say(why)
    return config, secrets_at(config, role, data, address=address)


def set_up_logs(config: Config) -> None:
    """Set up logging under the command's name."""
    setup_logs(config.telemetry.log_level, as_json=config.telemetry.log_json, role=_command())


def _say(why_kept: str) -> None:
    """Log why the configuration is not that of its files; for its parts `quantdrift up` has said so."""
    from quantdrift.core.process.child import INSTANCE

    if why_kept and INSTANCE not in os.environ:
        _LOG.error("%s", why_kept)


def load_under_up(config_path: Path) -> tuple[Config, str]:
    """Return the configuration, and why it is not that of its files: a part of `quantdrift up` goes on beside broken ones."""
    return load_or_kept(config_path) if DIRECTORY_VARIABLE in variables() else (load(config_path), "")


def audit_dsn(config: Config, data: Path | None) -> str:
    """Return the Postgres address for a command that changes something elsewhere; empty if the command has none.

    Raises
    ------
    OperatorError
        `storage.dsn_file` or the data directory cannot be read.
    """
    if address := os.environ.get("QUANTDRIFT_DSN", ""):
        return address
    if data is not None:
        return embedded_address(data, "dsn")
    return load_secrets(config, Role.REPORT).dsn if config.storage.dsn_file else ""


def prepare_sidecar(config_path: Path) -> tuple[Config, Secrets | None]:
    """Set up logging; return the configuration and the secrets of a sidecar, None if a file cannot be read now.

    A relay needs no secret, and must not wait for one. Where the files are broken or lack a key, it serves with the
    configuration that was accepted last.
    """
    config, why = load_or_kept(config_path)
    set_up_logs(config)
    _say(why)
    try:
        return config, load_secrets(config, Role.SIDECAR)
    except UnreadableSecretError as error:
        if not config.sidecar.listen:
            raise
        _LOG.error("%s; requests are relayed, and nothing is captured until it can be read", error)
        return config, None
    except OperatorError as error:
        last = None if why else kept(config_path)
        if last is None:
            raise
        config = last.config()
        secrets = load_secrets(config, Role.SIDECAR)
        _LOG.error("%s\nThe last configuration that was accepted is used instead, %s", error, last)
        return config, secrets


def _command() -> str:
    """Return the command without `quantdrift`: `monitor`, or `slices fit`."""
    words: list[str] = []
    context: click.Context | None = click.get_current_context()
    while context is not None and context.parent is not None:
        words.insert(0, context.info_name or "")
        context = context.parent
    return " ".join(words)


def emit(record: Any) -> None:
    """Print `record` as one JSON object."""
    click.echo(msgspec.json.format(msgspec.json.encode(record), indent=2))

"""The command `quantdrift db`: the schema."""

import sys
from pathlib import Path
from typing import Final

import click

from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.cli.output import Steps
from quantdrift.core.config.load import Role

_WAITING: Final = 3  # 1 is a database that does not answer, 2 what a person must solve


@click.group()
def db() -> None:
    """Create and upgrade the database schema."""


@db.command("upgrade")
@CONFIG
@DATA
@click.option(
    "--check",
    "is_check",
    is_flag=True,
    help="Change nothing: say what would be applied, and exit with 3 if anything would.",
)
@JSON
def db_upgrade(config_path: Path, data: Path | None, is_check: bool, as_json: bool) -> None:
    """Upgrade the schema to this release and create the partitions of the coming days.

    Running it again, or twice at the same time, is safe. Run it before the processes of a new release start.

    \b
    Example:
      QUANTDRIFT_DSN=postgresql://... quantdrift db upgrade --check
      QUANTDRIFT_DSN=postgresql://... quantdrift db upgrade
    """
    import asyncio

    from quantdrift.storage.admin.migrate import check, head, upgrade

    _, secrets = prepare(config_path, Role.MIGRATE, data)
    if is_check:
        state = asyncio.run(check(secrets.dsn))
        if as_json:
            emit({"revision": state.revision, "head": head(), "waiting": state.waiting})
        else:
            would = f"`quantdrift db upgrade` would apply {', '.join(state.waiting)}"
            click.echo(
                f"schema revision: {state.revision or 'none'}; {would if state.waiting else 'nothing to upgrade'}"
            )
        sys.exit(_WAITING if state.waiting else 0)
    with Steps(quiet=as_json) as step:
        applied = asyncio.run(upgrade(secrets.dsn, progress=step))
    if as_json:
        emit({"applied": applied, "head": head()})
    else:
        click.echo(f"schema revision: {head()} ({len(applied)} revisions applied)")

"""The command `quantdrift db`: the schema."""

from pathlib import Path

import click

from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.cli.output import Steps
from quantdrift.core.config.load import Role


@click.group()
def db() -> None:
    """Create and upgrade the database schema."""


@db.command("upgrade")
@CONFIG
@DATA
@JSON
def db_upgrade(config_path: Path, data: Path | None, as_json: bool) -> None:
    """Upgrade the schema to this release and create the partitions of the coming days.

    Running it again, or twice at the same time, is safe. Run it before the processes of a new release start.

    \b
    Example:
      QUANTDRIFT_DSN=postgresql://... quantdrift db upgrade
    """
    import asyncio

    from quantdrift.storage.admin.migrate import head, upgrade

    _, secrets = prepare(config_path, Role.MIGRATE, data)
    with Steps(quiet=as_json) as step:
        applied = asyncio.run(upgrade(secrets.dsn, progress=step))
    if as_json:
        emit({"applied": applied, "head": head()})
    else:
        click.echo(f"schema revision: {head()} ({len(applied)} revisions applied)")

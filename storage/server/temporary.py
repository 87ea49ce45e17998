"""A temporary database, migrated to the newest schema and deleted at the end, for developers' tools."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantdrift.storage.server.postgres import PostgresServer


@contextmanager
def throwaway_server() -> Iterator[PostgresServer]:
    """Start an embedded server in a temporary directory, and remove both at the end."""
    with tempfile.TemporaryDirectory(prefix="quantdrift-") as parent:
        # For root the server runs under another account, which must be able to enter the directory.
        Path(parent).chmod(0o755)
        with PostgresServer(Path(parent) / "postgres", durable=False) as server:
            yield server

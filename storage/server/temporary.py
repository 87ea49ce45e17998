"""A database for a moment: migrated to the newest schema, gone afterwards. For the tools of developers."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantdrift.storage.server.postgres import PostgresServer


@contextmanager
def throwaway_server() -> Iterator[PostgresServer]:
    """Start an embedded server in a temporary directory, and remove both at the end."""
    with tempfile.TemporaryDirectory(prefix="quantdrift-") as parent:
        # As root the server runs as somebody else, who must be able to enter.
        Path(parent).chmod(0o755)
        with PostgresServer(Path(parent) / "postgres", durable=False) as server:
            yield server

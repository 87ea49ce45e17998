"""The log file of an embedded server: cut when it grows too large, with one file of older lines beside it."""

import contextlib
from pathlib import Path
from typing import Final

MOST_BYTES: Final = 8 << 20
"""Size from which on a log is cut. With the older lines it takes at most one and a half times as much."""


def keep_small(log: Path, most_bytes: int = MOST_BYTES) -> None:
    """Cut a log that is larger than `most_bytes`: the newer half goes to a file beside it, with `.1` appended.

    The server writes on, because it has the file open for appending; lines that it writes at this very moment may be lost.
    It works while the disk is full: then the older lines are not kept.

    Parameters
    ----------
    log
        The file, which every writer has opened for appending. Nothing is done if it does not exist.
    most_bytes
        Its largest size.
    """
    try:
        if log.stat().st_size <= most_bytes:
            return
        with log.open("rb+") as file:
            file.seek(-(most_bytes // 2), 2)
            newer = file.read(most_bytes // 2)
            with contextlib.suppress(OSError):
                older = log.with_name(f"{log.name}.1")
                older.unlink(missing_ok=True)
                older.touch(mode=0o600)
                older.write_bytes(newer[newer.find(b"\n") + 1 :])
            file.truncate(0)
    except OSError:
        return

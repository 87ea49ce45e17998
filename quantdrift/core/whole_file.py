"""Files that are written completely or not at all."""

import os
import stat
from pathlib import Path


def write_whole(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a file completely or not at all, through a draft beside it; its folder is made.

    A pipe or a device, such as /dev/null or /dev/stdout, is written to: a draft would take its place.

    Parameters
    ----------
    mode
        Rights of a new file, less the umask of the process. One that is there keeps its own.

    Raises
    ------
    OSError
        It cannot be written.
    """
    before = path.stat().st_mode if path.exists() else None
    if before is not None and not stat.S_ISREG(before):
        path.write_bytes(content)
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.touch(mode=mode)
        if before is not None:
            draft.chmod(stat.S_IMODE(before))
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise

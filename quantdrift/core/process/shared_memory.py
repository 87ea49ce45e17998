"""The directory of this user in the memory of the machine, which outlives the processes of a sidecar and needs no disk."""

import os
import stat
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the directory in it belongs to this user alone


def user_directory(*, make: bool = False) -> Path:
    """Return the directory of this user.

    Raises
    ------
    OSError
        There is none, or another user can write to it.
    """
    user = os.geteuid()
    directory = SHARED_MEMORY / f"quantdrift-{user}"
    if make and SHARED_MEMORY.is_dir():
        directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != user or status.st_mode & 0o022:
        raise PermissionError(f"{directory} is not a directory of this user alone")
    return directory

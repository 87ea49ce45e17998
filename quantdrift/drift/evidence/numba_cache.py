"""The cache of compiled code: loops over the groups of a signal are compiled by Numba, which makes them many times faster.

A compiled function gets only numbers and arrays, uses IEEE arithmetic in the written order (no fused or reordered sums),
and gives the same result as its source run by Python.

Machine code is kept on disk, in a folder named by a digest of this whole package, so that it is never older than its
sources. The folder is next to the sources, or in this user's cache where the sources belong to another user. If an image
has filled it in advance (`quantdrift.drift.detectors.protocol.compile_all`) and it is read-only, a private copy is used.
Where none of these is possible, every process compiles for itself, which takes some seconds.

The folder contains code that is trusted as much as the sources: it is loaded only from a folder that belongs to this
user or to root, and that no other user may write to.
"""

import atexit
import contextlib
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import llvmlite.binding as llvm
import numba
import numpy as np
from numpy.typing import NDArray

_COPY: Final = "quantdrift-code-"
_COMPLETE: Final = "complete"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def folder_for(root: Path) -> Path | None:
    """Return the folder below `root` with the machine code of these sources, or a private copy of it, or None.

    Parameters
    ----------
    root
        A folder that may be missing or read only.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    folder = root / f"compiled-{digest.hexdigest()[:16]}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(folder):
            return None
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        if not folder.is_dir() or not _is_ours(folder):
            return None
    try:
        copy = tempfile.mkdtemp(prefix=_COPY)  # nobody else may write there: code is loaded from it
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        return Path(shutil.copytree(folder, Path(copy) / folder.name))
    except OSError:
        return None


def _is_ours(folder: Path) -> bool:
    status = folder.stat()
    return status.st_uid in {0, os.geteuid()} and not status.st_mode & 0o022


def user_cache() -> Path | None:
    """Return this user's cache folder, or None if other users could replace it."""
    try:
        configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
        root = ((configured if configured.is_absolute() else Path.home() / ".cache") / "quantdrift").resolve()
        above = root
        while not above.exists():
            above = above.parent
        if all(_is_ours(folder) or _is_sticky(folder) for folder in (above, *above.parents)):
            return root
    except (OSError, RuntimeError):  # a link that leads nowhere, or a user without a home
        pass
    return None


def _is_sticky(folder: Path) -> bool:
    """Return whether users cannot replace each other's files in it, as in /tmp."""
    status = folder.stat()
    return status.st_uid in {0, os.geteuid()} and bool(status.st_mode & stat.S_ISVTX)


def _cache_folder() -> Path | None:
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return folder_for(Path(chosen))
    next_to_sources = folder_for(Path(__file__).parent / "__pycache__")
    return next_to_sources or ((own := user_cache()) and folder_for(own))


_FOLDER = _cache_folder()
if _FOLDER:
    vars(numba.config)["CACHE_DIR"] = str(_FOLDER)


def is_complete() -> bool:
    """Return whether everything has been compiled and is in this process's cache."""
    try:
        return _FOLDER is not None and (_FOLDER / _COMPLETE).read_text("utf-8") == _made_for()
    except OSError:
        return False


def is_shared() -> bool:
    """Return whether other processes of this user can load the code that this process compiles."""
    return _FOLDER is not None and not _FOLDER.parent.name.startswith(_COPY)


def mark_complete() -> None:
    """Mark the cache as complete."""
    if _FOLDER is not None:
        with contextlib.suppress(OSError):  # a full disk: it is compiled again another time
            (_FOLDER / _COMPLETE).write_text(_made_for(), "utf-8")


def _made_for() -> str:
    """Return all that machine code depends on besides the text of the sources; Numba also checks their times."""
    changed = max(source.stat().st_mtime_ns for source in Path(__file__).parents[1].rglob("*.py"))
    processor = vars(numba.config)["CPU_NAME"] or llvm.get_host_cpu_name()
    return f"{sys.version} numba {numba.__version__} {processor} {changed}"


def compiled(function: _Function) -> _Function:
    """Return the function compiled, for each type of arguments when it is first called with them."""
    return cast("_Function", numba.njit(cache=_FOLDER is not None, error_model="numpy")(function))


@compiled
def dot(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Return the sum of the products, added up in four lanes: a single one would wait for every addition."""
    n = len(left)
    a = b = c = d = 0.0
    for index in range(0, n - 3, 4):
        a += left[index] * right[index]
        b += left[index + 1] * right[index + 1]
        c += left[index + 2] * right[index + 2]
        d += left[index + 3] * right[index + 3]
    for index in range(n - n % 4, n):
        a += left[index] * right[index]
    return (a + b) + (c + d)

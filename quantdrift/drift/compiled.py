"""What follows a signal group by group is compiled: a loop over numbers is many times as fast as in the interpreter.

A compiled function sees numbers and arrays alone, keeps to IEEE arithmetic in the order in which it is written (no
fused or reordered sums), and does what its source does when Python runs it.

Machine code is kept on disk, in a folder named by a digest of this whole package: it is never older than any of the
sources it was made from. Where an image fills that folder beforehand (`quantdrift.drift.detector.compile_all`) and is
read only afterwards, it is used from a private copy. Where neither can be, every process compiles for itself when its
first groups come, which takes some seconds.

What is kept is code, and as trusted as the sources beside it: it is loaded only from a folder that belongs to this user
or to root, and that nobody else may write to.
"""

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

_Function = TypeVar("_Function", bound=Callable[..., Any])


def kept_in(root: Path) -> Path | None:
    """Return the folder below `root` where machine code of these sources is kept, or a copy of it, or None.

    Parameters
    ----------
    root
        A folder that may be missing or read only.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    place = root / f"compiled-{digest.hexdigest()[:16]}"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(place):
            return None
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError:
        if not place.is_dir() or not _is_ours(place):
            return None
    try:
        copy = tempfile.mkdtemp(
            prefix="quantdrift-code-"
        )  # nobody else may write there: code is loaded from it
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        return Path(shutil.copytree(place, Path(copy) / place.name))
    except OSError:
        return None


def _is_ours(place: Path) -> bool:
    status = place.stat()
    return status.st_uid in {0, os.geteuid()} and not status.st_mode & 0o022


_KEPT_IN = kept_in(Path(os.environ.get("NUMBA_CACHE_DIR") or Path(__file__).parent / "__pycache__"))
if _KEPT_IN:
    vars(numba.config)["CACHE_DIR"] = str(_KEPT_IN)


def compiled(function: _Function) -> _Function:
    """Return the function compiled, for each type of arguments when it is first called with them."""
    return cast("_Function", numba.njit(cache=_KEPT_IN is not None, error_model="numpy")(function))


@compiled
def dot(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return the sum of the products, added up in four lanes: a single one would wait for every addition."""
    n = len(one)
    a = b = c = d = 0.0
    for place in range(0, n - 3, 4):
        a += one[place] * other[place]
        b += one[place + 1] * other[place + 1]
        c += one[place + 2] * other[place + 2]
        d += one[place + 3] * other[place + 3]
    for place in range(n - n % 4, n):
        a += one[place] * other[place]
    return (a + b) + (c + d)

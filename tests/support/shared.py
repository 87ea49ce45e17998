"""What is expensive to make, made by one process of a run for all of them."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Path]) -> Path:
    """Return what `make` returned for a new folder: the first process to ask makes it, the others wait.

    Parameters
    ----------
    tmp_path_factory
        Pytest's; the folder is beside those of the processes, and belongs to this run alone.
    name
        Of the folder.
    make
        Fills the folder, and returns it or a path inside. Nobody changes it afterwards.
    """
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"shared-{name}"
    done = place.with_suffix(".made")
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            place.mkdir(exist_ok=True)  # left by one that failed
            done.write_text(str(make(place)), encoding="utf-8")
    return Path(done.read_text(encoding="utf-8"))

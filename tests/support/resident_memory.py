"""Resident memory of a process."""

import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

Given = ParamSpec("Given")
Found = TypeVar("Found")
MB: Final = 1_000_000


def resident_bytes() -> int:
    """Return what this process takes now."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()


def apart(measure: Callable[Given, Found], *args: Given.args, **kwargs: Given.kwargs) -> Found:
    """Return what a function returns in a process of its own: what others have left on a heap is measured with it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, *args, **kwargs).result()

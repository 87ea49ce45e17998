"""Settings of glibc's heap that keep it from growing over weeks, without making it slower.

By default glibc gives threads their own heaps (arenas), up to eight for each core, and memory that one arena has freed
cannot be used by another: a worker whose batches pass through four threads keeps the peak of each of them. It also returns
large buffers to the system as soon as they are free, and the system clears their pages for the next batch: a small
convolutional net in PyTorch spent half of its time on that. With another C library nothing is changed.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Final, cast

# Of malloc.h, see mallopt(3).
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_ARENAS: Final = 2
_KEPT_BYTES: Final = 128 << 20  # at the end of an arena
_LARGEST_BYTES: Final = 32 << 20  # glibc's limit; larger buffers are always returned to the system at once


def configure() -> None:
    """Let all threads share two arenas, which keep buffers for the next batch. Call it before starting threads."""
    if (mallopt := _function("mallopt", ctypes.c_int, ctypes.c_int)) is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def trim() -> None:
    """Return free memory to the system, also between buffers in use; it takes milliseconds."""
    if (malloc_trim := _function("malloc_trim", ctypes.c_size_t)) is not None:
        malloc_trim(0)


def _function(name: str, *types: Any) -> Callable[..., int] | None:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):  # musl has neither
        return None
    function.argtypes = types
    return cast("Callable[..., int]", function)

"""The C library's heap: the same size over weeks in which buffers of every size come and go, and no slower for it.

glibc gives threads heaps of their own, up to eight for each core, and what one of them has freed another cannot use: a
worker whose batches pass through four threads keeps the most that each of them ever held. And it gives large buffers back to
the system as soon as they are free, which has to clear their pages for the next batch: a small convolutional net in PyTorch
spent half of its time on that. Where the C library is another one nothing is done.
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
_LARGEST_BYTES: Final = 32 << 20  # glibc takes no more; what is larger is given back at once


def settle() -> None:
    """Let all threads share two arenas, which keep buffers for the next batch; call it before there are many threads."""
    if (mallopt := _function("mallopt", ctypes.c_int, ctypes.c_int)) is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def trim() -> None:
    """Give back to the system what is free, also between what is in use; it takes milliseconds."""
    if (malloc_trim := _function("malloc_trim", ctypes.c_size_t)) is not None:
        malloc_trim(0)


def _function(name: str, *types: Any) -> Callable[..., int] | None:
    try:
        found = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):  # musl has neither
        return None
    found.argtypes = types
    return cast("Callable[..., int]", found)

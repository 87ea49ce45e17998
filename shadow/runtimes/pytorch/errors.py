"""What PyTorch fails at, made into the error of one exchange."""

from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

import torch

from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.shadow.runtimes.protocol import error_text

# What a module, which may be anybody's code, and PyTorch under it raise on inputs they cannot compute.
ERRORS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)

Found = TypeVar("Found")


def computed(compute: Callable[[], Found]) -> Found:
    """Return what `compute` does; of one that fails nothing is kept.

    Raises
    ------
    QuarantineError
        Reason `replay`: it failed.
    """
    try:
        return compute()
    except ERRORS as error:
        said, no_memory = error_text(error), isinstance(error, torch.OutOfMemoryError)
    # Only now, and not as its cause: with the error go the tensors of all the calls that it came through, and what is
    # tried next has their room.
    if no_memory:
        with suppress(RuntimeError):  # a device that is lost will say so again
            torch.cuda.empty_cache()
    raise QuarantineError(QuarantineReason.REPLAY, said)

"""The conversion of PyTorch's errors to the quarantine error of an exchange."""

from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

import torch

from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.models.runtimes.protocol import failure_text

# Raised by a module, which may be a user's code, or by PyTorch on inputs that cannot be computed.
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

Result = TypeVar("Result")


def computed(compute: Callable[[], Result]) -> Result:
    """Return the result of `compute`. If it fails, its tensors are freed.

    Raises
    ------
    QuarantineError
        Reason `replay`: it failed.
    """
    try:
        return compute()
    except ERRORS as error:
        message, no_memory = failure_text(error), isinstance(error, torch.OutOfMemoryError)
    # Raised here, and not with the error as its cause: its traceback keeps tensors alive, whose memory the next try needs.
    if no_memory:
        with suppress(RuntimeError):  # a device that is lost will say so again
            torch.cuda.empty_cache()
    raise QuarantineError(QuarantineReason.REPLAY, message)

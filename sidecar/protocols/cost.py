"""The processor time that one exchange may cost in the capture process.

A decoder checks the time before each tensor, event and document. Between two checks there are calls of libraries whose
time grows in proportion to bytes and values, both of which are bounded: `json_tensors` keeps out the numbers for which
that is not so. A hostile client can fill the capture process with exchanges, but no single one can hold it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from quantdrift.core.records import Loss
from quantdrift.sidecar.protocols.errors import LostError

LIMIT_S = 5.0
"""Ordinary exchanges of 16 MiB take up to 2 s on a slow core. The capture process answers nobody meanwhile, and the sockets
before it have room for more than this time."""
_ENDS_S: ContextVar[float] = ContextVar("ends_s", default=float("inf"))


@contextmanager
def limited(limit_s: float | None = None) -> Iterator[None]:
    """Limit the processor time of this thread inside the block, where `check` is called; None: to `LIMIT_S`."""
    token = _ENDS_S.set(time.thread_time() + (LIMIT_S if limit_s is None else limit_s))
    try:
        yield
    finally:
        _ENDS_S.reset(token)


def check() -> None:
    """Raise an error if the exchange has used up its processor time.

    Raises
    ------
    LostError
        `too_costly`.
    """
    if time.thread_time() > _ENDS_S.get():
        raise LostError(Loss.TOO_COSTLY, f"decoding takes more than {LIMIT_S:g} s of processor time")

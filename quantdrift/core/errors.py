"""The base classes of all errors, by who must act: a person, a retry, or the quarantine."""

import os
import re
from enum import StrEnum

_ERRNO = re.compile(r"\[Errno (\d+)\]")


class QuantdriftError(Exception):
    """Base class of every error that quantdrift raises on purpose."""


class OperatorError(QuantdriftError):
    """The configuration, the environment or a command is wrong: a person must act.

    The message says what to do. The command line prints it without a traceback and exits with 2.
    """


class RetryError(QuantdriftError):
    """A temporary condition (a server is unavailable, a lock is held): the caller retries later."""


def os_error_text(error: OSError) -> str:
    """Return the text of an error of a socket or file, for people."""
    # The text of a failed connection has the address in Python notation; of a name with several addresses, all of them.
    code = _ERRNO.search(str(error))
    if code is not None and (isinstance(error, ConnectionError) or error.errno is None):
        return os.strerror(int(code[1])).lower()
    if error.strerror:
        return error.strerror
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


class QuarantineReason(StrEnum):
    """Why the shadow quarantined an exchange."""

    DECODE = "decode"  # the message is not an exchange that this version can read
    SUBJECT = "subject"  # it says another model than the subject that it was published to
    LIMITS = "limits"  # a text, number of parts, shape or weight is beyond what any sidecar sends
    SCHEMA = "schema"  # tensor names, types or shapes do not match the reference
    MEDIA = "media"  # a message has images, audio or the like that the reference does not read
    OUTPUT = "output"  # the candidate's output cannot be compared with the reference's
    TOKENIZER = "tokenizer"  # candidate and reference make other tokens of the same text
    REPLAY = "replay"  # the reference fails on this input every time
    TOO_LATE = "too_late"  # captured so long ago that its partition is gone
    TOO_EARLY = "too_early"  # captured in the future because a clock is wrong
    ENCRYPTED = "encrypted"  # no key here opens it: it is kept as it came
    POISON = "poison"  # delivered too often without being finished


class QuarantineError(QuantdriftError):
    """One sample is permanently bad: quarantine it with `reason` and continue.

    Parameters
    ----------
    reason
        Counted in metrics and stored.
    detail
        What was wrong, without the payload.
    """

    def __init__(self, reason: QuarantineReason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail

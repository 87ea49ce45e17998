"""The error tree: one root, and one family per person or process that must act."""

from enum import StrEnum


class QuantdriftError(Exception):
    """The root of every error that quantdrift raises on purpose."""


class OperatorError(QuantdriftError):
    """The configuration, the environment or a command is wrong: a person must act.

    The message says what to do. The command line prints it without a traceback and exits with 2.
    """


class RetryError(QuantdriftError):
    """A passing condition (a server is away, a lock is held): the caller tries again later."""


class QuarantineReason(StrEnum):
    """Why the shadow set an exchange aside."""

    DECODE = "decode"  # the message is no exchange that this version understands
    SCHEMA = "schema"  # tensor names, types or shapes do not fit the reference
    OUTPUT = "output"  # the candidate's output cannot be compared with the reference's
    REPLAY = "replay"  # the reference failed on this input, every time
    TOO_LATE = "too_late"  # no partition takes its capture time any more
    TOO_EARLY = "too_early"  # captured in the future, says a clock that is wrong: no partition takes it yet
    POISON = "poison"  # delivered too often without ever being finished


class QuarantineError(QuantdriftError):
    """One sample is bad and will stay bad: set it aside under `reason` and go on.

    Parameters
    ----------
    reason
        One of the closed set that is counted and stored.
    detail
        What was wrong, in words, without any payload.
    """

    def __init__(self, reason: QuarantineReason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail

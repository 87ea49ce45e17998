"""What an observer raises when it can no longer follow a connection."""

from quantdrift.core.errors import QuantdriftError


class FramingError(QuantdriftError):
    """The bytes of a connection can no longer be told apart into messages with certainty."""

"""The error of an observer that can no longer follow a connection."""

from quantdrift.core.errors import QuantdriftError


class FramingError(QuantdriftError):
    """The message boundaries of a connection are no longer certain."""

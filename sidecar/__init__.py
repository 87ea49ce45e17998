"""Beside the inference pod: relay workers, the capture process, the intake; and the tap for servers in Python."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidecar.tap import Tap

__all__ = ["Tap"]


def __getattr__(name: str) -> Any:
    """Return the tap when it is asked for: a relay worker has no use for it."""
    if name != "Tap":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sidecar.tap import Tap  # noqa: PLC0415 - see above

    return Tap

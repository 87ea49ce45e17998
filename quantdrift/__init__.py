"""quantdrift: finds the input slice on which a quantised model has silently gone bad."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantdrift.sidecar.tap import Tap

__all__ = ["Tap"]


def __getattr__(name: str) -> Any:
    """Return the tap when it is asked for: importing `quantdrift` alone loads nothing else."""
    if name != "Tap":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quantdrift.sidecar.tap import Tap  # noqa: PLC0415 - see above

    return Tap

"""Sentences about noise: a side that gives other outputs for the same request."""

from types import MappingProxyType
from typing import Final

from quantdrift.core.notation import number
from quantdrift.core.records import Side
from quantdrift.core.slices import ALL
from quantdrift.facts.events import NoiseEvent

_CHECKS: Final = MappingProxyType(
    {
        Side.REFERENCE: (
            "Check whether the reference depends on the batch (batch statistics, dropout that is not off, sampling), on the device or on"
            " random numbers; then make it deterministic, or accept a larger budget."
        ),
        Side.CANDIDATE: (
            "The candidate gives a different answer to the same request: check whether it samples, or whether the replica serves another"
            " version."
        ),
    }
)


def noise_line(event: NoiseEvent) -> str:
    """Return a change of noise in one line: the version, the side, and its noise against the limit."""
    what = "differs from itself too much" if event.exceeds else "no longer differs from itself too much"
    where = "" if event.slice == ALL else f", {event.slice}"
    return (
        f"{event.model} {event.version}{where}: the {event.side.value} {what}: {event.measure} {number(event.mean, 3)} "
        f"[{number(event.low, 3)}, {number(event.high, 3)}] (limit: {number(event.limit, 3)})"
    )


def advice(side: Side, *, exceeds: bool, of_slice: bool) -> str:
    """Return what a change of noise means for the verdicts, and what to check.

    Parameters
    ----------
    of_slice
        It is the noise of one slice, and not of all traffic.
    """
    if not exceeds:
        return "Nothing to do: its slices have verdicts again."
    unknown = (
        "The status of this slice is not known while this lasts; the other slices are not affected."
        if of_slice
        else "The status of its slices is not known while this lasts, except of those that are known to have less noise."
    )
    return f"{unknown} {_CHECKS[side]}"

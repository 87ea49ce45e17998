"""What models and times are called."""

from quantdrift.core.notation import number
from quantdrift.core.tasks import Build
from quantdrift.facts.events import AlertEvent


def full_precision(event: AlertEvent) -> str:
    """Return what the reference is called: language models are seldom served in FP32."""
    return "the unquantised model" if event.build is Build.LANGUAGE else "the FP32 model"


def slower(limit_s: float | None) -> str:
    """Return what counts as slow, as words that follow `took`."""
    return "longer than the latency budget" if limit_s is None else f"longer than {number(limit_s)} s"

"""What happened to a model, in a few words: a release, an alert, or a decision of a person."""

from types import MappingProxyType
from typing import Final

from quantdrift.core.signals import BUILT_IN

ACTIONS: Final = MappingProxyType(
    {
        "ack": "acknowledged",
        "unack": "not acknowledged any more",
        "note": "note",
        "escalate": "escalated",
        "close": "closed",
    }
)
"""What was done about an alert."""
METRICS: Final = MappingProxyType({signal.metric.value: signal.name for signal in BUILT_IN})
"""What the metrics are."""
ONSET: Final = "onset (estimated)"
SINCE: Final = "Since"
"""The question that the estimated onset answers, with what is known of the time before."""


def began(at: str) -> str:
    """Return since when, where nothing is known of the time before."""
    return f"about {at} (estimated)."


def released(version: str) -> str:
    """Return that a version is new."""
    return f"version {version} was seen for the first time"


def happened(kind: str, subject: str, old: str | None = None, new: str | None = None) -> str:
    """Return what happened: `alert 5 closed`, `budget flip: 0.01 to 0.02`, `baseline approved: changed answers`.

    Parameters
    ----------
    kind
        `release`, `onset`, `budget`, or an action of the audit: a noun and a verb, such as `alert ack`.
    subject
        The version, alert, option or metric.
    old, new
        Of a budget.
    """
    noun, _, verb = kind.partition(" ")
    if noun == "alert" and verb in ACTIONS:
        return f"note on {subject}" if verb == "note" else f"{subject} {ACTIONS[verb]}"
    metric = METRICS.get(subject.partition(" ")[0])
    if noun == "baseline" and metric:
        return f"{kind}: {metric}"
    option = subject.rpartition(".budget.")[2]
    texts = {
        "release": released(subject),
        "onset": ONSET,
        "gate": f"{subject} ended",
        "alert": f"{subject} opened",
        "budget": f"budget {option}: {old or 'default'} to {new or 'default'}",
    }
    return texts.get(kind, f"{kind} {subject}".strip())

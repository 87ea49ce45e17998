"""The reasons of a verdict: why the state of a slice is what it is, as it stands beside the state."""

from typing import Final

from quantdrift.core.notation import count_of, percent
from quantdrift.core.tasks import Task
from quantdrift.facts.words.alert import how_to_declare
from quantdrift.facts.words.happened import METRICS

REPLACED: Final = "replaced: another version of this model serves, and this one does not any more"
RETIRED: Final = "retired: nothing was compared for 30 days"
LOST: Final = (
    "loss: too many of its samples were lost or not observed in the last hour: see `quantdrift status`"
)
NO_REFERENCE: Final = "no reference: map this version to one in models.references"
STALE: Final = "stale: there is traffic, but nothing was compared"
WAITS: Final = "waits for its next exchange: what was compared so far counts as no evidence now"
UNDECIDED: Final = "undecided: the evidence is rising, but it is below what an alert needs"
NOISE_ASKED: Final = "noise not measured: the evidence is rising, and its exchanges are replayed twice to find whether noise of the reference explains it"
HEALTHY: Final = "no evidence against its budget or its baseline"
UNNAMED: Final = "the evidence is enough to alert; the deciding signal was not recorded"
_NOT_NOW: Final = "; nothing is compared now, because sampling was paused "


def alarm(reason: str, paused: str) -> str:
    """Return why a slice alerts, as was said at the alarm, and by whom sampling is paused; empty texts: not known, and not."""
    said = (reason or UNNAMED).partition(_NOT_NOW)[0]
    return f"{said}{_NOT_NOW}{paused}" if paused else said


def sampling_paused(paused: str) -> str:
    """Return that sampling is paused, by whom and since when."""
    return f"paused: sampling was paused {paused}; `quantdrift resume` ends it"


def looks_like_sessions(attribute: str) -> str:
    """Return that requests with one value of an attribute have similar results, and what to do."""
    return f"looks like sessions: requests that share {attribute} are correlated and are over-counted: {how_to_declare(attribute)}"


def not_measured(n: int, n_items: int, task: Task) -> str:
    """Return that most of what was compared could not be measured."""
    why = (
        "are texts sampled with penalties, biases or a grammar, without log-probabilities"
        if task is Task.GENERATION
        else "could not be measured: the reference returned NaN or infinity"
    )
    return f"not measured: {n:,} of {n_items:,} answers {why}; see `quantdrift status`"


def too_few(n_more: int, *, has_people: bool) -> str:
    """Return how much more must be compared before a state is known."""
    return f"needs {_more(n_more, has_people=has_people)}"


def no_baseline_yet(n_more: int, *, has_people: bool) -> str:
    """Return that a slice is within its budget, and what its learned baseline lacks."""
    return f"no evidence against its budget; its baseline needs some {_more(_round(n_more), has_people=has_people)}"


def quarantined(share: float, reason: str) -> str:
    """Return that samples could not be compared, and the most frequent reason."""
    return f"loss: {_share(share)} could not be compared, most of them because of `{reason}`; see `quantdrift status`"


def unaccounted(n: int) -> str:
    """Return that samples are missing since a sidecar ended without its last counts."""
    return (
        f"loss: {_round(n):,} of this model's samples of the last hour are not accounted for: a sidecar ended without sending its last counts,"
        " for example because its machine was lost; see `quantdrift status`"
    )


def expired(share: float) -> str:
    """Return that samples left the stream before they were replayed."""
    return (
        f"loss: {_share(share)} left the stream before they were replayed: the shadow is too slow or was away, or a person dropped them;"
        " add workers or raise stream.max_age_s"
    )


def fewer_samples(before: float, now: float, lost: float, of_slice: float) -> str:
    """Return that the share of a slice has fallen while samples are missing; `of_slice`: how much of its own may be among them."""
    return (
        f"samples missing: its share of the samples fell from {percent(before)} to {percent(now)} while {percent(lost)} of all samples"
        f" were lost, so up to {percent(of_slice)} of its own may be among them; see `quantdrift status`"
    )


def too_noisy(side: str, metric: str, *, proved: bool, where: str = "") -> str:
    """Return that a side differs from itself by too much to say anything."""
    return f"noise: the {side} {'differs' if proved else 'may differ'} from itself by too large a part of the budget for {METRICS.get(metric, metric)}{where}"


def _share(share: float) -> str:
    return f"{100 * min(share, 1.0):.0f} % of this model's samples of the last hour"


def _more(n: int, *, has_people: bool) -> str:
    return count_of(n, "more person", "more people") if has_people else count_of(n, "more exchange")


def _round(n: int) -> int:
    """Return `n` to two significant digits: the reason is no counter."""
    return int(float(f"{n:.2g}"))

"""What true labels say: whether a drift was a loss of accuracy."""

from collections.abc import Sequence

from quantdrift.core.notation import count_of, percent
from quantdrift.facts.estimate import Estimate

FEW = "too few labels"


def outcome(loss: Estimate) -> str:
    """Return the result in a few words, for a cell of a table."""
    if loss.low is None or loss.high is None:
        return FEW
    if loss.low > 0:
        return "less accurate than the reference"
    return "more accurate than the reference" if loss.high < 0 else "no clear difference in accuracy"


def accuracy(loss: Estimate) -> str:
    """Return how much accuracy is lost or gained: `4.1 % fewer answers are right than with the reference (2 % to 6 %)`."""
    if loss.low is None or loss.high is None:
        return FEW
    ends = (loss.low, loss.high) if loss.mean >= 0 else (-loss.high, -loss.low)
    kind = "fewer" if loss.mean >= 0 else "more"
    clear = "" if ends[0] > 0 else ", so no clear difference"
    interval = f"{percent(ends[0])} to {percent(ends[1])}"
    return f"{percent(abs(loss.mean))} {kind} answers are right than with the reference ({interval}){clear}"


def lost(slices: Sequence[tuple[str, int, Estimate]]) -> str:
    """Return in one sentence whether accuracy was lost, and where.

    Parameters
    ----------
    slices
        Name, labelled answers and loss of each slice, the clearest loss first.
    """
    worse = [entry for entry in slices if entry[2].low is not None and entry[2].low > 0]
    if not worse:
        n = max((entry[1] for entry in slices), default=0)
        return f"Not clearly: {count_of(n, 'true label')} show no slice that is less accurate than the reference."
    name, n, loss = worse[0]
    where = "all traffic" if name == "all" else name
    more = f" {count_of(len(worse) - 1, 'more slice')} lost accuracy, too." if len(worse) > 1 else ""
    return f"Yes: {count_of(n, 'true label')} show that in {where} {accuracy(loss)}.{more}"


def not_labelled(version: str) -> str:
    """Return what is not known of changed answers without labels, as words that follow `not known:`."""
    return f"whether the changed answers of {version} are wrong: none of them has a label"

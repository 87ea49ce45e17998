"""How long answers take, and how long an item takes on both sides."""

from collections.abc import Sequence

from quantdrift.core.notation import count_of, number, percent
from quantdrift.facts.speed import ItemTimes, Times

PARTS = {
    "answer": "the end of the answer",
    "first token": "the first token, of streams",
    "further token": "each further token, of streams",
}
"""The ends of the times that the relay measures."""
NOT_COMPARABLE = (
    "Do not divide one by the other: the reference computes whole batches; the time of the quantised model includes waiting and"
    " network, on its own device."
)


def speed(
    times: Times | None, items: Sequence[ItemTimes], budget_s: float, learned_s: float | None = None
) -> str:
    """Return how long the answers of a version took, and how long an item takes on both sides; empty: no time was measured.

    Parameters
    ----------
    items
        Of the version, one entry for each device of the reference.
    budget_s
        The latency budget; 0: there is none.
    learned_s
        What at most 1 % of all traffic exceeded when it was learned; None: nothing was learned.
    """
    if times is None:
        return ""
    budget = f" (budget: {number(budget_s)} s; {percent(times.slower)} took longer)" if budget_s else ""
    answers = (
        f"Half of its answers took at most {number(times.median)} s at the relay, and 99 % at most {number(times.p99)} s{budget},"
        f" from {count_of(times.n, 'exchange')} of the last day."
    )
    learned = (
        ""
        if learned_s is None
        else f"In the time that was learned from, 99 % took at most {number(learned_s)} s."
    )
    sides = [
        f"Reference: {number(entry.reference)} s for an item, on {entry.device or 'an unknown device'}."
        f" Quantised model: {number(entry.candidate)} s."
        for entry in items
    ]
    return " ".join(filter(None, (answers, learned, *sides, NOT_COMPARABLE if items else "")))

"""What a comparison of two sides says: two versions, models or times."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from quantdrift.core.notation import count_of, listed, moment, percent
from quantdrift.core.text import Table
from quantdrift.facts.cost import money_of
from quantdrift.facts.estimate import Change
from quantdrift.facts.figures import Figure

MOST_ROWS: Final = 20
"""Slices that a text shows or names."""
_MOST: Final = 3


def compared(
    title: str,
    old: str,
    slices: Sequence[tuple[str, Change]],
    whole: Change | None,
    shares: tuple[float, float] | None,
) -> str:
    """Return what a comparison shows, in one or two sentences.

    Parameters
    ----------
    title, old
        What the new and the old side are called.
    slices
        The slices with data on both sides, each with its change.
    whole
        The change over all traffic; None: the two have no traffic in common.
    shares
        Of changed answers over all traffic, old and new; None: not known.
    """
    if whole is None:
        return f"{title} and {old} have no compared traffic in common."
    worse = [name for name, change in slices if change is Change.WORSE]
    n_better, of = sum(change is Change.BETTER for _, change in slices), count_of(len(slices), "slice")
    if worse:
        also = f", and better in {n_better:,}" if n_better else ""
        text = f"{title} is worse than {old} in {len(worse):,} of {of}: {listed(worse, _MOST)}{also}."
    elif whole is Change.WORSE:
        text = f"{title} is worse than {old} over all traffic; no single slice shows it."
    elif n_better or whole is Change.BETTER:
        where = f"in {n_better:,} of {of}" if n_better else "over all traffic"
        text = f"{title} is better than {old} {where}, and worse in none."
    else:
        text = f"{title} shows no clear difference from {old} {'in its one slice' if len(slices) == 1 else f'in any of {of}'}."
    if shares is None:
        return text
    return (
        f"{text} Over all traffic {percent(shares[1])} of its answers changed; with {old} it was"
        f" {percent(shares[0])}."
    )


def comparison_head(old: str, new: str, measure: str) -> tuple[str, ...]:
    """Return the columns of a comparison; `measure` is the divergence of the task, with its unit."""
    return (
        "slice",
        "change",
        f"changed, {old}",
        f"changed, {new}",
        "difference, points",
        f"difference of {measure}",
        "exchanges",
    )


def comparison_text(
    said: Sequence[str],
    table: Table | None,
    *,
    left_out: Sequence[tuple[datetime, datetime]] = (),
    cost: Figure | None = None,
    warning: str = "",
    n_more: int = 0,
    only: Sequence[tuple[str, Sequence[str]]] = (),
) -> list[str | Table]:
    """Return a comparison in lines, with a row for each slice.

    Parameters
    ----------
    said
        What it shows, and what both sides rest on.
    table
        A row for each slice; None: there is none.
    left_out
        Times that are on neither side.
    cost
        Of the difference; None without a price.
    warning
        Why the sides may not be comparable; empty: nothing is known.
    n_more
        Slices that are not in the table, if any.
    only
        Both sides, each with the slices that the other one does not have.
    """
    lines: list[str | Table] = [*said]
    lines += [f"left out: {moment(begin)} to {moment(end)}" for begin, end in left_out]
    if cost is not None:
        lines.append(f"cost of the difference in the window of the new side: {money_of(cost)}")
    if warning:
        lines.append(f"Careful: {warning}.")
    if table is not None:
        lines += ["", table]
    if n_more > 0:
        lines.append(f"{n_more} more: --json prints all")
    for side, names in only:
        if names:
            more = f" and {len(names) - MOST_ROWS} more" if len(names) > MOST_ROWS else ""
            lines.append(f"only in {side}: {', '.join(names[:MOST_ROWS])}{more}")
    return lines

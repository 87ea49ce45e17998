"""The sentence that says what a comparison of two sides shows: two versions, models or times."""

from collections.abc import Sequence

from quantdrift.core.notation import count_of, listed, percent
from quantdrift.facts.estimate import Change

_MOST = 3


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

"""The comparator for rankings: scores of entries, ranked from the highest down.

Each side's scores rank the entries. Equal scores are ranked by their position in the output on both sides, so that equal
outputs never differ; for `flip` and `divergence` any order of entries that the reference scores equal is correct.

- `flip` = 1 where the entry that the candidate ranks first is not one that the reference scores highest.
- `tie` = 1 where that is so, but the candidate scores another entry equally high that is one of the reference's best:
  which one is first is a matter of their order. `models.count_ties` says whether such an item flips.
- `divergence` = 1 - DCG / IDCG, the loss of normalised discounted cumulative gain of the candidate's order among the
  first k, in [0, 1] (Järvelin and Kekäläinen, Cumulated gain-based evaluation of IR techniques, ACM Transactions on
  Information Systems, 2002). DCG = sum over ranks i from 1 to k of gain / log2(1 + i), IDCG the same in the
  reference's order. The gain of an entry is (s - least) / (largest - least) of the reference's scores of the item: it
  is not negative, and independent of the scale and offset of the scores. Swaps of entries with nearly equal scores cost
  almost nothing. If all scores are equal, the loss is 0.

In `detail`:

- `kendall_distance` = (1 - tau-b) / 2, in [0, 1]: without ties the share of pairs in another order (see `tau`), over all
  ranks. Undefined where all scores of a side are equal.
- `rbo`, rank-biased overlap over all ranks, in [0, 1], 1 where the orders are equal (Webber, Moffat and Zobel, A
  similarity measure for indefinite rankings, ACM Transactions on Information Systems, 2010, extrapolated): with X_d the
  number of entries among the first d of both, n entries and persistence p,
  `RBO_ext = X_n / n p^n + (1 - p) / p sum over d of X_d / d p^d`. Since X_n = n it is computed as
  `1 - (1 - p) / p sum over d of (1 - X_d / d) p^d`, which is exactly 1 for equal orders.
- `topk_overlap` = share of the reference's first k that are among the candidate's, in [0, 1].

Entries that the reference scores at or below the padding are left out on both sides; k and n are then those of the item.
A candidate's minus infinity is a valid score, which ranks last. A side with any other value that is not finite, with only
minus infinity, or without entries is not finite: if it is the candidate's, it is a flip and all else is undefined; if it
is the reference's, everything is undefined.
"""

import numpy as np
import numpy.typing as npt

from quantdrift.core.config.tasks import Ranking
from quantdrift.models.comparators.numbers import aligned
from quantdrift.models.comparators.protocol import Divergences, Flags, Values
from quantdrift.models.tensors.arrays import Array, output_error

Ranks = npt.NDArray[np.int64]


def tau(first: Values, second: Values, kept: Flags) -> Values:
    """Return Kendall's tau-b of each item : (items,), in [-1, 1]; NaN where all values of a side are equal.

    With c concordant and d discordant pairs of all n0, n1 and n2 of which are tied on one side or the other,
    `tau-b = (c - d) / sqrt((n0 - n1) (n0 - n2))` (Kendall, The treatment of ties in ranking problems, Biometrika, 1945).
    Discordant pairs are the inversions of one side in the order of the other (Knight, A computer method for calculating
    Kendall's tau with ungrouped data, Journal of the American Statistical Association, 1966), counted in
    O(n log n) for all items at once.

    Parameters
    ----------
    first, second
        (items, entries), none of the kept ones NaN.
    kept
        (items, entries): the others are left out.
    """
    # Entries that are left out are tied with nothing: they come last, in the same order on both sides.
    x, y = _dense(first, kept), _dense(second, kept)
    order = np.lexsort((y, x), axis=1)
    n_discordant = _inversions(np.take_along_axis(y, order, axis=1))
    n = kept.sum(axis=1).astype(np.float64)
    pairs = n * (n - 1) / 2
    tied_x, tied_y = _ties(x), _ties(y)
    tied_both = _ties(_dense((x * (x.shape[1] + 1) + y).astype(np.float64), kept))
    score = pairs - tied_x - tied_y + tied_both - 2 * n_discordant
    untied = np.sqrt((pairs - tied_x) * (pairs - tied_y))
    return np.where(untied > 0, score / np.where(untied > 0, untied, 1.0), np.nan)


def _dense(values: Values, kept: Flags) -> Ranks:
    """Return ranks from 0, equal for equal values; entries that are not kept get the highest ranks, without ties."""
    order = np.lexsort((np.where(kept, values, 0.0), ~kept), axis=1)
    ranked = np.take_along_axis(values, order, axis=1)
    new = (ranked[:, 1:] != ranked[:, :-1]) | ~np.take_along_axis(kept, order, axis=1)[:, 1:]
    ranks = np.zeros(values.shape, dtype=np.int64)
    np.put_along_axis(ranks, order[:, 1:], np.cumsum(new, axis=1), axis=1)
    return ranks


def _ties(ranks: Ranks) -> Values:
    """Return the number of tied pairs of each item."""
    n_items, n = ranks.shape
    rows = np.arange(n_items)[:, np.newaxis] * n
    sizes = np.bincount((ranks + rows).ravel(), minlength=n_items * n).reshape(n_items, n).astype(np.float64)
    ties: Values = (sizes * (sizes - 1) / 2).sum(axis=1)
    return ties


def _inversions(ranks: Ranks) -> Values:
    """Return the number of pairs of each item in falling order.

    Such a pair has a highest differing bit, which is set in the first entry: for each bit, highest first, the pairs are
    counted that are equal in all higher bits.
    """
    n_inversions = np.zeros(len(ranks))
    for bit in reversed(range(int(ranks.shape[1]).bit_length())):
        above, bits = ranks >> (bit + 1), (ranks >> bit) & 1
        before = np.cumsum(bits, axis=1) - bits
        begins = np.diff(above, axis=1, prepend=-1) > 0
        of_group = before - np.maximum.accumulate(np.where(begins, before, 0), axis=1)
        n_inversions += np.where(bits == 0, of_group, 0).sum(axis=1)
        ranks = np.take_along_axis(ranks, np.argsort(ranks >> bit, axis=1, kind="stable"), axis=1)
    return n_inversions


Positions = npt.NDArray[np.int64]

RANKED = 10
"""Places that count where `models.top_k` is not given: those of a first page."""
PERSISTENCE = 0.9
"""The value of Webber et al. (2010): the first ten places have 86 % of the weight."""


class RankingComparator:
    """Compares rankings.

    Parameters
    ----------
    options
        `models.ranking`: the padding.
    top_k
        How many of the first places count; 0: all.
    persistence
        Of rank-biased overlap: the probability that a reader goes on to the next place.
    count_ties
        Whether a tie is a flip.
    """

    def __init__(
        self,
        options: Ranking,
        *,
        top_k: int = RANKED,
        persistence: float = PERSISTENCE,
        count_ties: bool = True,
    ) -> None:
        self._options = options
        self._count_ties = count_ties
        self._top_k, self._persistence = top_k, persistence

    def compare(self, candidate: Array, reference: Array) -> Divergences:
        """Return the divergence of each item.

        Parameters
        ----------
        candidate, reference
            (items, entries).

        Raises
        ------
        QuarantineError
            Reason `output`: they are not such scores, or their shapes differ.
        """
        q, p = aligned(candidate, reference, "[items, entries]")
        if q.ndim != 2:
            raise output_error(
                f"an output of shape {list(q.shape)} is not [items, entries]: check `models.output`"
            )
        kept = ~(p <= self._options.padding) & ~np.isneginf(p)  # NaN is not padding
        # If the reference has only padding, whether the candidate is finite depends on all of its scores.
        q_finite, p_finite = _finite(q, kept | ~kept.any(axis=1, keepdims=True)), _finite(p, kept)
        both = q_finite & p_finite
        kept &= both[:, np.newaxis]
        q, p = (np.where(kept, side, 0.0) for side in (q, p))
        by_q, by_p = _order(q, kept), _order(p, kept)
        at_q, at_p = _positions(by_q), _positions(by_p)
        n = kept.sum(axis=1)
        k = np.minimum(n, self._top_k) if self._top_k else n
        gains = _gains(p, kept)
        first = np.take_along_axis(gains, by_q[:, :1], axis=1)[:, 0]
        best = gains.max(axis=1)
        flip = np.where(both, first < best, True)
        level = kept & (q == np.where(kept, q, -np.inf).max(axis=1, keepdims=True))
        tie = flip & both & (level & (gains == best[:, np.newaxis])).any(axis=1)
        if not self._count_ties:
            flip &= ~tie
        figures = {
            "kendall_distance": (1 - tau(q, p, kept)) / 2,
            "rbo": self._overlap(np.maximum(at_q, at_p), kept),
            "topk_overlap": _share(kept & (np.maximum(at_q, at_p) < k[:, np.newaxis]), k),
        }
        return Divergences(
            flip=np.where(p_finite, flip.astype(np.float64), np.nan),
            tie=np.where(p_finite, tie.astype(np.float64), np.nan),
            divergence=np.where(both, _loss(gains, by_q, by_p, k), np.nan),
            candidate_finite=q_finite,
            reference_finite=p_finite,
            detail={name: np.where(both, values, np.nan) for name, values in figures.items()},
        )

    def _overlap(self, depths: Positions, kept: Flags) -> Values:
        """Return rank-biased overlap; `depths` is the rank, from 0, from which on an entry is in both lists."""
        p = self._persistence
        n_items, n = depths.shape
        counts = np.zeros((n_items, n))
        rows, columns = np.nonzero(kept)
        np.add.at(counts, (rows, depths[rows, columns]), 1.0)
        d = np.arange(1, n + 1)
        missing = np.where(d <= kept.sum(axis=1, keepdims=True), 1 - np.cumsum(counts, axis=1) / d, 0.0)
        overlap: Values = 1 - (1 - p) / p * (missing * p**d).sum(axis=1)
        return overlap


def _finite(scores: Values, kept: Flags) -> Flags:
    """Return whether an item's scores are numbers or minus infinity, and at least one is a number."""
    broken = np.isnan(scores) | np.isposinf(scores)
    return np.asarray(~(broken & kept).any(axis=1) & (np.isfinite(scores) & kept).any(axis=1))


def _order(scores: Values, kept: Flags) -> Positions:
    """Return the entries by falling score, equal ones in the order of the output, padding last : (items, entries)."""
    order: Positions = np.lexsort((-scores, ~kept), axis=1)
    return order


def _positions(order: Positions) -> Positions:
    """Return the rank of each entry, from 0."""
    positions = np.empty_like(order)
    np.put_along_axis(positions, order, np.arange(order.shape[1])[np.newaxis], axis=1)
    return positions


def _gains(scores: Values, kept: Flags) -> Values:
    """Return the reference's scores scaled to [0, 1], zero for padding."""
    least = np.where(kept, scores, np.inf).min(axis=1, keepdims=True) / 2
    most = np.where(kept, scores, -np.inf).max(axis=1, keepdims=True) / 2
    span = np.where(most > least, most - least, 1.0)  # of halves, which cannot overflow
    gains: Values = np.where(kept, (scores / 2 - np.where(kept, least, 0.0)) / span, 0.0)
    return gains


def _loss(gains: Values, by_q: Positions, by_p: Positions, k: Positions) -> Values:
    positions = np.arange(gains.shape[1])
    weights = np.where(positions < k[:, np.newaxis], 1 / np.log2(positions + 2), 0.0)
    had, ideal = ((np.take_along_axis(gains, order, axis=1) * weights).sum(axis=1) for order in (by_q, by_p))
    return np.where(ideal > 0, np.maximum(1 - had / np.where(ideal > 0, ideal, 1.0), 0.0), 0.0)


def _share(common: Flags, k: Positions) -> Values:
    share: Values = common.sum(axis=1) / np.maximum(k, 1)
    return share

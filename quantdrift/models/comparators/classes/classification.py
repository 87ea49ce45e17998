"""The comparator for classifiers: two distributions over the same classes, per item, in float64.

With p the reference's and q the candidate's probabilities:

- `flip` = 1 where the top class differs; `topk` = 1 where the set of the k top classes differs.
- `tie` = 1 where the top class differs, but a class is at the top of both sides: several classes share the largest value
  of a side, and which of them is first is a matter of their order. `models.count_ties` says whether
  such an item flips.
- `divergence` = KL(p || q) = sum p ln(p / q). For logits it is infinite where the candidate excludes a class that the
  reference does not. For probabilities a zero of the candidate counts as min(p, 1/512), the closest to p of all values that
  8 bits round to zero: an infinite KL would only reflect the number of bits.
- `js` = KL(p || m) / 2 + KL(q || m) / 2 with m = (p + q) / 2 (Lin, 1991): symmetric, at most ln 2.
- `margin` = |gap(q) - gap(p)|, the gap being that of the two largest probabilities.

And in `detail`, without a unit:

- `tv` = sum |p - q| / 2, total variation, in [0, 1]: the largest difference in the probability of any set of classes.
- `weighted_flip` = `flip` * gap(p), in [0, 1]: flips weighted by the reference's confidence.
- `topk_overlap`: share of the reference's k top classes that are among the candidate's, in [0, 1]; 1 if all are.
- `confidence_shift` = max q - max p, in [-1, 1]: above 0 the candidate is more confident than the reference, each in its own
  top class.
- `calibration_shift` = q(c) - p(c), c the candidate's top class, in [-1, 1]: above 0 the candidate is more confident in its
  answer than the reference in the same answer. If the reference is calibrated, this is the candidate's miscalibration.
- `gained`, `lost`: a class of interest is the top class only of the candidate, or only of the reference; only if the
  configuration names such classes. A candidate that is not finite has lost, and not gained.
- `candidate_scores`, `reference_scores`: the k top classes of a side, at most 5, as pairs of class number and probability, so that
  somebody can judge the item without its payload. Only where the top class differs or `tv` is at least 0.01, and only if the
  candidate lists all classes.

Equal values are ranked by class number on both sides, so that equal outputs never differ. A list of top classes (below)
may rank equal values in any order: any order of classes that the reference scores equal is correct.

A side is *finite* if it is a distribution. Logits may contain minus infinity (a masked class, probability zero) as long as
at least one value is finite; NaN, plus infinity, only minus infinity, and no value at all make a side not finite, and so do
probabilities that are all zero.
Where only the candidate is not finite, `flip` and `topk` are 1, because it has no top class and the reference has one, and
all else is undefined. Where the reference is not finite, everything is undefined, because there is nothing to compare with.
Flags record either case, and no undefined value enters an average.

A candidate may list its top classes instead, `value:index[:label]` (Triton's classification extension). The list's order is
then the candidate's ranking, and the reference is reduced to as many classes: `flip` is exact, `topk` compares the sets of
as many as were listed, at most k, and so does `topk_overlap`; `weighted_flip`, `gained` and `lost` are exact. The other
measures are defined as far as the list allows:

- all classes listed: `js`, `tv`, `margin` and the shifts; for logits also `divergence`. For probabilities it is undefined:
  they are printed with six decimals, and a printed zero may be anything below 5e-7;
- two or more probabilities listed: `margin`; one or more: the shifts;
- else none: the sum over fewer logits than classes is unknown.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.config.schema import OutputKind
from quantdrift.models.comparators.classes.classes_of_interest import among
from quantdrift.models.comparators.numbers import filled, is_empty, rounded
from quantdrift.models.comparators.protocol import Divergences, Flags, Values, flags_where_known
from quantdrift.models.tensors.arrays import Array, output_error


def top_set(values: Values, k: int) -> Flags:
    """Return whether each value is among the k largest of its item : (items, values); of equal values the first ones are.

    Parameters
    ----------
    values
        (items, values), none of them NaN.
    k
        From 1 to the number of values.
    """
    threshold = np.partition(values, -k, axis=1)[:, -k, np.newaxis]
    above = values > threshold
    level = values == threshold
    room = k - above.sum(axis=1, keepdims=True)
    chosen: Flags = above | (level & (np.cumsum(level, axis=1) <= room))
    return chosen


Classes = npt.NDArray[np.int64]
LN2 = float(np.log(2.0))
# A softmax quantised to 8 bits is off by up to 1/512 per class, and has zeros; sums further off are not distributions.
TOP_K = 5
"""Top classes that are compared as a set where `models.top_k` is not given: the usual top-5."""
_MOST_SCORES = 5
_LEAST_TV = 0.01  # below it the scores of both sides look the same to a person
_DECIMALS = 4
_PAIR = np.dtype([("class", np.int64), ("probability", np.float64)])
SUM_TOLERANCE = 0.05
ZERO_TOLERANCE = 1 / 512
NEGATIVE_TOLERANCE = 1e-6


class TopLabels(msgspec.Struct, frozen=True, kw_only=True):
    """The k largest values of each item, the largest first.

    Parameters
    ----------
    classes
        Their classes : (items, k), int64, no class twice.
    values
        As printed : (items, k), float64, never rising; may include NaN and infinities.
    """

    classes: npt.NDArray[np.int64]
    values: Values

    @property
    def k(self) -> int:
        """Number of listed classes."""
        return int(self.classes.shape[1])

    def spread(self, n_classes: int) -> Values:
        """Return the values of all classes : (items, classes); all of them must have been listed."""
        values = np.empty((len(self.classes), n_classes))
        np.put_along_axis(values, self.classes, self.values, axis=1)
        return values


def read_listed(texts: Array, n_classes: int) -> TopLabels:
    """Return the listed classes and values.

    Parameters
    ----------
    texts
        (items, k), bytes.
    n_classes
        Number of classes of the model.

    Raises
    ------
    QuarantineError
        Reason `output`: they are not such lists, or list classes that the model does not have.
    """
    if texts.ndim != 2 or not 1 <= texts.shape[1] <= n_classes:
        raise output_error(
            f"the candidate's output is text{list(texts.shape)}, which is not a list of at most {n_classes} classes"
        )
    pairs = [_pair(text) for text in texts.ravel().tolist()]
    values = np.array([value for value, _ in pairs]).reshape(texts.shape)
    classes = np.array([index for _, index in pairs], dtype=np.int64).reshape(texts.shape)
    ordered = np.sort(classes, axis=1)
    if classes.max(initial=0) >= n_classes or (ordered[:, 1:] == ordered[:, :-1]).any():
        raise output_error(
            f"the candidate lists a class twice, or one not below the {n_classes} classes of the reference"
        )
    if (values[:, 1:] > values[:, :-1]).any():
        raise output_error("the candidate's list of classes does not begin with the largest value")
    return TopLabels(classes=classes, values=values)


def _pair(text: bytes) -> tuple[float, int]:
    value, _, rest = text.partition(b":")
    index = rest.partition(b":")[0]
    if index.isdigit() and len(index) < 10:
        try:
            return float(value), int(index)
        except ValueError:
            pass
    raise output_error(
        "the candidate's output is text, but not a list of `value:index:label`: labels alone cannot be compared. Have the "
        "model return its logits or probabilities too, and name them in `models.output`"
    )


class ClassificationComparator:
    """Compares classification outputs.

    Parameters
    ----------
    output_kind
        Whether the outputs are logits or probabilities.
    top_k
        Size of the set of top classes; limited by the number of classes.
    interest
        Numbers of the classes of interest.
    count_ties
        Whether an item flips where the top class differs by a tie alone.
    """

    def __init__(
        self, output_kind: OutputKind, top_k: int, interest: Sequence[int] = (), *, count_ties: bool = True
    ) -> None:
        self._output_kind = output_kind
        self._top_k = top_k
        self._interest = tuple(interest)
        self._count_ties = count_ties

    def compare(self, candidate: Array, reference: Array) -> Divergences:
        """Return the divergence of each item.

        Parameters
        ----------
        candidate, reference
            (items, classes), floating point, logits or probabilities; at least two classes. The candidate's may also be
            (items, listed classes), texts.

        Raises
        ------
        QuarantineError
            Reason `output`: shapes differ or are not (items, classes), the outputs are labels, or they are configured as
            probabilities and are not.
        """
        if is_empty(candidate) or is_empty(reference):
            least = max(2, 1 + max(self._interest, default=0))
            candidate, reference = (
                filled(candidate, reference, least=least),
                filled(reference, candidate, least=least),
            )
        if candidate.dtype == np.dtype(object):
            return self._compare_listed(candidate, reference)
        _check_shapes(candidate, reference)
        return self._compare_values(candidate.astype(np.float64), reference.astype(np.float64))

    def _compare_values(self, candidate: Values, reference: Values) -> Divergences:
        log_q, q_finite = self._log_probabilities(candidate, "candidate")
        log_p, p_finite = self._log_probabilities(reference, "reference")
        both = p_finite & q_finite
        q, p = np.exp(log_q), np.exp(log_p)
        candidate_margin, reference_margin = _gap(q), _gap(p)
        candidate_top, reference_top = _top(candidate), _top(reference)
        # A flip needs a finite reference, not a finite candidate.
        flip = np.where(q_finite, candidate_top != reference_top, True)
        tie = flip & both & tied_at_top(candidate, reference)
        flip = self._counted(flip, tie)
        k = min(self._top_k, candidate.shape[1])
        not_in_reference = top_set(candidate, k) & ~top_set(reference, k)
        topk = np.where(q_finite, not_in_reference.any(axis=1), True)
        tv = np.abs(p - q).sum(axis=1) / 2
        shown = both & ((candidate_top != reference_top) | (tv >= _LEAST_TV))
        return Divergences(
            flip=np.where(p_finite, flip.astype(np.float64), np.nan),
            tie=np.where(p_finite, tie.astype(np.float64), np.nan),
            topk=np.where(p_finite, topk.astype(np.float64), np.nan),
            js=np.where(both, _jensen_shannon(p, q), np.nan),
            divergence=np.where(both, self._kullback_leibler(log_p, log_q), np.nan),
            margin=np.where(both, np.abs(candidate_margin - reference_margin), np.nan),
            candidate_margin=np.where(q_finite, candidate_margin, np.nan),
            reference_margin=np.where(p_finite, reference_margin, np.nan),
            candidate_finite=q_finite,
            reference_finite=p_finite,
            detail={
                "candidate_scores": _scores(q, k, shown),
                "reference_scores": _scores(p, k, shown),
                "candidate_top": np.where(q_finite, candidate_top, -1),
                "reference_top": np.where(p_finite, reference_top, -1),
                "tv": np.where(both, tv, np.nan),
                "weighted_flip": np.where(p_finite, flip * reference_margin, np.nan),
                "topk_overlap": np.where(both, 1 - not_in_reference.sum(axis=1) / k, np.nan),
                **_shifts(q.max(axis=1), p, candidate_top, both),
                **self._turned(
                    np.where(flip, candidate_top, reference_top),
                    reference_top,
                    finite=(q_finite, p_finite),
                    n_classes=p.shape[1],
                ),
            },
        )

    def _counted(self, flip: Flags, tie: Flags) -> Flags:
        """Return which items flip, of those whose top class differs."""
        return flip if self._count_ties else np.asarray(flip & ~tie)

    def _kullback_leibler(self, log_p: Values, log_q: Values) -> Values:
        if self._output_kind is OutputKind.PROBABILITIES:
            log_q = rounded(log_q, log_p)
        p = np.exp(log_p)
        # A class with p = 0 adds nothing, whatever q is.
        with np.errstate(invalid="ignore"):
            terms = np.where(p > 0, p * (log_p - log_q), 0.0)
        # Rounding may make the sum of nearly equal distributions negative.
        divergence: Values = np.maximum(terms.sum(axis=1), 0.0)
        return divergence

    def _turned(
        self, candidate_top: Classes, reference_top: Classes, *, finite: tuple[Flags, Flags], n_classes: int
    ) -> dict[str, npt.NDArray[Any]]:
        """Return flips into and out of the classes of interest, if any; `finite`: the finite items of each side."""
        if not self._interest:
            return {}
        q_finite, p_finite = finite
        wanted = among(self._interest, n_classes)
        now, before = wanted[candidate_top] & q_finite, wanted[reference_top]
        return {
            "gained": flags_where_known(now & ~before, p_finite),
            "lost": flags_where_known(before & ~now, p_finite),
        }

    def _compare_listed(self, texts: Array, reference: Array) -> Divergences:
        _check_reference(texts, reference)
        n_classes = reference.shape[1]
        listed = read_listed(texts, n_classes)
        full = listed.k == n_classes
        reference = reference.astype(np.float64)
        compared = self._compare_values(listed.spread(n_classes) if full else reference, reference)
        p_finite = compared.reference_finite
        q_finite, gap = self._of_list(listed)
        if full:
            gap = compared.candidate_margin
        k = min(self._top_k, listed.k)
        chosen = np.zeros(reference.shape, dtype=np.bool_)
        np.put_along_axis(chosen, listed.classes[:, :k], values=True, axis=1)
        # Triton's sort leaves equal values in any order: the list may begin with any class that the reference scores equal.
        least = np.partition(reference, -k, axis=1)[:, -k, np.newaxis]
        # The list has k classes: count wrong ones, or missing ones above the threshold, whichever are more.
        n_strays = np.maximum(
            (chosen & (reference < least)).sum(axis=1), (~chosen & (reference > least)).sum(axis=1)
        )
        topk = np.where(q_finite, n_strays > 0, True)
        top = listed.classes[:, 0]
        best = reference.max(axis=1) == np.take_along_axis(reference, top[:, np.newaxis], axis=1)[:, 0]
        flip = np.where(q_finite, ~best, True)
        both = q_finite & p_finite
        tie = flip & both & _listed_tie(listed, reference)
        flip = self._counted(flip, tie)
        undefined, nothing = np.full(len(reference), np.nan), np.full(len(reference), None, dtype=object)
        return msgspec.structs.replace(
            compared,
            flip=np.where(p_finite, flip.astype(np.float64), np.nan),
            tie=np.where(p_finite, tie.astype(np.float64), np.nan),
            topk=np.where(p_finite, topk.astype(np.float64), np.nan),
            js=compared.js if full else undefined,
            divergence=compared.divergence if full and self._output_kind is OutputKind.LOGITS else undefined,
            margin=np.where(both, np.abs(gap - compared.reference_margin), np.nan),
            candidate_margin=np.where(q_finite, gap, np.nan),
            candidate_finite=q_finite,
            detail={
                **compared.detail,
                "candidate_top": np.where(q_finite, top, -1),
                "tv": compared.detail["tv"] if full else undefined,
                **({} if full else {"candidate_scores": nothing, "reference_scores": nothing}),
                "weighted_flip": np.where(p_finite, flip * compared.reference_margin, np.nan),
                "topk_overlap": np.where(both, 1 - n_strays / k, np.nan),
                **(self._shifts_of_list(listed, reference, both) if not full else {}),
                **self._turned(
                    top,
                    np.where(best | ~flip, top, _top(reference)),
                    finite=(q_finite, p_finite),
                    n_classes=n_classes,
                ),
            },
        )

    def _shifts_of_list(self, listed: TopLabels, reference: Values, both: Flags) -> dict[str, Values]:
        """Return the shifts of confidence, which follow from the first listed probability."""
        p = np.exp(self._log_probabilities(reference, "reference")[0])
        defined = both & (self._output_kind is OutputKind.PROBABILITIES)
        return _shifts(listed.values[:, 0], p, listed.classes[:, 0], defined)

    def _of_list(self, listed: TopLabels) -> tuple[Flags, Values]:
        """Return which items are finite, and the gap of the two largest probabilities if the list has both."""
        values = listed.values
        if self._output_kind is OutputKind.LOGITS:
            finite: Flags = np.asarray(~np.isnan(values).any(axis=1) & np.isfinite(values[:, 0]))
            return finite, np.full(len(values), np.nan)
        finite = np.asarray(np.isfinite(values).all(axis=1))
        safe = np.where(finite[:, np.newaxis], values, 0.0)
        _check_probabilities(safe, safe.sum(axis=1) - 1.0, "candidate")
        return finite, safe[:, 0] - safe[:, 1] if listed.k > 1 else np.full(len(values), np.nan)

    def _log_probabilities(self, output: Values, side: str) -> tuple[Values, Flags]:
        """Return ln of the probabilities, and which items are finite; others hold the uniform distribution."""
        if self._output_kind is OutputKind.PROBABILITIES:
            finite: Flags = np.asarray(np.isfinite(output).all(axis=1) & output.any(axis=1))
            safe = np.where(finite[:, np.newaxis], output, 1.0 / output.shape[1])
            return _log_normalised(safe, side), finite
        finite = np.asarray(~np.isnan(output).any(axis=1) & np.isfinite(output.max(axis=1)))
        safe = np.where(finite[:, np.newaxis], output, 0.0)
        with np.errstate(over="ignore"):  # as far apart as float64 reaches: probability zero
            shifted = safe - safe.max(axis=1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), finite


def _check_shapes(candidate: Array, reference: Array) -> None:
    for side, array in (("candidate", candidate), ("reference", reference)):
        if array.dtype.kind != "f":
            raise output_error(
                f"the {side}'s output is {array.dtype.name}: labels cannot be compared as distributions. Have the "
                "model return its logits or probabilities too, and name them in `models.output`; if they are quantised, "
                "set `models.references.output_scale`"
            )
    if candidate.shape != reference.shape:
        raise output_error(
            f"the candidate's output is {list(candidate.shape)}, the reference's {list(reference.shape)}"
        )
    if candidate.ndim != 2 or candidate.shape[1] < 2:
        raise output_error(
            f"outputs of shape {list(candidate.shape)} are not [items, classes] with at least two classes: name "
            "the classification output in `models.output`; for one score per item set task `multilabel`"
        )


def _check_reference(texts: Array, reference: Array) -> None:
    if reference.dtype.kind != "f" or reference.ndim != 2 or reference.shape[1] < 2:
        raise output_error(
            f"the candidate's output is text, the reference's {reference.dtype.name}{list(reference.shape)}: a list of "
            "top classes can only be compared with floating-point [items, classes]"
        )
    if len(texts) != len(reference):
        raise output_error(f"the candidate's output has {len(texts)} items, the reference's {len(reference)}")


def _check_probabilities(probabilities: Values, excess: Values, side: str) -> None:
    unexplained = excess - ZERO_TOLERANCE * (probabilities == 0).sum(axis=1)
    worst = float(excess.max(initial=0.0, where=unexplained > SUM_TOLERANCE))
    lowest = float(probabilities.min(initial=0.0))
    if worst > 0 or lowest < -NEGATIVE_TOLERANCE:
        raise output_error(
            f"the {side}'s output is not a distribution (sums differ from 1 by up to {worst:.3g}, smallest value "
            f"{lowest:.3g}): if these are logits, set `models.output_kind`"
        )


def _log_normalised(probabilities: Values, side: str) -> Values:
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is refused below
        total = probabilities.sum(axis=1, keepdims=True)
    _check_probabilities(probabilities, np.where(total > 0, np.abs(total - 1.0), np.inf)[:, 0], side)
    clipped = np.maximum(probabilities, 0.0)
    with np.errstate(divide="ignore"):
        log: Values = np.log(clipped / clipped.sum(axis=1, keepdims=True))
    return log


def _jensen_shannon(p: Values, q: Values) -> Values:
    middle = (p + q) / 2
    halves = [
        np.where(
            side > 0, side * np.log(np.where(side > 0, side / np.where(middle > 0, middle, 1.0), 1.0)), 0
        )
        for side in (p, q)
    ]
    divergence: Values = np.clip((halves[0] + halves[1]).sum(axis=1) / 2, 0.0, LN2)
    return divergence


def _shifts(sureness: Values, p: Values, top: Classes, defined: Flags) -> dict[str, Values]:
    """Return `confidence_shift` and `calibration_shift`; `sureness` is the candidate's top probability."""
    same = np.take_along_axis(p, top[:, np.newaxis], axis=1)[:, 0]
    return {
        "confidence_shift": np.where(defined, sureness - p.max(axis=1), np.nan),
        "calibration_shift": np.where(defined, sureness - same, np.nan),
    }


def tied_at_top(candidate: Values, reference: Values) -> Flags:
    """Return whether some entry has the largest value of both sides : (items,), of finite (items, entries)."""
    first = [side == side.max(axis=1, keepdims=True) for side in (candidate, reference)]
    return np.asarray((first[0] & first[1]).any(axis=1))


def _listed_tie(listed: TopLabels, reference: Values) -> Flags:
    """Return the same of a list : (items,); classes that it leaves out are not known to share its first value."""
    of_listed = np.take_along_axis(reference, listed.classes, axis=1)
    best = of_listed == reference.max(axis=1, keepdims=True)
    return np.asarray((best & (listed.values == listed.values[:, :1])).any(axis=1))


def _scores(probabilities: Values, k: int, shown: Flags) -> npt.NDArray[Any]:
    """Return the top classes of the items in `shown` with their probabilities, (items,) of lists; None elsewhere."""
    scores: npt.NDArray[Any] = np.full(len(probabilities), None, dtype=object)
    few = min(k, _MOST_SCORES)
    items = np.flatnonzero(shown)
    rows = probabilities[items]
    top = np.argsort(-rows, axis=1, kind="stable")[:, :few]
    pairs = np.empty(top.shape, dtype=_PAIR)  # `tolist` makes a list of tuples of each row
    pairs["class"] = top
    pairs["probability"] = np.take_along_axis(rows, top, axis=1).round(_DECIMALS)
    for item, of_item in zip(items.tolist(), pairs.tolist(), strict=True):
        scores[item] = of_item
    return scores


def _gap(probabilities: Values) -> Values:
    two = np.partition(probabilities, -2, axis=1)[:, -2:]
    gap: Values = two[:, 1] - two[:, 0]
    return gap


def _top(output: Values) -> Classes:
    top: Classes = np.argmax(output, axis=1)
    return top

"""The comparator for multi-label classifiers: a probability for each label, any number of which may apply.

With p the reference's and q the candidate's probabilities (of logits, by the logistic function), and P and Q the sets of
labels whose probability is above the label's threshold:

- `flip` = 1 where P and Q differ.
- `divergence` = sum over labels of p ln(p / q) + (1 - p) ln((1 - p) / (1 - q)), in nats: the KL of the labels' Bernoulli
  distributions (Kullback and Leibler, 1951), as if labels were drawn independently. For logits it is exact where
  probabilities round to 0 or 1, and infinite where the candidate excludes a label that the reference does not. For
  probabilities a candidate's q = 0 counts as min(p, 1/512), the closest to p of all values that 8 bits round to zero, and
  likewise 1 - q.

In `detail`:

- `hamming` = share of labels that are in only one of the sets, in [0, 1].
- `jaccard_distance` = 1 - |P and Q| / |P or Q|, in [0, 1] (Jaccard, 1901); 0 where both are empty.
- `labels_gained` = |Q without P|, `labels_lost` = |P without Q|.
- `gained`, `lost`: a label of interest is among those; only if the configuration names such labels. A candidate that is not
  finite has lost all labels of the reference.

A logit may be minus infinity (an excluded label). A side with any other value that is not finite is not finite: if it is
the candidate's, it is a flip and all else is undefined; if it is the reference's, everything is undefined.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quantdrift.core.config.schema import OutputKind
from quantdrift.models.comparators.classes.classes_of_interest import among
from quantdrift.models.comparators.numbers import TOLERANCE, NumberPair, filled, pair_of, rounded
from quantdrift.models.comparators.protocol import Divergences, Flags, Values, flags_where_known
from quantdrift.models.tensors.arrays import Array, output_error


class MultilabelComparator:
    """Compares scores of labels.

    Parameters
    ----------
    output_kind
        Whether the outputs are logits or probabilities.
    thresholds
        Probability above which a label applies: one for all labels, or one for each.
    interest
        Numbers of the labels of interest.
    """

    def __init__(
        self, output_kind: OutputKind, thresholds: Sequence[float] = (0.5,), interest: Sequence[int] = ()
    ) -> None:
        self._output_kind = output_kind
        self._thresholds = np.array(thresholds)
        self._interest = tuple(interest)

    def compare(self, candidate: Array, reference: Array) -> Divergences:
        """Return the divergence of each item.

        Parameters
        ----------
        candidate, reference
            (items, labels), or (items,) for a single label.

        Raises
        ------
        QuarantineError
            Reason `output`: shapes differ or are not these, the numbers of labels and thresholds differ, or values are not
            probabilities.
        """
        logits = self._output_kind is OutputKind.LOGITS
        least = max(len(self._thresholds), 1 + max(self._interest, default=0))
        candidate, reference = (
            filled(candidate, reference, least=least),
            filled(reference, candidate, least=least),
        )
        pair = pair_of(_columns(candidate), _columns(reference), "[items, labels]", masked=logits)
        n_labels = pair.reference.shape[1]
        if len(self._thresholds) not in (1, n_labels):
            raise output_error(
                f"models.threshold has {len(self._thresholds)} entries, but the output has {n_labels} labels"
            )
        q, *log_q = self._probabilities(pair.candidate, pair.candidate_finite, "candidate")
        p, *log_p = self._probabilities(pair.reference, pair.reference_finite, "reference")
        now = (q > self._thresholds) & pair.candidate_finite[:, np.newaxis]
        before = p > self._thresholds
        gained, lost = now & ~before, before & ~now
        changed, either = (gained | lost).sum(axis=1), (now | before).sum(axis=1)
        return Divergences(
            flip=pair.flip(changed > 0),
            divergence=pair.defined(_kullback_leibler(log_p, log_q, exact=logits)),
            candidate_finite=pair.candidate_finite,
            reference_finite=pair.reference_finite,
            detail={
                "hamming": pair.defined(changed / n_labels),
                "jaccard_distance": pair.defined(changed / np.maximum(either, 1)),
                "labels_gained": pair.defined(gained.sum(axis=1).astype(np.float64)),
                "labels_lost": pair.defined(lost.sum(axis=1).astype(np.float64)),
                **self._turned(now, before, pair),
            },
        )

    def _probabilities(self, output: Values, finite: Flags, side: str) -> tuple[Values, Values, Values]:
        """Return the probability p of each label, ln p and ln(1 - p)."""
        if self._output_kind is OutputKind.LOGITS:
            log_p, log_not_p = -np.logaddexp(0.0, -output), -np.logaddexp(0.0, output)
            return np.exp(log_p), log_p, log_not_p
        p = np.clip(output, 0.0, 1.0)
        if np.abs(output - p)[finite].max(initial=0.0) > TOLERANCE:
            raise output_error(
                f"the {side}'s output has values from {output.min():.3g} to {output.max():.3g}, which are not probabilities: "
                "if they are logits, set `models.output_kind`"
            )
        with np.errstate(divide="ignore"):
            return p, np.log(p), np.log1p(-p)

    def _turned(self, now: Flags, before: Flags, pair: NumberPair) -> dict[str, npt.NDArray[Any]]:
        """Return whether labels of interest were gained or lost, if there are any."""
        if not self._interest:
            return {}
        wanted = among(self._interest, now.shape[1])
        return {
            "gained": flags_where_known(
                np.asarray((now & ~before & wanted).any(axis=1)), pair.reference_finite
            ),
            "lost": flags_where_known(
                np.asarray((before & ~now & wanted).any(axis=1)), pair.reference_finite
            ),
        }


def _columns(output: Array) -> Array:
    """Return the output as (items, labels)."""
    if output.ndim == 1:
        return output[:, np.newaxis]
    if output.ndim != 2:
        raise output_error(
            f"an output of shape {list(output.shape)} is not [items, labels]: check `models.output`"
        )
    return output


def _kullback_leibler(log_p: list[Values], log_q: list[Values], *, exact: bool) -> Values:
    """Return the sum over labels of the KL of their Bernoulli distributions; each list holds ln p and ln(1 - p)."""
    terms = np.zeros(log_p[0].shape)
    for of_p, of_q in zip(log_p, log_q, strict=True):
        compared_q = of_q if exact else rounded(of_q, of_p)
        # A term with p = 0 adds nothing, whatever q is.
        with np.errstate(invalid="ignore"):
            terms += np.where(np.exp(of_p) > 0, np.exp(of_p) * (of_p - compared_q), 0.0)
    # Rounding may make terms of nearly equal probabilities negative.
    with np.errstate(over="ignore"):
        divergence: Values = np.maximum(terms, 0.0).sum(axis=1)
    return divergence

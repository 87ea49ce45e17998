"""The description of a cluster: what is more frequent in it than elsewhere, beyond chance, and which features set it apart."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.facts.estimate import holm

MOST_LABELS: Final = 1000
MOST_TRAITS: Final = 3
LEVEL: Final = 0.01
"""Largest probability that a fit names any trait that is no trait."""
LEAST_APART: Final = 1.0  # standard deviations
LEAST_COUNT: Final = 10
LEAST_LIFT: Final = 1.2


class Trait(msgspec.Struct, frozen=True, kw_only=True):
    """A declared slice, or the value of an attribute, that is over-represented in a cluster.

    Parameters
    ----------
    label
        The slice's name, e.g. `scanner=faint`, or `header.x-site=s3`.
    lift
        Its share within the cluster over its share of everything, both weighted by 1 / pi.
    share
        Its share within the cluster.
    count
        Vectors of the cluster that have it, not weighted.
    p_adjusted
        Of the test of `traits_of`, for all clusters and labels together.
    """

    label: str
    lift: float
    share: float
    count: int
    p_adjusted: float


class Apart(msgspec.Struct, frozen=True, kw_only=True):
    """A feature by which a cluster was formed, or of the inputs in it, and lies apart from the rest.

    Parameters
    ----------
    feature
        Its name.
    inside, elsewhere
        Its mean in the cluster, and of all that is not in it, weighted by 1 / pi.
    """

    feature: str
    inside: float
    elsewhere: float


def traits_of(
    positions: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float64],
    labels: Sequence[Sequence[str]],
    exchanges: Sequence[str],
    n_clusters: int,
) -> list[tuple[Trait, ...]]:
    """Return per cluster the labels that distinguish it from the rest, the most distinctive first.

    Labels are ranked by what they add to the divergence of the cluster's labels from those of all traffic: share * ln(lift).
    One counts only from `LEAST_COUNT` vectors and a lift of `LEAST_LIFT` on, and if Fisher's exact test finds it more frequent in the
    cluster than elsewhere, with one item of each exchange, since items of one exchange are alike. Its one-sided p-values of all
    clusters and labels are adjusted by Holm.

    Assumptions: exchanges are independent, and their sampling depends on the label or on the cluster and not on both. A label by a feature that formed
    the clusters differs between them by construction: of such labels the test shows less than it seems (Gao, Bien and Witten 2022).
    Bound: a label that does not depend on the cluster is named with a probability of at most `LEVEL`, all clusters together.

    Parameters
    ----------
    positions : (n,)
        The cluster of each vector, from 0; below 0 for none.
    weights : (n,)
        1 / pi.
    labels
        What each vector has; beyond the `MOST_LABELS` most frequent they are left out.
    exchanges
        The id of the exchange of each vector.
    n_clusters
        How many clusters there are.

    References
    ----------
    Fisher (1935), The Logic of Inductive Inference, Journal of the Royal Statistical Society 98.
    """
    frequent_labels = {
        label
        for label, count in Counter(label for of_one in labels for label in of_one).most_common(MOST_LABELS)
        if count >= LEAST_COUNT
    }
    overall: defaultdict[str, float] = defaultdict(float)
    inside: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(n_clusters)]
    counts: list[Counter[str]] = [Counter() for _ in range(n_clusters)]
    for position, weight, of_one in zip(positions.tolist(), weights.tolist(), labels, strict=True):
        for label in frequent_labels.intersection(of_one):
            overall[label] += weight
            if position >= 0:
                inside[position][label] += weight
                counts[position][label] += 1
    p_values = _p_values(positions, labels, exchanges, sorted(frequent_labels), n_clusters)
    total = float(weights.sum())
    result = []
    for position, sums in enumerate(inside):
        mass = float(weights[positions == position].sum())
        traits = [
            Trait(
                label=label,
                lift=(sums[label] / mass) / (overall[label] / total),
                share=sums[label] / mass,
                count=count,
                p_adjusted=p_values[position, label],
            )
            for label, count in counts[position].items()
            if count >= LEAST_COUNT
        ]
        result.append(_telling(traits))
    return result


def _p_values(
    positions: npt.NDArray[np.int64],
    labels: Sequence[Sequence[str]],
    exchanges: Sequence[str],
    frequent_labels: Sequence[str],
    n_clusters: int,
) -> dict[tuple[int, str], float]:
    """Return the adjusted p-value of each cluster and label."""
    from scipy.stats import hypergeom  # noqa: PLC0415 - only the fit needs it, and it takes a second

    rows = list({exchange: row for row, exchange in reversed(list(enumerate(exchanges)))}.values())
    at = {label: column for column, label in enumerate(frequent_labels)}
    joint = np.zeros((n_clusters + 1, len(at)), np.int64)  # the last row has what is in no cluster
    for row in rows:
        for label in at.keys() & set(labels[row]):
            joint[positions[row], at[label]] += 1
    sizes = np.bincount(positions[rows] % (n_clusters + 1), minlength=n_clusters + 1)
    p = hypergeom.sf(joint[:-1] - 1, len(rows), joint.sum(axis=0)[np.newaxis], sizes[:-1, np.newaxis])
    adjusted = holm(p.ravel().tolist())
    keys = ((position, label) for position in range(n_clusters) for label in frequent_labels)
    return {key: 1.0 if value is None else value for key, value in zip(keys, adjusted, strict=True)}


def apart(
    values: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float64],
    members: npt.NDArray[np.bool_],
    features: Sequence[str],
) -> tuple[Apart, ...]:
    """Return the features whose mean in a cluster lies `LEAST_APART` standard deviations or more from the mean elsewhere, the farthest first.

    They formed the cluster, so that no test of them would mean anything: this says where it lies, not that it lies apart.

    Parameters
    ----------
    values : (n, features)
        Of all vectors, not scaled.
    weights : (n,)
        1 / pi.
    members : (n,)
        Which vectors are in the cluster.
    """
    if not members.any() or members.all():
        return ()
    exact = values.astype(np.float64)
    inside = np.average(exact[members], axis=0, weights=weights[members])
    elsewhere = np.average(exact[~members], axis=0, weights=weights[~members])
    centre = np.average(exact, axis=0, weights=weights)
    spread = np.sqrt(np.average((exact - centre) ** 2, axis=0, weights=weights))
    far = np.divide(np.abs(inside - elsewhere), spread, out=np.zeros_like(spread), where=spread > 0)
    order = [column for column in np.argsort(-far, kind="stable").tolist() if far[column] >= LEAST_APART]
    return tuple(
        Apart(feature=features[column], inside=float(inside[column]), elsewhere=float(elsewhere[column]))
        for column in order[:MOST_TRAITS]
    )


def features_apart(
    positions: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float64],
    features: Sequence[Mapping[str, float]],
    exchanges: Sequence[str],
    n_clusters: int,
) -> list[tuple[Apart, ...]]:
    """Return per cluster the features of inputs that set it apart, the farthest first.

    One counts if its mean lies `LEAST_APART` standard deviations or more from the mean elsewhere, and if the test of Wilcoxon, Mann and
    Whitney finds its values higher or lower in the cluster, with one item of each exchange. Its two-sided p-values of all clusters and
    features, by the normal approximation with ties, are adjusted by Holm.

    Assumptions: exchanges are independent, and their sampling depends on the feature or on the cluster and not on both. Clusters of an
    embedding are not formed by these features themselves. Bound: a feature that does not depend on the cluster is named with a probability
    of at most `LEVEL`, all clusters together.

    Parameters
    ----------
    positions : (n,)
        The cluster of each vector, from 0; below 0 for none.
    weights : (n,)
        1 / pi.
    features
        Of each vector by name; a vector that lacks one does not count for it. Empty: nothing is known.
    exchanges
        The id of the exchange of each vector.
    n_clusters
        How many clusters there are.

    References
    ----------
    Mann and Whitney (1947), On a Test of Whether One of Two Random Variables is Stochastically Larger than the Other, Annals of
    Mathematical Statistics 18.
    """
    p_values: list[float | None] = []
    means: list[tuple[int, float, Apart]] = []
    for name in sorted({name for of_one in features for name in of_one}):
        rows = np.array([row for row, of_one in enumerate(features) if name in of_one], dtype=np.intp)
        values = np.array([features[row][name] for row in rows.tolist()], dtype=np.float64)
        weight = weights[rows]
        centre = np.average(values, weights=weight)
        spread = math.sqrt(float(np.average((values - centre) ** 2, weights=weight)))
        first = np.unique(np.array([exchanges[row] for row in rows.tolist()]), return_index=True)[1]
        ranks = _Ranks(values[first])
        for cluster in range(n_clusters):
            members = positions[rows] == cluster
            p = ranks.p_value(members[first])
            if p is None or spread == 0:
                continue
            inside = float(np.average(values[members], weights=weight[members]))
            elsewhere = float(np.average(values[~members], weights=weight[~members]))
            p_values.append(p)
            mean = Apart(feature=name, inside=inside, elsewhere=elsewhere)
            means.append((cluster, abs(inside - elsewhere) / spread, mean))
    found: list[list[tuple[float, Apart]]] = [[] for _ in range(n_clusters)]
    for p_adjusted, (cluster, far, mean) in zip(holm(p_values), means, strict=True):
        if p_adjusted is not None and p_adjusted <= LEVEL and far >= LEAST_APART:
            found[cluster].append((far, mean))
    return [
        tuple(mean for _, mean in sorted(of_one, key=lambda pair: (-pair[0], pair[1].feature))[:MOST_TRAITS])
        for of_one in found
    ]


class _Ranks:
    """The ranks of values, for the test of Wilcoxon, Mann and Whitney of any of them against the rest."""

    def __init__(self, values: npt.NDArray[np.float64]) -> None:
        from scipy.stats import rankdata  # noqa: PLC0415 - only the fit needs it, and it takes a second

        n = len(values)
        ties = np.unique(values, return_counts=True)[1].astype(np.float64)
        self._ranks = rankdata(values)
        self._spread = (n + 1 - float((ties**3 - ties).sum()) / max(n * (n - 1), 1)) / 12

    def p_value(self, members: npt.NDArray[np.bool_]) -> float | None:
        """Return the two-sided p-value that the values of `members` are neither higher nor lower; None: too few of either, or all alike."""
        n, n_inside = len(members), int(members.sum())
        variance = n_inside * (n - n_inside) * self._spread
        if min(n_inside, n - n_inside) < LEAST_COUNT or variance <= 0:
            return None
        excess = abs(float(self._ranks[members].sum()) - n_inside * (n + 1) / 2)
        return math.erfc(max(excess - 0.5, 0.0) / math.sqrt(2 * variance))


def _telling(traits: list[Trait]) -> tuple[Trait, ...]:
    frequent = [trait for trait in traits if trait.lift >= LEAST_LIFT and trait.p_adjusted <= LEVEL]
    frequent.sort(key=lambda trait: (-trait.share * math.log(trait.lift), trait.label))
    return tuple(frequent[:MOST_TRAITS])

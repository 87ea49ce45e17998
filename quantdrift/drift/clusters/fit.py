"""Learned slices: centroids by mini-batch k-means, with ids that stay and radii beyond which an input is novel.

One half of the exchanges (by a hash of their id) places the centroids, the other half measures how far ordinary
traffic lies from them. The score of a vector is s(x) = min_j ||x - c_j|| / spread_j. With weights w = 1 / pi the radius
of cluster j is t * spread_j, t the smallest score with

    sum of w_i over s_i <= t  >=  q * (sum of w_i + w_max)

which is split conformal prediction (Vovk, Gammerman and Shafer 2005; weighted as in Tibshirani et al. 2019, with the
largest weight for the next item). So a further vector of the same traffic lies beyond every radius with probability at
most 1 - q, on average over samples of this size, if vectors of different exchanges are exchangeable. Measured on the
half that placed the centroids, the scores would be too small. Where q cannot be reached with so few vectors the radii
are infinite and nothing counts as novel.

The centroids are Sculley's (2010). A refit starts once from the existing centroids and once from new ones; the former
are kept unless the latter divide the traffic better by `_BETTER`. Ids then follow the nearest centroids (`matching`).
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.clusters import (
    MOST_IDS,
    OTHER_ID,
    Anchors,
    Bools,
    Clustering,
    Float32,
    Float64,
    Ints,
    finite_rows,
)
from quantdrift.drift.clusters.describe import Apart, Trait, apart, features_apart, traits_of

_BETTER: Final = 0.95
_LEAST_IN_CLUSTER: Final = 20
_LEAST_SPREAD: Final = (
    0.25  # of the spread over all clusters: a few equal vectors must not have a radius of 0
)
_TINY: Final = 1e-6
_FARTHEST: Final = 100.0  # medians of the distance: beyond it a vector places no centroid
_BATCH: Final = 1024
_FRESH_STARTS: Final = 3
_MOST_FORMER: Final = 64
_N_MEDOIDS: Final = 3
LIMIT: Final = 1.0
Array = npt.NDArray[Any]
MOST_VALUES: Final = 1000


class ClusterSample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The sample that a clustering is fitted to: one row per item.

    Parameters
    ----------
    vectors : (n, width)
        Float32; rows with values that are no finite numbers are counted and left out.
    weights : (n,)
        1 / pi, pi the item's total inclusion probability.
    exchanges
        Ids; items of one exchange stay together.
    labels
        Names of the declared slices of each item: what clusters are described with.
    attributes
        Recorded attributes of each item: what the vocabulary is made of.
    features
        Features of each item's inputs, for the description of an embedding's clusters; empty: nothing is known of them.
    """

    vectors: Float32
    weights: Float64
    exchanges: Sequence[str]
    labels: Sequence[Sequence[str]]
    attributes: Sequence[Mapping[str, str]]
    features: Sequence[Mapping[str, float]] = ()

    def rows(self, chosen: Bools) -> "ClusterSample":
        """Return the rows that are `chosen` : (n,)."""
        rows = np.flatnonzero(chosen).tolist()
        return ClusterSample(
            vectors=self.vectors[chosen],
            weights=self.weights[chosen],
            exchanges=[self.exchanges[row] for row in rows],
            labels=[self.labels[row] for row in rows],
            attributes=[self.attributes[row] for row in rows],
            features=[self.features[row] for row in rows] if self.features else (),
        )


class Naming(msgspec.Struct, frozen=True, kw_only=True):
    """The names and ids of a clustering to be fitted.

    Parameters
    ----------
    model, reference_digest, version, space, columns
        As in `Clustering`.
    next_id
        The first id that no cluster of this model ever had.
    most_ids
        Largest id that may be given.
    attributes
        Attribute keys whose vocabulary is wanted.
    """

    model: str
    reference_digest: str
    version: int
    space: str
    columns: tuple[str, ...] = ()
    next_id: int = 1
    most_ids: int = MOST_IDS
    attributes: tuple[str, ...] = ()


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster, described.

    Parameters
    ----------
    id
        `OTHER_ID` where no id was left.
    n
        Vectors of the sample in it.
    share
        Its share of the traffic, an estimate: weighted by 1 / pi, from a sample.
    radius
        Scaled distance from the centroid beyond which a vector is not in the cluster; None if there were too few vectors
        to compute it.
    traits
        Declared slices and values of attributes that are over-represented in it.
    apart
        Features by which it was formed and lies apart; in an embedding, whose numbers have no names, those of the inputs that a test finds apart.
    medoids
        Ids of the exchanges nearest to the centroid: look at these.
    """

    id: int
    n: int
    share: float
    radius: float | None
    traits: tuple[Trait, ...]
    medoids: tuple[str, ...]
    apart: tuple[Apart, ...] = ()


class Fitted(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A clustering and its description, in the order of its ids; `n_vectors` is the size of the sample."""

    clustering: Clustering
    clusters: tuple[Cluster, ...]
    n_vectors: int


def fit_clusters(
    sample: ClusterSample,
    naming: Naming,
    *,
    n_clusters: int,
    quantile: float,
    previous: Clustering | None,
    seed: int,
) -> Fitted:
    """Fit a clustering.

    Parameters
    ----------
    sample
        At least one finite row.
    naming
        Whose it is.
    n_clusters
        Most clusters; fewer where they would have only a few vectors.
    quantile
        q: at most 1 - q of ordinary traffic is expected to be called novel.
    previous
        The one before it in the same space, or None.
    seed
        The same seed and sample give the same clustering.

    Raises
    ------
    ValueError
        No row is finite.
    """
    finite = finite_rows(sample.vectors)
    vocabulary = known_values(naming.attributes, sample.attributes, sample.weights, most_unseen=1 - quantile)
    gaps = not bool(finite.all())
    sample = sample.rows(finite)
    if len(sample.vectors) == 0:
        raise ValueError("no vector is made of finite numbers")
    # One vector a million times as far out as the others would get its own centroid and determine the scale.
    near = _near(sample.vectors)
    placing = _half(sample.exchanges)
    fits_centroids, measured = placing & near, ~placing
    centre, scale = _scaling(sample.rows(near), per_column=bool(naming.columns))
    points: Float64 = (sample.vectors.astype(np.float64) - centre) / scale
    old = None if previous is None or previous.width != len(centre) else previous
    start = np.empty((0, len(centre))) if old is None else (old.anchors().centres - centre) / scale
    centroids = _centroids(points[fits_centroids], sample.weights[fits_centroids], start, n_clusters, seed)
    spreads = _spreads(points[fits_centroids], sample.weights[fits_centroids], centroids)
    ids, former, next_id = _identities(
        centroids, spreads, old, naming, scaled=lambda raw: (raw.astype(np.float64) - centre) / scale
    )
    clustering = Clustering(
        model=naming.model,
        reference_digest=naming.reference_digest,
        version=naming.version,
        space=naming.space,
        columns=naming.columns,
        ids=ids,
        centroids=centroids.astype(np.float32),
        radii=spreads.astype(np.float32),
        spreads=spreads.astype(np.float32),
        centre=centre,
        scale=scale,
        gaps=gaps,
        vocabulary=vocabulary,
        former=former,
        next_id=next_id,
        expected_novel=1 - quantile,
    )
    _, scores = clustering.nearest(sample.vectors[measured])
    threshold = novelty_threshold(scores, sample.weights[measured], quantile)
    # Rounded up, so that float32 puts none of the vectors that were measured beyond it.
    radii = np.nextafter((spreads * max(threshold, _TINY)).astype(np.float32), np.float32(np.inf))
    clustering = msgspec.structs.replace(clustering, radii=radii.astype(np.float32))
    described = _described(clustering, sample, declared=frozenset(naming.attributes))
    return Fitted(clustering=clustering, clusters=described, n_vectors=len(finite))


def novelty_threshold(scores: Float64, weights: Float64, quantile: float) -> float:
    """Return t of the module's formula: infinite where there are too few scores for `quantile`.

    Parameters
    ----------
    scores : (n,)
        Scores of vectors that were not used to fit the centroids.
    weights : (n,)
        1 / pi.
    quantile
        q in (0, 1).
    """
    if len(scores) == 0:
        return float("inf")
    order = np.argsort(scores, kind="stable")
    mass = np.cumsum(weights[order])
    needed = quantile * (mass[-1] + weights.max())
    # The relative slack is for the rounding of the sum alone.
    index = int(np.searchsorted(mass, needed * (1 - 1e-12)))
    return float(scores[order][index]) if index < len(scores) else float("inf")


def _half(exchanges: Iterable[str]) -> Bools:
    """Return which rows are used to fit the centroids: half of the exchanges, the same ones each time."""
    return np.array([zlib.crc32(exchange.encode()) % 2 == 0 for exchange in exchanges], dtype=np.bool_)


def _near(vectors: Float32) -> Bools:
    """Return which vectors, (n,), lie within `_FARTHEST` times the median distance from the median."""
    points = vectors.astype(np.float64)
    distance = np.sqrt(np.square(points - np.median(points, axis=0)).sum(axis=1))
    near: Bools = distance <= _FARTHEST * max(float(np.median(distance)), _TINY)
    return near


def _scaling(sample: ClusterSample, *, per_column: bool) -> tuple[Float32, Float32]:
    """Return centre and scale: one for each feature, or a common one for an embedding, which keeps its geometry."""
    vectors = sample.vectors.astype(np.float64)
    centre = np.average(vectors, axis=0, weights=sample.weights)
    squares = np.average((vectors - centre) ** 2, axis=0, weights=sample.weights)
    scale = np.sqrt(squares) if per_column else np.full(len(centre), np.sqrt(squares.sum()))
    scale = np.where(scale > np.finfo(np.float32).tiny, scale, 1.0)
    return centre.astype(np.float32), scale.astype(np.float32)


def _centroids(
    points: Float64, weights: Float64, start: npt.NDArray[Any], n_clusters: int, seed: int
) -> Float64:
    from sklearn.cluster import MiniBatchKMeans  # noqa: PLC0415 - only the fit needs it, and it takes a second
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped] # noqa: PLC0415 - comes with it

    k = max(1, min(n_clusters, len(points) // _LEAST_IN_CLUSTER))
    if len(points) == 0:
        return start[:1] if len(start) else np.zeros((1, start.shape[1]))
    best: Float64 = start
    with threadpool_limits(1):
        runs: list[tuple[Any, int, float]] = [("k-means++", _FRESH_STARTS, 1.0)]
        if len(start):
            runs.insert(0, (_filled(start, points, weights, k, seed), 1, _BETTER))
        cost = np.inf
        for init, n_init, factor in runs:
            means = MiniBatchKMeans(k, init=init, n_init=n_init, batch_size=_BATCH, random_state=seed)
            means.fit(points, sample_weight=weights / weights.mean())
            fitted: Float64 = means.cluster_centers_.astype(np.float64)
            if (reached := _cost(points, weights, fitted)) < cost:
                best, cost = fitted, reached * factor
    counts = np.bincount(_squares(points, best).argmin(axis=1), minlength=k)
    large_enough = counts >= min(_LEAST_IN_CLUSTER, counts.max())
    centroids: Float64 = best[large_enough]
    return centroids


def _filled(start: npt.NDArray[Any], points: Float64, weights: Float64, k: int, seed: int) -> Float64:
    """Return k starting points: the previous centroids, filled up with points far from them (k-means++)."""
    chosen: Float64 = start[:k].astype(np.float64)
    generator = np.random.default_rng(seed)
    while len(chosen) < k:
        odds = _squares(points, chosen).min(axis=1) * weights
        even = np.full(len(points), 1 / len(points))
        row = generator.choice(len(points), p=odds / odds.sum() if odds.sum() > 0 else even)
        chosen = np.vstack((chosen, points[row]))
    return chosen


def _squares(points: Float64, centroids: Float64) -> Float64:
    """Return squared distances : (n, k)."""
    squares: Float64 = (
        (points**2).sum(axis=1)[:, np.newaxis] - 2 * points @ centroids.T + (centroids**2).sum(axis=1)
    )
    return squares.clip(min=0.0)


def _cost(points: Float64, weights: Float64, centroids: Float64) -> float:
    return float(np.average(_squares(points, centroids).min(axis=1), weights=weights))


def _spreads(points: Float64, weights: Float64, centroids: Float64) -> Float64:
    """Return the root mean square distance of each centroid's own points, none much below that of all : (k,)."""
    if len(points) == 0:
        return np.ones(len(centroids))
    squares = _squares(points, centroids)
    nearest, least = squares.argmin(axis=1), squares.min(axis=1)
    mass = np.bincount(nearest, weights, minlength=len(centroids))
    sums = np.bincount(nearest, weights * least, minlength=len(centroids))
    overall = np.average(least, weights=weights)
    own = np.divide(sums, mass, out=np.full(len(centroids), overall), where=mass > 0)
    spreads: Float64 = np.sqrt(own).clip(min=max(_LEAST_SPREAD * float(np.sqrt(overall)), _TINY))
    return spreads


def _identities(
    centroids: Float64,
    spreads: Float64,
    old: Clustering | None,
    naming: Naming,
    *,
    scaled: Callable[[Float32], Float64],
) -> tuple[tuple[int, ...], Anchors, int]:
    """Return the ids, the clusters that disappeared, and the next free id.

    A centroid gets the id of the old centroid that it continues, otherwise that of a former centroid that has come back,
    otherwise a new id.
    """
    width = centroids.shape[1]
    empty = Anchors(ids=(), centres=np.empty((0, width), np.float32), spreads=np.empty(0, np.float32))
    ids: list[int] = [OTHER_ID] * len(centroids)
    gone: list[tuple[int, Float32, float]] = []
    for anchors in (empty, empty) if old is None else (old.anchors(), old.former):
        free = [index for index, cluster_id in enumerate(ids) if cluster_id == OTHER_ID]
        matched = match_centroids(scaled(anchors.centres), anchors.spreads, centroids[free], spreads[free])
        for index, which in zip(free, matched, strict=True):
            if which is not None:
                ids[index] = anchors.ids[which]
        gone += [
            (cluster_id, anchors.centres[which], float(anchors.spreads[which]))
            for which, cluster_id in enumerate(anchors.ids)
            if cluster_id not in ids
        ]
    next_id = max(naming.next_id, 1 if old is None else old.next_id)
    for index, cluster_id in enumerate(ids):
        if cluster_id == OTHER_ID and next_id <= naming.most_ids:
            ids[index], next_id = next_id, next_id + 1
    former_clusters = gone[:_MOST_FORMER]
    former = Anchors(
        ids=tuple(cluster_id for cluster_id, _, _ in former_clusters),
        centres=np.array([at for _, at, _ in former_clusters], np.float32).reshape(
            len(former_clusters), width
        ),
        spreads=np.array([spread for _, _, spread in former_clusters], np.float32),
    )
    return tuple(ids), former, next_id


def _described(
    clustering: Clustering, sample: ClusterSample, *, declared: frozenset[str]
) -> tuple[Cluster, ...]:
    """Describe the clusters; attributes that are `declared` describe them by the names of their slices."""
    positions, ratios = clustering.nearest(sample.vectors)
    inside: Ints = np.where(ratios > 1.0, -1, positions)
    labels = [
        (*names, *(f"{key}={value}" for key, value in attributes.items() if key not in declared))
        for names, attributes in zip(sample.labels, sample.attributes, strict=True)
    ]
    traits = traits_of(inside, sample.weights, labels, sample.exchanges, len(clustering.ids))
    tested = features_apart(inside, sample.weights, sample.features, sample.exchanges, len(clustering.ids))
    distances = np.linalg.norm(clustering.scaled(sample.vectors) - clustering.centroids[positions], axis=1)
    total = float(sample.weights.sum())
    clusters = []
    for position, cluster_id in enumerate(clustering.ids):
        members = np.flatnonzero(inside == position)
        nearest = members[np.argsort(distances[members], kind="stable")]
        exchanges = dict.fromkeys(sample.exchanges[row] for row in nearest[: 10 * _N_MEDOIDS].tolist())
        clusters.append(
            Cluster(
                id=cluster_id,
                n=len(members),
                share=float(sample.weights[members].sum()) / total,
                radius=float(clustering.radii[position]) if np.isfinite(clustering.radii[position]) else None,
                traits=traits[position],
                medoids=tuple(exchanges)[:_N_MEDOIDS],
                apart=apart(sample.vectors, sample.weights, inside == position, clustering.columns)
                if clustering.columns
                else tested[position],
            )
        )
    return tuple(sorted(clusters, key=lambda cluster: (cluster.id == OTHER_ID, cluster.id)))


def match_centroids(
    old: Array, old_spreads: Array, new: Array, new_spreads: Array, *, limit: float = LIMIT
) -> list[int | None]:
    """Return for each new centroid the old one that it continues, or None.

    Old i and new j cost min(1, ||o_i - n_j|| / (limit * (s_i + s_j) / 2)), and the Hungarian method finds the
    pairs with the smallest sum, each centroid in at most one (Kuhn 1955). Only pairs that cost less than 1 count: centroids
    further from each other than `limit` spreads are two clusters. Costs are cut at 1 and not infinite beyond it. Otherwise
    clusters that have not moved would pass their ids to their neighbours, only to make one more pair.

    The result does not depend on the order of either side, except if two sums are equal.

    Parameters
    ----------
    old : (m, width)
        Centroids, scaled like `new`.
    old_spreads : (m,)
        Root mean square distances of the vectors from their centroid; above 0.
    new : (k, width)
        Centroids.
    new_spreads : (k,)
        Root mean square distances of their vectors; above 0.
    limit
        Farthest that a cluster may have moved, in spreads.
    """
    matches: list[int | None] = [None] * len(new)
    if len(old) == 0 or len(new) == 0:
        return matches
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415 -- 0.1 s, which every monitor would spend at its start

    distances = np.linalg.norm(
        old[:, np.newaxis].astype(np.float64) - new[np.newaxis].astype(np.float64), axis=2
    )
    allowed = limit * (old_spreads[:, np.newaxis] + new_spreads[np.newaxis]) / 2
    costs = np.minimum(distances / allowed, 1.0)
    for i, j in zip(*linear_sum_assignment(costs), strict=True):
        if costs[i, j] < 1.0:
            matches[int(j)] = int(i)
    return matches


def known_values(
    keys: Iterable[str],
    values: Sequence[Mapping[str, str]],
    weights: npt.NDArray[np.float64],
    *,
    most_unseen: float,
) -> dict[str, frozenset[str]]:
    """Return per attribute the values seen so far, for those attributes whose values are known by now.

    The share of traffic whose value was never met is about the share whose value was met exactly once (Good 1953).
    With the next item counted as one of these, at the largest weight, (W_1 + w_max) / (W + w_max) must be at most
    `most_unseen`. A request id is unknown for ever by this rule: every value of it is new. So is an attribute with
    more than `MOST_VALUES` values.

    Parameters
    ----------
    keys
        Attributes, as recorded.
    values
        Attributes of each item; an absent one does not count.
    weights : (n,)
        1 / pi of each.
    most_unseen
        Largest share of ordinary traffic with a value that was not met.
    """
    vocabulary: dict[str, frozenset[str]] = {}
    for key in keys:
        present = [
            (value, weight)
            for of_one, weight in zip(values, weights.tolist(), strict=True)
            if (value := of_one.get(key)) is not None
        ]
        counts = Counter(value for value, _ in present)
        if not present or len(counts) > MOST_VALUES:
            continue
        total = sum(weight for _, weight in present)
        once = sum(weight for value, weight in present if counts[value] == 1)
        largest = max(weight for _, weight in present)
        if (once + largest) / (total + largest) <= most_unseen:
            vocabulary[key] = frozenset(counts)
    return vocabulary

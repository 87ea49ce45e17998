"""The learned slices and novelty of items, and the vectors to keep for the next fit of a clustering."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.clusters import (
    MOST_VECTORS,
    MOST_WIDTH,
    OTHER_ID,
    SAMPLE_SHARE,
    Clustering,
    cluster_slice,
    novel_input,
    novel_value,
    space_of,
)
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.records import Exchange
from quantdrift.core.slices import SliceKey, attribute_key
from quantdrift.models.runtimes.embedding import vectors_of
from quantdrift.models.tensors.arrays import Array
from quantdrift.storage.comparisons.rows import VectorRow

_HOUR_S: Final = 3600.0
_U64: Final = 2.0**64


class ClusterAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """The learned slices of an exchange.

    Parameters
    ----------
    slices
        Learned and novel slices of each item.
    version
        Version of the clustering that assigned them; 0 if there is none yet.
    vectors
        The vectors to store.
    """

    slices: tuple[tuple[SliceKey, ...], ...]
    version: int
    vectors: tuple[VectorRow, ...]


class ClusterSlices:
    """Assigns items to learned slices. `use_clusterings` may be called from another thread than the rest.

    Vectors to keep are chosen by a hash of exchange and item, independent of their content, and at most
    `MOST_VECTORS` of a model in an hour.

    Parameters
    ----------
    config
        Models and slices.
    most_vectors
        Most vectors of a model that are kept in an hour.

    Attributes
    ----------
    sample_share
        Share of the items whose vector is kept. Only tests change it.
    overflow
        Per model, the items assigned to a cluster without a slice of its own.
    n_over_cap
        Per model, the vectors not kept because of `most_vectors`.
    """

    def __init__(self, config: Config, *, most_vectors: int = MOST_VECTORS) -> None:
        self._most_vectors = most_vectors
        self._config = config
        self.sample_share = SAMPLE_SHARE
        self._spaces: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._clusterings: Mapping[tuple[str, str, str], Clustering] = {}
        self._hour = 0
        self._n_kept: dict[str, int] = {}
        self.overflow: dict[str, int] = {}
        self.n_over_cap: dict[str, int] = {}

    def use_clusterings(self, clusterings: Iterable[Clustering]) -> None:
        """Use these clusterings from the next batch on, and no others."""
        self._clusterings = {
            (clustering.model, clustering.reference_digest, clustering.space): clustering
            for clustering in clusterings
        }

    def assign(
        self,
        *,
        model: Model,
        exchange: Exchange,
        digest: str,
        embedding: Array | None,
        features: Sequence[Mapping[str, float]],
        at: datetime,
    ) -> ClusterAssignment:
        """Return the learned slices of an exchange's items.

        Parameters
        ----------
        digest
            Digest of the reference that replayed the exchange.
        embedding : (items, ...)
            The reference's embedding, or None if it has none.
        features
            Features of each item, keyed by `feature_key`.
        at
            The current time: the cap on vectors is per hour.
        """
        if model.name not in self._spaces:
            self._spaces[model.name] = space_of(self._config, model)
        space, columns = self._spaces[model.name]
        none: tuple[tuple[SliceKey, ...], ...] = ((),) * len(features)
        if columns:
            vectors = _feature_vectors(columns, features)
        elif not space or embedding is None or embedding.ndim == 0 or len(embedding) != len(features):
            return ClusterAssignment(slices=none, version=0, vectors=())
        else:
            vectors = vectors_of(embedding)
        if not 0 < vectors.shape[1] <= MOST_WIDTH:
            return ClusterAssignment(slices=none, version=0, vectors=())
        key = (model.name, digest, space)
        kept = self._kept(key, exchange, vectors, at)
        clustering = self._clusterings.get(key)
        if clustering is None or clustering.width != vectors.shape[1]:
            return ClusterAssignment(slices=none, version=0, vectors=kept)
        slices = self._slices_of(model.name, exchange, clustering, vectors)
        return ClusterAssignment(slices=slices, version=clustering.version, vectors=kept)

    def _slices_of(
        self, model: str, exchange: Exchange, clustering: Clustering, vectors: npt.NDArray[np.float32]
    ) -> tuple[tuple[SliceKey, ...], ...]:
        unseen = clustering.unseen(exchange.attributes)
        values = [novel_value(model, name, key) for key in unseen if (name := self._rule(model, key))]
        ids, novel = clustering.assign(vectors)
        slices = []
        for cluster_id, is_novel in zip(ids.tolist(), novel.tolist(), strict=True):
            if is_novel:
                slices.append((novel_input(model), *values))
            elif cluster_id >= 0:
                slices.append((cluster_slice(model, cluster_id), *values))
            else:
                slices.append((*values,))
        if n_other := int((ids == OTHER_ID).sum()):
            self.overflow[model] = self.overflow.get(model, 0) + n_other
        return tuple(slices)

    def _rule(self, model: str, attribute: str) -> str:
        """Return the name of the first rule that slices by `attribute`, empty if none does any more."""
        for rule in self._config.slices:
            if (
                not (rule.feature or rule.cross)
                and rule.model in {"", model}
                and attribute_key(rule) == attribute
            ):
                return rule.name
        return ""

    def _kept(
        self,
        key: tuple[str, str, str],
        exchange: Exchange,
        vectors: npt.NDArray[np.float32],
        at: datetime,
    ) -> tuple[VectorRow, ...]:
        model, digest, space = key
        chosen = [item for item in range(len(vectors)) if _draw(exchange.id, item) < self.sample_share]
        hour = int(at.timestamp() // _HOUR_S)
        if hour != self._hour:
            self._hour, self._n_kept = hour, {}
        room = max(self._most_vectors - self._n_kept.get(model, 0), 0)
        if len(chosen) > room:
            self.n_over_cap[model] = self.n_over_cap.get(model, 0) + len(chosen) - room
            chosen = chosen[:room]
        self._n_kept[model] = self._n_kept.get(model, 0) + len(chosen)
        return tuple(
            VectorRow(
                captured_at=exchange.captured_at,
                exchange_id=exchange.id,
                item=item,
                model=model,
                reference_digest=digest,
                space=space,
                pi=exchange.sampling.pi,
                vector=vectors[item].astype("<f4").tobytes(),
            )
            for item in chosen
        )


def _feature_vectors(
    columns: Sequence[str], features: Sequence[Mapping[str, float]]
) -> npt.NDArray[np.float32]:
    """Return the features as vectors : (items, columns); an absent feature is NaN."""
    rows = [[of_item.get(column, np.nan) for column in columns] for of_item in features]
    with np.errstate(over="ignore"):  # beyond float32 it is infinite, which no clustering assigns
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(columns)).astype(np.float32)


def _draw(exchange_id: str, item: int) -> float:
    """Return a number in [0, 1) that is the same for every replay of an item."""
    digest = hashlib.blake2b(f"{exchange_id}/{item}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / _U64

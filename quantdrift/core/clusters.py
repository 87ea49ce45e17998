"""A clustering: learned slices and novelty as a frozen record, which shadow workers apply with numpy.

An item belongs to the cluster with the nearest centroid. It is *novel* if it lies beyond the radius of every centroid:
min_j ||x - c_j|| / r_j > 1. Distances are Euclidean, after centring and scaling. `quantdrift.drift.clusters.fit` fits
clusterings and documents how radii are chosen and what share of ordinary traffic lies beyond them.
"""

import struct
import zlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.config.schema import Config, Model
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Predicate
from quantdrift.core.slices import SliceKey, feature_key

FEATURES: Final = "features"
OTHER_ID: Final = 0
CLUSTER_KEY: Final = "cluster"
NOVELTY_KEY: Final = "novelty"
FORMAT: Final = 1
MOST_WIDTH: Final = 4096
MOST_IDS: Final = 128
"""Largest id of a cluster of a model, refits included: each is a slice for ever, with detectors and rows of its own."""
LEAST_VECTORS: Final = 300
"""Below so many vectors nothing is fitted: seven clusters of some forty each come of the first ones."""
ENOUGH_VECTORS: Final = 2_000
"""A fit to fewer is repeated whenever there are twice as many: 16 clusters have some hundred each then."""
MOST_VECTORS: Final = 20_000
"""Vectors kept of a model, the newest: some 300 for each of the 64 clusters that it may have at most."""
NOVELTY_QUANTILE: Final = 0.995
"""At most 1 minus this share of ordinary inputs is expected to be called novel by mistake: one in 200."""
SAMPLE_SHARE: Final = 0.05
"""Share of compared items whose vector is stored for the next fit: 300 vectors come from 6,000 items, 2,000 from 40,000."""
_MAGIC: Final = b"QC"
_HEAD: Final = struct.Struct("<2sBI")  # magic, format, CRC-32 of what follows

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Novelty(StrEnum):
    """Kinds of novelty that do not concern an attribute."""

    INPUT = "input"  # far from every centroid


class Anchors(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Positions of current or former clusters, by which a new fit recognises them and keeps their ids.

    Parameters
    ----------
    ids : (m,)
        From 1; an id is never reused.
    centres : (m, width)
        Float32, the centroids before scaling.
    spreads : (m,)
        Float32: root mean square distance of a cluster's vectors from its centroid, scaled.
    """

    ids: tuple[int, ...]
    centres: Float32
    spreads: Float32


class Clustering(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The result of one fit: centroids, radii, ids, scaling and known attribute values.

    Parameters
    ----------
    model, reference_digest
        The model whose inputs it clusters, and the reference that embeds them.
    version
        One higher with each fit of the model.
    space
        The vector space, see `space_of`.
    columns
        Feature keys in the order of the vector; empty for an embedding.
    ids : (k,)
        Ids of the clusters; `OTHER_ID` for clusters found when no id was left.
    centroids : (k, width)
        Float32, scaled.
    radii : (k,)
        Float32, scaled; infinite if there were too few vectors to estimate it.
    centre, scale : (width,)
        Float32: a vector is scaled as (x - centre) / scale.
    spreads : (k,)
        Float32: root mean square distances from the centroids, scaled.
    gaps
        Whether the fit had vectors with non-finite values; then such a vector is not novel.
    vocabulary
        All values of the fit by attribute key, without attributes that have too many values.
    former
        Clusters that no longer exist, newest first; they get their id back if they are found again.
    next_id
        The first id that this model has never used.
    expected_novel
        Upper bound of the share of ordinary traffic that is expected to be called novel.
    """

    model: str
    reference_digest: str
    version: int
    space: str
    columns: tuple[str, ...]
    ids: tuple[int, ...]
    centroids: Float32
    radii: Float32
    centre: Float32
    scale: Float32
    spreads: Float32
    gaps: bool
    vocabulary: dict[str, frozenset[str]]
    former: Anchors
    next_id: int
    expected_novel: float

    @property
    def width(self) -> int:
        """Length of a vector."""
        return len(self.centre)

    def anchors(self) -> Anchors:
        """Return the positions of the clusters with their own id."""
        own = [index for index, cluster_id in enumerate(self.ids) if cluster_id != OTHER_ID]
        raw = self.centroids.astype(np.float64) * self.scale + self.centre
        return Anchors(
            ids=tuple(self.ids[index] for index in own),
            centres=raw[own].astype(np.float32),
            spreads=self.spreads[own],
        )

    def scaled(self, vectors: npt.NDArray[Any]) -> Float64:
        """Return `vectors` : (n, width) scaled, float64."""
        scaled: Float64 = (vectors.astype(np.float64) - self.centre) / self.scale
        return scaled

    def nearest(self, vectors: npt.NDArray[Any]) -> tuple[Ints, Float64]:
        """Return the nearest centroid and min_j (distance to j) / (radius of j) for each vector.

        Parameters
        ----------
        vectors : (n, width)
            Unscaled and finite.

        Returns
        -------
        positions : (n,)
            Positions in `ids`.
        ratios : (n,)
            Float64; above 1: beyond every radius.
        """
        points = self.scaled(vectors)
        centroids = self.centroids.astype(np.float64)
        # ||x||^2 - 2 x.c + ||c||^2 in float64: its rounding is far below that of the float32 inputs.
        squares = (
            (points**2).sum(axis=1)[:, np.newaxis] - 2 * points @ centroids.T + (centroids**2).sum(axis=1)
        )
        distances = np.sqrt(np.maximum(squares, 0.0))
        ratios: Float64 = (distances / self.radii.astype(np.float64)).min(axis=1)
        return distances.argmin(axis=1), ratios

    def assign(self, vectors: npt.NDArray[Any]) -> tuple[Ints, Bools]:
        """Return the cluster of each vector and whether it is novel.

        Parameters
        ----------
        vectors : (n, width)
            Unscaled.

        Returns
        -------
        ids : (n,)
            Cluster ids, `OTHER_ID` included; -1 for a vector that is novel or not finite.
        novel : (n,)
            Whether it lies beyond every radius, or is not finite although the fit had only finite vectors.

        Raises
        ------
        ValueError
            The vectors have another width.
        """
        if vectors.ndim != 2 or vectors.shape[1] != self.width:
            raise ValueError(
                f"vectors are {list(vectors.shape)}, the clustering has {self.width} numbers each"
            )
        finite = finite_rows(vectors)
        ids = np.full(len(vectors), -1, dtype=np.int64)
        novel: Bools = ~finite & (not self.gaps)
        if finite.any():
            positions, ratios = self.nearest(vectors[finite])
            beyond = ratios > 1.0
            novel[finite] = beyond
            ids[finite] = np.where(beyond, -1, np.asarray(self.ids, dtype=np.int64)[positions])
        return ids, novel

    def unseen(self, attributes: Mapping[str, str]) -> list[str]:
        """Return the keys of the attributes whose value the fit did not have, without absent attributes."""
        return [
            key
            for key, values in self.vocabulary.items()
            if (value := attributes.get(key)) is not None and value not in values
        ]


def space_of(config: Config, model: Model) -> tuple[str, tuple[str, ...]]:
    """Return the space that a model's inputs are clustered in, and its columns.

    Returns
    -------
    space
        Name of the output or layer of the reference, or `features` with their keys, so that other features are another
        space. Empty if nothing is learned.
    columns
        Keys of the features, sorted; empty for an embedding.
    """
    if model.embedding != FEATURES:
        return model.embedding, ()
    rules = (rule for rule in config.slices if rule.feature and rule.model in {"", model.name})
    columns = tuple(sorted({feature_key(rule) for rule in rules}))
    return f"{FEATURES} {', '.join(columns)}", columns


def cluster_slice(model: str, cluster: int) -> SliceKey:
    """Return the slice of a cluster; all clusters without their own id share the slice of `OTHER_ID`."""
    if cluster == OTHER_ID:
        return SliceKey(
            model=model,
            name=f"{CLUSTER_KEY}=(other)",
            predicate=f"{CLUSTER_KEY} is any other",
            where=(Predicate(key=CLUSTER_KEY),),
        )
    return SliceKey(
        model=model,
        name=f"{CLUSTER_KEY}={cluster}",
        predicate=f"{CLUSTER_KEY} {cluster}",
        where=(Predicate(key=CLUSTER_KEY, equals=str(cluster)),),
    )


def novel_input(model: str) -> SliceKey:
    """Return the slice of the items that are far from every centroid."""
    return SliceKey(
        model=model,
        name=f"novel={Novelty.INPUT}",
        predicate="novel",
        where=(Predicate(key=NOVELTY_KEY, equals=Novelty.INPUT.value),),
    )


def novel_value(model: str, rule: str, attribute: str) -> SliceKey:
    """Return the slice of the items whose `attribute` has a value that the fit did not have; `rule` gives its name."""
    return SliceKey(
        model=model,
        name=f"novel={rule}",
        predicate=f"novel {attribute}",
        where=(Predicate(key=NOVELTY_KEY, equals=attribute),),
    )


def finite_rows(vectors: npt.NDArray[Any]) -> Bools:
    """Return which rows of `vectors` : (n, width) are finite."""
    finite: Bools = np.atleast_1d(np.isfinite(vectors).all(axis=1))
    return finite


class _Content(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The binary form; `arrays` are float32, little-endian."""

    model: str
    reference_digest: str
    version: int
    space: str
    columns: tuple[str, ...]
    width: int
    ids: tuple[int, ...]
    former_ids: tuple[int, ...]
    arrays: tuple[bytes, ...]
    gaps: bool
    vocabulary: dict[str, list[str]]
    next_id: int
    expected_novel: float


def dump_clustering(clustering: Clustering) -> bytes:
    """Return the binary form: `QC`, format (1 byte), CRC-32 (4 bytes), MessagePack."""
    arrays = (
        clustering.centroids,
        clustering.radii,
        clustering.spreads,
        clustering.centre,
        clustering.scale,
        clustering.former.centres,
        clustering.former.spreads,
    )
    content = _Content(
        model=clustering.model,
        reference_digest=clustering.reference_digest,
        version=clustering.version,
        space=clustering.space,
        columns=clustering.columns,
        width=clustering.width,
        ids=clustering.ids,
        former_ids=clustering.former.ids,
        arrays=tuple(array.astype("<f4").tobytes() for array in arrays),
        gaps=clustering.gaps,
        vocabulary={key: sorted(values) for key, values in sorted(clustering.vocabulary.items())},
        next_id=clustering.next_id,
        expected_novel=clustering.expected_novel,
    )
    body = msgspec.msgpack.encode(content)
    return _HEAD.pack(_MAGIC, FORMAT, zlib.crc32(body)) + body


def load_clustering(blob: bytes) -> Clustering:
    """Return the clustering in `blob`.

    Raises
    ------
    OperatorError
        It has another format or is damaged; the message says what to do.
    """
    if len(blob) < _HEAD.size or blob[:2] != _MAGIC:
        raise OperatorError(_damaged("it has no header"))
    _, version, check = _HEAD.unpack_from(blob)
    if version != FORMAT:
        raise OperatorError(
            f"a clustering in the database has format {version}, but this release reads format {FORMAT}: "
            "run the release that wrote it, or upgrade"
        )
    body = blob[_HEAD.size :]
    if check != zlib.crc32(body):
        raise OperatorError(_damaged("its checksum does not match"))
    try:
        content = msgspec.msgpack.decode(body, type=_Content)
        arrays = _arrays(content)
    except (ValueError, msgspec.MsgspecError) as error:
        raise OperatorError(_damaged(str(error))) from error
    centroids, radii, spreads, centre, scale, former_centres, former_spreads = arrays
    return Clustering(
        model=content.model,
        reference_digest=content.reference_digest,
        version=content.version,
        space=content.space,
        columns=content.columns,
        ids=content.ids,
        centroids=centroids,
        radii=radii,
        centre=centre,
        scale=scale,
        spreads=spreads,
        gaps=content.gaps,
        vocabulary={key: frozenset(values) for key, values in content.vocabulary.items()},
        former=Anchors(ids=content.former_ids, centres=former_centres, spreads=former_spreads),
        next_id=content.next_id,
        expected_novel=content.expected_novel,
    )


def _arrays(content: _Content) -> list[Float32]:
    k, m, width = len(content.ids), len(content.former_ids), content.width
    shapes = [(k, width), (k,), (k,), (width,), (width,), (m, width), (m,)]
    return [
        np.frombuffer(data, "<f4").astype(np.float32).reshape(shape)
        for data, shape in zip(content.arrays, shapes, strict=True)
    ]


def _damaged(why: str) -> str:
    return f"a clustering in the database is damaged ({why}): `quantdrift slices fit --anew` makes a new one"

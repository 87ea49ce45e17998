"""Slices that no rule declares: learned ones (clusters, and what is novel to them) and confirmed discovered ones.

The database knows them: which of them have traffic, the clustering that says who is in a learned slice, and the conditions of a
discovered one.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from quantdrift.core.clusters import (
    CLUSTER_KEY,
    NOVELTY_KEY,
    OTHER_ID,
    Clustering,
    Novelty,
    space_of,
)
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.diagnosable import is_told
from quantdrift.core.records import Exchange
from quantdrift.core.slices import CAPTURED, SliceKey
from quantdrift.core.text import plain
from quantdrift.models.tensors.arrays import Array
from quantdrift.shadow.slices.clusters import ClusterSlices
from quantdrift.storage.database import Database
from quantdrift.storage.gate import watched_slices
from quantdrift.storage.slices.clusters import newest_clusterings
from quantdrift.storage.slices.discovery import active_slices

DISCOVERED: Final = "discovered"
_RARE: Final = "it has little ordinary traffic by design"
KINDS: Final = (CLUSTER_KEY, "novel", DISCOVERED)
"""What `--slice` calls them: the beginning of their names, and all discovered ones together."""


class FoundSlices(msgspec.Struct, frozen=True, kw_only=True):
    """Learned and discovered slices of a model that are judged.

    Parameters
    ----------
    learned, discovered
        The slices.
    clusterings
        Those that say who is in a learned slice.
    left_out
        Why others are not judged, one sentence for each reason.
    """

    learned: tuple[SliceKey, ...] = ()
    discovered: tuple[SliceKey, ...] = ()
    clusterings: tuple[Clustering, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[SliceKey, ...]:
        """All of them."""
        return (*self.learned, *self.discovered)

    @property
    def attributes(self) -> set[str]:
        """The keys of all attributes that tell who is in them."""
        return {key for slice_key in self.keys for key in _needed(slice_key)}

    def only(self, kinds: Collection[str]) -> "FoundSlices":
        """Return those of some of the `KINDS`."""
        return msgspec.structs.replace(
            self,
            learned=tuple(key for key in self.learned if key.name.partition("=")[0] in kinds),
            discovered=self.discovered if DISCOVERED in kinds else (),
        )

    def without_novel(self) -> "FoundSlices":
        """Return those that are not rare by design: to wait for enough of a slice that ordinary traffic hardly has would be endless."""
        novel = [key for key in self.learned if is_novel(key)]
        said = tuple(f"{plain(key.name)}: {_RARE}; --slice novel judges it" for key in novel)
        return msgspec.structs.replace(
            self,
            learned=tuple(key for key in self.learned if key not in novel),
            left_out=(*self.left_out, *said),
        )

    def told_by(self, recorded: Collection[str]) -> "FoundSlices":
        """Return those that the attributes of a recording tell; the others are left out, and it is said."""
        untold = {key.name: absent for key in self.keys if (absent := sorted(_needed(key) - {*recorded}))}
        said = tuple(
            f"{plain(name)}: the recording has no {' and no '.join(f'`{plain(key)}`' for key in absent)}"
            for name, absent in untold.items()
        )
        return msgspec.structs.replace(
            self,
            learned=tuple(key for key in self.learned if key.name not in untold),
            discovered=tuple(key for key in self.discovered if key.name not in untold),
            left_out=(*self.left_out, *said),
        )


NONE_FOUND: Final = FoundSlices()


class LearnedItems:
    """Finds the learned slices of recorded items.

    Parameters
    ----------
    config, model
        The configuration, and the model.
    found
        The learned slices that are judged.
    digest
        Digest of the reference.
    """

    def __init__(self, config: Config, model: Model, found: FoundSlices, digest: str) -> None:
        self._model, self._digest = model, digest
        self._judged = {key.predicate for key in found.learned}
        self._known = sorted({key for clustering in found.clusterings for key in clustering.vocabulary})
        self._slices = ClusterSlices(config)
        self._slices.sample_share = 0.0  # nothing is kept for the next fit
        self._slices.use_clusterings(found.clusterings)

    def of(
        self,
        exchange: Exchange,
        *,
        attributes: Mapping[str, Sequence[str]],
        features: Sequence[Mapping[str, float]],
        embedding: Array | None,
    ) -> list[tuple[SliceKey, ...]]:
        """Return the learned slices of each item.

        Parameters
        ----------
        exchange
            The items as one exchange.
        attributes
            The values of the items, by the key of the attribute.
        features, embedding
            As of `ClusterSlices.assign`.
        """
        slices: list[tuple[SliceKey, ...]] = [()] * len(features)
        if not self._judged:
            return slices
        # An exchange has one value of an attribute: items with the same values are assigned together.
        recorded_keys = [key for key in self._known if key in attributes]
        together: dict[tuple[str, ...], list[int]] = {}
        for item in range(len(features)):
            together.setdefault(tuple(attributes[key][item] for key in recorded_keys), []).append(item)
        for values, items in together.items():
            shared_attributes = dict(zip(recorded_keys, values, strict=True))
            assigned = self._slices.assign(
                model=self._model,
                exchange=msgspec.structs.replace(exchange, attributes=shared_attributes),
                digest=self._digest,
                embedding=None if embedding is None else embedding[items],
                features=[features[item] for item in items],
                at=exchange.captured_at,
            )
            for item, keys in zip(items, assigned.slices, strict=True):
                slices[item] = tuple(key for key in keys if key.predicate in self._judged)
        return slices


async def found_slices(database: Database, config: Config, model: Model, digest: str) -> FoundSlices:
    """Return the learned and discovered slices of a model that had traffic within the last day, as `quantdrift gate --live` judges them.

    Parameters
    ----------
    database
        Where they are recorded.
    config, model
        The configuration, and the model.
    digest
        Digest of the reference.

    Raises
    ------
    OperatorError, RetryError
        As `Database.begin`; a clustering is damaged.
    """
    watched = await watched_slices(database, model.name)
    clusterings = await clusterings_of(database, config, model, {digest})
    learned = tuple(key for key in watched if is_learned(clusterings, key))
    confirmed = {key.predicate for key in await active_slices(database) if key.model == model.name}
    discovered = [key for key in watched if key.predicate in confirmed]
    left_out = [
        f"{plain(key.name)}: its feature is no longer in [[slices]]"
        for key in discovered
        if not is_told(config, key.where)
    ]
    if model.embedding and not clusterings:
        left_out.append(
            "learned slices: there is no clustering of this reference yet; `quantdrift slices clusters` says what is missing"
        )
    elif model.embedding and not learned:
        left_out.append("learned slices: none had traffic within the last day")
    return FoundSlices(
        learned=learned,
        discovered=tuple(key for key in discovered if is_told(config, key.where)),
        clusterings=tuple(clusterings),
        left_out=tuple(left_out),
    )


async def clusterings_of(
    database: Database, config: Config, model: Model, digests: Collection[str]
) -> list[Clustering]:
    """Return the newest clusterings of a model, by the references of these digests. Errors as `found_slices`."""
    space, _ = space_of(config, model)
    if not space:
        return []
    stored = await newest_clusterings(database, model.name, space=space)
    return [entry.clustering for entry in stored if entry.clustering.reference_digest in digests]


def is_learned(clusterings: Sequence[Clustering], key: SliceKey) -> bool:
    """Return whether these clusterings say who is in a slice: a cluster of them, or what is novel to them."""
    clusters = {str(number) for clustering in clusterings for number in clustering.ids if number != OTHER_ID}
    return bool(clusterings) and any(
        condition.key == NOVELTY_KEY or (condition.key == CLUSTER_KEY and condition.equals in clusters)
        for condition in key.where
    )


def is_novel(key: SliceKey) -> bool:
    """Return whether a slice has what is novel to a clustering: at most 0.5 % of traffic like that of the fit."""
    return any(condition.key == NOVELTY_KEY for condition in key.where)


def left_out_live(
    watched: Sequence[SliceKey], judged: Sequence[SliceKey], routed: Collection[str]
) -> tuple[str, ...]:
    """Return which slices with traffic the gate on live traffic leaves out, each with the reason.

    Parameters
    ----------
    watched, judged
        Those that had traffic within the last day, and those of them whose items can be told.
    routed
        Names of slices that have a route: these are judged in any case.
    """
    known = {key.name for key in judged}
    rare = [key.name for key in judged if is_novel(key) and key.name not in routed]
    return (
        *(f"{plain(name)}: {_RARE}; --alert on an alert of it judges it" for name in rare),
        *(
            f"{plain(key.name)}: neither the configuration nor the newest clustering tells who is in it"
            for key in watched
            if key.name not in known
        ),
    )


def is_of_clustering(key: SliceKey) -> bool:
    """Return whether a clustering says who is in a slice."""
    return any(condition.key in {CLUSTER_KEY, NOVELTY_KEY} for condition in key.where)


def _needed(key: SliceKey) -> set[str]:
    """Return the keys of the attributes that tell who is in a slice."""
    novel = {condition.equals or "" for condition in key.where if condition.key == NOVELTY_KEY} - {
        Novelty.INPUT
    }
    return novel | {condition.key for condition in key.where if condition.key.startswith(CAPTURED)}

"""The comparison of outputs that one side computed twice: the divergence of an item from itself."""

import math
from collections.abc import Sequence

from quantdrift.core.errors import QuarantineError
from quantdrift.core.records import Side
from quantdrift.core.slices import SliceKey
from quantdrift.models.comparators.protocol import Comparator, Divergences
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.tensors.arrays import Outputs
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.storage.comparisons.rows import NoiseItem, VersionKey


class RepeatedItems:
    """Compares outputs that one side computed twice. Not thread-safe.

    It has its own comparators: some keep statistics of what they compare, which repeated items must not enter.

    Parameters
    ----------
    side
        The side that computed both.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._comparators: dict[str, Comparator] = {}

    def items(
        self,
        entry: PreparedExchange,
        again: Outputs | QuarantineError,
        first: Outputs,
        rows: Sequence[int],
        slices: Sequence[tuple[SliceKey, ...]],
    ) -> list[NoiseItem]:
        """Return the rows of items whose outputs were computed twice; none if they cannot be compared.

        Parameters
        ----------
        again, first
            Outputs by name : (rows, ...) each; `again` may be an error.
        rows
            The items' positions in the exchange.
        slices
            The slices that each of them counts for.
        """
        if isinstance(again, QuarantineError):
            return []
        model = entry.version_reference.model
        comparator = self._comparators.get(model.name)
        if comparator is None:
            comparator = self._comparators[model.name] = comparator_of(model)
        try:
            divergences = comparator.compare(again, first)
        except QuarantineError:
            return []
        return _items(entry, divergences, rows, slices, self._side)


def _items(
    entry: PreparedExchange,
    divergences: Divergences,
    rows: Sequence[int],
    slices: Sequence[tuple[SliceKey, ...]],
    side: Side,
) -> list[NoiseItem]:
    exchange, version = entry.exchange, version_of(entry)
    return [
        NoiseItem(
            captured_at=exchange.captured_at,
            exchange_id=exchange.id,
            item=item,
            side=side,
            version=version,
            policy=exchange.sampling.policy,
            pi1=exchange.sampling.pi1,
            pi2=exchange.sampling.pi2,
            flip=None if math.isnan(flip) else bool(flip),
            divergence=None if math.isnan(divergence) else divergence,
            slices=of_item,
        )
        for item, of_item, flip, divergence in zip(
            rows, slices, divergences.flip.tolist(), divergences.divergence.tolist(), strict=True
        )
        if not (math.isnan(flip) and math.isnan(divergence))
    ]


def versions_of(batch: Sequence[PreparedExchange]) -> list[VersionKey]:
    """Return the keys of exchanges of one signature; equal ones are the same object."""
    keys: dict[bool, VersionKey] = {}
    for entry in batch:
        if entry.exchange.is_verified not in keys:
            keys[entry.exchange.is_verified] = version_of(entry)
    return [keys[entry.exchange.is_verified] for entry in batch]


def version_of(entry: PreparedExchange) -> VersionKey:
    """Return the key of an exchange's candidate version and reference."""
    return VersionKey(
        model=entry.exchange.model,
        candidate_version=entry.exchange.stored_version,
        reference_digest=entry.version_reference.runtime.artefact.digest,
    )

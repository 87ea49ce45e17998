"""Outputs that were computed twice, compared with the model's own comparator: the divergence of an item from itself."""

import math
from collections.abc import Sequence

from quantdrift.core.errors import QuarantineError
from quantdrift.core.records import Side
from quantdrift.shadow.comparators.protocol import Comparator, Divergences
from quantdrift.shadow.comparators.registry import comparator_of
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.tensors.arrays import Outputs
from quantdrift.storage.shadow.rows import NoiseItem, VersionKey


class RepeatedItems:
    """Compares what one side computed twice. One thread uses it.

    It has comparators of its own: some remember what they have seen, and what is seen twice must not be remembered.

    Parameters
    ----------
    side
        Whose outputs.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._comparators: dict[str, Comparator] = {}

    def items(
        self, entry: PreparedExchange, again: Outputs | QuarantineError, first: Outputs, rows: Sequence[int]
    ) -> list[NoiseItem]:
        """Return what is stored of items whose outputs were computed twice; nothing where they cannot be compared.

        Parameters
        ----------
        entry
            Their exchange.
        again, first
            Outputs by name : (rows, ...) each, or why there are none.
        rows
            Which items of the exchange they are.
        """
        if isinstance(again, QuarantineError):
            return []
        model = entry.judge.model
        comparator = self._comparators.get(model.name)
        if comparator is None:
            comparator = self._comparators[model.name] = comparator_of(model)
        try:
            found = comparator.compare(again, first)
        except QuarantineError:
            return []
        return _items(entry, found, rows, self._side)


def _items(entry: PreparedExchange, found: Divergences, rows: Sequence[int], side: Side) -> list[NoiseItem]:
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
        )
        for item, flip, divergence in zip(rows, found.flip.tolist(), found.divergence.tolist(), strict=True)
        if not (math.isnan(flip) and math.isnan(divergence))
    ]


def version_of(entry: PreparedExchange) -> VersionKey:
    """Return the candidate version of an exchange, with its reference."""
    return VersionKey(
        model=entry.exchange.model,
        candidate_version=entry.exchange.version,
        reference_digest=entry.judge.runtime.artefact.digest,
    )

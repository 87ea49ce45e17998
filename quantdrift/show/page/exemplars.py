"""Where answers of a slice left the FP32 model, from its exemplars: texts of clients, shown only with `web.exemplars`."""

import asyncio
import logging
from typing import Final

from quantdrift.core.config.schema import Stream
from quantdrift.core.errors import QuantdriftError
from quantdrift.core.records import Exemplar, ExemplarKind
from quantdrift.core.said_tokens import DivergentToken, divergent_tokens
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.exemplars import exemplars, opener
from quantdrift.core.stream.rights import NatsRole

_LOG = logging.getLogger(__name__)
_MOST: Final = 3
_PATIENCE_S: Final = 3.0


class TextExemplars:
    """Reads exemplars for the page: one reader at a time, and for a few seconds at most.

    Parameters
    ----------
    stream
        With the key of a shadow.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._turn = asyncio.Lock()

    async def worst(
        self, model: str, slices: tuple[str, ...], versions: tuple[str, ...]
    ) -> list[DivergentToken]:
        """Return the divergent tokens of the worst damaged exemplars of these slices; none where they cannot be read now."""
        try:
            async with asyncio.timeout(_PATIENCE_S), self._turn:
                return await self._read(model, slices, versions)
        except (QuantdriftError, TimeoutError) as error:
            _LOG.warning(
                "exemplars of model %s cannot be read for the page: %s", model, str(error) or "no answer"
            )
            return []

    async def _read(
        self, model: str, slices: tuple[str, ...], versions: tuple[str, ...]
    ) -> list[DivergentToken]:
        queue = await Queue.connect(self._stream, client_name="quantdrift page", role=NatsRole.SHADOW)
        try:
            kept = [
                exemplar
                for name in slices
                async for exemplar in exemplars(
                    queue, model, name, opened=opener(self._stream), kind=ExemplarKind.DAMAGED
                )
                if exemplar.exchange.stored_version in versions
            ]
        finally:
            await queue.close()
        worst = sorted(kept, key=_damage, reverse=True)
        different: dict[tuple[str, str, str], DivergentToken] = {}
        for exemplar in worst:
            for token in divergent_tokens(exemplar):
                different.setdefault((token.prompt, token.before, token.served), token)
        return list(different.values())[:_MOST]


def _damage(exemplar: Exemplar) -> float:
    return max((item.divergence or 0.0 for item in exemplar.items), default=0.0)

"""What the page shows of exemplars: texts and images of clients, shown only with `web.exemplars`."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from quantdrift.core.config.schema import Stream
from quantdrift.core.errors import QuantdriftError
from quantdrift.core.records import Exemplar, ExemplarKind
from quantdrift.core.said_tokens import DivergentToken, divergent_tokens
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.exemplars import exemplars, opener
from quantdrift.core.stream.rights import NatsRole
from quantdrift.show.page.pictures import InputPicture, pictures

_LOG = logging.getLogger(__name__)
_MOST: Final = 3
_PATIENCE_S: Final = 3.0


class ShownExemplars(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown of the exemplars of some slices.

    Parameters
    ----------
    tokens
        Where generated text left the FP32 model.
    pictures
        Of inputs that are images.
    """

    tokens: Sequence[DivergentToken] = ()
    pictures: Sequence[InputPicture] = ()


class PageExemplars:
    """Reads exemplars for the page: one reader at a time, and for a few seconds at most.

    Parameters
    ----------
    stream
        With the key of the page.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._turn = asyncio.Lock()

    async def shown(
        self, model: str, slices: Sequence[str], version: str, kind: ExemplarKind
    ) -> ShownExemplars:
        """Return what is shown of the exemplars of these slices, the most damaged ones first; nothing where they cannot be read now."""
        try:
            async with asyncio.timeout(_PATIENCE_S), self._turn:
                return await self._read(model, slices, version, kind)
        except (QuantdriftError, TimeoutError) as error:
            _LOG.warning(
                "exemplars of model %s cannot be read for the page: %s", model, str(error) or "no answer"
            )
            return ShownExemplars()

    async def _read(
        self, model: str, slices: Sequence[str], version: str, kind: ExemplarKind
    ) -> ShownExemplars:
        queue = await Queue.connect(self._stream, client_name="quantdrift page", role=NatsRole.PAGE)
        try:
            kept = [
                exemplar
                for name in slices
                async for exemplar in exemplars(queue, model, name, opened=opener(self._stream), kind=kind)
                if exemplar.exchange.stored_version == version
            ]
        finally:
            await queue.close()
        worst = sorted(kept, key=_damage, reverse=True)
        different: dict[tuple[str, str, str], DivergentToken] = {}
        for exemplar in worst:
            for token in divergent_tokens(exemplar):
                different.setdefault((token.prompt, token.before, token.served), token)
        return ShownExemplars(tokens=list(different.values())[:_MOST], pictures=pictures(worst))


def _damage(exemplar: Exemplar) -> float:
    return max((item.divergence or 0.0 for item in exemplar.items), default=0.0)

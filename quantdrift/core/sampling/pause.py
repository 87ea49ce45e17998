"""A pause of sampling, for everything or for some models, as the fleet's bucket and a sidecar's own files hold it."""

from datetime import datetime
from typing import Annotated, Self

import msgspec

from quantdrift.core.errors import QuantdriftError

KEY = "pause"
MAX_BYTES = 65_536
MOST_MODELS = 200


class PauseError(QuantdriftError):
    """Bytes that are no pause, or one that cannot be."""


# A person may write one: a time without a zone cannot be compared with now.
_Aware = Annotated[datetime, msgspec.Meta(tz=True)]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Who has stopped it, and for how long.

    Parameters
    ----------
    by
        Who.
    at
        When; aware, UTC.
    until
        When it ends by itself; aware. None: it is resumed by hand.
    reason
        In that person's words, or empty.
    """

    by: str
    at: _Aware
    until: _Aware | None = None
    reason: str = ""

    def holds(self, now: datetime) -> bool:
        """Return whether it is in force."""
        return self.until is None or now < self.until


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """What is not sampled.

    Parameters
    ----------
    everything
        Stops all sampling, or None.
    models
        Stops that of single models, by name.
    """

    everything: Order | None = None
    models: dict[str, Order] = {}

    def at(self, now: datetime) -> Self:
        """Return what of it is in force at `now`, aware."""
        everything = self.everything if self.everything is not None and self.everything.holds(now) else None
        models = {name: order for name, order in self.models.items() if order.holds(now)}
        return type(self)(everything=everything, models=models)

    def paused(self, order: Order, model: str | None = None) -> Self:
        """Return the same with one more order, for a model or for everything.

        Raises
        ------
        PauseError
            There are too many models, or too many words for a sidecar to read.
        """
        if model is None:
            found = msgspec.structs.replace(self, everything=order)
        else:
            found = msgspec.structs.replace(self, models={**self.models, model: order})
        if len(found.models) > MOST_MODELS:
            raise PauseError(f"at most {MOST_MODELS} models are paused by name: pause everything")
        if len(encode(found)) > MAX_BYTES:
            raise PauseError(f"a pause holds at most {MAX_BYTES} bytes: use shorter names and reasons")
        return found

    def resumed(self, model: str | None = None) -> Self:
        """Return the same without the order for a model; without a model, without any order at all."""
        if model is None:
            return type(self)()
        return msgspec.structs.replace(
            self, models={name: order for name, order in self.models.items() if name != model}
        )


_DECODER = msgspec.json.Decoder(Pause)


def encode(pause: Pause) -> bytes:
    """Return it as JSON: a person may look at it."""
    return msgspec.json.encode(pause)


def decode(raw: bytes) -> Pause:
    """Return what `encode` made.

    Raises
    ------
    PauseError
        It is none.
    """
    if len(raw) > MAX_BYTES:
        raise PauseError(f"a pause of {len(raw)} bytes")
    try:
        return _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PauseError(f"no pause: {error}") from error

"""Pauses of sampling, for all models or some, as stored in the bucket of the fleet and in files of a sidecar."""

from datetime import datetime
from typing import Annotated, Any, Self

import msgspec

from quantdrift.core.errors import QuantdriftError

KEY = "pause"
MAX_BYTES = 65_536
MOST_MODELS = 200


class PauseError(QuantdriftError):
    """Bytes that are not a valid pause, or a pause above the limits."""


# A person may write the file, and a time without a zone cannot be compared with the current time.
_Aware = Annotated[datetime, msgspec.Meta(tz=True)]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One order to pause.

    Parameters
    ----------
    by
        User of the database whose entry in the audit belongs to it. Without one: the user at NATS, as the command says.
    at
        Aware, UTC.
    until
        When the pause ends, aware; None: when somebody resumes.
    reason
        In the person's words, or empty.
    """

    by: str
    at: _Aware
    until: _Aware | None = None
    reason: str = ""

    def holds(self, now: datetime) -> bool:
        """Return whether the pause is in effect."""
        return self.until is None or now < self.until

    def in_words(self) -> str:
        """Return by whom it is, since when, until when and why."""
        until = "" if self.until is None else f" until {self.until:%Y-%m-%d %H:%M} UTC"
        reason = f" ({self.reason})" if self.reason else ""
        return f"by {self.by} since {self.at:%Y-%m-%d %H:%M} UTC{until}{reason}"


class LocalPause(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of one sidecar: to pause, or to resume.

    Parameters
    ----------
    model
        Model; empty: everything.
    until, reason
        As of `Order`; for a pause only.
    """

    model: str = ""
    until: _Aware | None = None
    reason: str = ""


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """All pauses.

    Parameters
    ----------
    everything
        Pause of all sampling, if any.
    models
        Pauses of single models, by name.
    audit
        Number of the entry in the audit that the command wrote; 0: none, because it could not reach Postgres.
    """

    everything: Order | None = None
    models: dict[str, Order] = {}
    audit: int = 0

    def at(self, now: datetime) -> Self:
        """Return the pauses in effect at `now` (aware)."""
        everything = self.everything if self.everything is not None and self.everything.holds(now) else None
        models = {name: order for name, order in self.models.items() if order.holds(now)}
        return type(self)(everything=everything, models=models)

    def state(self) -> dict[str, Any]:
        """Return what is paused, as the audit stores it: JSON without the number of the entry."""
        state: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(self, audit=0))
        del state["audit"]
        return state

    def paused(self, order: Order, model: str | None = None) -> Self:
        """Return a copy with one more order, for a model or for everything.

        Raises
        ------
        PauseError
            There are more models, or more bytes, than a sidecar reads.
        """
        if model is None:
            changed = msgspec.structs.replace(self, everything=order)
        else:
            changed = msgspec.structs.replace(self, models={**self.models, model: order})
        if len(changed.models) > MOST_MODELS:
            raise PauseError(f"at most {MOST_MODELS} models can be paused by name: pause everything")
        if len(encode(changed)) > MAX_BYTES:
            raise PauseError(f"a pause has at most {MAX_BYTES} bytes: use shorter names and reasons")
        return changed

    def resumed(self, model: str | None = None) -> Self:
        """Return a copy without the order for a model; if no model is given, without any order."""
        if model is None:
            return type(self)()
        return msgspec.structs.replace(
            self, models={name: order for name, order in self.models.items() if name != model}
        )


_DECODER = msgspec.json.Decoder(Pause)


def encode(pause: Pause) -> bytes:
    """Return it as JSON, which a person can read."""
    return msgspec.json.encode(pause)


def decode(raw: bytes) -> Pause:
    """Return the pause in `raw`.

    Raises
    ------
    PauseError
        It is not a valid pause.
    """
    if len(raw) > MAX_BYTES:
        raise PauseError(f"a pause of {len(raw)} bytes; at most {MAX_BYTES} are allowed")
    try:
        return _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PauseError(f"not a valid pause: {error}") from error

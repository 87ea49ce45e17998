"""An exchange that is ready to be replayed, and what a reference answers to it."""

import msgspec

from quantdrift.core.errors import QuarantineError
from quantdrift.core.records import Exchange
from quantdrift.shadow.replay.references import VersionReference
from quantdrift.shadow.tensors.arrays import Array, Outputs

Answer = dict[str, Array] | QuarantineError


class PreparedExchange(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange that is ready to be replayed.

    Parameters
    ----------
    stream_sequence, payload
        Its place in the stream and its wire form.
    exchange
        As captured.
    judge
        What it is measured with.
    inputs
        Name to array : (items, ...), as the reference takes them.
    candidate
        What is compared of the candidate, by name : (items, ...), where that is more than its outputs; else None.
    """

    stream_sequence: int
    payload: bytes
    exchange: Exchange
    judge: VersionReference
    inputs: dict[str, Array]
    candidate: Outputs | None = None

    @property
    def batched(self) -> bool:
        """Whether the reference takes several items at once: always, where we have put the items together."""
        return self.judge.model.batched or self.candidate is not None

    @property
    def n_items(self) -> int:
        """Number of items."""
        return len(next(iter(self.inputs.values())))

    @property
    def signature(self) -> tuple[object, ...]:
        """What exchanges must share to be replayed together: version, and names, types and shapes of inputs.

        In their order too: a feature without the name of an input is that of the first one.
        """
        shapes = tuple((name, array.dtype.str, array.shape[1:]) for name, array in self.inputs.items())
        return (self.exchange.model, self.exchange.version, shapes)

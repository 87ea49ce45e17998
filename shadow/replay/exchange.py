"""An exchange that is ready to replay, and the type of a reference's answer."""

import msgspec

from quantdrift.core.errors import QuarantineError
from quantdrift.core.records import Exchange
from quantdrift.models.tensors.arrays import Array, Outputs
from quantdrift.shadow.replay.references import VersionReference

Answer = dict[str, Array] | QuarantineError


class PreparedExchange(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange that is ready to replay.

    Parameters
    ----------
    stream_sequence, payload
        Its sequence number in the stream, and its wire form.
    version_reference
        The reference and the comparator of its candidate version.
    inputs
        Name to array : (items, ...), as the reference takes them.
    candidate
        The candidate's side of the comparison, by name : (items, ...), if it is not simply the captured outputs; else None.
    """

    stream_sequence: int
    payload: bytes
    exchange: Exchange
    version_reference: VersionReference
    inputs: dict[str, Array]
    candidate: Outputs | None = None

    @property
    def batched(self) -> bool:
        """Whether the reference takes several items at once; always, if the worker has built the items itself."""
        return self.version_reference.model.batched or self.candidate is not None

    @property
    def n_items(self) -> int:
        """Number of items."""
        return len(next(iter(self.inputs.values())))

    @property
    def signature(self) -> tuple[object, ...]:
        """What exchanges must share to be replayed together: version, and names, types and shapes of inputs.

        The order of inputs counts too: a feature without an input's name is computed from the first one.
        """
        shapes = tuple([(name, array.dtype.str, array.shape[1:]) for name, array in self.inputs.items()])
        return (self.exchange.model, self.exchange.version, shapes)

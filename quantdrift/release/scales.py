"""How numbers are quantised: the width of a step and the integer of zero, for a tensor, a channel or a block."""

import msgspec
import numpy as np

from quantdrift.models.tensors.arrays import Array


class Scale(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How numbers are quantised.

    Parameters
    ----------
    scale
        () or (channels,): the width of a step, float64. With `blocks` it has two dimensions, and may be negative.
    zero_point
        Of the same shape: the integer of zero, int64; with `blocks` a number.
    axis
        The dimension of the channels; None: one scale for the tensor.
    lowest, highest
        The smallest and the largest integer.
    blocks
        A dimension of the tensor, and for each of its entries the number of the block; None: there are no blocks.
    block_size
        Values of a block; 0: there are no blocks.
    """

    scale: Array
    zero_point: Array
    axis: int | None
    lowest: int
    highest: int
    blocks: tuple[int, Array] | None = None
    block_size: int = 0

    @property
    def low(self) -> Array:
        """The smallest value that can be represented, by channel or block."""
        return np.minimum(*self._ends())

    @property
    def high(self) -> Array:
        """The largest value that can be represented, by channel or block."""
        return np.maximum(*self._ends())

    def along(self, part: Array, n_dims: int) -> Array:
        """Return a scale, a zero point or an end so that it multiplies a tensor of so many dimensions."""
        if self.blocks is not None:
            return np.take(part, self.blocks[1], axis=self.blocks[0])
        return along(part, self.axis, n_dims)

    def _ends(self) -> tuple[Array, Array]:
        ends = [np.asarray((end - self.zero_point) * self.scale) for end in (self.lowest, self.highest)]
        return ends[0], ends[1]


def along(part: Array, axis: int | None, n_dims: int) -> Array:
    """Return a scale or zero point so that it multiplies a tensor along its axis."""
    if axis is None or part.size == 1:
        return part.reshape(())
    shape = [1] * n_dims
    shape[axis] = part.size
    return part.reshape(shape)


def dequantised(integers: Array, scale: Scale) -> Array:
    """Return the values of integers, float32."""
    step, zero = (scale.along(part, integers.ndim) for part in (scale.scale, scale.zero_point))
    return np.asarray(((integers.astype(np.int64) - zero) * step).astype(np.float32))

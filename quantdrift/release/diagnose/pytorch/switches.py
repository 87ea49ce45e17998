"""The switches of a PyTorch candidate: an activation range, the weights of a layer, or a layer as a whole.

Each computes in floating point what integer kernels compute, with its scale multiplied by a factor, or is in FP32. A factor
changes the rounding and repairs nothing: what is wrong with a weight beside its rounding stays.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from quantdrift.core.errors import OperatorError

_MOST_FACTOR: Final = 0.05  # above 1
_QUARTER: Final = 4.0  # the median error of rounding is a quarter of a step

Chosen = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Returns the scale and the zero point for given values."""


class Switch(torch.nn.Module):
    """A site: it is quantised, or in FP32."""

    restored = False
    factor = 1.0

    def set(self, *, restored: bool, factor: float) -> None:
        """Put the site into FP32 or not, and set the factor of its scale."""
        self.restored = restored
        self.factor = factor


class RangeSwitch(Switch):
    """An activation range.

    Parameters
    ----------
    chosen
        Scale and zero point for given values.
    lowest, highest
        The smallest and the largest integer.
    is_dynamic
        Whether the scale depends on the values.
    """

    def __init__(self, chosen: Chosen, lowest: int, highest: int, *, is_dynamic: bool) -> None:
        super().__init__()
        self._chosen = chosen
        self._lowest = lowest
        self._highest = highest
        self._is_dynamic = is_dynamic
        self.keeps = False
        self.raw: torch.Tensor | None = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return values as they are behind their range."""
        scale, zero = self._chosen(values)
        if self.keeps and self.raw is None:
            self.raw = values / scale + zero if self._is_dynamic else values
        if self.restored:
            return values
        step = scale * self.factor
        integers = torch.clamp(torch.round(values * (1.0 / step)) + zero, self._lowest, self._highest)
        return ((integers - zero) * step).to(values.dtype)


class WeightSwitch(Switch):
    """A weight or bias of a layer.

    Parameters
    ----------
    raw, served
        The reference's values, and the candidate's.
    step
        Width of the candidate's steps, for each value or for all; None: unknown.
    """

    def __init__(self, raw: torch.Tensor, served: torch.Tensor, step: torch.Tensor | None) -> None:
        super().__init__()
        self.raw = raw
        self.served = served
        self._step = (served - raw).abs().median() * _QUARTER if step is None else step
        self.target: torch.nn.Parameter | None = None

    def set(self, *, restored: bool, factor: float) -> None:
        """Put the weight into FP32 or not, and set the factor of its scale; a target gets the values."""
        is_new = (restored, factor) != (self.restored, self.factor)
        super().set(restored=restored, factor=factor)
        if is_new and self.target is not None:
            self.target.data = self.forward()

    def forward(self) -> torch.Tensor:
        """Return the values."""
        if self.restored:
            return self.raw
        if self.factor == 1.0:
            return self.served
        other = _rounded(self.raw, self._step * self.factor) - _rounded(self.raw, self._step)
        return self.served + other


class LayerSwitch(Switch):
    """A layer as a whole: the candidate's own, or the reference's.

    Its scales are unknown, so a factor gives each row the error that the layer makes on another row.

    Parameters
    ----------
    served, reference
        The layer on both sides.
    """

    def __init__(self, served: torch.nn.Module, reference: torch.nn.Module) -> None:
        super().__init__()
        self.served = served
        self.reference = reference

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer returns.

        Raises
        ------
        OperatorError
            A quantised tensor comes in, which the reference's layer does not take.
        """
        if any(isinstance(argument, torch.Tensor) and argument.is_quantized for argument in args):
            raise OperatorError(
                f"the candidate passes quantised tensors to a layer of class {type(self.served).__name__}, which the reference's layer"
                " does not take: such modules cannot be diagnosed. Export the model with PyTorch 2 Export"
            )
        if self.restored:
            return self.reference(*args, **kwargs)
        output = self.served(*args, **kwargs)
        if self.factor == 1.0 or not isinstance(output, torch.Tensor) or len(output) < 2:
            return output
        expected = self.reference(*args, **kwargs)
        shift = 1 + int((self.factor - 1.0) / _MOST_FACTOR * (len(output) - 1)) % (len(output) - 1)
        return expected + torch.roll(output - expected, shift, dims=0)


def _rounded(values: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return torch.where(step > 0, torch.round(values / step) * step, values)

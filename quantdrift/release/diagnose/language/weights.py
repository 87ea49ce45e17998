"""The weights of a language model's candidate beside those of its reference, and the reference's network with any of both.

Quantisation of weights alone is what their values say: the candidate computes with its weights in floating point. So its copy is the
reference's network in FP32 with the candidate's weights, whatever form they are stored in, as long as transformers loads the folder:
tensors of torchao (INT4, INT8, FP8) tell their values, and rounded weights are stored as values.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec
import torch

from quantdrift.core.errors import OperatorError
from quantdrift.facts.language_diagnosis import OffRows
from quantdrift.models.runtimes.pytorch.errors import ERRORS
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.diagnose.pytorch.modules import step_of
from quantdrift.release.diagnose.pytorch.switches import WeightSwitch
from quantdrift.release.sites import Weight

_BLOCK: Final = re.compile(r"^(.*?\.\d+)\.")
_GROUPS: Final = (256, 128, 64, 32)  # values that share a scale, beside a whole row
_UNIFORM: Final = 0.1  # of a step: so far are gaps of a grid from whole steps, after another rounding to BF16
_MOST_BLOCKS: Final = 0.9  # in 8 bits some of 32 values have no two neighbouring steps
_MOST_STEPS: Final = 260  # of a grid of 8 bits, from end to end
_CONTINUOUS: Final = 0.9  # of neighbours in a row are distinct where nothing was rounded to a grid: of 8 bits some 0.8 of 64 are
_NEIGHBOURS: Final = (64, 128)
_ZERO: Final = 1e-3  # of the root mean square: values below it have the spacing of such a one
_SHORT: Final = 32
_NOTHING: Final = 1e-5
_SPACING: Final = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
_LOUD: Final = 3.0  # times the usual error of a row
_FEWEST_OFF, _MOST_OFF = 0.002, 0.5
_EIGHT_BITS: Final = {torch.float8_e4m3fn: (3, 2.0**-9), torch.float8_e5m2: (2, 2.0**-16)}


class LanguageWeight(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A weight that differs from the reference's.

    Parameters
    ----------
    names
        Its names in the network: several where it is shared.
    layer
        The layer that it belongs to.
    raw, served
        The reference's values, and the candidate's, float32.
    step, low, high
        Width of a step, and what the range cuts values off at; None: unknown.
    """

    names: tuple[str, ...]
    layer: str
    raw: torch.Tensor
    served: torch.Tensor
    step: torch.Tensor | None
    low: torch.Tensor | None = None
    high: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def error(self) -> float:
        """Root mean square of the error, relative to the weight."""
        size = float(self.raw.square().mean().sqrt())
        return float((self.served - self.raw).square().mean().sqrt()) / size if size else 1.0

    def levels(self) -> int:
        """Return the number of distinct values among 32 neighbours, the median."""
        flat = self.served.reshape(-1)
        if len(flat) < _SHORT:
            return len(set(flat.tolist()))
        blocks = flat[: len(flat) // _SHORT * _SHORT].reshape(-1, _SHORT).sort(dim=1).values
        return int((blocks.diff(dim=1) != 0).sum(dim=1).median()) + 1

    def off_rows(self, n_tokens: int, of_slice: Array, elsewhere: Array | None) -> OffRows | None:
        """Return the rows of a table of tokens that are off by more than the others; None: it is no such table, or there are none.

        Parameters
        ----------
        n_tokens
            Tokens that the model knows.
        of_slice, elsewhere
            Token ids of the answers of the slice with their prompts, and of others.
        """
        if self.raw.dim() != 2 or len(self.raw) != n_tokens:
            return None
        sizes = self.raw.norm(dim=1)
        errors = torch.where(sizes > 0, (self.served - self.raw).norm(dim=1) / sizes.clamp(min=1e-12), 0.0)
        usual = float(errors.median())
        off = (errors > _LOUD * usual) & (errors > _NOTHING)
        if not _FEWEST_OFF <= float(off.float().mean()) <= _MOST_OFF:
            return None
        loud = off.numpy()
        return OffRows(
            n=int(loud.sum()),
            n_rows=len(loud),
            error=float(errors[off].mean()),
            usual=float(errors[~off].mean()),
            of_slice=float(loud[of_slice].mean()),
            elsewhere=None if elsewhere is None or not len(elsewhere) else float(loud[elsewhere].mean()),
        )

    def compared(self, number: int) -> Weight:
        """Return it with its number, as files alone are judged."""
        numbers = [None if part is None else part.numpy() for part in (self.step, self.low, self.high)]
        return Weight(
            site=number,
            raw=self.raw.numpy(),
            served=self.served.numpy(),
            axis=0,
            step=numbers[0],
            low=numbers[1],
            high=numbers[2],
        )


class Differing(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The weights that differ, and those of the candidate that the reference does not have in this shape."""

    weights: tuple[LanguageWeight, ...]
    unmatched: tuple[str, ...]

    @property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """The numbers of the weights of each layer, by its name, in the order of the network."""
        found: dict[str, list[int]] = {}
        for number, weight in enumerate(self.weights):
            found.setdefault(weight.layer, []).append(number)
        return {name: tuple(numbers) for name, numbers in found.items()}


def differing(candidate: torch.nn.Module, reference: torch.nn.Module) -> Differing:
    """Return the weights of a candidate that differ from the reference's.

    Raises
    ------
    OperatorError
        A tensor of the candidate does not tell its values.
    """
    wanted = dict(reference.named_parameters(remove_duplicate=False))
    shared: dict[tuple[int, int], list[str]] = {}
    tensors: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}
    unmatched = []
    for name, tensor in candidate.named_parameters(remove_duplicate=False):
        raw = wanted.get(name)
        if raw is None or raw.shape != tensor.shape:
            unmatched.append(name)
            continue
        key = (id(tensor), id(raw))
        shared.setdefault(key, []).append(name)
        tensors[key] = (tensor, raw)
    weights = []
    for key, names in shared.items():
        tensor, parent = tensors[key]
        values = values_of(tensor, names[0])
        original = parent.detach().to("cpu", torch.float32)
        if not torch.equal(values, original):
            step, low, high = _steps_of(tensor, values)
            weights.append(
                LanguageWeight(
                    names=tuple(names),
                    layer=layer_of(names[0]),
                    raw=original,
                    served=values,
                    step=step,
                    low=low,
                    high=high,
                )
            )
    return Differing(weights=tuple(weights), unmatched=tuple(unmatched))


class SwitchedNetwork:
    """The reference's network, in which each differing weight is the reference's or the candidate's.

    Parameters
    ----------
    network
        The reference's network in FP32; its weights are exchanged.
    weights
        The weights that differ.
    """

    def __init__(self, network: torch.nn.Module, weights: Sequence[LanguageWeight]) -> None:
        self._switches = []
        device = next(network.parameters()).device
        for weight in weights:
            raw, served, step = (
                part.to(device) for part in (weight.raw, weight.served, _rounding_of(weight))
            )
            switch = WeightSwitch(raw, served, step)
            switch.target = torch.nn.Parameter(served.clone(), requires_grad=False)
            for name in weight.names:
                layer, _, key = name.rpartition(".")
                setattr(network.get_submodule(layer), key, switch.target)
            self._switches.append(switch)

    def set(self, restored: Collection[int], factors: Array | None) -> None:
        """Take some weights of the reference, and give the steps of the others factors."""
        chosen = set(restored)
        for number, switch in enumerate(self._switches):
            is_raw = number in chosen
            factor = 1.0 if factors is None or is_raw else float(factors[number])
            switch.set(restored=is_raw, factor=factor)


def layer_of(name: str) -> str:
    """Return the layer of a weight: `model.layers.3` of all in that block, else the module that has it."""
    block = _BLOCK.match(name)
    return block.group(1) if block else name.rpartition(".")[0] or name


def values_of(tensor: Any, name: str) -> torch.Tensor:
    """Return the values of a tensor, float32.

    Raises
    ------
    OperatorError
        It does not tell them.
    """
    try:
        plain = type(tensor.data) in {torch.Tensor, torch.nn.Parameter}
        values = tensor.detach() if plain else tensor.detach().dequantize()
        if not values.dtype.is_floating_point or values.element_size() < 2:
            raise OperatorError(
                f"the weight `{name}` of the candidate is stored as {str(values.dtype).removeprefix('torch.')}, and its scale is not known here:"
                " tensors of torchao and weights that are stored as numbers of 16 or 32 bits can be diagnosed"
            )
        found: torch.Tensor = values.to("cpu", torch.float32)
    except ERRORS as error:
        raise OperatorError(
            f"the weight `{name}` of the candidate, a {type(tensor.data).__name__}, does not tell its values: {error}"
        ) from error
    return found


def _steps_of(
    tensor: Any, values: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the width of a step, and the smallest and the largest value, for each value; None: not known."""
    stored = getattr(tensor, "qdata", None)
    step = step_of(tensor, values.shape)
    if step is not None and isinstance(stored, torch.Tensor) and stored.dtype in _EIGHT_BITS:
        bits, smallest = _EIGHT_BITS[stored.dtype]
        exponent = stored.to(torch.float32).abs().clamp(min=smallest).log2().floor()
        return step * torch.exp2(exponent - bits).clamp(min=smallest), None, None
    if step is not None:
        return step.expand(values.shape), None, None
    if values.dim() < 2:
        return _spacing(values, tensor.dtype), None, None
    if (grid := _grid(values)) is not None:
        return grid
    return (_spacing(values, tensor.dtype) if _is_continuous(values) else None), None, None


def _grid(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return the step, the smallest and the largest value of the group that each value shares a uniform grid with; None: there is no grid."""
    flat = values.reshape(len(values), -1)
    for size in dict.fromkeys((flat.shape[1], *_GROUPS)):
        if size < _SHORT or flat.shape[1] % size:
            continue
        groups = flat.reshape(-1, size)
        ordered = groups.sort(dim=1).values
        gaps = ordered.diff(dim=1)
        is_gap = gaps > _NOTHING * ordered.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
        least = torch.where(is_gap, gaps, torch.inf).amin(dim=1, keepdim=True)
        steps = torch.where(is_gap, gaps / least, 0.0)
        is_whole = ((steps - steps.round()).abs() < _UNIFORM).all(dim=1)
        fits = is_whole & (steps.sum(dim=1) < _MOST_STEPS)
        if float(fits.float().mean()) >= _MOST_BLOCKS:
            least = torch.where(torch.isfinite(least), least, 1.0)  # a group of one value has no step
            ends = ordered[:, :1], ordered[:, -1:]
            step, low, high = (part.expand(groups.shape).reshape(values.shape) for part in (least, *ends))
            return step, low, high
    return None


def _is_continuous(values: torch.Tensor) -> bool:
    """Return whether hardly two neighbours are equal, as where nothing was rounded to a grid."""
    rows = values.reshape(len(values), -1)
    least, size = _NEIGHBOURS
    size = min(size, rows.shape[1])
    if size < least:
        return False
    blocks = rows[:, : rows.shape[1] // size * size].reshape(-1, size).sort(dim=1).values
    return float((blocks.diff(dim=1) != 0).float().mean()) > _CONTINUOUS


def _spacing(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the distance of neighbouring numbers of the type in which values are stored."""
    least = max(_ZERO * float(values.square().mean().sqrt()), torch.finfo(dtype).smallest_normal)
    return values.abs().clamp(min=least) * _SPACING.get(dtype, 2.0**-23)


def _rounding_of(weight: LanguageWeight) -> torch.Tensor:
    """Return the width of a step for placebos: where it is not known, four times the median error of the values that are off."""
    if weight.step is not None:
        return weight.step
    error = (weight.served - weight.raw).abs()
    return 4.0 * error[error > 0].median()

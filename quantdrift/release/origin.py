"""Whether a candidate's weights are those of the reference, rounded: known from the two files alone, before any input runs.

Rounding to the nearest integer moves a value by half a step at most, and one that a range cuts off to its end. What is off by more
than 0.6 steps was not made by rounding this reference:

| off by more | what it is |
|---|---|
| nothing | the reference's weights, rounded |
| some tensors, at most half of them | a fault in each of these |
| most tensors, most of their values | another checkpoint: a candidate of it cannot be explained by this reference |
| most tensors, one factor for each channel | weights that AWQ or SmoothQuant have scaled |
| most tensors, some of their values | a method that moves weights by whole steps to keep the answers, such as GPTQ |

Measured on layers of two small networks: GPTQ moves 3 to 22 % of the values so far, at 8 bits and at 4, none by three steps. A
checkpoint that differs by a tenth of each weight's spread is off in 86 % or more at 8 bits. At 4 bits, where such a difference is
below one step, it is taken for a method, and the answers judge it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from quantdrift.core.config.schema import Reference, Runtime
from quantdrift.core.errors import OperatorError
from quantdrift.core.notation import part
from quantdrift.facts.diagnosis import NamedTensor, OffTensor, WeightFault, WeightsOrigin
from quantdrift.facts.words.diagnosis import fault_words
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.sites import Graph, ReferenceWeights, Site, Weight, loaded, placed

_ROUNDED: Final = 0.6  # steps: half of one, and some for what a tool folds in other order
_LAST_PLACES: Final = 4 * 2.0**-23  # of a value in float32
_MOST: Final = 0.5
_CONSTANT: Final = 0.9  # of the values, to be one shift
_FEW_CHANNELS: Final = 0.5
_SAME_FACTOR: Final = 0.01
_UNSCALED: Final = (
    0.25  # of the values that are off: so many may stay, because a factor is an estimate and ends are cut off
)


class Origins(msgspec.Struct, frozen=True, kw_only=True):
    """What the weights say.

    Parameters
    ----------
    origin
        Of all together.
    off
        Those that are off.
    n_tensors
        Tensors that were compared: those whose steps are known.
    """

    origin: WeightsOrigin
    off: tuple[OffTensor, ...]
    n_tensors: int

    @property
    def refusal(self) -> str:
        """Why a diagnosis by this reference would explain another model; empty: it would not."""
        if self.origin is WeightsOrigin.OTHER:
            return (
                f"{len(self.off)} of {self.n_tensors} weights are not those of the reference, rounded: on average"
                f" {part(float(np.mean([tensor.share for tensor in self.off])))} of their values are off by more than rounding explains."
                " The candidate was not made from this reference. Give the checkpoint that it was made from as the reference"
            )
        if self.origin is WeightsOrigin.SCALED:
            return (
                f"{len(self.off)} of {self.n_tensors} weights are those of the reference times one factor for each channel, as AWQ and SmoothQuant"
                " scale them: the candidate was not made from this reference alone. Export the scaled model in FP32, which gives the same"
                " answers as yours, and give it as the reference"
            )
        return ""


def origins_of(weights: Sequence[Weight]) -> Origins:
    """Return what the weights of a candidate are, by those of the reference."""
    compared = [weight for weight in weights if weight.step is not None and weight.raw.size]
    of_matrices = {weight.site for weight in weights if weight.raw.ndim > 1}
    off = tuple(
        tensor
        for weight in compared
        if (tensor := _off(weight, is_bias=weight.site in of_matrices)) is not None
    )
    origin = WeightsOrigin.ROUNDED
    if off:
        origin = WeightsOrigin.FAULTS
    if len(off) > _MOST * len(compared) and len(off) > 1:
        numbers = {tensor.site for tensor in off}
        matrices = [weight for weight in compared if weight.site in numbers and weight.raw.ndim > 1]
        if matrices and np.mean([_is_scaled(weight) for weight in matrices]) > _MOST:
            origin = WeightsOrigin.SCALED
        elif np.median([tensor.share for tensor in off]) > _MOST:
            origin = WeightsOrigin.OTHER
        else:
            origin = WeightsOrigin.MOVED
    return Origins(origin=origin, off=off, n_tensors=len(compared))


def named(origins: Origins, sites: Sequence[Site]) -> tuple[NamedTensor, ...]:
    """Return the tensors that are off by the names of their sites, if they are faults of their own."""
    if origins.origin is not WeightsOrigin.FAULTS:
        return ()
    return tuple(NamedTensor(site=sites[tensor.site].name, tensor=tensor) for tensor in origins.off)


def origins_of_files(candidate: Path, reference: Path) -> tuple[Origins, tuple[NamedTensor, ...]] | None:
    """Return what the weights of an ONNX candidate are; None where it has no pairs that could be compared.

    Raises
    ------
    OperatorError
        A file cannot be read.
    """
    models = [loaded(path, what) for path, what in ((candidate, "candidate"), (reference, "reference"))]
    try:
        placement = placed(Graph(models[0], candidate), ReferenceWeights(models[1], reference))
    except OperatorError:  # of another form: its answers alone can be judged
        return None
    weights = [weight for _, matched in placement.weights for _, weight in matched]
    if not weights:
        return None
    origins = origins_of(weights)
    return origins, named(origins, [site for site, _ in (*placement.activations, *placement.weights)])


def check_origin(candidate: Path, reference: Reference, *, remedy: str = "") -> list[str]:
    """Return which weights of a candidate are faulty, in sentences; none where the files are not ONNX files in QDQ form.

    Parameters
    ----------
    candidate
        The file.
    reference
        The reference that it should have been made from.
    remedy
        A further sentence of the refusal.

    Raises
    ------
    OperatorError
        The candidate was made from another checkpoint.
    """
    if reference.runtime is not Runtime.ONNX or not Path(reference.path).is_file():
        return []
    try:
        compared = origins_of_files(candidate, Path(reference.path))
    except OperatorError:  # who opens it says what is wrong
        return []
    if compared is None:
        return []
    origins, faults = compared
    if origins.origin is WeightsOrigin.OTHER:
        raise OperatorError(f"{candidate}: {origins.refusal}.{remedy}")
    return [f"{candidate}: {fault.site}: {fault_words(fault.tensor)}" for fault in faults]


def _off(weight: Weight, *, is_bias: bool) -> OffTensor | None:
    """Return how a weight differs by more than rounding; None: it does not. One with a single dimension is a bias, or a constant."""
    assert weight.step is not None
    error, step = _error(weight), np.broadcast_to(weight.step, weight.raw.shape)
    slack = _LAST_PLACES * np.abs(weight.raw)
    off = np.abs(error) > _ROUNDED * step + slack
    if not off.any():
        return None
    share = float(off.mean())
    by_channel = np.array([side.any() for side in np.moveaxis(np.atleast_1d(off), weight.axis or 0, 0)])
    channels: tuple[int, ...] = ()
    fault = WeightFault.VALUES
    steps = error / step
    middle = float(np.median(steps))
    if weight.raw.ndim < 2:
        fault = WeightFault.BIAS if is_bias else WeightFault.VALUES
    elif abs(middle) > _ROUNDED and (np.abs(steps - middle) <= _ROUNDED).mean() > _CONSTANT:
        fault = WeightFault.SHIFT
    elif by_channel.mean() <= _FEW_CHANNELS:
        fault, channels = WeightFault.CHANNELS, tuple(np.flatnonzero(by_channel).tolist())
    return OffTensor(site=weight.site, fault=fault, share=share, channels=channels)


def _error(weight: Weight) -> Array:
    """Return what is wrong with each value beside what its range cuts off, float64."""
    raw = weight.raw.astype(np.float64)
    if weight.low is not None and weight.high is not None:
        raw = np.clip(raw, weight.low, weight.high)
    return np.asarray(weight.served - raw)


def _is_scaled(weight: Weight) -> bool:
    """Return whether a weight is the reference's times one factor for each entry of a dimension, and rounded."""
    assert weight.step is not None
    raw, served = (side.astype(np.float64) for side in (weight.raw, weight.served))
    step = np.broadcast_to(weight.step, raw.shape)
    for axis in range(raw.ndim):
        others = tuple(dim for dim in range(raw.ndim) if dim != axis)
        size = np.square(raw).sum(axis=others, keepdims=True)
        factor = (raw * served).sum(axis=others, keepdims=True) / np.where(size > 0, size, 1.0)
        left = (np.abs(served - factor * raw) > _ROUNDED * step).mean()
        if (
            np.ptp(factor) > _SAME_FACTOR
            and left < _UNSCALED * (np.abs(served - raw) > _ROUNDED * step).mean()
        ):
            return True
    return False

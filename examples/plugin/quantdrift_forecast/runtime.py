"""The runtime `npz-linear`: a linear model in a NumPy archive with `weight` : (features, outputs...) and `bias` : (outputs...)."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quantdrift.plugins.runtimes import (
    Array,
    Artefact,
    OperatorError,
    Provenance,
    ReferenceRuntime,
    RuntimePlugin,
    RuntimeRequest,
    TensorSpec,
    check_inputs,
    check_pin,
    digest_of,
)


class NpzOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`[models.references.options]`: the names of the reference's only input and output."""

    input: str = "x"
    output: str = "forecast"


class NpzLinear:
    """`output = input @ weight + bias`, in float32.

    Parameters
    ----------
    path
        The archive.
    options
        The names of its tensors.

    Raises
    ------
    OperatorError
        It cannot be read, or holds no float32 arrays that fit.
    """

    embedding = ""

    def __init__(self, path: Path, options: NpzOptions) -> None:
        try:
            with np.load(path, allow_pickle=False) as archive:
                self._weight, self._bias = archive["weight"], archive["bias"]
        except (OSError, ValueError, KeyError) as error:
            raise OperatorError(
                f"{path} is no NumPy archive with `weight` and `bias`: {type(error).__name__}"
            ) from error
        fits = self._weight.ndim >= 2 and self._weight.shape[1:] == self._bias.shape
        float32 = np.dtype(np.float32)
        if not fits or {self._weight.dtype, self._bias.dtype} != {float32}:
            raise OperatorError(
                f"{path}: `weight` must be (features, outputs...) and `bias` (outputs...), both float32"
            )
        self.artefact = Artefact(
            path=str(path), digest=digest_of(path), precision="float32", opset=0, producer="numpy"
        )
        self.provenance = Provenance(
            runtime="npz-linear", version=np.__version__, provider="numpy", device="cpu"
        )
        self.inputs = (TensorSpec(name=options.input, dtype=float32, shape=(None, self._weight.shape[0])),)
        self.outputs = (TensorSpec(name=options.output, dtype=float32, shape=(None, *self._bias.shape)),)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return the output : (items, outputs...), float32, of the input : (items, features), float32."""
        check_inputs(inputs, self.inputs)
        x = inputs[self.inputs[0].name]
        # einsum adds up each item on its own, so a result does not depend on its neighbours in the batch.
        product: Any = np.einsum("if,f...->i...", x, self._weight)
        return {self.outputs[0].name: product + self._bias}

    def close(self) -> None:
        """Do nothing: there are only two arrays."""


def _open(request: RuntimeRequest, options: NpzOptions) -> ReferenceRuntime:
    if request.embedding:
        raise OperatorError("runtime `npz-linear` has no embeddings: remove `models.embedding`")
    runtime = NpzLinear(Path(request.reference.path), options)
    check_pin(request.reference.path, runtime.artefact.digest, request.reference.digest)
    return runtime


NPZ_LINEAR = RuntimePlugin(open_reference=_open, options=NpzOptions)

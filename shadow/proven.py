"""A reference that notices when it is broken, so that no sample pays for a device that has died."""

from collections.abc import Mapping

import numpy as np

from quantdrift.core.errors import QuarantineError
from shadow.runtime import Array, Artefact, BrokenRuntimeError, Provenance, ReferenceRuntime, TensorSpec


class ProvenRuntime:
    """A reference that keeps the smallest input it could compute, and tries it again whenever another one fails.

    Where that fails as well, the input is not to blame: a CUDA device that was lost or whose memory is taken fails
    every exchange from then on, and each of them would be set aside. The first input to be kept is made of zeros,
    where the reference computes that.

    Parameters
    ----------
    runtime
        What computes.
    """

    def __init__(self, runtime: ReferenceRuntime) -> None:
        self._runtime = runtime
        self._good: dict[str, Array] | None = None
        zeros = {spec.name: _zeros(spec) for spec in runtime.inputs}
        try:
            runtime.run(zeros)
        except QuarantineError:
            return  # not every reference takes zeros
        self._good = zeros

    @property
    def artefact(self) -> Artefact:
        """What was loaded."""
        return self._runtime.artefact

    @property
    def provenance(self) -> Provenance:
        """What replays it."""
        return self._runtime.provenance

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Every input that must be given."""
        return self._runtime.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Every output, in the reference's order."""
        return self._runtime.outputs

    @property
    def embedding(self) -> str:
        """The output whose vectors make learned slices, or empty."""
        return self._runtime.embedding

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return every output by name.

        Raises
        ------
        QuarantineError
            Reason `replay`: the reference cannot compute this, though it computes others.
        BrokenRuntimeError
            It computes nothing any more, not even what it could before.
        RetryError
            What computes is away for now.
        """
        try:
            outputs = self._runtime.run(inputs)
        except QuarantineError as error:
            self._check(error)
            raise
        if self._good is None or _n_bytes(inputs) < _n_bytes(self._good):
            self._good = inputs
        return outputs

    def close(self) -> None:
        """Let go of what the runtime holds."""
        self._good = None
        self._runtime.close()

    def _check(self, error: QuarantineError) -> None:
        if self._good is None:
            return
        try:
            self._runtime.run(self._good)
        except QuarantineError:
            where = f"{self.artefact.path} on {self.provenance.device}"
            raise BrokenRuntimeError(
                f"the reference {where} fails on inputs that it could compute before ({error.detail}): "
                "look at the device"
            ) from error


def _zeros(spec: TensorSpec) -> Array:
    shape = tuple(1 if dim is None else dim for dim in spec.shape)
    return np.full(shape, "" if spec.dtype == np.dtype(object) else 0, dtype=spec.dtype)


def _n_bytes(inputs: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in inputs.values())

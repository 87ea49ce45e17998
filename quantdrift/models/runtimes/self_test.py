"""The self-test of a reference, which tells a bad input from a device or server that has failed."""

from collections.abc import Mapping

import numpy as np

from quantdrift.core.errors import QuarantineError, RetryError
from quantdrift.models.language.scoring import without_free_answer
from quantdrift.models.runtimes.protocol import (
    BrokenRuntimeError,
    ReferenceRuntime,
    SuspectInputError,
    WrappedRuntime,
)
from quantdrift.models.tensors.arrays import Array, TensorSpec


class SelfTestedRuntime(WrappedRuntime):
    """A reference that keeps the smallest input it has computed, and repeats it whenever another input fails.

    If the repeated input fails as well, the new input is not the cause: a CUDA device that was lost, or whose memory is used
    up, fails on every exchange from then on, and each would be quarantined. The first kept input consists of zeros, if the
    reference computes them.

    A broken device ends the worker. If a server fails, other models go on: the exchange waits until the server computes the
    kept input again. Only if the self-test passed just before an input, and the server fails on everything after it, the
    input is suspected.

    Parameters
    ----------
    remote
        Whether the reference is at a server.
    """

    def __init__(self, runtime: ReferenceRuntime, *, remote: bool = False) -> None:
        super().__init__(runtime)
        self._remote = remote
        self._waits = False
        self._good: dict[str, Array] | None = None
        zeros = {spec.name: _zeros(spec) for spec in runtime.inputs}
        try:
            runtime.run(zeros)
        except QuarantineError:
            return  # not every reference takes zeros
        self._good = zeros

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return every output by name.

        Raises
        ------
        QuarantineError
            Reason `replay`: the reference cannot compute this input, but computes others.
        BrokenRuntimeError
            It no longer computes anything, not even the kept input.
        RetryError
            The server is unreachable, or computes nothing at present.
        SuspectInputError
            The server had recovered, and computes nothing since this input.
        """
        waited = self._waits
        if waited:
            self._self_test("still")
        try:
            outputs = self._runtime.run(inputs)
        except QuarantineError as error:
            if self._remote:
                self._check_server(error, passed_before=waited)
            else:
                self._check(error)
            raise
        self._waits = False
        if self._good is None or _n_bytes(inputs) < _n_bytes(self._good):
            # Copied: it may be a view of a batch, which would stay in memory.
            self._good = {name: array.copy() for name, array in without_free_answer(inputs).items()}
        return outputs

    def close(self) -> None:
        """Close the wrapped runtime."""
        self._good = None
        super().close()

    def _check(self, error: QuarantineError) -> None:
        if self._good is None:
            return
        try:
            self._runtime.run(self._good)
        except QuarantineError:
            where = f"{self.artefact.path} on {self.provenance.device}"
            raise BrokenRuntimeError(
                f"the reference {where} fails on inputs that it could compute before ({error.detail}): "
                "check the device, its memory and its driver"
            ) from error

    def _check_server(self, error: QuarantineError, *, passed_before: bool) -> None:
        try:
            self._self_test(error.detail)
        except RetryError as away:
            if not passed_before:
                raise
            self._waits = True
            raise SuspectInputError(
                f"{self.artefact.path} worked just before this input, and fails on every input since ({error.detail})"
            ) from away
        self._waits = False

    def _self_test(self, why: str) -> None:
        """Check that the server still computes the kept input."""
        if self._good is None:
            return
        try:
            self._runtime.run(self._good)
        except QuarantineError as error:
            self._waits = True
            raise RetryError(
                f"{self.artefact.path} fails on inputs that it could compute before ({why}; {error.detail})"
            ) from error


def _zeros(spec: TensorSpec) -> Array:
    shape = tuple(1 if dim is None else dim for dim in spec.shape)
    return np.full(shape, "" if spec.dtype == np.dtype(object) else 0, dtype=spec.dtype)


def _n_bytes(inputs: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in inputs.values())

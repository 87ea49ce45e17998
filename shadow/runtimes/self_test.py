"""A reference that notices when it is broken, so that no sample pays for a device or a server that has died."""

from collections.abc import Mapping

import numpy as np

from quantdrift.core.errors import QuarantineError, RetryError
from quantdrift.shadow.language.scoring import without_own
from quantdrift.shadow.runtimes.protocol import (
    BrokenRuntimeError,
    ReferenceRuntime,
    SuspectInputError,
    WrappedRuntime,
)
from quantdrift.shadow.tensors.arrays import Array, TensorSpec


class SelfTestedRuntime(WrappedRuntime):
    """A reference that keeps the smallest input it could compute, and tries it again whenever another one fails.

    Where that fails as well, the input is not to blame: a CUDA device that was lost or whose memory is taken fails
    every exchange from then on, and each of them would be set aside. The first input to be kept is made of zeros,
    where the reference computes that.

    A device that is broken ends the worker. A server is somebody else's, and other models go on: what failed waits until
    the server computes again what it could. Only where that was proven just before an input, and the server fails at
    everything after it again, is the input in doubt.

    Parameters
    ----------
    runtime
        What computes.
    remote
        Whether that is a server.
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
            Reason `replay`: the reference cannot compute this, though it computes others.
        BrokenRuntimeError
            It computes nothing any more, not even what it could before.
        RetryError
            What computes is away for now, or a server computes nothing at present.
        SuspectInputError
            A server that was waited for computes nothing any more after this input.
        """
        waited = self._waits
        if waited:
            self._prove("still")
        try:
            outputs = self._runtime.run(inputs)
        except QuarantineError as error:
            if self._remote:
                self._check_server(error, proven_before=waited)
            else:
                self._check(error)
            raise
        self._waits = False
        if self._good is None or _n_bytes(inputs) < _n_bytes(self._good):
            # Copied: it may be a part of a batch, which would stay with it.
            self._good = {name: array.copy() for name, array in without_own(inputs).items()}
        return outputs

    def close(self) -> None:
        """Let go of what the runtime holds."""
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
                "look at the device"
            ) from error

    def _check_server(self, error: QuarantineError, *, proven_before: bool) -> None:
        try:
            self._prove(error.detail)
        except RetryError as away:
            if not proven_before:
                raise
            self._waits = True
            raise SuspectInputError(
                f"{self.artefact.path} was well, and fails at everything since it was given this input ({error.detail})"
            ) from away
        self._waits = False

    def _prove(self, why: str) -> None:
        """Have a server compute what it could before."""
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

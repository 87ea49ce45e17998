"""What a runtime around another one says of itself: what the other one says."""

from quantdrift.shadow.runtime import Artefact, Provenance, ReferenceRuntime, TensorSpec


class WrappedRuntime:
    """A reference that stands before another one; whoever derives from it says how it runs.

    Parameters
    ----------
    runtime
        What computes.
    """

    def __init__(self, runtime: ReferenceRuntime) -> None:
        self._runtime = runtime

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

    def close(self) -> None:
        """Let go of what the runtime holds."""
        self._runtime.close()

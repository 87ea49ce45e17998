"""The smallest reference: one matrix product in memory. It passes the same contract as the real ones."""

import hashlib

import numpy as np
import numpy.typing as npt

from quantdrift.core.errors import QuarantineError, QuarantineReason
from shadow.runtime import Array, Artefact, Provenance, TensorSpec


class LinearRuntime:
    """`logits = x @ weight + bias`, computed in float32.

    Parameters
    ----------
    weight
        (features, classes), float32.
    bias
        (classes,), float32.
    """

    def __init__(self, weight: npt.NDArray[np.float32], bias: npt.NDArray[np.float32]) -> None:
        self._weight = weight
        self._bias = bias
        self.artefact = Artefact(
            path="memory",
            digest=hashlib.sha256(weight.tobytes() + bias.tobytes()).hexdigest(),
            precision="float32",
            opset=0,
            producer="quantdrift",
        )
        self.provenance = Provenance(runtime="linear", version=np.__version__, provider="numpy", device="cpu")
        n_features, n_classes = weight.shape
        float32 = np.dtype(np.float32)
        self.inputs = (TensorSpec(name="x", dtype=float32, shape=(None, n_features)),)
        self.outputs = (TensorSpec(name="logits", dtype=float32, shape=(None, n_classes)),)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return `logits` : (items, classes) of `x` : (items, features).

        Raises
        ------
        QuarantineError
            Reason `replay`: the input has another name or shape.
        """
        if set(inputs) != {"x"}:
            raise QuarantineError(
                QuarantineReason.REPLAY, f"the reference takes `x`, given were {sorted(inputs)}"
            )
        try:
            # einsum adds up each item on its own, so a result does not depend on its neighbours in the batch.
            logits = np.einsum("if,fc->ic", inputs["x"], self._weight) + self._bias
        except ValueError as error:
            raise QuarantineError(QuarantineReason.REPLAY, str(error)) from error
        return {"logits": logits}

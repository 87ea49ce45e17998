"""The smallest runtime, for tests: one matrix product in memory. It passes the same contract tests as the real ones."""

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt

from quantdrift.core.errors import OperatorError, QuarantineError, QuarantineReason
from quantdrift.models.runtimes.embedding import unknown_embedding
from quantdrift.models.runtimes.protocol import Artefact, Provenance, failure_text
from quantdrift.models.tensors.arrays import Array, TensorSpec

_LOGITS: Final = "logits"
_PRODUCT: Final = "product"


class LinearRuntime:
    """`logits = x @ weight + bias`, computed in float32.

    Parameters
    ----------
    weight
        (features, classes), float32.
    bias
        (classes,), float32.
    embedding
        `logits`, or `product`: x @ weight, which then is an output too. Empty: none.

    Raises
    ------
    OperatorError
        There is no such embedding.
    """

    def __init__(
        self, weight: npt.NDArray[np.float32], bias: npt.NDArray[np.float32], embedding: str = ""
    ) -> None:
        if embedding not in {"", _LOGITS, _PRODUCT}:
            raise OperatorError(unknown_embedding(embedding, [_LOGITS, _PRODUCT]))
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
        names = (_LOGITS, _PRODUCT) if embedding == _PRODUCT else (_LOGITS,)
        self.outputs = tuple(TensorSpec(name=name, dtype=float32, shape=(None, n_classes)) for name in names)
        self.embedding = embedding

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return `logits` : (items, classes), and `product` if it is the embedding, of `x` : (items, features).

        Raises
        ------
        QuarantineError
            Reason `replay`: the input has another name or shape.
        """
        if set(inputs) != {"x"}:
            raise QuarantineError(
                QuarantineReason.REPLAY, f"the reference takes `x`, but got {sorted(inputs)}"
            )
        try:
            # einsum adds up each item on its own, so a result does not depend on its neighbours in the batch.
            product = np.einsum("if,fc->ic", inputs["x"], self._weight)
        except ValueError as error:
            raise QuarantineError(QuarantineReason.REPLAY, failure_text(error)) from error
        outputs = {_LOGITS: product + self._bias, _PRODUCT: product}
        return {spec.name: outputs[spec.name] for spec in self.outputs}

    def close(self) -> None:
        """Do nothing: there are only two arrays."""

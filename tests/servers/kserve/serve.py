"""For KServe's model server: a linear layer over v1 and v2, and texts in capitals over v2."""

from typing import Any

import numpy as np
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer

_WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3) / np.float32(8)


class Linear(Model):
    """Three scores for each row of four numbers."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ready = True

    def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Any:
        """Answer in the protocol that was asked in."""
        if isinstance(payload, InferRequest):
            return _answer(self.name, payload, "scores", payload.inputs[0].as_numpy() @ _WEIGHTS)
        rows = np.array(payload["instances"], dtype=np.float32)
        return {"predictions": (rows @ _WEIGHTS).tolist()}


class Reference(Model):
    """The linear model of `tests/support/shadow/onnx_models.py`, which tells what it takes and gives."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ready = True

    def get_input_types(self) -> list[dict[str, Any]]:
        """Say what is taken."""
        return [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]

    def get_output_types(self) -> list[dict[str, Any]]:
        """Say what is given."""
        return [{"name": "logits", "datatype": "FP32", "shape": [-1, 3]}]

    def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Any:
        """Answer a v2 request."""
        weight = np.random.default_rng(7).normal(size=(4, 3)).astype(np.float32)
        bias = np.linspace(-0.1, 0.1, 3, dtype=np.float32)
        return _answer(self.name, payload, "logits", payload.inputs[0].as_numpy() @ weight + bias)


class Words(Model):
    """Each text in capitals."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ready = True

    def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Any:
        """Answer a v2 request."""
        texts = payload.inputs[0].as_numpy().ravel().tolist()
        loud = [(text if isinstance(text, bytes) else text.encode()).upper() for text in texts]
        return _answer(self.name, payload, "loud", np.array(loud, dtype=np.object_))


def _answer(model: str, asked: InferRequest, name: str, values: Any) -> InferResponse:
    datatype = "BYTES" if values.dtype == np.object_ else "FP32"
    output = InferOutput(name, list(values.shape), datatype)
    output.set_data_from_numpy(values, binary_data=asked.use_binary_outputs)
    return InferResponse(
        asked.id, model, [output], use_binary_outputs=asked.use_binary_outputs, model_version="3"
    )


if __name__ == "__main__":
    ModelServer().start([Linear("linear"), Words("words"), Reference("reference")])

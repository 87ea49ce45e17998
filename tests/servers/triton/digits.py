"""For Triton's Python backend: the model of `examples/references`, with the weights that lie beside this file."""

from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as backend


class TritonPythonModel:
    """What the backend looks for."""

    def initialize(self, _arguments: dict[str, str]) -> None:
        """Read the weights, under the names that PyTorch has for them."""
        self._weights = dict(np.load(Path(__file__).with_name("weights.npz")))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests, one response for each."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        pixels, scanner = (
            backend.get_input_tensor_by_name(request, name).as_numpy() for name in ("pixels", "scanner")
        )
        held = self._weights
        flat = pixels.reshape(len(pixels), -1)
        features = flat @ held["hidden.weight"].T + held["hidden.bias"] + held["scanner.weight"][scanner]
        logits = np.maximum(features, 0) @ held["last.weight"].T + held["last.bias"]
        return backend.InferenceResponse([backend.Tensor("logits", logits)])

"""For Triton's Python backend: the linear model of `tests/support/shadow/onnx_models.py`. It fails on infinity, and is slow on NaN."""

import time
from typing import Any

import numpy as np
import triton_python_backend_utils as backend

_WEIGHT = np.random.default_rng(7).normal(size=(4, 3)).astype(np.float32)
_BIAS = np.linspace(-0.1, 0.1, 3, dtype=np.float32)
_SLOW_S = 1.5


class TritonPythonModel:
    """What the backend looks for."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests, one response for each."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        x = backend.get_input_tensor_by_name(request, "x").as_numpy()
        if np.isinf(x).any():
            return backend.InferenceResponse(error=backend.TritonError("infinite"))
        if np.isnan(x).any():
            time.sleep(_SLOW_S)
        return backend.InferenceResponse([backend.Tensor("logits", x @ _WEIGHT + _BIAS)])

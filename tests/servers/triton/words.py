"""For Triton's Python backend: texts in capitals, repeated, with their lengths."""

from typing import Any

import numpy as np
import triton_python_backend_utils as backend


class TritonPythonModel:
    """What the backend looks for."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests, one response for each."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        texts = backend.get_input_tensor_by_name(request, "text").as_numpy().tolist()
        times = int(backend.get_input_tensor_by_name(request, "times").as_numpy()[0])
        loud = [text.upper() * times for text in texts]
        return backend.InferenceResponse(
            [
                backend.Tensor("loud", np.array(loud, dtype=np.object_)),
                backend.Tensor("length", np.array([len(text) for text in loud], dtype=np.int32)),
            ]
        )

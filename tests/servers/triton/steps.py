"""For Triton's Python backend: a decoupled model, which answers a number with its powers, one response for each."""

from typing import Any

import numpy as np
import triton_python_backend_utils as backend


class TritonPythonModel:
    """What the backend looks for."""

    def execute(self, requests: list[Any]) -> None:
        """Answer requests, each with as many responses as `n` says."""
        for request in requests:
            n = int(backend.get_input_tensor_by_name(request, "n").as_numpy()[0])
            base = backend.get_input_tensor_by_name(request, "base").as_numpy()
            sender = request.get_response_sender()
            for power in range(1, n + 1):
                sender.send(backend.InferenceResponse([backend.Tensor("power", np.power(base, power))]))
            sender.send(flags=backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

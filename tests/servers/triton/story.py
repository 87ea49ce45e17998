"""For Triton's Python backend: a decoupled model with the tensors of a generate endpoint, which says each word in capitals, one at a time."""

from typing import Any

import numpy as np
import triton_python_backend_utils as backend


class TritonPythonModel:
    """What the backend looks for."""

    def execute(self, requests: list[Any]) -> None:
        """Answer requests, a response for each word."""
        for request in requests:
            sender = request.get_response_sender()
            (text,) = backend.get_input_tensor_by_name(request, "text_input").as_numpy().tolist()
            for index, word in enumerate(text.decode().split()):
                said = f"{' ' if index else ''}{word.upper()}".encode()
                tensor = backend.Tensor("text_output", np.array([said], dtype=np.object_))
                sender.send(backend.InferenceResponse([tensor]))
            sender.send(flags=backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

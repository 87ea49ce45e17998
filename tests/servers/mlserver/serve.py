"""For MLServer: a linear layer, and texts in capitals."""

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceRequest, InferenceResponse

_WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3) / np.float32(8)


class Linear(MLModel):
    """Three scores for each row of four numbers."""

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Answer one request."""
        x = NumpyCodec.decode_input(payload.inputs[0])
        output = NumpyCodec.encode_output("scores", (x @ _WEIGHTS).astype(np.float32))
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=[output])


class Words(MLModel):
    """Each text in capitals."""

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Answer one request."""
        texts = StringCodec.decode_input(payload.inputs[0])
        output = StringCodec.encode_output("loud", [text.upper() for text in texts])
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=[output])

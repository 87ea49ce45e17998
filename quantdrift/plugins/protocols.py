"""What the protocol of a plug-in and its decoder are made of; see docs/how-to/plugins.md."""

from quantdrift.core.config.models import Model, ModelTensor
from quantdrift.core.records import Loss, Tensor
from quantdrift.sidecar.protocols.decoder import (
    DecodedRequest,
    DecodedResponse,
    Decoder,
    ProtocolPlugin,
    WireContext,
)
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head
from quantdrift.sidecar.protocols.json_tensors import pack_values, read_document, untyped_tensor

__all__ = [
    "DecodedRequest",
    "DecodedResponse",
    "Decoder",
    "Head",
    "Loss",
    "LostError",
    "Model",
    "ModelTensor",
    "ProtocolPlugin",
    "Tensor",
    "WireContext",
    "pack_values",
    "read_document",
    "untyped_tensor",
]

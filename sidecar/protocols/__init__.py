"""Decoders of the protocols of inference servers, one module for each protocol."""

from collections.abc import Mapping

from quantdrift.core.plugins import plugin_record
from quantdrift.core.records import Protocol
from quantdrift.sidecar.protocols.chats.generate import Generate
from quantdrift.sidecar.protocols.chats.messages import AnthropicMessages
from quantdrift.sidecar.protocols.chats.ollama import OllamaChat, OllamaGenerate
from quantdrift.sidecar.protocols.chats.responses import OpenAIResponses
from quantdrift.sidecar.protocols.decoder import Decoder, ProtocolPlugin
from quantdrift.sidecar.protocols.kserve_v1 import KserveV1
from quantdrift.sidecar.protocols.oip import OipRest
from quantdrift.sidecar.protocols.oip_grpc import OipGrpc, OipGrpcStream
from quantdrift.sidecar.protocols.openai import OpenAIChat, OpenAICompletions, OpenAIEmbeddings
from quantdrift.sidecar.protocols.torchserve import TorchServe

DECODERS: Mapping[Protocol, Decoder] = {
    Protocol.OIP_REST: OipRest(),
    Protocol.OIP_GRPC: OipGrpc(),
    Protocol.OIP_GRPC_STREAM: OipGrpcStream(),
    Protocol.KSERVE_V1: KserveV1(),
    Protocol.TORCHSERVE: TorchServe(),
    Protocol.OPENAI_CHAT: OpenAIChat(),
    Protocol.OPENAI_COMPLETIONS: OpenAICompletions(),
    Protocol.OPENAI_EMBEDDINGS: OpenAIEmbeddings(),
    Protocol.OPENAI_RESPONSES: OpenAIResponses(),
    Protocol.ANTHROPIC_MESSAGES: AnthropicMessages(),
    Protocol.OLLAMA_CHAT: OllamaChat(),
    Protocol.OLLAMA_GENERATE: OllamaGenerate(),
    Protocol.GENERATE: Generate(),
}


def decoder_of(protocol: Protocol) -> Decoder:
    """Return the decoder of a protocol.

    Raises
    ------
    OperatorError
        It is that of a plug-in that cannot be imported or is not named.
    """
    return DECODERS.get(protocol) or plugin_record(protocol, ProtocolPlugin).decoder

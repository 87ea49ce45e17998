"""Exchanges with an OpenAI-compatible server, made of its bodies by the decoders that capture uses."""

from collections.abc import Mapping
from typing import Any

import msgspec

from quantdrift.core.config.schema import Model
from quantdrift.core.records import Exchange, Protocol
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.language.from_exchange import scoring_inputs
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import VersionReference
from quantdrift.sidecar.protocols.decoder import Decoder
from quantdrift.sidecar.protocols.openai import OpenAIChat, OpenAICompletions, OpenAIEmbeddings
from tests.support.shadow.onnx_models import exchange_of, inputs_of
from tests.support.sidecar.decode import answer, ask

_DECODERS: Mapping[str, tuple[Protocol, Decoder]] = {
    "/v1/chat/completions": (Protocol.OPENAI_CHAT, OpenAIChat()),
    "/v1/completions": (Protocol.OPENAI_COMPLETIONS, OpenAICompletions()),
    "/v1/embeddings": (Protocol.OPENAI_EMBEDDINGS, OpenAIEmbeddings()),
}


def exchange(path: str, asked: Mapping[str, Any], answered: Any, version: str = "int8") -> Exchange:
    """Return the record of one exchange."""
    protocol, decoder = _DECODERS[path]
    query = ask(decoder, asked)
    reply = answer(decoder, answered, query)
    return msgspec.structs.replace(
        exchange_of(inputs_of(1), model=query.model, version=version),
        protocol=protocol,
        inputs=query.inputs,
        outputs=reply.outputs,
    )


def prepared(exchange: Exchange, model: Model, runtime: ReferenceRuntime) -> PreparedExchange:
    """Return an exchange that is ready to be replayed."""
    reference = model.references[0]
    version_reference = VersionReference(
        model=model, runtime=runtime, comparator=comparator_of(model), reference=reference
    )
    inputs, candidate = scoring_inputs(
        exchange,
        model.generation,
        has_replica=version_reference.has_replica(exchange.version),
        media=reference.media,
    )
    return PreparedExchange(
        stream_sequence=1,
        payload=b"",
        exchange=exchange,
        version_reference=version_reference,
        inputs=inputs,
        candidate=candidate,
    )


def chat(content: str | None = "yes", **more: Any) -> dict[str, Any]:
    """Return what a server answers to a chat with one choice."""
    message = {"role": "assistant", "content": content, **more.pop("message", {})}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop", **more}]}

"""Attributes of OpenTelemetry's conventions for generative AI, https://github.com/open-telemetry/semantic-conventions-genai."""

from collections.abc import Mapping
from typing import Final

from quantdrift.core.records import Exchange, Protocol
from quantdrift.models.tensors.codec import decode

_CHAT, _COMPLETION = "chat", "text_completion"
# What is asked of a model, and whose form of an interface it is.
_OPERATIONS: Final[Mapping[str, tuple[str, str]]] = {
    Protocol.OPENAI_CHAT: (_CHAT, "openai"),
    Protocol.OPENAI_COMPLETIONS: (_COMPLETION, "openai"),
    Protocol.OPENAI_RESPONSES: (_CHAT, "openai"),
    Protocol.ANTHROPIC_MESSAGES: (_CHAT, "anthropic"),
    Protocol.OLLAMA_CHAT: (_CHAT, "ollama"),
    Protocol.OLLAMA_GENERATE: (_COMPLETION, "ollama"),
    Protocol.GENERATE: (_COMPLETION, "triton"),
}


def genai_attributes(exchange: Exchange) -> dict[str, str]:
    """Return operation, provider and model of an exchange; nothing if no text was generated."""
    found = _OPERATIONS.get(exchange.protocol)
    if found is None:
        return {}
    operation, provider = found
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": exchange.model,
    }


def usage_attributes(exchange: Exchange) -> dict[str, int]:
    """Return the tokens of prompt and answer, as the server counted them; nothing where it did not."""
    usage = next((tensor for tensor in exchange.outputs if tensor.name == "usage"), None)
    if usage is None or usage.shape != (2,) or usage.datatype != "INT64":
        return {}
    n_prompt, n_answer = decode(usage).tolist()
    return {"gen_ai.usage.input_tokens": n_prompt, "gen_ai.usage.output_tokens": n_answer}

"""What is asked of vLLM in the tests, and how its answers are compared."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference
from quantdrift.shadow.replay.replay import ReplayResult, compare_batch
from tests.servers.answers import Asked, Held
from tests.servers.server import Server
from tests.support.shadow.language_models import loaded, opening, remote_opening
from tests.support.shadow.openai_exchanges import prepared

CHAT = {
    "model": "small",
    "messages": [{"role": "user", "content": "what does the größte fox 🙂 say?"}],
    "max_tokens": 24,
    "temperature": 0.0,
}
PROMPT = {"model": "small", "prompt": "the quick brown", "max_tokens": 16, "temperature": 0.0}
LISTS = {"logprobs": True, "top_logprobs": 5}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
FREE = {"temperature": 1.5, "seed": 4}
TOOL = {"type": "function", "function": {"name": "measure", "parameters": {"type": "object"}}}
ONE_OF = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "one", "schema": ONE_OF, "strict": True}}
CALLED = {"type": "function", "function": {"name": "measure", "parameters": ONE_OF, "strict": True}}


def more(**options: Any) -> dict[str, Any]:
    """Return what is vLLM's own, as its client is told of it."""
    return {"extra_body": options}


IDS = more(return_token_ids=True)
TOLD: Mapping[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat", CHAT),
    "chat-lists": ("chat", CHAT | LISTS),
    "chat-ids": ("chat", CHAT | LISTS | IDS),
    "chat-named": ("chat", CHAT | LISTS | more(return_tokens_as_token_ids=True)),
    "chat-choices": ("chat", CHAT | LISTS | IDS | FREE | {"n": 2}),
    "completion": ("completions", PROMPT),
    "completion-lists": ("completions", PROMPT | {"logprobs": 5}),
    "completion-ids": ("completions", PROMPT | {"logprobs": 5} | IDS),
    "completion-choices": ("completions", PROMPT | IDS | FREE | {"prompt": ["A relay", "ü"], "n": 2}),
}
REQUEST: Asked = {
    **TOLD,
    **{f"{name}-stream": (kind, asked | STREAM) for name, (kind, asked) in TOLD.items()},
    "biased": ("chat", CHAT | LISTS | IDS | {"logit_bias": {"67": 20.0}, "frequency_penalty": 1.0}),
    "grammar": (
        "chat",
        CHAT | LISTS | more(return_token_ids=True, structured_outputs={"regex": "[a-e ]{20}"}),
    ),
    "listed": (
        "chat",
        CHAT | FREE | {"logprobs": True} | more(return_token_ids=True, logprob_token_ids=[67, 68]),
    ),
    "free": ("chat", CHAT | FREE | STREAM),
    "long": ("chat", CHAT | LISTS | {"max_tokens": 200}),
    "long-ids": ("chat", CHAT | LISTS | IDS | {"max_tokens": 200}),
    "stop": ("chat", CHAT | LISTS | {"stop": ["e"]}),
    "stop-ids": ("chat", CHAT | LISTS | IDS | {"stop": ["e"]}),
    "end": ("chat", CHAT | LISTS | {"logit_bias": {"1": 100.0}}),
}
# Of what is told without ids, the same answer with them.
TWINS = {
    **dict.fromkeys(("chat", "chat-lists"), "chat-ids"),
    **dict.fromkeys(("completion", "completion-lists"), "completion-ids"),
    "long": "long-ids",
    "stop": "stop-ids",
}
TOOLS: Asked = {
    "tool-stream": ("chat", CHAT | STREAM | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 80})
}


def parts(folder: Path) -> Asked:
    """Return what makes a character of two tokens of nearly any choice."""
    _, tokenizer = loaded(folder)
    allowed = tokenizer.convert_tokens_to_ids(
        ["Ã", "¶"]
    )  # how the two bytes of ö are written in a vocabulary
    asked = CHAT | LISTS | {"n": 32, "max_tokens": 2, "temperature": 1.0, "seed": 1}
    return {"parts": ("chat", asked | more(allowed_token_ids=allowed))}


def forced(folder: Path) -> Asked:
    """Return what makes JSON and a call of a tool that come to an end: a small model goes on with blanks."""
    _, tokenizer = loaded(folder)
    blanks = {str(one): -100.0 for one in range(len(tokenizer)) if tokenizer.decode([one]).isspace()}
    asked = CHAT | {"logit_bias": blanks, "max_tokens": 80}
    return {
        "json": ("chat", asked | {"response_format": JSON}),
        "call": ("chat", asked | {"tools": [CALLED], "tool_choice": "required"}),
    }


def runtime_request(kind: str, server: Server, folder: Path, **options: Any) -> RuntimeRequest:
    """Return what a reference is told: a folder that `transformers` reads, or the server."""
    url = f"http://127.0.0.1:{server.http_port}"
    return opening(folder, **options) if kind == "transformers" else remote_opening(url, **options)


def compared(held: Held, told: RuntimeRequest) -> ReplayResult:
    """Return what comes of an exchange."""
    with closing(open_reference(told)) as runtime:
        (outcome,) = compare_batch([prepared(held.exchange, told.model, runtime)], most_items=32)
    assert isinstance(outcome, ReplayResult), outcome
    return outcome

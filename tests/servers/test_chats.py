"""Other interfaces of language models, asked by the clients of OpenAI, Anthropic and Ollama, through the relay.

The server is small, and answers with the typed models of these clients: no real one of Anthropic's or Ollama's interface installs
from a package.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from quantdrift.core.records import Protocol
from quantdrift.init.server import ask_server
from tests.servers.answers import Answers, Asked
from tests.servers.environment import HERE
from tests.servers.passage import passage
from tests.servers.server import Server
from tests.servers.tensors import texts

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

SAID = 'größe matters "quoted" 🙂'
HEARD = 'GRÖSSE MATTERS "QUOTED" 🙂'
SYSTEM, USER = {"role": "system", "content": "be loud"}, {"role": "user", "content": SAID}
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
FUNCTION: dict[str, Any] = {"name": "measure", "description": "measures", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = ["measure", {"text": "größe"}]
RESPONSE = {
    "model": "loud",
    "instructions": "be loud",
    "input": SAID,
    "temperature": 0,
    "max_output_tokens": 9,
}
MESSAGE = {
    "model": "loud",
    "system": "be loud",
    "messages": [USER],
    "max_tokens": 9,
    "extra_body": {"temperature": 0},
}
LINES = {"model": "loud", "options": {"temperature": 0, "num_predict": 9}}
GENERATE = {**LINES, "system": "be loud", "prompt": SAID}
WITH_TOOL: dict[str, dict[str, Any]] = {
    "responses": RESPONSE | {"tools": [{"type": "function", **FUNCTION, "strict": None}]},
    "messages": MESSAGE | {"tools": [{"name": "measure", "description": "measures", "input_schema": SCHEMA}]},
    "chat": LINES | {"messages": [SYSTEM, USER], "tools": [TOOL]},
}
ASKED: Asked = {
    f"{kind}{suffix}": (kind, given | ({"stream": True} if suffix else {}))
    for kind, given in {**WITH_TOOL, "generate": GENERATE}.items()
    for suffix in ("", "-stream")
}
KINDS = {
    "responses": Protocol.OPENAI_RESPONSES,
    "messages": Protocol.ANTHROPIC_MESSAGES,
    "chat": Protocol.OLLAMA_CHAT,
    "generate": Protocol.OLLAMA_GENERATE,
}


@pytest.fixture(scope="module")
def answers(chats: Server, tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Answers]:
    """Return what was asked and got."""
    with passage(tmp_path_factory.mktemp("relay"), chats.http_port, nats_url, [{"name": "loud"}]) as way:
        yield Answers(chats, way, ASKED, HERE / "chats" / "ask.py")


def test_init_finds_its_interfaces(chats: Server) -> None:
    """Those of OpenAI's servers, and Ollama's, which has a list of its own."""
    asked = ask_server(f"127.0.0.1:{chats.http_port}")
    assert asked is not None
    assert set(KINDS.values()) < set(asked.protocols)
    assert [model.name for model in asked.models] == ["loud"]


@pytest.mark.parametrize("name", ASKED)
def test_it_is_captured_as_a_chat_would_be(answers: Answers, name: str) -> None:
    """The same messages, options, text, calls and counts of tokens, whichever interface, whole and streamed."""
    kind = name.partition("-")[0]
    has_tool = kind in WITH_TOOL
    assert answers.got[name] == {"text": HEARD, "calls": [CALL] if has_tool else []}
    held = answers.captured(name)
    assert (held.exchange.protocol, held.exchange.model) == (KINDS[kind], "loud")
    assert held.document("messages") == [SYSTEM, USER]
    options = held.document("options")
    options.pop("stream", None)
    assert options == {"max_tokens": 9, "temperature": 0}
    assert held.heard() == [HEARD]
    assert held.exchange.latency is not None
    assert (held.exchange.latency.first_token_s is not None) == (name != kind)
    n_words = len(SAID.split())
    assert held.outputs["usage"].shape == (2,)
    assert held.outputs["usage"].data == n_words.to_bytes(8, "little") * 2
    assert texts(held.outputs["finish_reason"]) == ["tool_calls" if has_tool else "stop"]
    if has_tool:
        assert held.document("tools") == [TOOL]
        (written,) = texts(held.outputs["tool_calls"])
        (call,) = json.loads(written)
        function = call["function"]
        assert [function["name"], json.loads(function["arguments"])] == CALL

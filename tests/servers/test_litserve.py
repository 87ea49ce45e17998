"""LitServe, asked by OpenAI's own client: chat plain and streamed, tool calls and embeddings, through the relay."""

import json
from collections.abc import Iterator

import numpy as np
import pytest

from quantdrift.core.records import Protocol
from tests.servers.answers import Answers, Asked
from tests.servers.passage import Passage, passage
from tests.servers.server import Server
from tests.servers.tensors import tensor, texts

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

SAID = [{"role": "system", "content": "be loud"}, {"role": "user", "content": 'größe matters "quoted" 🙂'}]
HEARD = 'GRÖSSE MATTERS "QUOTED" 🙂'
CHAT = {"model": "loud", "messages": SAID, "temperature": 0.5}
TOOL = {
    "type": "function",
    "function": {"name": "measure", "description": "measures", "parameters": {"type": "object"}},
}
TEXTS = ["a bee sees", "moo"]
ASKED: Asked = {
    "plain": ("chat", CHAT),
    "stream": ("chat", CHAT | {"stream": True}),
    "choices": ("chat", CHAT | {"stream": True, "n": 2}),
    "tool": ("chat", CHAT | {"tools": [TOOL]}),
    "tool-stream": ("chat", CHAT | {"tools": [TOOL], "stream": True}),
    "embeddings": ("embeddings", {"model": "letters", "input": TEXTS, "encoding_format": "float"}),
}


@pytest.fixture(scope="module")
def way(litserve: Server, tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Passage]:
    """Return a relay before LitServe."""
    models = [{"name": "loud"}, {"name": "letters"}]
    with passage(tmp_path_factory.mktemp("relay"), litserve.http_port, nats_url, models) as made:
        yield made


@pytest.fixture(scope="module")
def answers(litserve: Server, way: Passage) -> Answers:
    """Return what was asked and got."""
    return Answers(litserve, way, ASKED)


def test_a_chat_is_captured(answers: Answers) -> None:
    """The whole answer at once."""
    assert answers.said("plain") == HEARD
    held = answers.captured("plain")
    assert (held.exchange.protocol, held.exchange.model) == (Protocol.OPENAI_CHAT, "loud")
    assert held.document("messages") == SAID
    assert held.document("options") == {"temperature": 0.5}
    assert held.heard() == [HEARD]
    assert texts(held.outputs["finish_reason"]) == ["stop"]


def test_a_streamed_chat_is_captured_as_if_it_had_come_at_once(answers: Answers) -> None:
    """Server-sent events, a word at a time, are joined."""
    assert len(answers.got["stream"]) > len(HEARD.split())
    assert answers.said("stream") == HEARD
    streamed, plain = answers.captured("stream"), answers.captured("plain")
    assert streamed.inputs["messages"] == plain.inputs["messages"]
    for name in ("text", "finish_reason"):
        assert streamed.outputs[name] == plain.outputs[name]


def test_several_choices_in_one_stream_are_told_apart(answers: Answers) -> None:
    """Two choices, whose pieces come mixed."""
    assert [answers.said("choices", index) for index in (0, 1)] == [HEARD, HEARD]
    assert answers.captured("choices").heard() == [HEARD, HEARD]


@pytest.mark.parametrize("name", ["tool", "tool-stream"])
def test_a_tool_call_is_captured(answers: Answers, name: str) -> None:
    """A function's name and arguments, plain and streamed."""
    if name == "tool":
        calls = answers.got[name]["choices"][0]["message"]["tool_calls"]
    else:
        calls = [call for delta in answers.deltas(name) for call in delta.get("tool_calls") or ()]
    (call,) = calls
    assert (call["function"]["name"], call["function"]["arguments"]) == ("measure", '{"text": "größe"}')
    held = answers.captured(name)
    assert held.document("tools") == [TOOL]
    (written,) = texts(held.outputs["tool_calls"])
    (captured,) = json.loads(written)
    assert captured == {member: call[member] for member in ("id", "type", "function")}


def test_embeddings_are_captured(answers: Answers) -> None:
    """Two texts, two vectors."""
    vectors = [entry["embedding"] for entry in answers.got["embeddings"]["data"]]
    assert vectors == [[text.count(vowel) / 4 for vowel in "aeiou"] for text in TEXTS]
    held = answers.captured("embeddings")
    assert (held.exchange.protocol, held.exchange.model) == (Protocol.OPENAI_EMBEDDINGS, "letters")
    assert texts(held.inputs["input"]) == TEXTS
    assert held.outputs["embedding"] == tensor("embedding", "FP32", np.array(vectors, dtype=np.float32))

"""`transformers serve`, asked by OpenAI's own client: a real language model's chat and completions, plain and streamed."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quantdrift.core.records import Protocol
from quantdrift.models.runtimes.registry import open_reference
from quantdrift.shadow.replay.replay import ReplayResult, compare_batch
from tests.servers.answers import Answers, Asked
from tests.servers.passage import Passage, passage
from tests.servers.server import Server
from tests.servers.tensors import texts
from tests.support.shadow.language_models import opening
from tests.support.shadow.openai_exchanges import prepared

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800), pytest.mark.release]

CHAT = {
    "model": "small",
    "messages": [{"role": "user", "content": "what does the fox say?"}],
    "max_tokens": 24,
    "temperature": 0.0,
}
PROMPT = {"model": "small", "prompt": "the quick brown", "max_tokens": 16, "temperature": 0.0}
RESPONSE = {
    "model": "small",
    "input": "what does the fox say?",
    "max_output_tokens": 24,
    "temperature": 0.0,
}
REQUEST: Asked = {
    "chat": ("chat", CHAT),
    "chat-stream": ("chat", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    "completion": ("completions", PROMPT),
    "completion-stream": ("completions", PROMPT | {"stream": True}),
    "response": ("responses", RESPONSE | {"stream": False}),
    "response-stream": ("responses", RESPONSE | {"stream": True}),
}


@pytest.fixture(scope="module")
def way(transformers: Server, tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Passage]:
    """Return a relay before the server."""
    with passage(
        tmp_path_factory.mktemp("relay"), transformers.http_port, nats_url, [{"name": "small"}]
    ) as made:
        yield made


@pytest.fixture(scope="module")
def answers(transformers: Server, way: Passage) -> Answers:
    """Return what was asked and got."""
    return Answers(transformers, way, REQUEST)


def test_a_chat_is_captured_streamed_or_not(answers: Answers) -> None:
    """Decoding is greedy, so that both ways give the same text."""
    assert answers.said("chat")
    assert answers.said("chat-stream") == answers.said("chat")
    for name in ("chat", "chat-stream"):
        held = answers.captured(name)
        assert (held.exchange.protocol, held.exchange.model) == (Protocol.OPENAI_CHAT, "small")
        assert held.document("messages") == CHAT["messages"]
        assert held.document("options")["max_tokens"] == CHAT["max_tokens"]
        assert held.heard() == [answers.said("chat")]


def test_a_completion_is_captured_streamed_or_not(answers: Answers) -> None:
    """The legacy endpoint."""
    text = answers.got["completion"]["choices"][0]["text"]
    pieces = [choice["text"] for chunk in answers.got["completion-stream"] for choice in chunk["choices"]]
    assert text
    assert "".join(pieces) == text
    for name in ("completion", "completion-stream"):
        held = answers.captured(name)
        assert (held.exchange.protocol, held.exchange.model) == (Protocol.OPENAI_COMPLETIONS, "small")
        assert texts(held.inputs["prompt"]) == [PROMPT["prompt"]]
        assert held.heard() == [text]


def test_a_response_is_captured_as_the_same_chat(answers: Answers) -> None:
    """The interface that new clients prefer: the messages, the limit and the text are those of the chat."""
    for name in ("response", "response-stream"):
        held = answers.captured(name)
        assert (held.exchange.protocol, held.exchange.model) == (Protocol.OPENAI_RESPONSES, "small")
        assert held.document("messages") == CHAT["messages"]
        assert held.document("options")["max_tokens"] == CHAT["max_tokens"]
        assert held.heard() == [answers.said("chat")]


def test_what_was_served_is_what_the_reference_would_have_said(
    answers: Answers, language_folder: Path
) -> None:
    """The server tells neither tokens nor log-probabilities: their texts are enough, and the prompts have as many tokens."""
    told = opening(language_folder)
    runtime = open_reference(told)
    held = [answers.captured(name) for name in REQUEST]
    assert any("usage" in one.outputs for one in held)
    batch = [prepared(one.exchange, told.model, runtime) for one in held]
    for outcome in compare_batch(batch, most_items=len(batch)):
        assert isinstance(outcome, ReplayResult), outcome
        assert outcome.divergences.flip.tolist() == [0]
        np.testing.assert_allclose(outcome.divergences.divergence, 0, atol=1e-5)
        assert outcome.divergences.detail["n_scored"][0] > 5

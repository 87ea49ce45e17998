"""Language models at an OpenAI-compatible server: what goes wrong, and how texts become tokens there."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantdrift.core.errors import OperatorError, QuarantineError, RetryError
from quantdrift.models.language.answer import ToolCall
from quantdrift.models.language.free_running_answer import FreeAnswer, FreeAnswerOutcome, FreeAnswerRequest
from quantdrift.models.language.scoring import SCORES, ScoringRequest, objects, tokens_read
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.registry import open_reference
from quantdrift.models.runtimes.self_test import SelfTestedRuntime
from tests.support.shadow.language_models import loaded, opening, remote_opening
from tests.support.shadow.score_streams import scored
from tests.support.shadow.vllm_like import VllmLike, serving

pytestmark = pytest.mark.integration

REQUEST = ScoringRequest(prompt_ids=(0, 5), served_ids=(7, 8))
SAID = ({"role": "user", "content": "what drifts?"},)
DEADLINE_S = 30.0


@pytest.fixture
def server(language_folder: Path) -> VllmLike:
    """Return what answers."""
    return VllmLike(*loaded(language_folder))


@pytest.fixture
def runtime(server: VllmLike) -> Iterator[ReferenceRuntime]:
    """Return the reference at that server."""
    with serving(server) as url:
        runtime = open_reference(remote_opening(url))
        yield runtime
        runtime.close()


def test_texts_are_made_tokens_by_the_server(runtime: ReferenceRuntime, language_folder: Path) -> None:
    """A chat by its template: the same as with the model at hand."""
    asked = (
        ScoringRequest(messages=SAID, served=" the mean"),
        ScoringRequest(messages=SAID, template={"add_generation_prompt": False}, served=" the mean"),
        ScoringRequest(prompt="A relay", served=" forwards"),
    )
    local = scored(open_reference(opening(language_folder)), *asked)
    for one, other in zip(scored(runtime, *asked), local, strict=True):
        assert one.ids == other.ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        np.testing.assert_array_equal(one.ranks, other.ranks)


def test_documents_reach_the_template(language_folder: Path) -> None:
    """As one more thing that it is given: /tokenize is silent about members that it does not know."""
    model, tokenizer = loaded(language_folder)
    shown = "{% for document in documents or [] %}<s>{{ document['text'] }}</s>{% endfor %}"
    tokenizer.chat_template = shown + tokenizer.chat_template
    more = {"documents": [{"text": "a slice"}], "chat_template_kwargs": {"more": 1}}
    with serving(VllmLike(model, tokenizer)) as url:
        runtime = open_reference(remote_opening(url))
        n_tokens = len(
            tokenizer.apply_chat_template(list(SAID), add_generation_prompt=True, return_dict=False, **more)
        )
        asked = ScoringRequest(messages=SAID, template=more, n_prompt_tokens=n_tokens, served=" the mean")
        assert len(scored(runtime, asked)[0].ids) > 0
        runtime.close()


def test_the_token_in_which_a_text_was_cut_is_not_scored(runtime: ReferenceRuntime) -> None:
    """It is not what was generated; nothing is left of a text of one."""
    whole, cut, nothing = scored(
        runtime,
        ScoringRequest(prompt_ids=(0, 5), served=" the mean"),
        ScoringRequest(prompt_ids=(0, 5), served=" the mean", is_cut=True),
        ScoringRequest(prompt_ids=(0, 5), served="a", is_cut=True),
    )
    assert cut.ids == whole.ids[:-1]
    assert nothing.ids == ()


def test_answers_are_asked_for_together(runtime: ReferenceRuntime, server: VllmLike) -> None:
    """One request for a batch, that generates no more than it must."""
    server.asked.clear()
    scored(runtime, REQUEST, REQUEST)
    ((path, body),) = server.asked
    assert path == "/v1/completions"
    assert body["prompt"] == [[0, 5, 7, 8], [0, 5, 7, 8]]
    assert (body["max_tokens"], body["prompt_logprobs"], body["temperature"]) == (1, 20, 0)


def test_a_request_has_no_more_tokens_than_a_batch_may(language_folder: Path) -> None:
    """Two answers of four tokens, then one that is longer than a batch; the scores are those of one request for all."""
    asked = (REQUEST, REQUEST, ScoringRequest(prompt_ids=tuple(range(9)), served_ids=(7, 8)))
    server = VllmLike(*loaded(language_folder))
    with serving(server) as url:
        opened = [open_reference(remote_opening(url, batch_tokens=n)) for n in (8, 1000)]
        n_before = len(server.asked)
        parts, whole = (scored(runtime, *asked) for runtime in opened)
        requests = [len(body["prompt"]) for _, body in server.asked[n_before:] if "prompt_logprobs" in body]
        for runtime in opened:
            runtime.close()
    assert requests == [2, 1, 3]
    assert [tokens_read({SCORES: objects([of])}) for of in parts] == [4, 4, 11]
    assert (
        tokens_read({SCORES: np.zeros((1, 4), np.float32)}) == tokens_read({}) == 0
    )  # a detector's, and none
    for one, other in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_server_that_is_away_is_waited_for(
    runtime: ReferenceRuntime, server: VllmLike, status: int
) -> None:
    """Nothing is wrong with the exchange."""
    server.fails = [status]
    with pytest.raises(RetryError, match=str(status)):
        scored(runtime, REQUEST)
    assert len(scored(runtime, REQUEST)[0].logprobs) == 2


@pytest.mark.parametrize("statuses", [[401], [404], [500, 503]])
def test_no_access_or_no_model_is_waited_for_too(
    runtime: ReferenceRuntime, server: VllmLike, statuses: list[int]
) -> None:
    """They may come back."""
    server.fails = statuses
    with pytest.raises(RetryError):
        scored(runtime, REQUEST)


@pytest.mark.parametrize("status", [400, 422, 500])
def test_an_exchange_that_is_refused_is_set_aside(
    runtime: ReferenceRuntime, server: VllmLike, status: int
) -> None:
    """A failure too, where the server still has the model. What the server says may quote the text: it is not told."""
    server.fails = [status]
    with pytest.raises(QuarantineError, match=f"HTTP {status}; see the server's log") as caught:
        scored(runtime, REQUEST)
    assert "as it was told" not in str(caught.value)


def test_a_server_that_is_gone_is_waited_for(language_folder: Path) -> None:
    """At the start and later."""
    with serving(VllmLike(*loaded(language_folder))) as url:
        runtime = open_reference(remote_opening(url))
    runtime.close()  # what is kept of a server that ends is no connection
    with pytest.raises(RetryError, match="is away"):
        scored(runtime, REQUEST)
    with pytest.raises(RetryError, match="is away"):
        open_reference(remote_opening(url))


def test_a_server_that_cannot_score_is_refused_at_the_start(
    server: VllmLike, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is one without the model."""
    refusal = (400, {"error": {"message": "not here", "code": 400}})
    answer = server.answer
    monkeypatch.setattr(
        server, "answer", lambda path, asked: refusal if path == "/v1/completions" else answer(path, asked)
    )
    with (
        serving(server) as url,
        pytest.raises(OperatorError, match=r"returns no log-probabilities.*not here"),
    ):
        open_reference(remote_opening(url))
    other = VllmLike(None, None, name="other")
    with serving(other) as url, pytest.raises(OperatorError, match=r"\['other'\]"):
        open_reference(remote_opening(url))


def test_texts_wait_for_a_model_that_is_not_there(runtime: ReferenceRuntime, server: VllmLike) -> None:
    """The server says so with the status that a missing /tokenize has."""
    server.fails = [404, 404]
    with pytest.raises(RetryError):
        scored(runtime, ScoringRequest(prompt="a", served="b"))
    assert len(scored(runtime, ScoringRequest(prompt="a", served="b"))[0].logprobs) == 1


def test_texts_need_a_server_that_makes_tokens(language_folder: Path) -> None:
    """The error says what helps."""
    model, tokenizer = loaded(language_folder)
    with serving(VllmLike(model, tokenizer, takes_prompt_logprobs=False)) as url:
        runtime = open_reference(remote_opening(url))
        with pytest.raises(QuarantineError, match="return_token_ids"):
            scored(runtime, ScoringRequest(prompt="a", served="b"))
        runtime.close()


def _own(**options: Any) -> FreeAnswerRequest:
    return FreeAnswerRequest(max_tokens=6, is_capped=True, options=options, seed=3)


def test_an_own_answer_is_asked_for_as_the_client_asked(runtime: ReferenceRuntime, server: VllmLike) -> None:
    """But for what asks for more of it, or for it to be told otherwise; a prompt of tokens stays one."""
    tool = {"type": "function", "function": {"name": "f"}}
    sent = {"temperature": 0.3, "top_p": 0.5, "seed": 4, "stop": ["x"], "tool_choice": "auto"}
    own = _own(**sent, n=3, stream=True, logprobs=True, top_logprobs=5, max_tokens=900)
    server.asked.clear()
    chat, text = scored(
        runtime,
        ScoringRequest(messages=SAID, tools=(tool,), served=" the mean", free_answer=own),
        ScoringRequest(prompt_ids=(0, 5), served_ids=(7, 8), free_answer=_own(temperature=0)),
    )
    asked = [(path, body) for path, body in server.asked if "prompt_logprobs" not in body]
    assert asked[-2:] == [
        (
            "/v1/chat/completions",
            {**sent, "model": "small", "max_tokens": 6, "messages": list(SAID), "tools": [tool]},
        ),
        ("/v1/completions", {"model": "small", "max_tokens": 6, "temperature": 0, "prompt": [0, 5]}),
    ]
    for scores in (chat, text):
        assert scores.free_answer is not None
        assert (scores.free_answer.outcome, scores.free_answer.n_tokens, scores.free_answer.calls) == (
            FreeAnswerOutcome.DONE,
            6,
            (),
        )


@pytest.mark.parametrize("status", [400, 401, 500, 503])
def test_a_server_that_does_not_answer_itself_costs_no_scores(
    runtime: ReferenceRuntime, server: VllmLike, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Whatever it says; other answers of the batch are asked for all the same."""
    answer = server.answer
    monkeypatch.setattr(
        server,
        "answer",
        lambda path, asked: (
            (status, {"error": {"message": "no"}}) if asked.get("seed") == 13 else answer(path, asked)
        ),
    )
    failed, done = scored(
        runtime,
        ScoringRequest(prompt_ids=(0, 5), served_ids=(7, 8), free_answer=_own(seed=13)),
        ScoringRequest(prompt_ids=(0, 5), served_ids=(7, 8), free_answer=_own()),
    )
    assert failed.free_answer is not None
    assert done.free_answer is not None
    assert (failed.free_answer.outcome, done.free_answer.outcome) == (
        FreeAnswerOutcome.FAILED,
        FreeAnswerOutcome.DONE,
    )
    np.testing.assert_array_equal(failed.logprobs, done.logprobs)


@pytest.mark.parametrize(
    ("document", "outcome"),
    [
        ({"choices": []}, FreeAnswerOutcome.FAILED),
        ({"choices": "none"}, FreeAnswerOutcome.FAILED),
        (
            {
                "choices": [
                    {
                        "message": {
                            "content": None,
                            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
                        },
                        "finish_reason": "tool_calls",
                    }
                ]
            },
            FreeAnswerOutcome.DONE,
        ),
    ],
    ids=["nothing", "unreadable", "a call"],
)
def test_what_a_server_answers_itself_is_read(
    runtime: ReferenceRuntime,
    server: VllmLike,
    monkeypatch: pytest.MonkeyPatch,
    document: dict[str, Any],
    outcome: FreeAnswerOutcome,
) -> None:
    """Calls of tools are told from text; what is no answer has failed."""
    answer = server.answer
    monkeypatch.setattr(
        server,
        "answer",
        lambda path, asked: (200, document) if path == "/v1/chat/completions" else answer(path, asked),
    )
    (scores,) = scored(runtime, ScoringRequest(messages=SAID, served="a", free_answer=_own()))
    assert scores.free_answer is not None
    assert scores.free_answer.outcome is outcome
    if outcome is FreeAnswerOutcome.DONE:
        assert scores.free_answer.calls == (ToolCall(name="f", arguments="{}"),)
        assert (scores.free_answer.text, scores.free_answer.n_tokens) == ("", None)


def test_what_proves_a_server_is_not_answered_again(runtime: ReferenceRuntime, server: VllmLike) -> None:
    """It is scored, as often as something fails."""
    proven = SelfTestedRuntime(runtime, remote=True)
    scored(proven, ScoringRequest(prompt_ids=(0, 5), served_ids=(7, 8), free_answer=_own()))
    server.asked.clear()
    server.fails = [400]
    with pytest.raises(QuarantineError):
        scored(proven, REQUEST)
    assert all("prompt_logprobs" in body for path, body in server.asked)
    assert len(server.asked) == 2


def test_a_server_that_hangs_over_an_own_answer_is_not_waited_for(
    server: VllmLike, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It scores all the same, over another connection."""
    answer, ended = server.answer, threading.Event()

    def hanging(path: str, asked: Any) -> tuple[int, Any]:
        if "seed" not in asked:
            return answer(path, asked)
        ended.wait(DEADLINE_S)
        return 500, {}

    monkeypatch.setattr(server, "answer", hanging)
    with serving(server) as url:
        runtime = open_reference(remote_opening(url, own_s=0.2))
        late, left = scored(
            runtime, *[ScoringRequest(prompt_ids=(0, 5), served_ids=(7, 8), free_answer=_own(seed=1))] * 2
        )
        assert late.free_answer == left.free_answer == FreeAnswer(outcome=FreeAnswerOutcome.LATE)
        assert len(scored(runtime, REQUEST)[0].logprobs) == 2
        ended.set()
        runtime.close()

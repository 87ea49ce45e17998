"""vLLM on the CPU: what it serves is captured, and the same weights do not diverge from it, whoever scores them."""

import http.client
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantdrift.core.records import Protocol
from quantdrift.models.tensors.codec import decode
from tests.servers.answers import Answers
from tests.servers.passage import Passage, passage
from tests.servers.server import Server
from tests.servers.tensors import texts
from tests.servers.vllm_asked import (
    CHAT,
    REQUEST,
    TOLD,
    TOOL,
    TOOLS,
    TWINS,
    compared,
    forced,
    parts,
    runtime_request,
)
from tests.support.shadow.language_models import loaded
from tests.support.sidecar.relay_process import wait

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800), pytest.mark.release]


@pytest.fixture(scope="module")
def way(vllm: Server, tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Passage]:
    """Return a relay before the server."""
    with passage(tmp_path_factory.mktemp("relay"), vllm.http_port, nats_url, [{"name": "small"}]) as made:
        yield made


@pytest.fixture(scope="module")
def answers(vllm: Server, way: Passage, language_folder: Path) -> Answers:
    """Return what was asked and got."""
    return Answers(vllm, way, {**REQUEST, **TOOLS, **parts(language_folder), **forced(language_folder)})


def _is_read_as_it_was_made(answers: Answers, name: str, folder: Path) -> bool:
    """Return whether the text makes the tokens again that made it: a model may take two where its tokenizer takes one."""
    twin = TWINS.get(name.removesuffix("-stream"))
    if twin is None:
        return True  # its tokens are told
    ids: list[int] = decode(answers.captured(twin).outputs["token_ids.0"]).tolist()
    _, tokenizer = loaded(folder)
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    again: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return again == ids[: len(again)]


@pytest.mark.parametrize("name", TOLD)
def test_what_is_said_is_captured_streamed_or_not(answers: Answers, name: str) -> None:
    """Text, tokens, lists, why it ended and how many tokens there were: all that the client got."""
    whole, stream = answers.captured(name), answers.captured(f"{name}-stream")
    got = answers.got[name]
    kind = Protocol.OPENAI_CHAT if name.startswith("chat") else Protocol.OPENAI_COMPLETIONS
    assert (whole.exchange.protocol, whole.exchange.model) == (kind, "small")
    said = [one["text"] if "text" in one else one["message"]["content"] for one in got["choices"]]
    assert whole.heard() == said
    assert all(said)
    assert stream.outputs == whole.outputs
    assert texts(whole.outputs["finish_reason"]) == [one["finish_reason"] for one in got["choices"]]
    for index, choice in enumerate(got["choices"]):
        if "ids" in name:
            ids = choice.get("prompt_token_ids") or got["prompt_token_ids"]
            own = whole.outputs.get(f"prompt_token_ids.{index}", whole.outputs.get("prompt_token_ids"))
            assert own is not None
            assert decode(own).tolist() == ids
            assert decode(whole.outputs[f"token_ids.{index}"]).tolist() == choice["token_ids"]
        if choice["logprobs"] is not None:
            logprobs = choice["logprobs"]
            served = logprobs.get("token_logprobs") or [one["logprob"] for one in logprobs["content"]]
            assert decode(whole.outputs[f"logprobs.{index}"]).tolist() == served
            assert whole.outputs[f"top_logprobs.{index}"].shape[0] == len(served)


def test_a_call_of_a_tool_is_captured(answers: Answers) -> None:
    """Its arguments come piece by piece."""
    calls = [call for delta in answers.deltas("tool-stream") for call in delta.get("tool_calls") or ()]
    held = answers.captured("tool-stream")
    (written,) = texts(held.outputs["tool_calls"])
    (captured,) = json.loads(written)
    assert captured["function"] == {
        "name": "measure",
        "arguments": "".join(call["function"].get("arguments") or "" for call in calls),
    }
    assert captured["id"] == calls[0]["id"]
    assert held.document("tools") == [TOOL]


@pytest.mark.parametrize("kind", ["transformers", "openai"])
@pytest.mark.parametrize("name", REQUEST)
def test_a_model_does_not_diverge_from_itself(
    answers: Answers, vllm: Server, language_folder: Path, name: str, kind: str
) -> None:
    """Whatever was asked of it, and whoever scores it."""
    found = compared(answers.captured(name), runtime_request(kind, vllm, language_folder)).divergences
    assert not found.flip.any()
    assert (found.detail["n_scored"] > 0).all()
    asked = REQUEST[name][1]
    is_listed = "logprobs" in asked and name != "grammar"
    if not _is_read_as_it_was_made(answers, name, language_folder):
        # Of other tokens than were served nothing is said.
        assert set(found.detail["logprobs"]) == {"misaligned" if is_listed else "unavailable"}
        assert set(found.detail["measure"]) == {"none"}
        return
    assert set(found.detail["logprobs"]) == {"wire" if is_listed else "unavailable"}
    if is_listed or (asked["temperature"] == 0 and name != "grammar"):
        assert set(found.detail["measure"]) == {"kl" if is_listed else "regret"}
        np.testing.assert_allclose(found.divergence, 0, atol=1e-9)
    if is_listed:
        np.testing.assert_allclose(found.detail["perplexity_ratio"], 1, atol=1e-5)


@pytest.mark.parametrize("kind", ["transformers", "openai"])
def test_characters_of_several_tokens_are_measured(
    answers: Answers, vllm: Server, language_folder: Path, kind: str
) -> None:
    """Without ids, though vLLM spells the whole character where it ends, and a tokenizer never."""
    held = answers.captured("parts")
    found = compared(held, runtime_request(kind, vllm, language_folder)).divergences
    whole = [index for index, text in enumerate(held.heard()) if text == "ö"]
    assert whole
    assert set(found.detail["logprobs"][whole]) == {"wire"}
    np.testing.assert_allclose(found.divergence[whole], 0, atol=1e-9)
    assert not found.flip[whole].any()


@pytest.mark.parametrize(
    "name", ["chat", "chat-choices", "completion-ids", "free", "stop", "end", "json", "call"]
)
def test_its_own_answers_are_those_that_it_served(
    answers: Answers, vllm: Server, language_folder: Path, name: str
) -> None:
    """Greedily, by a seed, as JSON, or as a call: one answer of each exchange, as long, and ended for the same reason."""
    found = compared(
        answers.captured(name),
        runtime_request("openai", vllm, language_folder, own_share=1.0, own_tokens=200),
    ).divergences
    detail = {column: values.tolist() for column, values in found.detail.items()}
    n_choices = len(found.divergence)
    assert detail["own"] == ["done", *[None] * (n_choices - 1)]
    assert detail["finish_changed"][0] is False
    if n_choices == 1:
        assert detail["length_ratio"] == [1.0]
    if name == "json":
        assert (detail["json_valid"], detail["own_json_valid"]) == ([True], [True])
    if name == "call":
        assert (detail["tool_calls_valid"], detail["own_tool_calls_valid"]) == ([True], [True])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"own_tokens": 5}, ("done", "length", 5, 1.0, False)),
        ({"own_s": 1e-3}, ("late", None, None, None, None)),
    ],
    ids=["cut", "late"],
)
def test_an_own_answer_is_bounded(
    answers: Answers, vllm: Server, language_folder: Path, options: dict[str, Any], told: tuple[Any, ...]
) -> None:
    """In tokens, to which both are held, and in time: the exchange is compared all the same."""
    opened = runtime_request("openai", vllm, language_folder, own_share=1.0, **options)
    found = compared(answers.captured("chat-ids"), opened).divergences
    columns = ("own", "own_finish_reason", "own_n_tokens", "length_ratio", "finish_changed")
    assert tuple(found.detail[column].tolist()[0] for column in columns) == told
    np.testing.assert_allclose(found.divergence, 0, atol=1e-9)


@pytest.mark.parametrize("name", ["chat-lists", "completion-ids", "long", "long-ids", "end"])
def test_its_lists_enclose_how_likely_the_end_was(
    answers: Answers, vllm: Server, language_folder: Path, name: str
) -> None:
    """What `transformers` knows exactly, for one end as for several."""
    for end_ids in ((1,), (1, 5, 67)):
        exact, found = (
            compared(
                answers.captured(name), runtime_request(kind, vllm, language_folder, end_ids=end_ids)
            ).divergences.detail
            for kind in ("transformers", "openai")
        )
        below, above = 1 - 1e-4, 1 + 1e-4
        assert (found["early_end"] <= exact["early_end"] * above).all()
        assert (found["early_end_upper"] >= exact["early_end"] * below).all()
        if answers.got[name]["choices"][0]["finish_reason"] == "stop":
            assert (found["end_p"] <= exact["end_p"] * above).all()
            assert len(end_ids) > 1 or (found["end_p"] >= exact["end_p"] * below).all()
        else:
            assert np.isnan([found["end_p"], exact["end_p"]]).all()
        if name != "end":  # at once: there is no place before it
            assert (exact["early_end"] > 0).all()
            assert (found["kept_share"] >= exact["kept_share"] * below).all()


def test_a_client_that_hangs_up_is_counted(vllm: Server, tmp_path: Path, nats_url: str) -> None:
    """A stream that nobody heard to its end is no answer; the server goes on."""
    asked = json.dumps(
        CHAT | {"stream": True, "n": 8, "temperature": 1.0, "max_tokens": 200, "ignore_eos": True}
    )
    head = {"Content-Type": "application/json"}
    with passage(tmp_path / "relay", vllm.http_port, nats_url, [{"name": "small"}]) as way:
        client = http.client.HTTPConnection("127.0.0.1", way.port)
        client.request("POST", "/v1/chat/completions", asked, head)
        assert client.sock.recv(1)
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        wait(lambda: way.lost("client_abort") == 1, "the stream is counted")
        assert way.offered() == 1

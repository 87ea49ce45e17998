"""What every runtime must do that scores served tokens."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from quantdrift.core.errors import OperatorError, QuarantineError
from shadow.language import Asked, Scores, objects
from shadow.opening import Opening, open_reference
from shadow.proven import ProvenRuntime
from shadow.runtime import ReferenceRuntime
from tests.language_models import loaded, opening, remote_opening, scored
from tests.vllm_like import VllmLike, serving

pytestmark = pytest.mark.contract

TEXTS = (
    ("A detector", " watches the mean of a slice."),
    ("What the relay does:", " it forwards bytes"),
    (
        "Evidence",
        " grows until an alert is due, and the false alarms of the whole fleet are bounded in advance",
    ),
    ("x", "y"),
)


@pytest.fixture(params=["transformers", "proven", "prompt_logprobs", "echo"])
def told(request: pytest.FixtureRequest, language_folder: Path) -> Iterator[Opening]:
    """Return what is configured of a reference in each of the ways."""
    if request.param in {"transformers", "proven"}:
        yield opening(language_folder)
        return
    model, tokenizer = loaded(language_folder)
    server = VllmLike(model, tokenizer, takes_prompt_logprobs=request.param == "prompt_logprobs")
    with serving(server) as url:
        yield remote_opening(url)


@pytest.fixture
def runtime(told: Opening, request: pytest.FixtureRequest) -> Iterator[ReferenceRuntime]:
    """Return the reference, closed at the end."""
    runtime: ReferenceRuntime = open_reference(told)
    yield ProvenRuntime(runtime) if "proven" in request.node.callspec.id else runtime
    runtime.close()


@pytest.fixture
def asked(language_folder: Path) -> list[Asked]:
    """Return answers to be scored, as tokens: not every server makes them of text."""
    _, tokenizer = loaded(language_folder)
    return [
        Asked(
            prompt_ids=tuple(tokenizer(prompt)["input_ids"]), served_ids=tuple(tokenizer(text)["input_ids"])
        )
        for prompt, text in TEXTS
    ]


def test_scores_are_those_of_one_step_after_another(
    runtime: ReferenceRuntime, asked: list[Asked], language_folder: Path
) -> None:
    """Teacher forcing in one padded batch gives what the model says when it reads token by token."""
    model, _ = loaded(language_folder)
    for one, scores in zip(asked, scored(runtime, *asked), strict=True):
        assert one.prompt_ids is not None
        assert one.served_ids is not None
        assert scores.ids == one.served_ids
        read = list(one.prompt_ids)
        for place, token in enumerate(one.served_ids):
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([read])).logits[0, -1].double()
            logprobs = torch.log_softmax(logits, dim=-1)
            assert scores.logprobs[place] == pytest.approx(float(logprobs[token]), abs=1e-5)
            if not np.isnan(scores.ranks[place]):
                assert scores.ranks[place] == 1 + int((logprobs > logprobs[token]).sum())
            best = logprobs.topk(20).values.numpy()
            shown = np.sort(scores.top_logprobs[place][~np.isnan(scores.top_logprobs[place])])[::-1][:20]
            np.testing.assert_allclose(shown, best, atol=1e-5)
            read.append(token)


def test_company_and_order_do_not_matter(runtime: ReferenceRuntime, asked: list[Asked]) -> None:
    """Rows are filled up to the longest; no score sees that."""
    together = scored(runtime, *asked)
    alone = [scored(runtime, one)[0] for one in asked]
    turned = scored(runtime, *asked[::-1])[::-1]
    for one, other, third in zip(together, alone, turned, strict=True):
        _same(one, other)
        _same(one, third)


def _same(one: Scores, other: Scores) -> None:
    assert one.tokens == other.tokens
    np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(one.ranks, other.ranks)


def test_what_cannot_be_scored_has_no_scores(runtime: ReferenceRuntime, asked: list[Asked]) -> None:
    """Beside others, and alone."""
    nothing = Asked(prompt="x", served=None)
    assert [len(one.logprobs) for one in scored(runtime, nothing, asked[3], nothing)] == [0, 1, 0]
    assert [len(one.logprobs) for one in scored(runtime, nothing)] == [0]


def test_no_more_is_scored_than_is_configured(told: Opening, asked: list[Asked]) -> None:
    """Nor than the model takes: the rest of an answer is left out, and a prompt that is too long is refused."""
    generation = msgspec.structs.replace(told.model.generation, max_tokens=3, top=2)
    model = msgspec.structs.replace(told.model, generation=generation)
    runtime = open_reference(msgspec.structs.replace(told, model=model))
    (scores,) = scored(runtime, asked[0])
    assert len(scores.logprobs) == 3
    assert scores.top_logprobs.shape[1] in {2, 3}  # the served one beside the two likeliest
    long = tuple([5] * 252)
    room = Asked(prompt_ids=long, served_ids=(5,) * 100)
    whole = open_reference(told)
    assert len(scored(whole, room)[0].logprobs) in {3, 4}  # a server generates one more
    with pytest.raises(QuarantineError, match="the reference takes 25"):
        scored(whole, Asked(prompt_ids=long * 2, served_ids=(5,)))
    runtime.close()
    whole.close()


def test_a_prompt_of_other_tokens_than_the_candidates_is_refused(language_folder: Path) -> None:
    """Another tokenizer or template would be read as divergence."""
    runtime = open_reference(opening(language_folder))
    said = ({"role": "user", "content": "what drifts?"},)
    with pytest.raises(QuarantineError, match="made 3 tokens of the prompt, the reference makes"):
        scored(runtime, Asked(messages=said, n_prompt_tokens=3, served="the mean"))


def test_a_runtime_says_what_it_is(runtime: ReferenceRuntime) -> None:
    """The digest is that of the reference; what a server holds is not verified."""
    assert len(runtime.artefact.digest) == 64
    assert [spec.name for spec in runtime.inputs] == ["prompt", "answer", "asked"]
    assert [spec.name for spec in runtime.outputs] == ["scores"]
    verified = runtime.provenance.runtime == "transformers"
    assert runtime.artefact.precision == ("float32" if verified else "unverified")
    assert runtime.embedding == ""


def test_other_inputs_are_refused(runtime: ReferenceRuntime) -> None:
    """As replay errors."""
    with pytest.raises(QuarantineError, match="replay"):
        runtime.run({"x": np.zeros((1, 4), dtype=np.float32)})
    with pytest.raises(QuarantineError, match="replay"):
        runtime.run({name: objects([""]) for name in ("prompt", "answer", "asked")})


def test_a_closed_runtime_may_be_closed_again(runtime: ReferenceRuntime) -> None:
    """Closing leaves nothing behind that would complain."""
    runtime.close()
    runtime.close()


def test_there_is_no_embedding(told: Opening) -> None:
    """Asking for one is an error that says so."""
    with pytest.raises(OperatorError, match="shows no embedding"):
        open_reference(msgspec.structs.replace(told, embedding="hidden"))

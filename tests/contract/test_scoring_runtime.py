"""What every runtime must do that scores served tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.models.language.free_running_answer import FreeAnswerOutcome, FreeAnswerRequest
from quantdrift.models.language.scoring import Scores, ScoringRequest, objects
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference
from quantdrift.models.runtimes.self_test import SelfTestedRuntime
from tests.support.shadow.score_streams import scored

pytestmark = [pytest.mark.contract, pytest.mark.slow]

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
def told(request: pytest.FixtureRequest, language_folder: Path) -> Iterator[RuntimeRequest]:
    """Return what is configured of a reference in each of the ways."""
    from tests.support.shadow.language_models import loaded, opening, remote_opening
    from tests.support.shadow.vllm_like import VllmLike, serving

    if request.param in {"transformers", "proven"}:
        yield opening(language_folder)
        return
    model, tokenizer = loaded(language_folder)
    server = VllmLike(model, tokenizer, takes_prompt_logprobs=request.param == "prompt_logprobs")
    with serving(server) as url:
        yield remote_opening(url)


@pytest.fixture
def runtime(told: RuntimeRequest, request: pytest.FixtureRequest) -> Iterator[ReferenceRuntime]:
    """Return the reference, closed at the end."""
    runtime: ReferenceRuntime = open_reference(told)
    yield SelfTestedRuntime(runtime) if "proven" in request.node.callspec.id else runtime
    runtime.close()


@pytest.fixture
def asked(language_folder: Path) -> list[ScoringRequest]:
    """Return answers to be scored, as tokens: not every server makes them of text."""
    from tests.support.shadow.language_models import loaded

    _, tokenizer = loaded(language_folder)
    return [
        ScoringRequest(
            prompt_ids=tuple(tokenizer(prompt)["input_ids"]), served_ids=tuple(tokenizer(text)["input_ids"])
        )
        for prompt, text in TEXTS
    ]


def test_scores_are_those_of_one_step_after_another(
    runtime: ReferenceRuntime, asked: list[ScoringRequest], language_folder: Path
) -> None:
    """Teacher forcing in one padded batch gives what the model says when it reads token by token."""
    import torch

    from tests.support.shadow.language_models import loaded

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


def test_company_and_order_do_not_matter(runtime: ReferenceRuntime, asked: list[ScoringRequest]) -> None:
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


def test_what_cannot_be_scored_has_no_scores(runtime: ReferenceRuntime, asked: list[ScoringRequest]) -> None:
    """Beside others, and alone."""
    nothing = ScoringRequest(prompt="x", served=None)
    assert [len(one.logprobs) for one in scored(runtime, nothing, asked[3], nothing)] == [0, 1, 0]
    assert [len(one.logprobs) for one in scored(runtime, nothing)] == [0]


def test_no_more_is_scored_than_is_configured(told: RuntimeRequest, asked: list[ScoringRequest]) -> None:
    """Nor than the model takes: the rest of an answer is left out, and a prompt that is too long is refused."""
    generation = msgspec.structs.replace(told.model.generation, max_tokens=3, top=2)
    model = msgspec.structs.replace(told.model, generation=generation)
    runtime = open_reference(msgspec.structs.replace(told, model=model))
    (scores,) = scored(runtime, asked[0])
    assert len(scores.logprobs) == 3
    assert scores.top_logprobs.shape[1] in {2, 3}  # the served one beside the two likeliest
    long = tuple([5] * 252)
    room = ScoringRequest(prompt_ids=long, served_ids=(5,) * 100)
    whole = open_reference(told)
    assert len(scored(whole, room)[0].logprobs) in {3, 4}  # a server generates one more
    with pytest.raises(QuarantineError, match="the reference takes 25"):
        scored(whole, ScoringRequest(prompt_ids=long * 2, served_ids=(5,)))
    runtime.close()
    whole.close()


def test_a_prompt_of_other_tokens_than_the_candidates_is_refused(language_folder: Path) -> None:
    """Another tokenizer or template would be read as divergence."""
    from tests.support.shadow.language_models import opening

    runtime = open_reference(opening(language_folder))
    said = ({"role": "user", "content": "what drifts?"},)
    with pytest.raises(QuarantineError, match="made 3 tokens of the prompt, the reference makes"):
        scored(runtime, ScoringRequest(messages=said, n_prompt_tokens=3, served="the mean"))


def test_served_tokens_of_another_vocabulary_are_refused(
    runtime: ReferenceRuntime, asked: list[ScoringRequest], request: pytest.FixtureRequest
) -> None:
    """Where their text is known, and until an answer agrees; a server that cannot spell them scores them as they are."""
    text = TEXTS[2][1]
    right = msgspec.structs.replace(asked[2], served=text)
    wrong = msgspec.structs.replace(right, served_ids=tuple(range(40, 40 + len(right.served_ids or ()))))
    if "echo" in request.node.callspec.id:
        scored(runtime, wrong)
        return
    with pytest.raises(QuarantineError, match="tokenizer: the tokens of the answer are another text"):
        scored(runtime, wrong)
    for each in (right, wrong):
        scored(runtime, each)


def test_a_runtime_says_what_it_is(runtime: ReferenceRuntime) -> None:
    """The digest is that of the reference; what a server holds is not verified."""
    assert len(runtime.artefact.digest) == 64
    assert [spec.name for spec in runtime.inputs] == ["prompt", "answer", "request"]
    assert [spec.name for spec in runtime.outputs] == ["scores"]
    verified = runtime.provenance.runtime == "transformers"
    assert runtime.artefact.precision == ("float32" if verified else "unverified")
    assert runtime.embedding == ""


def test_other_inputs_are_refused(runtime: ReferenceRuntime) -> None:
    """As replay errors."""
    with pytest.raises(QuarantineError, match="replay"):
        runtime.run({"x": np.zeros((1, 4), dtype=np.float32)})
    with pytest.raises(QuarantineError, match="replay"):
        runtime.run({name: objects([""]) for name in ("prompt", "answer", "request")})


def test_a_closed_runtime_may_be_closed_again(runtime: ReferenceRuntime) -> None:
    """Closing leaves nothing behind that would complain."""
    runtime.close()
    runtime.close()


def test_there_is_no_embedding(told: RuntimeRequest) -> None:
    """Asking for one is an error that says so."""
    with pytest.raises(OperatorError, match="shows no embedding"):
        open_reference(msgspec.structs.replace(told, embedding="hidden"))


def _ends(language_folder: Path, one: ScoringRequest, end_ids: tuple[int, ...]) -> list[float]:
    """Return how likely the model ends at each place of an answer and behind it."""
    import torch

    from tests.support.shadow.language_models import loaded

    model, _ = loaded(language_folder)
    assert one.prompt_ids is not None
    assert one.served_ids is not None
    ids = (*one.prompt_ids, *one.served_ids)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0, len(one.prompt_ids) - 1 :].double()
    return [float(place[list(end_ids)].sum()) for place in torch.softmax(logits, dim=-1)]


def test_ends_are_as_likely_as_the_model_holds_them(
    told: RuntimeRequest, asked: list[ScoringRequest], language_folder: Path, request: pytest.FixtureRequest
) -> None:
    """Of a folder exact, of a server's lists within bounds, of lists without ids only where the candidate ended."""
    exact = request.node.callspec.id in {"transformers", "proven"}
    end_ids = (1, 5)
    generation = msgspec.structs.replace(told.model.generation, end_ids=end_ids)
    model = msgspec.structs.replace(told.model, generation=generation)
    runtime = open_reference(msgspec.structs.replace(told, model=model))
    ended = [msgspec.structs.replace(one, is_ended=True) for one in asked]
    for plain, one, scores in zip(asked, scored(runtime, *asked), scored(runtime, *ended), strict=True):
        _same(msgspec.structs.replace(scores, end_p=0.0), msgspec.structs.replace(one, end_p=0.0))
        truth = _ends(language_folder, plain, end_ids)
        assert np.isnan(one.end_p)
        assert len(scores.ends) == len(scores.logprobs) == len(truth) - 1
        if exact:
            assert scores.end_p == pytest.approx(truth[-1], rel=1e-4)
            np.testing.assert_allclose(scores.ends, truth[:-1], rtol=1e-4)
            np.testing.assert_array_equal(scores.ends, scores.ends_upper)
        elif "echo" in request.node.callspec.id:
            assert 0 < scores.end_p <= truth[-1] * (1 + 1e-4)
            assert np.isnan(scores.ends).all()
        else:
            assert 0 < scores.end_p <= truth[-1] * (1 + 1e-4)
            assert (scores.ends <= np.array(truth[:-1]) * (1 + 1e-4)).all()
            assert (scores.ends_upper >= np.array(truth[:-1]) * (1 - 1e-4)).all()
            assert (scores.ends_upper < 1).all()
    runtime.close()


def test_an_end_that_was_served_is_the_end(
    told: RuntimeRequest, asked: list[ScoringRequest], language_folder: Path
) -> None:
    """It is scored as ever; one that a limit put there, or that is not the last scored, is none."""
    one = asked[1]
    assert one.served_ids is not None
    most = len(one.served_ids) + 1
    generation = msgspec.structs.replace(told.model.generation, end_ids=(1,), max_tokens=most)
    model = msgspec.structs.replace(told.model, generation=generation)
    runtime = open_reference(msgspec.structs.replace(told, model=model))
    ended = msgspec.structs.replace(one, served_ids=(*one.served_ids, 1))
    known, unsure, cut, long = scored(
        runtime,
        msgspec.structs.replace(ended, is_ended=True),
        ended,
        msgspec.structs.replace(ended, is_ended=False),
        msgspec.structs.replace(ended, served_ids=(*one.served_ids, 1, 5), is_ended=True),
    )
    truth = _ends(language_folder, one, (1,))[-1]
    assert known.ids == unsure.ids == (*one.served_ids, 1)
    assert known.end_p == pytest.approx(truth, rel=1e-4)
    assert unsure.end_p == known.end_p
    assert len(known.ends) == len(known.logprobs) - 1
    assert np.isnan([cut.end_p, long.end_p]).all()
    assert len(cut.ends) == len(cut.logprobs)
    assert len(long.ends) == most
    runtime.close()


def test_the_reference_answers_itself_as_it_was_asked(
    told: RuntimeRequest, asked: list[ScoringRequest], language_folder: Path
) -> None:
    """Greedily: what the model itself goes on with, cut where it was to be, beside scores that stay what they are."""
    import torch

    from tests.support.shadow.language_models import loaded

    runtime = open_reference(told)
    model, tokenizer = loaded(language_folder)
    own = FreeAnswerRequest(max_tokens=12, is_capped=True, options={"temperature": 0}, seed=3)
    plain = scored(runtime, *asked)
    found = scored(runtime, *(msgspec.structs.replace(one, free_answer=own) for one in asked[:2]), *asked[2:])
    for one, of, before in zip(asked, found, plain, strict=True):
        np.testing.assert_array_equal(of.logprobs, before.logprobs)
        if one not in asked[:2]:
            assert of.free_answer is None
            continue
        assert of.free_answer is not None
        ids = torch.tensor([one.prompt_ids])
        with torch.inference_mode():
            whole = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
            )
        said = whole[0, ids.shape[1] :]
        text = tokenizer.decode(said, skip_special_tokens=True)
        reason = "stop" if said[-1] == tokenizer.eos_token_id else "length"
        assert (of.free_answer.outcome, of.free_answer.text, of.free_answer.n_tokens) == (
            FreeAnswerOutcome.DONE,
            text,
            len(said),
        )
        assert (of.free_answer.finish_reason, of.free_answer.max_tokens, of.free_answer.is_capped) == (
            reason,
            12,
            True,
        )
    runtime.close()


def test_an_answer_that_fails_loses_no_exchange(told: RuntimeRequest, asked: list[ScoringRequest]) -> None:
    """A prompt that leaves no room, and no time at all: the scores are there."""
    own = FreeAnswerRequest(max_tokens=300, is_capped=True, options={"temperature": 0}, seed=3)
    long = ScoringRequest(prompt_ids=(5,) * 254, served_ids=(5,), free_answer=own)
    generation = msgspec.structs.replace(told.model.generation, own_s=1e-9)
    hurried = msgspec.structs.replace(told, model=msgspec.structs.replace(told.model, generation=generation))
    one = msgspec.structs.replace(asked[0], free_answer=own)
    for opening_, asked_, outcomes in (
        (told, long, {FreeAnswerOutcome.FAILED, FreeAnswerOutcome.DONE}),
        (hurried, one, {FreeAnswerOutcome.LATE}),
    ):
        runtime = open_reference(opening_)
        (scores,) = scored(runtime, asked_)
        assert scores.free_answer is not None
        assert scores.free_answer.outcome in outcomes
        assert len(scores.logprobs) == len(asked_.served_ids or ())
        runtime.close()


def test_an_end_that_is_no_token_is_refused_at_the_start(told: RuntimeRequest) -> None:
    """Later it would have answers refused."""
    generation = msgspec.structs.replace(told.model.generation, end_ids=(1, 99_999))
    model = msgspec.structs.replace(told.model, generation=generation)
    with pytest.raises(OperatorError, match=r"end_ids.*99999"):
        open_reference(msgspec.structs.replace(told, model=model))


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0, "stop": ["the"]}])
def test_answers_that_are_generated_together_are_those_of_each_alone(
    language_folder: Path, options: dict[str, Any]
) -> None:
    """Greedy ones of prompts of all lengths, that end at different places."""
    from tests.support.shadow.language_models import opening

    own = FreeAnswerRequest(max_tokens=24, is_capped=False, options=options, seed=1)
    words = ["what", "drifts", "when", "the", "relay", "forwards", "bytes", "of", "a", "slice"]
    asked = [ScoringRequest(prompt=" ".join(words[: n + 1]), free_answer=own) for n in (4, 0, 8, 2, 6, 1)]
    runtime = open_reference(opening(language_folder))
    together = [of.free_answer for of in scored(runtime, *asked)]
    alone = [scored(runtime, one)[0].free_answer for one in asked]
    runtime.close()
    assert together == alone
    assert len({answer.n_tokens for answer in alone if answer is not None}) > 1

"""How far a sampled token is among the least likely ones: exact in the mean, whatever the distribution, and never too much."""

import math

import msgspec
import numpy as np
import pytest

from quantdrift.models.language.answer import Answer
from quantdrift.models.language.request_options import sampling_temperature
from quantdrift.models.language.scoring import Scores
from quantdrift.models.language.unlikely import LEAST_LIKELY, unlikely_tokens
from tests.support.shadow.score_streams import compared, scores_of, told

pytestmark = pytest.mark.unit

TEMPERATURES = (0.3, 0.7, 1.0, 1.6)
DRAWN = Answer(text="said", finish_reason="length", temperature=0.7)


def distributions(n_tokens: int = 40) -> list[np.ndarray]:
    """Return log-probabilities of some distributions: even, peaked, with equally likely tokens, with impossible ones."""
    random = np.random.default_rng(3)
    drawn = [random.dirichlet(np.full(n_tokens, alpha)) for alpha in (0.02, 0.1, 1.0, 10.0)]
    steps = np.repeat(np.arange(1.0, 6.0), n_tokens // 5) ** 4
    cases = [*drawn, np.full(n_tokens, 1 / n_tokens), steps / steps.sum(), np.eye(n_tokens)[3]]
    return [np.log(np.maximum(p, 1e-300)) for p in cases]


def mean_of_draws(logprobs: np.ndarray, temperature: float, k: int, drawn_at: float | None = None) -> float:
    """Return the expectation over a token that is drawn from a distribution at a temperature."""
    p = np.exp(logprobs / (drawn_at or temperature))
    n_tokens = len(logprobs)
    scores = scores_of(np.tile(logprobs, (n_tokens, 1)), tuple(range(n_tokens)), k=k)
    return float((p / p.sum()) @ unlikely_tokens(scores, temperature))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("case", range(7))
def test_a_draw_of_the_reference_itself_has_the_known_mean(case: int, temperature: float) -> None:
    """Exactly, from all log-probabilities."""
    logprobs = distributions()[case]
    assert mean_of_draws(logprobs, temperature, k=40) == pytest.approx(LEAST_LIKELY, abs=1e-6)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("k", [0, 1, 5, 20])
@pytest.mark.parametrize("case", range(7))
def test_with_the_listed_tokens_alone_it_is_never_more(case: int, k: int, temperature: float) -> None:
    """Token by token a lower bound."""
    logprobs = distributions()[case]
    whole, listed = (
        unlikely_tokens(scores_of(np.tile(logprobs, (40, 1)), tuple(range(40)), k=width), temperature)
        for width in (40, k)
    )
    assert (listed <= whole + 1e-9).all()
    if temperature == 1.0 and k:
        above = logprobs > np.sort(logprobs)[-k] + 1e-6
        assert listed[above] == pytest.approx(whole[above], abs=1e-9)


@pytest.mark.parametrize("case", range(7))
def test_a_lower_temperature_and_samplers_that_cut_the_tail_have_no_higher_mean(case: int) -> None:
    """So what a server does beyond the request's temperature does not page."""
    logprobs = distributions()[case]
    assert mean_of_draws(logprobs, 1.0, k=40, drawn_at=0.6) <= LEAST_LIKELY + 1e-9
    order = np.argsort(-logprobs)
    kept = np.exp(logprobs)[order].cumsum() - np.exp(logprobs)[order] < 0.9
    cut = np.full(40, -np.inf)
    cut[order[kept]] = logprobs[order[kept]]
    p = np.exp(cut)
    values = unlikely_tokens(scores_of(np.tile(logprobs, (40, 1)), tuple(range(40)), k=40), 1.0)
    assert (p / p.sum()) @ values <= LEAST_LIKELY + 1e-9


def test_another_model_draws_what_the_reference_would_say_least() -> None:
    """Tokens of a uniform candidate under a peaked reference."""
    peaked = distributions()[0]
    values = unlikely_tokens(scores_of(np.tile(peaked, (40, 1)), tuple(range(40)), k=5), 1.0)
    assert values.mean() > 0.8


def test_what_is_not_known_has_no_value() -> None:
    """A log-probability that is not known, and an impossible token under a reference that lists nothing else."""
    scores = scores_of(distributions()[2][None], (3,), k=4)
    unknown = msgspec.structs.replace(scores, logprobs=np.array([np.nan]))
    assert np.isnan(unlikely_tokens(unknown, 1.0)).all()
    impossible = Scores(
        tokens=(b"x",),
        ids=(1,),
        logprobs=np.array([-np.inf]),
        ranks=np.array([2.0]),
        top_tokens=((b"y",),),
        top_ids=np.array([[0]]),
        top_logprobs=np.array([[0.0]]),
    )
    assert unlikely_tokens(impossible, 1.0).tolist() == [1.0]


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({}, 1.0),
        ({"temperature": None}, 1.0),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05}, 0.7),
        ({"temperature": 0.7, "typical_p": 1, "repetition_penalty": 1.0}, 0.7),
        ({"temperature": 0}, None),
        ({"temperature": "hot"}, None),
        ({"top_k": 1}, None),
        ({"presence_penalty": 0.5}, None),
        ({"logit_bias": {"3": 5}}, None),
        ({"typical_p": 0.9}, None),
        ({"dynatemp_range": 0.5}, None),
        ({"response_format": {"type": "json_object"}}, None),
        ({"tool_choice": "required"}, None),
    ],
)
def test_the_temperature_is_known_where_nothing_else_moves_tokens(
    options: dict[str, object], temperature: float | None
) -> None:
    """Penalties, biases and grammars make it unknowable; samplers that cut the tail do not."""
    assert sampling_temperature(options) == temperature


def test_a_sampled_answer_without_log_probabilities_has_it() -> None:
    """Of which nothing else is known."""
    logprobs = distributions()[2]
    scores = scores_of(np.tile(logprobs, (3, 1)), (3, 1, 4), k=40)
    divergences = told(compared(None, scores, DRAWN))
    assert divergences["unlikely"] == pytest.approx(unlikely_tokens(scores, 0.7).mean())
    assert math.isnan(divergences["divergence"])


@pytest.mark.parametrize(
    "answer",
    [
        msgspec.structs.replace(DRAWN, temperature=None),
        msgspec.structs.replace(DRAWN, temperature=0.01),
        msgspec.structs.replace(DRAWN, n_tokens=5),
    ],
    ids=["not known", "greedy but for rounding", "other tokens than were served"],
)
def test_other_answers_have_none(answer: Answer) -> None:
    """Undefined, not zero."""
    scores = scores_of(np.tile(distributions()[2], (3, 1)), (3, 1, 4), k=40)
    assert math.isnan(told(compared(None, scores, answer))["unlikely"])

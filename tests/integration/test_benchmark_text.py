"""The benchmarks of language models: what they draw, damage, score and count."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import text_damages
from benchmarks.text import Sampler, compared, divergence, first_pages, rounded, served
from quantdrift.core.records import Metric
from quantdrift.models.runtimes.registry import open_reference
from tests.support.shadow.language_models import loaded, opening

pytestmark = pytest.mark.integration

GREEDY = Sampler(temperature=0.0)
PROMPTS = torch.tensor([[5, 6, 7], [8, 9, 10]])


def test_fewer_bits_are_further_from_the_model(language_folder: Path) -> None:
    """32 bits are the model itself: its greedy answers are the reference's own, token by token."""
    model, _ = loaded(language_folder)
    answers = served(model, PROMPTS, GREEDY, seed=0)
    distances = [divergence(model, rounded(model, bits), PROMPTS, answers) for bits in (32, 8, 4, 2)]
    assert distances[0] == 0.0
    assert distances == sorted(distances)
    assert distances[3] > 100 * distances[1] > 0
    reference = open_reference(opening(language_folder))
    try:
        unlikely, regret, flip = compared(reference, PROMPTS, answers, 0.0)
        drawn, _, _ = compared(reference, PROMPTS, answers, 1.0)
    finally:
        reference.close()
    np.testing.assert_allclose(regret, 0, atol=1e-5)
    assert not flip.any()
    assert np.isnan(unlikely).all()
    assert (drawn < 0.05).all()


def test_tokens_are_drawn_from_the_likeliest(language_folder: Path) -> None:
    """With a `top_p` next to nothing only the first choice is left; a seed draws the same again."""
    model, _ = loaded(language_folder)
    first_choice = served(model, PROMPTS, Sampler(temperature=1.0, top_p=1e-9), seed=1)
    assert torch.equal(first_choice, served(model, PROMPTS, GREEDY, seed=2))
    usual = Sampler(temperature=1.0)
    drawn = served(model, PROMPTS, usual, seed=1)
    assert torch.equal(drawn, served(model, PROMPTS, usual, seed=1))
    assert not torch.equal(drawn, first_choice)


def test_pages_are_those_of_the_shipped_detector() -> None:
    """None where every value is below the budget, and soon where all are far above it."""
    assert np.isinf(first_pages(np.array([0.04, 0.06]), 0.1, runs=3, most=2000, seed=1)).all()
    assert (first_pages(np.array([0.9, 1.0]), 0.1, runs=3, most=2000, seed=1) < 40).all()


def test_a_kv_cache_is_rounded_while_answers_are_generated(language_folder: Path) -> None:
    """With all its bits an answer is the one that is computed without a cache; with two bits its log-probabilities are others."""
    model, _ = loaded(language_folder)
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    whole, coarse = (text_damages.said(model, prompts, GREEDY, 1, bits) for bits in (None, 2))
    for prompt, ids, logprobs in zip(prompts, whole.ids, whole.logprobs, strict=True):
        expected = served(model, torch.tensor([prompt]), GREEDY, seed=1)[0].tolist()
        assert ids[:42] == expected[: len(ids)]
        assert len(ids) == len(logprobs)
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()
        own = logits.log_softmax(dim=1)[torch.arange(len(ids)), torch.tensor(ids)]
        np.testing.assert_allclose(logprobs, own.detach().numpy(), atol=1e-4)
    assert all(
        abs(first[0] - other[0]) > 1e-4 for first, other in zip(whole.logprobs, coarse.logprobs, strict=True)
    )
    values = torch.tensor([[0.9, -0.2, 0.04, 1.0]])
    torch.testing.assert_close(text_damages.in_groups(values, 2), torch.tensor([[1.0, 0.0, 0.0, 1.0]]))


def test_answers_and_tokens_to_a_page_are_those_of_the_first_signal() -> None:
    """Answers that do not count add nothing, and healthy answers are seen once, in their order."""
    unknown = np.full(4000, np.nan)
    unlikely = np.where(np.arange(4000) < 3000, 0.05, 0.9)
    of = text_damages.Values(
        signals={Metric.UNLIKELY: unlikely, Metric.DIVERGENCE: unknown},
        tokens=np.full(4000, 10.0),
        languages=[],
        replay_s=0.0,
        serving_s=0.0,
    )
    answers, tokens = text_damages.pages(of, range(4000), 1, 4000, 1, is_drawn=False)
    assert 3000 < answers[0] < 3100
    assert tokens[0] == 10 * answers[0]
    healthy, _ = text_damages.pages(of, range(3000), 1, 3000, 1, is_drawn=False)
    assert np.isinf(healthy).all()

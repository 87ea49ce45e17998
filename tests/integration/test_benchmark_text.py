"""The benchmark of language models: what it draws, scores and counts."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.text import Sampler, compared, divergence, first_pages, rounded, served
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

"""References that are language models, on a CUDA device."""

from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quantdrift.core.config.schema import Provider
from quantdrift.models.language.scoring import Scores, TokenRow
from quantdrift.models.runtimes.text.transformers import TransformersLanguage
from tests.support.shadow.language_models import loaded, opening

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or a PyTorch without CUDA"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

VOCABULARY: Final = 4096
CLOSE: Final = 2e-4  # nats: FP32 in another order; TF32 is off by some 0.01


@pytest.fixture(scope="module")
def folder(language_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that is wide enough for products in TF32, with sharp answers."""
    directory = tmp_path_factory.mktemp("wide")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    loaded(language_folder)[1].save_pretrained(directory)
    return directory


def _opened(folder: Path, provider: Provider, *, prefix_bytes: int = 0) -> TransformersLanguage:
    request = opening(folder, prefix_bytes=prefix_bytes)
    return TransformersLanguage(msgspec.structs.replace(request, provider=provider))


def _turns(seed: int) -> list[TokenRow]:
    """Return the turns of a conversation, each of which begins with those before it."""
    said = tuple(np.random.default_rng(seed).integers(2, VOCABULARY, 1000).tolist())
    return [
        TokenRow(prompt=said[: end - 50], served=said[end - 50 : end], temperature=0.7)
        for end in range(200, 1001, 200)
    ]


def _check_same(found: Scores, expected: Scores) -> None:
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(found.unlikely, expected.unlikely, rtol=0, atol=CLOSE)
    assert found.tokens == expected.tokens


def test_scores_on_the_device_are_those_of_strict_fp32(folder: Path) -> None:
    """Answers of different lengths together: the same as on the CPU."""
    on_card, on_cpu = (_opened(folder, provider) for provider in (Provider.CUDA, Provider.CPU))
    assert on_card.provenance.provider == "cuda"
    rows = _turns(seed=1)
    for found, expected in zip(on_card.score(rows), on_cpu.score(rows), strict=True):
        _check_same(found, expected)


def test_beginnings_that_are_shared_on_the_device_change_no_score(folder: Path) -> None:
    """Turn after turn, as they come."""
    shared, unshared = (_opened(folder, Provider.CUDA, prefix_bytes=n_bytes) for n_bytes in (256 << 20, 0))
    for turn in _turns(seed=2):
        _check_same(shared.score([turn])[0], unshared.score([turn])[0])
    assert shared.n_computed < unshared.n_computed / 2


def test_a_closed_language_model_leaves_no_memory_on_the_device(folder: Path) -> None:
    """What libraries keep for the process they keep once, however often a reference is opened."""

    def left() -> int:
        language = _opened(folder, Provider.CUDA, prefix_bytes=256 << 20)
        language.score(_turns(seed=3))
        language.close()
        del language
        return int(torch.cuda.memory_allocated())

    first = left()
    assert [left() for _ in range(3)] == [first] * 3

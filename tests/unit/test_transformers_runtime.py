"""Language models in a folder: what is refused, and what a template makes of a chat."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from examples.generation.make import save
from quantdrift.core.errors import OperatorError, QuarantineError
from shadow.language import Asked
from shadow.opening import open_reference
from tests.language_models import loaded, opening, scored

pytestmark = pytest.mark.unit

SAID = ({"role": "user", "content": "what drifts?"},)


@pytest.fixture
def folder(language_folder: Path, tmp_path: Path) -> Path:
    """Return a copy of the model's folder, to be spoilt."""
    return Path(shutil.copytree(language_folder, tmp_path / "copy"))


def _configured(folder: Path, **members: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **members}))


def _stored(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def test_a_pickle_is_not_loaded(folder: Path) -> None:
    """It is code."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(OperatorError, match=r"pytorch_model\.bin"):
        open_reference(opening(folder))


def test_code_of_its_own_is_not_run(folder: Path) -> None:
    """Nor asked for."""
    _configured(folder, auto_map={"AutoModelForCausalLM": "own.Model"})
    (folder / "own.py").write_text("raise SystemExit")
    with pytest.raises(OperatorError, match="auto_map"):
        open_reference(opening(folder))


def test_what_is_quantised_is_no_reference(folder: Path) -> None:
    """It says so itself."""
    _configured(folder, quantization_config={"quant_method": "awq"})
    with pytest.raises(OperatorError, match="itself quantised"):
        open_reference(opening(folder))


def test_a_parent_in_bfloat16_must_be_named(folder: Path) -> None:
    """It is computed in float32 all the same, and recorded."""
    _stored(folder, lambda stored: {name: one.bfloat16() for name, one in stored.items()})
    _configured(folder, dtype="bfloat16")
    with pytest.raises(OperatorError, match="bfloat16"):
        open_reference(opening(folder))
    runtime = open_reference(opening(folder, reference={"allow_reduced_precision": ("bfloat16",)}))
    assert "bfloat16" in runtime.artefact.precision
    (scores,) = scored(runtime, Asked(messages=SAID, served="the mean"))
    assert np.isfinite(scores.logprobs).all()


def test_weights_that_are_missing_are_not_made_up(folder: Path) -> None:
    """`transformers` itself would go on with random ones."""
    _stored(folder, lambda stored: {k: v for k, v in stored.items() if "layers.1.mlp.up" not in k})
    with pytest.raises(OperatorError, match="would be made up"):
        open_reference(opening(folder))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json"]
)
def test_the_digest_is_that_of_everything_that_is_read(folder: Path, name: str) -> None:
    """Weights, tokenizer, template and configuration; a pin refuses any other."""
    digest = open_reference(opening(folder)).artefact.digest
    assert open_reference(opening(folder, reference={"digest": f"sha256:{digest}"})).artefact.digest == digest
    (folder / "README.md").write_text("not read")
    assert open_reference(opening(folder)).artefact.digest == digest
    path = folder / name
    if name.endswith(".safetensors"):
        _stored(folder, lambda stored: {key: one * 1.01 for key, one in stored.items()})
    else:
        path.write_text(path.read_text() + "\n")
    with pytest.raises(OperatorError, match="pins"):
        open_reference(opening(folder, reference={"digest": f"sha256:{digest}"}))


def test_a_folder_that_is_none_is_told(tmp_path: Path) -> None:
    """With what is to be there."""
    with pytest.raises(OperatorError, match="save_pretrained"):
        open_reference(opening(tmp_path / "nowhere"))


def test_a_chat_is_made_by_the_tokenizers_template(language_folder: Path) -> None:
    """Texts give what their tokens give; tools and arguments of the template count."""
    _, tokenizer = loaded(language_folder)
    runtime = open_reference(opening(language_folder))
    prompt = "<s>user: what drifts?</s><s>assistant: "
    ids = tuple(tokenizer(prompt)["input_ids"])
    served = tuple(tokenizer("the mean")["input_ids"])
    parts = ({"role": "user", "content": [{"type": "text", "text": "what drifts?"}]},)
    tool = {"type": "function", "function": {"name": "find"}}
    chat, of_parts, of_ids, other, with_tool = scored(
        runtime,
        Asked(messages=SAID, served="the mean"),
        Asked(messages=parts, served="the mean"),
        Asked(prompt_ids=ids, served_ids=served),
        Asked(messages=SAID, template={"add_generation_prompt": False}, served="the mean"),
        Asked(messages=SAID, tools=(tool,), served="the mean"),
    )
    np.testing.assert_allclose(chat.logprobs, of_ids.logprobs, atol=1e-5)
    np.testing.assert_allclose(of_parts.logprobs, of_ids.logprobs, atol=1e-5)
    assert np.abs(other.logprobs - chat.logprobs).max() > 1e-3
    assert np.abs(with_tool.logprobs - chat.logprobs).max() > 1e-3


@pytest.mark.parametrize(
    "asked",
    [
        Asked(messages=({"role": "user", "content": [{"type": "image_url"}]},), served="a"),
        Asked(messages=SAID, template={"chat_template_kwargs": {"tokenize": False}}, served="a"),
        Asked(
            messages=({"role": "user"},), template={"documents": 5, "x": 1}, prompt_ids=(10**6,), served="a"
        ),
        Asked(prompt="", served="a"),
    ],
    ids=["an image", "an argument of ours", "a token that is none", "no prompt"],
)
def test_what_the_model_cannot_read_is_refused(language_folder: Path, asked: Asked) -> None:
    """As a replay error of that exchange alone."""
    with pytest.raises(QuarantineError, match="replay"):
        scored(open_reference(opening(language_folder)), asked)


def _prepending() -> Any:
    """Return a tokenizer that puts a space before any text, as those of Llama 2 and Mistral do."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=[*"\n▁abcdefghijklmnopqrstuvwxyz"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["relay", "forwards", "relay", "forwards"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def test_a_space_that_a_tokenizer_prepends_is_not_doubled(language_folder: Path, tmp_path: Path) -> None:
    """An answer goes on where its prompt ends: together they are the tokens of the whole."""
    model, _ = loaded(language_folder)
    tokenizer = _prepending()
    runtime = open_reference(opening(save(tmp_path / "prepending", model, tokenizer)))
    whole = tokenizer("a relay forwards")["input_ids"]
    n_prompt = len(tokenizer("a relay")["input_ids"])
    (scores,) = scored(runtime, Asked(prompt="a relay", served=" forwards"))
    assert scores.ids == tuple(whole[n_prompt:])


def test_a_uniform_model_is_as_likely_everywhere(language_folder: Path, tmp_path: Path) -> None:
    """Each token costs the logarithm of the vocabulary."""
    model, tokenizer = loaded(language_folder)
    torch.nn.init.zeros_(model.lm_head.weight)
    runtime = open_reference(opening(save(tmp_path / "uniform", model, tokenizer)))
    (scores,) = scored(runtime, Asked(prompt="a", served=" relay and a detector"))
    np.testing.assert_allclose(scores.logprobs, -math.log(model.config.vocab_size), rtol=1e-6)
    assert set(scores.ranks) == {1.0}


@pytest.mark.parametrize("bound", ["_LOGITS_BYTES", "_TOKENS"])
def test_rows_that_do_not_fit_together_are_computed_apart(
    language_folder: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """Memory for layers and logits is bounded, and the scores are the same, in the same order."""
    asked = [Asked(prompt="a" * n, served=" relay" * n) for n in (1, 5, 2, 9)]
    together = scored(open_reference(opening(language_folder)), *asked)
    monkeypatch.setattr(f"shadow.transformers_runtime.{bound}", 1)
    monkeypatch.setattr("shadow.transformers_runtime._PLACES", 2)
    apart = scored(open_reference(opening(language_folder)), *asked)
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)

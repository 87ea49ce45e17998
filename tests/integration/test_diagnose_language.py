"""`quantdrift diagnose` of a language model, as typed: a candidate folder, recorded prompts, and faults that are injected."""

import copy
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.random import default_rng

from tests.support.commands import invoked
from tests.support.shadow.language_models import loaded, polyglot, rounded_in_blocks
from tests.support.shared import made_once

pytestmark = pytest.mark.integration

CONFIG = """
[shadow]
provider = "cpu"
threads = 1
[capture]
protocols = ["openai-chat"]
headers = ["x-language"]
[[models]]
name = "polyglot"
task = "generation"
[models.budget]
divergence = 0.02
[[models.references]]
runtime = "transformers"
path = "reference"
[[slices]]
name = "language"
header = "x-language"
values = ["en", "de"]
"""
N = 70
EMBEDDING = "model.embed_tokens.weight"
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a reference, a configuration and a recording of two languages."""
    from quantdrift.demo.text.sentences import Language, draw

    folder = tmp_path_factory.mktemp("polyglot")
    (folder / "reference").symlink_to(made_once(tmp_path_factory, "polyglot", polyglot))
    (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
    rng = default_rng(7)
    lines = []
    for language in (Language.EN, Language.DE):
        for _ in range(N):
            said = draw(language, rng)
            asked = [{"role": "user", "content": said.question}]
            lines.append({"language": language.value, "messages": asked, "answer": said.answer})
    (folder / "recorded.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def _candidate(folder: Path, name: str, change: Callable[[Weights, Weights], None]) -> str:
    """Write a candidate with weights of four bits that are changed further, and return its name."""
    model, tokenizer = loaded(folder / "reference")
    quantised = copy.deepcopy(model)
    weights = dict(quantised.named_parameters())
    with torch.no_grad():
        for weight in weights.values():
            if weight.dim() == 2:
                weight.copy_(rounded_in_blocks(weight))
        change(weights, dict(model.named_parameters()))
    for each in (quantised, tokenizer):
        each.save_pretrained(folder / name)
    return name


def _tokens_of_one_language(folder: Path) -> list[int]:
    """Return the tokens that the German lines alone have."""
    _, tokenizer = loaded(folder / "reference")
    ids: dict[str, set[int]] = {"en": set(), "de": set()}
    for line in map(json.loads, (folder / "recorded.jsonl").read_text().splitlines()):
        ids[line["language"]] |= {*tokenizer(line["messages"][0]["content"] + line["answer"])["input_ids"]}
    return sorted(ids["de"] - ids["en"])


def _diagnosed(folder: Path, candidate: str, *more: str) -> subprocess.CompletedProcess[str]:
    arguments = ("--slice=language=de", f"--candidate={candidate}", "--inputs=recorded.jsonl", *more)
    return invoked("diagnose", *arguments, directory=folder)


def test_rows_of_one_language_are_named(folder: Path) -> None:
    """Signs alone in the rows of tokens that only German has: the table is named, with its rows and how often the slice has them."""
    rows = _tokens_of_one_language(folder)

    def signs(weights: Weights, raw: Weights) -> None:
        row = raw[EMBEDDING][rows]
        weights[EMBEDDING][rows] = row.sign() * row.abs().mean(dim=1, keepdim=True)

    done = _diagnosed(folder, _candidate(folder, "rows", signs), "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    (layer,) = found["blamed"]
    assert layer["layer"] == "model.embed_tokens"
    assert layer["heals"] > 0.7
    assert layer["left"] < 0.02 < found["divergence"]
    table = layer["differing"][0]["rows"]
    assert table["n"] == pytest.approx(len(rows), rel=0.1)
    assert table["of_slice"] > 0.2
    assert table["elsewhere"] == 0
    assert found["copied"] == pytest.approx(found["divergence"], rel=1e-3)


def test_a_matrix_of_two_bits_is_named(folder: Path) -> None:
    """With its layer, what is wrong with it, and what to do."""
    name = "model.layers.1.mlp.up_proj.weight"

    def coarse(weights: Weights, raw: Weights) -> None:
        weights[name].copy_(rounded_in_blocks(raw[name], bits=2))

    (folder / "tight.toml").write_text(CONFIG.replace("divergence = 0.02", "divergence = 0.006"))
    done = _diagnosed(folder, _candidate(folder, "coarse", coarse), "--config=tight.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Cause: the matrix {name}." in done.stdout
    assert "distinct values among 32 neighbours" in done.stdout
    assert "Other slices are damaged, too" in done.stdout


def test_a_sound_candidate_has_no_cause(folder: Path) -> None:
    """It is within its budget; with a budget below its rounding no layer stands out, either."""
    sound = _candidate(folder, "sound", lambda _, __: None)
    within = _diagnosed(folder, sound)
    assert within.returncode == 3, within.stdout + within.stderr
    assert "Cause: within budget." in within.stdout
    (folder / "strict.toml").write_text(CONFIG.replace("divergence = 0.02", "divergence = 0.00001"))
    beyond = _diagnosed(folder, sound, "--config=strict.toml")
    assert beyond.returncode == 3, beyond.stdout + beyond.stderr
    assert "Cause: none of the layers." in beyond.stdout


def test_a_candidate_of_another_checkpoint_is_refused(folder: Path) -> None:
    """By its weights, whether these are rounded to eight bits or not at all."""
    generator = torch.Generator().manual_seed(1)

    def trained_on(weights: Weights, raw: Weights) -> None:
        for name, weight in raw.items():
            if weight.dim() == 2:
                moved = weight + 0.2 * weight.std() * torch.randn(weight.shape, generator=generator)
                weights[name].copy_(rounded_in_blocks(moved, bits=8) if "mlp" in name else moved)

    done = _diagnosed(folder, _candidate(folder, "earlier", trained_on))
    assert done.returncode == 2
    assert "The candidate was not made from this reference" in done.stderr


def test_what_a_person_must_change_is_said(folder: Path) -> None:
    """Exit code 2: a file in place of a folder, an option of other models, weights that do not differ."""
    assert "is no folder: of a language model" in _diagnosed(folder, "config.toml").stderr
    assert (
        "--picture are not for language models" in _diagnosed(folder, "reference", "--picture=a.svg").stderr
    )
    assert "no weight of the candidate differs" in _diagnosed(folder, "reference").stderr

"""`quantdrift gate` on recorded prompts of a language model, as typed: a folder or a server as the candidate."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import invoked
from tests.support.shadow.vllm_like import VllmLike, serving

pytestmark = pytest.mark.integration

CONFIG = """
[shadow]
provider = "cpu"
[capture]
protocols = ["openai-chat", "openai-completions"]
headers = ["x-topic"]
[[models]]
name = "digits"
task = "generation"
[models.generation]
tie = 0.05
own_tokens = 8
[models.budget]
signals = { changed-tokens = 0.2 }
cap = 0.5
[[models.references]]
runtime = "transformers"
path = "reference"
[[slices]]
name = "topic"
header = "x-topic"
values = ["law", "rare"]
"""
WORDS = (Path(__file__).resolve().parents[2] / "LICENSE").read_text(encoding="utf-8").split()
N = 24


def _lines(topic: str, begin: int) -> list[dict[str, Any]]:
    """Return prompts of one topic with the answers that were recorded: no two alike."""
    found = []
    for number in range(N):
        at = begin + 7 * number
        prompt, answer = " ".join(WORDS[at : at + 4]), " " + " ".join(WORDS[at + 4 : at + 10])
        asked = {"prompt": prompt} if number % 2 else {"messages": [{"role": "user", "content": prompt}]}
        found.append({"topic": topic, "answer": answer, **asked})
    return found


def _written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(language_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a configuration, the reference, two candidates, and a recording."""
    from transformers import AutoTokenizer

    from examples.generation.make import save
    from tests.support.shadow.language_models import loaded, rounded

    folder = tmp_path_factory.mktemp("prompts")
    (folder / "reference").symlink_to(language_folder)
    model, _ = loaded(language_folder)
    tokenizer = AutoTokenizer.from_pretrained(language_folder)
    save(folder / "int4", rounded(model), tokenizer)
    save(folder / "int2", rounded(model, levels=1), tokenizer)
    save(folder / "bf16", model.bfloat16(), tokenizer)
    _written(folder / "rec.jsonl", [*_lines("law", 0), *_lines("rare", 500)])
    (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
    return folder


def _gate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return invoked("gate", *arguments, directory=folder)


def test_a_candidate_in_a_folder_is_judged_by_answers(folder: Path) -> None:
    """BF16 hardly diverges and passes; weights of two bits fail. The tokens stand beside the answers, of which none need be unchanged."""
    passed = _gate(folder, "bf16", "--inputs=rec.jsonl", "--json")
    assert passed.returncode == 0, passed.stdout + passed.stderr
    record = json.loads(passed.stdout)
    answers = {(each["slice"], each["question"]): each for each in record["slices"]}
    assert {kind for _, kind in answers} == {"changed-tokens", "divergence"}
    assert answers["topic=rare", "divergence"]["n"] == N
    assert record["tokens"]["all"] == record["tokens"]["topic=law"] + record["tokens"]["topic=rare"] > 10 * N
    of_tokens = record["divergence_of_tokens"]["all"]
    assert of_tokens["tokens"] == record["tokens"]["all"]
    assert of_tokens["median"] <= of_tokens["p99"] <= of_tokens["p999"] < 0.1
    failed = _gate(folder, "int2", "--inputs=rec.jsonl")
    assert failed.returncode == 3, failed.stdout
    assert " tokens " in failed.stdout.splitlines()[0]
    assert "Divergence of tokens, topic=rare: median " in failed.stdout


def test_a_prompt_without_an_answer_is_answered_by_the_candidate(folder: Path, tmp_path: Path) -> None:
    """A prompt that comes twice counts once, whatever it is answered."""
    lines = [{"topic": "law", "prompt": " ".join(WORDS[at : at + 5])} for at in (0, 40, 80, 80)]
    done = _gate(folder, "bf16", f"--inputs={_written(tmp_path / 'rec.jsonl', lines)}", "--json")
    assert done.returncode == 4, done.stderr
    record = json.loads(done.stdout)
    assert record["slices"][0]["n"] == 3, record["slices"]
    assert record["n_copies"] == 1
    assert 4 <= record["tokens"]["all"] <= 4 * 8


def test_a_candidate_that_generates_is_asked_for_broken_answers_and_unlikely_tokens(
    folder: Path, tmp_path: Path
) -> None:
    """Weights of one bit draw what the reference would hardly say; JSON that no grammar held together is not known to be broken.

    The answers are drawn with seeds that follow from the prompts: the same ones in each run.
    """
    drawn = {"temperature": 1.0, "max_tokens": 8}
    lines = [
        {"topic": "law", "prompt": " ".join(WORDS[at : at + 5]), "answer": " by", "options": drawn}
        for at in range(0, 200, 5)
    ]
    lines[-1]["options"] = {**drawn, "response_format": {"type": "json_object"}}
    given = f"--inputs={_written(tmp_path / 'rec.jsonl', lines)}"
    found = {}
    for candidate in ("bf16", "int2"):
        record = json.loads(_gate(folder, candidate, given, "--generate=40", "--json").stdout)
        found[candidate] = {
            each["question"]: each for each in record["slices"] if each["slice"] == "topic=law"
        }
    assert set(found["bf16"]) == {"changed-tokens", "divergence", "broken-answers", "unlikely-tokens"}
    assert 30 < found["bf16"]["broken-answers"]["n"] < len(lines)
    assert found["bf16"]["unlikely-tokens"]["n"] > 30
    assert found["bf16"]["unlikely-tokens"]["mean"] < 0.1 < found["int2"]["unlikely-tokens"]["mean"]
    few = json.loads(_gate(folder, "bf16", given, "--generate=5", "--json").stdout)
    of_law = [
        each["n"]
        for each in few["slices"]
        if each["question"] == "broken-answers" and each["slice"] == "topic=law"
    ]
    assert of_law[0] in {4, 5}


def test_a_candidate_that_repeats_itself_is_broken_where_the_reference_does_not(
    folder: Path, tmp_path: Path
) -> None:
    """It says eight letters in a circle until the limit. The reference, asked the same, ends otherwise; as its own candidate it is sound."""
    import torch
    from transformers import AutoTokenizer

    from examples.generation.make import save
    from tests.support.shadow.language_models import loaded

    model, _ = loaded(folder / "reference")
    circle = torch.arange(67, 75)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        said = torch.nn.functional.normalize(model.get_input_embeddings().weight[circle], dim=1)
        model.lm_head.weight.zero_()
        model.lm_head.weight[circle.roll(-1)] = 40 * said
    save(folder / "circle", model, AutoTokenizer.from_pretrained(folder / "reference"))
    long = folder / "long.toml"
    long.write_text(CONFIG.replace("own_tokens = 8", "own_tokens = 230"), encoding="utf-8")
    lines = [
        {"topic": "law", "prompt": WORDS[at], "answer": " by", "options": {"temperature": 1.0}}
        for at in (0, 5, 9, 14, 20, 26)
    ]
    given = f"--inputs={_written(tmp_path / 'rec.jsonl', lines)}"
    found = {}
    for candidate in ("circle", "bf16"):
        done = _gate(folder, candidate, given, "--generate=6", "--json", f"--config={long}")
        record = json.loads(done.stdout)
        found[candidate] = {
            each["question"]: each for each in record["slices"] if each["slice"] == "topic=law"
        }["broken-answers"]
    assert (found["circle"]["n"], found["bf16"]["n"]) == (6, 6)
    assert found["circle"]["mean"] == 1.0
    assert found["bf16"]["mean"] == 0.0


def test_a_candidate_at_a_server_is_judged(
    folder: Path, fp32: VllmLike, int8: VllmLike, tmp_path: Path
) -> None:
    """It scores the answers; the reference may be at a server, too, and says the same as from its folder."""
    path = _written(tmp_path / "rec.jsonl", _lines("law", 0)[:4])
    with serving(int8) as address, serving(fp32) as reference:
        config = CONFIG.replace(
            'runtime = "transformers"\npath = "reference"', f'runtime = "openai"\nurl = "{reference}"'
        )
        (folder / "servers.toml").write_text(config, encoding="utf-8")
        done = _gate(folder, address, f"--inputs={path}", "--json")
        both = _gate(folder, address, f"--inputs={path}", "--json", "--config=servers.toml")
    assert done.returncode in (3, 4), done.stderr
    record = json.loads(done.stdout)
    divergence = next(each for each in record["slices"] if each["question"] == "divergence")
    assert divergence["n"] == 4
    assert 0 < divergence["mean"] < 0.5
    at_servers = next(each for each in json.loads(both.stdout)["slices"] if each["question"] == "divergence")
    assert at_servers["mean"] == pytest.approx(divergence["mean"], rel=0.05)


@pytest.mark.parametrize(
    ("line", "arguments", "said"),
    [
        ({"topic": "law"}, (), "line 1: give one of `prompt`, `messages` and `prompt_ids`"),
        ({"prompt": "a", "answer": " b"}, (), "has no attribute for the slices `topic`"),
        (
            {"prompt": "a", "answer": " b", "topic": [1]},
            (),
            "`topic` is neither a part of the prompt nor an attribute",
        ),
        (
            {"prompt": "a", "answer": " b", "topic": "law"},
            ("--against=bf16/config.json",),
            "--against is not for language models",
        ),
        (
            {"prompt": "a", "answer": " b", "topic": "law"},
            ("--against=bf16/config.json", "--margin=0.01"),
            "--margin is about changed answers, by which model `digits` is not judged",
        ),
    ],
)
def test_what_a_person_must_change_is_said(
    folder: Path, line: dict[str, Any], arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """Exit code 2, and the line."""
    done = _gate(folder, "bf16", f"--inputs={_written(tmp_path / 'rec.jsonl', [line])}", *arguments)
    assert done.returncode == 2
    assert said in done.stderr

"""`quantdrift quantise` on recorded inputs, as typed, on real networks."""

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.repair.network import OUTPUT, drawn, pages, write
from benchmarks.repair.shapes import Shape, write_shape
from quantdrift.facts.quantised import Family, Ranges, Recipe
from quantdrift.release.quantise.recipes import Quantiser
from tests.support.commands import invoked

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # minutes on a busy machine

CONFIG = f"""
[shadow]
provider = "cpu"
[capture]
headers = ["x-scanner"]
[[models]]
name = "digits"
output = "{OUTPUT}"
output_kind = "logits"
[models.budget]
flip = 0.05
[[models.references]]
path = "fp32.onnx"
[[slices]]
name = "scanner"
header = "x-scanner"
values = ["office", "bright"]
"""
N = 500
BRIGHT = 30
"""Gain of the bright pages: an INT8 range that holds them leaves a few levels for the others."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a configuration, two networks, and recordings of office pages and of bright ones."""
    folder = tmp_path_factory.mktemp("quantise")
    write(folder / "fp32.onnx", pages(), 1)
    write_shape(Shape.TRANSFORMER, folder / "transformer.onnx", pages(), 1)
    rng = np.random.default_rng(3)
    office, bright = (drawn(pages().held_out, N, rng) for _ in range(2))
    scanner = np.repeat(["office", "bright"], N)
    np.savez(folder / "alike.npz", image=np.concatenate([office, bright]), scanner=scanner)
    np.savez(folder / "rec.npz", image=np.concatenate([office, BRIGHT * bright]), scanner=scanner)
    np.savez(
        folder / "few.npz",
        image=np.concatenate([office[:60], bright[:60]]),
        scanner=np.repeat(["office", "bright"], 60),
    )
    (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
    (folder / "transformer.toml").write_text(
        CONFIG.replace("fp32.onnx", "transformer.onnx"), encoding="utf-8"
    )
    return folder


def _quantise(folder: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return invoked("quantise", f"--out={out}", *arguments, directory=folder)


def _record(out: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / "quantised.json").read_bytes())
    return record


def test_the_cheapest_that_passes_is_written_and_passes_the_gate(folder: Path, tmp_path: Path) -> None:
    """The gate leaves out what the file was made from, and passes it on the rest; the picture is there."""
    out, picture = tmp_path / "out", tmp_path / "curve.svg"
    done = _quantise(folder, out, "--inputs=alike.npz", "--max-recipes=10", f"--picture={picture}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass, the cheapest" in done.stdout
    assert f"Written: {out / 'quantised.onnx'}" in done.stdout
    record = _record(out)
    chosen = record["recipes"][record["chosen"]]
    content = (out / "quantised.onnx").read_bytes()
    assert record["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert chosen["bytes"] == len(content) < (folder / "fp32.onnx").stat().st_size
    passed = [
        record["recipes"][number]
        for number in record["judged"]
        if record["recipes"][number]["gate"]["verdict"] == "pass"
    ]
    assert chosen["bytes"] == min(each["bytes"] for each in passed)
    assert picture.read_text().startswith("<?xml")
    judged = invoked("gate", str(out / "quantised.onnx"), "--inputs=alike.npz", directory=folder)
    assert judged.returncode == 0, judged.stdout
    n_worked = sum(record["inputs"][part] for part in ("calibration", "choosing"))
    assert f"{n_worked} items do not count, because the candidate was calibrated on them" in judged.stderr


def test_a_slice_that_every_recipe_damages_is_named(folder: Path, tmp_path: Path) -> None:
    """Static INT8 alone cannot serve both kinds of pages: exit code 3, and nothing is written that somebody might deploy."""
    out = tmp_path / "out"
    done = _quantise(folder, out, "--inputs=rec.npz", "--max-recipes=2")
    assert done.returncode == 3, done.stdout
    assert "No recipe is good enough on every slice: scanner=office stops" in done.stdout
    assert not (out / "quantised.onnx").exists()
    assert _record(out)["verdict"] == "fail"


def test_too_few_inputs_are_said_with_their_number(folder: Path, tmp_path: Path) -> None:
    """At once, and in the end: exit code 4; the closest file is written for the gate on live traffic."""
    out = tmp_path / "out"
    done = _quantise(folder, out, "--inputs=few.npz", "--max-recipes=3", "--json")
    assert done.returncode == 4, done.stderr
    assert (
        "of the 76 inputs in the half that judges which a pass needs where no answer changes" in done.stderr
    )
    record = json.loads(done.stdout)
    assert record["verdict"] == "insufficient"
    assert (out / record["file"]).exists()


def test_a_transformer_by_time(folder: Path, tmp_path: Path) -> None:
    """The chosen model answers, and takes less processor time than any other that passed."""
    done = _quantise(
        folder,
        tmp_path / "out",
        "--inputs=alike.npz",
        "--config=transformer.toml",
        "--max-recipes=7",
        "--prefer=time",
    )
    record = _record(tmp_path / "out")
    # Which recipes are judged depends on the times that were measured: the last of them may need more inputs.
    assert done.returncode in ((0,) if record["chosen"] is not None else (3, 4)), done.stdout
    times = [
        each["time_ratio"] for each in record["recipes"] if (each["gate"] or {}).get("verdict") == "pass"
    ]
    if times:
        assert record["recipes"][record["chosen"]]["time_ratio"] == min(times)


def test_layers_that_keep_the_budget_in_fp32_are_tried_in_fp16(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe that follows has the same layers and a smaller file. One recipe alone is offered, to be quick."""
    base = Recipe(
        family=Family.STATIC,
        per_channel=True,
        bits=7,
        ranges=Ranges.MOST,
        operators=("Conv", "Gemm", "MatMul"),
    )
    monkeypatch.setattr(Quantiser, "recipes", lambda _: ([base], []))
    office, bright = np.split(np.load(folder / "alike.npz")["image"], 2)
    recorded = {"image": np.concatenate([office, 3 * bright]), "scanner": np.repeat(["office", "bright"], N)}
    np.savez(tmp_path / "rec.npz", **recorded)  # type: ignore[arg-type] # of numpy
    (folder / "tight.toml").write_text(CONFIG.replace("flip = 0.05", "flip = 0.015"), encoding="utf-8")
    out = tmp_path / "out"
    done = _quantise(folder, out, f"--inputs={tmp_path / 'rec.npz'}", "--config=tight.toml")
    recipes = _record(out)["recipes"]
    halved = [number for number, each in enumerate(recipes) if "in FP16" in each["name"]]
    assert halved, done.stdout
    kept = [each for each in recipes[: halved[0]] if each["within_budget"] and "in FP32" in each["name"]]
    (same,) = [
        each for each in kept if each["recipe"]["left_out"] == recipes[halved[0]]["recipe"]["left_out"]
    ]
    assert recipes[halved[0]]["bytes"] < same["bytes"]
    assert not recipes[halved[0]]["problem"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("transformer.onnx",), "is not the reference of model `digits`"),
        (("--slice=scaner",), "has no such rule in [[slices]]; it has `all`, `scanner`"),
        (("--picture=curve.pdf",), "name a file that ends in .svg or .png"),
    ],
)
def test_what_a_person_must_change_is_said(
    arguments: tuple[str, ...], said: str, folder: Path, tmp_path: Path
) -> None:
    """Exit code 2, and one sentence."""
    done = _quantise(folder, tmp_path / "out", "--inputs=few.npz", *arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_nothing_is_overwritten(folder: Path, tmp_path: Path) -> None:
    """A folder that is not empty is refused before anything runs."""
    (tmp_path / "kept").write_text("kept", encoding="utf-8")
    done = _quantise(folder, tmp_path, "--inputs=few.npz")
    assert done.returncode == 2
    assert "is not empty" in done.stderr

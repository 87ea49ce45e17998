"""`quantdrift diagnose` and `repair`, as typed, on weights in blocks, on several outputs, and on texts of different lengths."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks.repair.kinds import dynamic, in_blocks, inject
from benchmarks.repair.network import INPUT, OUTPUT, drawn, pages
from benchmarks.repair.shapes import Shape, write_shape
from quantdrift.models.tensors.arrays import Array
from tests.support.commands import invoked

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # minutes on a busy machine

CONFIG = """
[shadow]
provider = "cpu"
[[models]]
name = "digits"
{task}
[models.budget]
flip = 0.02
[[models.references]]
path = "faulty-reference.onnx"
"""
CLASSES = f'output = "{OUTPUT}"\noutput_kind = "logits"'
ASKED = ("--slice=all", "--candidate=faulty.onnx", "--inputs=rec.npz")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a perceptron, a candidate of it in blocks with one fault, and a recording."""
    folder = tmp_path_factory.mktemp("forms")
    write_shape(Shape.PERCEPTRON, folder / "fp32.onnx", pages())
    in_blocks(folder / "fp32.onnx", folder / "sound.onnx", bits=8)
    images = drawn(pages().held_out, 3_000, np.random.default_rng(3))
    site, _ = inject(
        folder / "sound.onnx",
        folder / "fp32.onnx",
        images[:500],
        np.random.default_rng(3),
        folder / "faulty.onnx",
    )
    (folder / "site").write_text(site, encoding="utf-8")
    np.savez(folder / "rec.npz", allow_pickle=False, **{INPUT: images})
    (folder / "config.toml").write_text(CONFIG.format(task=CLASSES), encoding="utf-8")
    return folder


def test_a_fault_in_blocks_is_named_and_repaired(folder: Path, tmp_path: Path) -> None:
    """The words are of weights, nothing is calibrated, and the file with one product in FP32 passes the gate."""
    site = (folder / "site").read_text(encoding="utf-8")
    said = invoked("diagnose", *ASKED, directory=folder)
    assert said.returncode == 0, said.stderr
    assert f"By the files alone, {site}: " in said.stdout
    assert "The candidate has no activation range that can be switched" in said.stdout
    assert "QuantFormat" not in said.stdout
    done = invoked("repair", *ASKED, f"--out={tmp_path / 'out'}", directory=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no activation is quantised, so there is no range" in done.stdout
    record = json.loads((tmp_path / "out" / "repairs.json").read_bytes())
    best = next(repair for repair in record["repairs"] if repair["result"] == "passes")
    assert best["sites"] == [site]
    kinds = [node.op_type for node in onnx.load(tmp_path / "out" / best["file"]).graph.node]
    assert kinds.count("MatMulNBits") == 3


def test_several_outputs_are_compared_together(folder: Path) -> None:
    """A task that reads two outputs of an item is diagnosed by both."""
    for name in ("faulty.onnx", "faulty-reference.onnx"):
        model = onnx.load(folder / name)
        model.graph.output.append(
            helper.make_tensor_value_info("end_norm", TensorProto.FLOAT, ["pages", 128])
        )
        onnx.save(model, folder / f"two-{name}")
    task = f'task = "tensor"\ntolerance = 0.1\n[models.tensor]\noutputs = ["{OUTPUT}", "end_norm"]'
    text = CONFIG.format(task=task).replace("faulty-reference.onnx", "two-faulty-reference.onnx")
    (folder / "two.toml").write_text(text, encoding="utf-8")
    asked = ("--slice=all", "--candidate=two-faulty.onnx", "--inputs=rec.npz", "--config=two.toml", "--json")
    said = invoked("diagnose", *asked, directory=folder)
    assert said.returncode == 0, said.stderr
    site = (folder / "site").read_text(encoding="utf-8")
    assert json.loads(said.stdout)["blamed"][0]["site"] == site


def test_texts_of_different_lengths_are_read_from_files_of_one_length_each(tmp_path: Path) -> None:
    """Token ids with an attention mask, in two files; without a mask the command says what is missing."""
    _texts(tmp_path / "fp32.onnx")
    dynamic(tmp_path / "fp32.onnx", tmp_path / "int8.onnx")
    text = CONFIG.format(task=CLASSES).replace("faulty-reference.onnx", "fp32.onnx")
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    (tmp_path / "rec").mkdir()
    rng = np.random.default_rng(1)
    for length in (4, 7):
        tokens = rng.integers(1, 50, (60, length))
        np.savez(tmp_path / "rec" / f"{length}.npz", input_ids=tokens, attention_mask=np.ones_like(tokens))
    asked = ("--slice=all", "--candidate=int8.onnx", "--inputs=rec", "--json")
    said = invoked("diagnose", *asked, directory=tmp_path)
    found = json.loads(said.stdout)
    assert (said.returncode, found["n_items"]) == (3, 120), said.stderr
    assert found["verdict"] == "no cause found"


def _texts(path: Path) -> None:
    """Write a network that averages the rows of a table at tokens that are not masked."""
    rng = np.random.default_rng(1)
    stored: dict[str, Array] = {
        "table": rng.normal(0, 1, (50, 16)).astype(np.float32),
        "weight": rng.normal(0, 1, (16, 5)).astype(np.float32),
        "last": np.array([2], np.int64),
        "tokens": np.array([1], np.int64),
    }
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"], name="embed"),
        helper.make_node("Cast", ["attention_mask"], ["mask"], name="mask", to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["wide"], name="widen"),
        helper.make_node("Mul", ["rows", "wide"], ["kept"], name="keep"),
        helper.make_node("ReduceSum", ["kept", "tokens"], ["sum"], name="sum", keepdims=0),
        helper.make_node("ReduceSum", ["wide", "tokens"], ["count"], name="count", keepdims=0),
        helper.make_node("Div", ["sum", "count"], ["mean"], name="mean"),
        helper.make_node("MatMul", ["mean", "weight"], [OUTPUT], name="classify"),
    ]
    graph = helper.make_graph(
        nodes,
        "texts",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "t"])
            for name in ("input_ids", "attention_mask")
        ],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)

"""`quantdrift quantise` of models that take one item, and of models that take texts, as typed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.commands import invoked

pytestmark = pytest.mark.integration

CONFIG = """
[shadow]
provider = "cpu"
[capture]
headers = ["x-site"]
[[models]]
name = "small"
output = "logits"
output_kind = "logits"
{more}
[models.budget]
flip = 0.1
[[models.references]]
path = "fp32.onnx"
[[slices]]
name = "site"
header = "x-site"
values = ["a", "b"]
"""
N = 240
WIDTH, HIDDEN = 64, 512
SITE = np.repeat(["a", "b"], N)


def _layers(width: int) -> tuple[list[Any], list[Any]]:
    """Return two layers from `x` to `logits`, and their weights."""
    rng = np.random.default_rng(1)
    first = rng.normal(0, width**-0.5, (width, HIDDEN)).astype(np.float32)
    last = rng.normal(0, HIDDEN**-0.5, (HIDDEN, 10)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["product"], name="first_product"),
        helper.make_node("Relu", ["product"], ["hidden"], name="relu"),
        helper.make_node("MatMul", ["hidden", "last"], ["logits"], name="last_product"),
    ]
    return nodes, [numpy_helper.from_array(first, "first"), numpy_helper.from_array(last, "last")]


def _saved(path: Path, nodes: list[Any], given: Any, dims: list[Any], stored: list[Any]) -> None:
    output = helper.make_tensor_value_info("logits", TensorProto.FLOAT, dims)
    graph = helper.make_graph(nodes, "small", [given], [output], stored)
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def _quantised(folder: Path) -> dict[str, Any]:
    done = invoked("quantise", "--out=out", "--inputs=recorded.npz", "--max-recipes=4", directory=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads((folder / "out" / "quantised.json").read_bytes())
    assert (folder / "out" / "quantised.onnx").stat().st_size < (folder / "fp32.onnx").stat().st_size
    return record


def test_a_model_without_a_dimension_of_items(tmp_path: Path) -> None:
    """Its items calibrate, choose and judge one by one."""
    nodes, stored = _layers(WIDTH)
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, WIDTH])
    _saved(tmp_path / "fp32.onnx", nodes, given, [1, 10], stored)
    values = np.random.default_rng(2).normal(0, 1, (2 * N, 1, WIDTH)).astype(np.float32)
    np.savez(tmp_path / "recorded.npz", x=values, site=SITE)
    (tmp_path / "config.toml").write_text(CONFIG.format(more="batched = false"), encoding="utf-8")
    record = _quantised(tmp_path)
    assert sum(record["inputs"].values()) <= 2 * N
    assert all(not each["problem"] for each in record["recipes"])


def test_a_model_of_texts(tmp_path: Path) -> None:
    """Words go in, and a table gives each a row."""
    rng = np.random.default_rng(3)
    words = [f"word{number}" for number in range(400)]
    nodes, stored = _layers(WIDTH)
    encoder = helper.make_node(
        "LabelEncoder",
        ["words"],
        ["numbers"],
        name="encoder",
        domain="ai.onnx.ml",
        keys_strings=words,
        values_int64s=list(range(len(words))),
        default_int64=0,
    )
    rows = helper.make_node("Gather", ["table", "numbers"], ["rows"], name="rows")
    mean = helper.make_node("ReduceMean", ["rows"], ["x"], name="mean", axes=[1], keepdims=0)
    table = rng.normal(0, 1, (len(words), WIDTH)).astype(np.float32)
    given = helper.make_tensor_value_info("words", TensorProto.STRING, ["items", 3])
    weights = [*stored, numpy_helper.from_array(table, "table")]
    _saved(tmp_path / "fp32.onnx", [encoder, rows, mean, *nodes], given, ["items", 10], weights)
    np.savez(tmp_path / "recorded.npz", words=rng.choice(words, (2 * N, 3)), site=SITE)
    (tmp_path / "config.toml").write_text(CONFIG.format(more=""), encoding="utf-8")
    record = _quantised(tmp_path)
    assert any(each["bytes"] and not each["problem"] for each in record["recipes"][1:])

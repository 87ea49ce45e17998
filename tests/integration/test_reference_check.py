"""`quantdrift config check` opens the references that are here, and compares the configuration with them."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantdrift.cli.release.reference_check import LARGE_BYTES
from tests.support.commands import invoked, started
from tests.support.shadow.onnx_models import BIAS, N_CLASSES, N_FEATURES, WEIGHT, linear_model, saved

pytestmark = pytest.mark.integration

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def _value(name: str, kind: int, *dims: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def _graph(
    nodes: list[onnx.NodeProto], outputs: list[onnx.ValueInfoProto], weights: dict[str, npt.NDArray[Any]]
) -> onnx.ModelProto:
    """Return a model that takes `features` : (items, 4), float32."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [_value("features", FLOAT, "n", N_FEATURES)],
        outputs,
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _classifier() -> onnx.ModelProto:
    """Return a classifier as the converters of scikit-learn and LightGBM export it: first the label, then probabilities."""
    node = helper.make_node(
        "LinearClassifier",
        ["features"],
        ["label", "probabilities"],
        domain="ai.onnx.ml",
        coefficients=WEIGHT.T.ravel().tolist(),
        intercepts=BIAS.tolist(),
        classlabels_ints=list(range(N_CLASSES)),
        multi_class=1,
        post_transform="SOFTMAX",
    )
    outputs = [_value("label", INT64, "n"), _value("probabilities", FLOAT, "n", N_CLASSES)]
    return _graph([node], outputs, {})


def _checked(directory: Path, text: str, *options: str, **variables: str) -> tuple[int, str]:
    """Return the exit code of `config check`, and what it prints."""
    (directory / "config.toml").write_text(text)
    done = invoked("config", "check", *options, directory=directory, **variables)
    return done.returncode, done.stdout + done.stderr


def _config(options: str = "", rest: str = "") -> str:
    return f'[[models]]\nname = "credit"\n{options}\n[[models.references]]\npath = "credit.onnx"\n{rest}'


def test_an_output_that_the_task_cannot_compare_is_named_with_the_one_to_set(tmp_path: Path) -> None:
    """The labels that an exported classifier gives first would quarantine every exchange."""
    saved(_classifier(), tmp_path / "credit.onnx")
    code, said = _checked(tmp_path, _config('output_kind = "probabilities"'))
    assert code == 2, said
    assert f"the reference {tmp_path / 'credit.onnx'} gives `label: int64[?]` (labels)" in said
    assert 'set output = "probabilities" (without it, the first output is compared)' in said
    code, said = _checked(tmp_path, _config('output_kind = "probabilities"\noutput = "probabilities"'))
    assert code == 0, said
    assert "float32, opset" in said


def test_all_that_does_not_fit_is_listed_at_once(tmp_path: Path) -> None:
    """A misspelt output, and a slice by an input that the model does not have; nearest names are proposed."""
    saved(_classifier(), tmp_path / "credit.onnx")
    rule = '[[slices]]\nname = "income"\nfeature = "mean"\ninput = "feature"\nedges = [1]\n'
    code, said = _checked(tmp_path, _config('output = "probabilites"', rule))
    assert code == 2
    assert said.startswith("quantdrift: the configuration does not fit its references:\n  - ")
    assert "the output `probabilites` is not one of the reference" in said
    assert "did you mean `probabilities`?" in said
    assert "slices `income`: the input `feature` is not one of the models: did you mean `features`?" in said
    code, said = _checked(tmp_path, _config('output = "probabilites"', rule), "--no-references")
    assert code == 0, said


@pytest.mark.parametrize(
    ("kind", "output", "operator"),
    [
        ("logits", "probabilities", "Softmax"),
        pytest.param("probabilities", "logits", "Gemm", marks=pytest.mark.release),
    ],
)
def test_an_output_kind_that_contradicts_the_last_operator_is_refused(
    tmp_path: Path, kind: str, output: str, operator: str
) -> None:
    """Probabilities that are read as logits hardly diverge, and logits are no probabilities."""
    nodes = [
        helper.make_node("Gemm", ["features", "w", "b"], ["product"]),
        helper.make_node("Identity", ["product"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"]),
    ]
    outputs = [_value(name, FLOAT, "n", N_CLASSES) for name in ("logits", "probabilities")]
    saved(_graph(nodes, outputs, {"w": WEIGHT, "b": BIAS}), tmp_path / "credit.onnx")
    code, said = _checked(tmp_path, _config(f'output = "{output}"\noutput_kind = "{kind}"'))
    right = "probabilities" if kind == "logits" else "logits"
    assert code == 2, said
    assert f"output_kind is `{kind}`, but the output `{output}` of the reference" in said
    assert f"ends in {operator}, which gives {right}" in said
    assert f'Set output_kind = "{right}"' in said
    code, said = _checked(tmp_path, _config(f'output = "{output}"\noutput_kind = "{right}"'))
    assert code == 0, said


def test_a_numeric_feature_of_a_text_is_refused(tmp_path: Path) -> None:
    """The slice would stay empty."""
    body = [
        helper.make_node("Shape", ["text"], ["size"]),
        helper.make_node("Slice", ["size", "zero", "one"], ["items"]),
        helper.make_node("Concat", ["items", "four"], ["shape"], axis=0),
        helper.make_node("ConstantOfShape", ["shape"], ["vector"]),
    ]
    graph = helper.make_graph(
        body,
        "text",
        [_value("text", TensorProto.STRING, "n", 1)],
        [_value("vector", FLOAT, "n", N_FEATURES)],
        [
            numpy_helper.from_array(np.array([value], dtype=np.int64), name)
            for name, value in (("zero", 0), ("one", 1), ("four", N_FEATURES))
        ],
    )
    opsets = [helper.make_opsetid("", 20)]
    saved(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "credit.onnx")
    for feature, expected in (("contrast", 2), ("length", 0)):
        rule = f'[[slices]]\nname = "words"\nfeature = "{feature}"\nedges = [1]\n'
        code, said = _checked(tmp_path, _config('task = "embedding"', rule))
        assert code == expected, said
        assert ("slices `words`: `text` of the models is text" in said) is (code == 2)


def test_a_file_that_ends_the_process_is_named_and_the_next_one_is_checked(tmp_path: Path) -> None:
    """A factory may end the process that loads it; the command goes on, and lists what is wrong with the others."""
    (tmp_path / "dying_factory.py").write_text("import os\n\n\ndef made():\n    os._exit(9)\n")
    from safetensors.numpy import save_file

    save_file({"w": WEIGHT}, tmp_path / "weights.safetensors")
    saved(linear_model(), tmp_path / "credit.onnx")
    text = (
        '[[models]]\nname = "dying"\n[[models.inputs]]\nname = "x"\ndatatype = "FP32"\nshape = [-1, 4]\n'
        '[[models.references]]\nruntime = "torch"\npath = "weights.safetensors"\nfactory = "dying_factory:made"\n'
        + _config('output = "logitz"')
    )
    (tmp_path / "config.toml").write_text(text)
    done = started(
        "config", "check", directory=tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), str(Path.cwd())])
    )
    assert done.returncode == 2, done.stderr
    assert "models `dying`: loading the reference" in done.stderr
    assert "ended its process (exit code 9)" in done.stderr
    assert "did you mean `logits`?" in done.stderr


def test_a_large_reference_is_opened_only_on_request(tmp_path: Path) -> None:
    """A note says so; the request opens it, and here finds that it is no model."""
    with (tmp_path / "credit.onnx").open("wb") as file:
        file.truncate(LARGE_BYTES)  # without blocks on the disk
    code, said = _checked(tmp_path, _config())
    assert code == 0, said
    assert "of model `credit` was not opened" in said
    assert "it has 1.0 GiB; --references opens it" in said


def test_a_hash_without_a_key_is_found_before_the_start(tmp_path: Path) -> None:
    """It is a note, since the key may be where the sidecar runs and not here."""
    text = '[capture]\nheaders = ["x-user"]\nhmac = ["header.x-user"]\n'
    code, said = _checked(tmp_path, text, QUANTDRIFT_HMAC_KEY="")
    assert code == 0
    assert said.startswith("config.toml is sound. It has no [[models]]:")
    assert "\n\nMissing here:\n  - capture.hmac" in said
    assert "capture.hmac names header.x-user, and there is no key here" in said
    assert "the sidecar does not start" in said
    code, said = _checked(tmp_path, text, "--json", QUANTDRIFT_HMAC_KEY="")
    assert "capture.hmac" in json.loads(said)["missing"][0]
    code, said = _checked(tmp_path, text, QUANTDRIFT_HMAC_KEY="a-key-of-sixteen-characters")
    assert "no key here" not in said


def test_a_column_that_no_input_has_is_named(tmp_path: Path) -> None:
    """With the last that it has; one that is there is fine."""
    saved(linear_model(), tmp_path / "linear.onnx")
    text = (
        '[[models]]\nname = "m"\n[[models.references]]\npath = "linear.onnx"\n'
        '[[slices]]\nname = "age"\nfeature = "value"\ncolumn = {}\nedges = [0.5]\n'
    )
    assert _checked(tmp_path, text.format(N_FEATURES - 1))[0] == 0
    code, words = _checked(tmp_path, text.format(N_FEATURES))
    assert code == 2
    assert (
        f"the input `x` of the models has {N_FEATURES} numbers for an item, so its last column is {N_FEATURES - 1}"
        in words
    )

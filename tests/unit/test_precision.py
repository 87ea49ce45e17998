"""Which ONNX graphs are refused as a reference."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantdrift.core.config.schema import Model, Provider, Reference
from quantdrift.core.errors import OperatorError
from quantdrift.models.runtimes.onnx.precision import external_files, findings
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime, inspect
from quantdrift.models.runtimes.protocol import digest_of
from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference
from quantdrift.release.sites import loaded
from tests.support.shadow.onnx_models import WEIGHT, linear_model, model_of, saved

pytestmark = pytest.mark.unit

X = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
Y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
SCALE = numpy_helper.from_array(np.array(0.1, np.float32), "scale")


def _quantised_nodes() -> list[onnx.NodeProto]:
    return [
        helper.make_node("QuantizeLinear", ["x", "scale"], ["q"], name="quantise"),
        helper.make_node("DequantizeLinear", ["q", "scale"], ["y"], name="dequantise"),
    ]


def _cast(to: int) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], name="down", to=to),
        helper.make_node("Cast", ["h"], ["y"], name="up", to=TensorProto.FLOAT),
    ]
    return model_of(helper.make_graph(nodes, "cast", [X], [Y]))


def _in_subgraph() -> onnx.ModelProto:
    inner = helper.make_graph(_quantised_nodes(), "then", [], [Y])
    other = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "else", [], [Y])
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    node = helper.make_node("If", ["c"], ["y"], name="if", then_branch=inner, else_branch=other)
    return model_of(helper.make_graph([node], "if", [condition, X], [Y], [SCALE]))


def _in_function() -> onnx.ModelProto:
    function = helper.make_function(
        "local", "Fake", ["x", "scale"], ["y"], _quantised_nodes(), [helper.make_opsetid("", 20)]
    )
    node = helper.make_node("Fake", ["x", "scale"], ["y"], domain="local")
    return model_of(helper.make_graph([node], "f", [X], [Y], [SCALE]), [function])


def _constant() -> onnx.ModelProto:
    value = numpy_helper.from_array(np.ones(4, np.float16), "half")
    nodes = [
        helper.make_node("Constant", [], ["h"], name="half", value=value),
        helper.make_node("Cast", ["h"], ["f"], name="up", to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "f"], ["y"]),
    ]
    return model_of(helper.make_graph(nodes, "constant", [X], [Y]))


def _half_input() -> onnx.ModelProto:
    half = helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["n", 4])
    node = helper.make_node("Cast", ["x"], ["y"], name="up", to=TensorProto.FLOAT)
    return model_of(helper.make_graph([node], "half", [half], [Y]))


@pytest.mark.parametrize(
    ("model", "where", "precision"),
    [
        (model_of(helper.make_graph(_quantised_nodes(), "q", [X], [Y], [SCALE])), "quantise", "quantised"),
        (_in_subgraph(), "If `if`: QuantizeLinear", "quantised"),
        (_in_function(), "function Fake: QuantizeLinear", "quantised"),
        (linear_model(weight=WEIGHT.astype(np.float16)), "stored tensor `w`", "float16"),
        (linear_model(weight=WEIGHT.astype(np.int8)), "stored tensor `w`", "int8"),
        (_cast(TensorProto.BFLOAT16), "Cast `down`", "bfloat16"),
        (_cast(TensorProto.FLOAT8E4M3FN), "Cast `down`", "float8e4m3fn"),
        (_constant(), "Constant `half`", "float16"),
        (_half_input(), "value `x`", "float16"),
    ],
)
def test_reduced_precision_is_found_wherever_it_hides(
    model: onnx.ModelProto, where: str, precision: str
) -> None:
    """Operators, weights, casts, constants and values, in the graph, its subgraphs and functions."""
    found = findings(model)
    assert any(where in finding.where and finding.precision == precision for finding in found), found


@pytest.mark.parametrize(
    "operator", ["QLinearConv", "MatMulInteger", "ConvInteger", "DynamicQuantizeLinear", "MatMulNBits"]
)
def test_quantising_operators_are_known(operator: str) -> None:
    """Each of the operators that exporters and quantisers write."""
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"])], "g", [X], [Y])
    assert [finding.precision for finding in findings(model_of(graph))] == ["quantised"]


def test_full_precision_is_clean() -> None:
    """An FP32 graph has no findings; neither have integer inputs or an activation whose name begins with Q."""
    assert findings(linear_model()) == []
    pixels = helper.make_tensor_value_info("x", TensorProto.UINT8, ["n", 4])
    nodes = [
        helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("QuickGelu", ["f"], ["y"], domain="com.microsoft"),
    ]
    assert findings(model_of(helper.make_graph(nodes, "image", [pixels], [Y]))) == []


def test_what_is_allowed_by_name_is_accepted() -> None:
    """Allowing `float16` accepts it and nothing else; a small integer type accepts quantising operators."""
    assert findings(_constant(), ("float16",)) == []
    assert findings(_cast(TensorProto.BFLOAT16), ("float16",))
    assert findings(_in_function(), ("int8",)) == []


def test_a_quantised_reference_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """The error names the nodes and the option that would allow it, and the loaded precision is told."""
    path = saved(_in_function(), tmp_path / "int8.onnx")
    with pytest.raises(OperatorError, match=r"QuantizeLinear `quantise`.*FP32.*allow_reduced_precision"):
        OnnxRuntime(path, provider=Provider.CPU)
    runtime = OnnxRuntime(path, provider=Provider.CPU, allow_reduced_precision=("int8",))
    assert runtime.artefact.precision == "float32+quantised"


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    """Missing, not ONNX, and not runnable files are an operator's error each."""
    with pytest.raises(OperatorError, match="cannot be read"):
        inspect(tmp_path / "missing.onnx")
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(OperatorError, match="not an ONNX model"):
        inspect(tmp_path / "text.onnx")
    node = helper.make_node("NoSuchOperator", ["x"], ["y"])
    path = saved(model_of(helper.make_graph([node], "g", [X], [Y])), tmp_path / "unknown.onnx")
    with pytest.raises(OperatorError, match="cannot load"):
        OnnxRuntime(path, provider=Provider.CPU)


def test_external_data_is_part_of_the_digest(tmp_path: Path) -> None:
    """The digest changes with weights beside the model, and says when they are missing."""
    path = tmp_path / "linear.onnx"
    onnx.save(linear_model(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert external_files(onnx.load(path, load_external_data=False)) == ("weights.bin",)
    before = inspect(path).digest
    assert before != digest_of(path)
    weights = bytearray((tmp_path / "weights.bin").read_bytes())
    weights[0] ^= 1
    (tmp_path / "weights.bin").write_bytes(weights)
    assert inspect(path).digest != before
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(OperatorError, match=r"weights\.bin cannot be read"):
        inspect(path)


def test_the_digest_of_one_file_is_its_sha256(tmp_path: Path) -> None:
    """As `sha256sum` prints it."""
    (tmp_path / "f").write_bytes(b"abc")
    assert digest_of(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_reference_with_another_digest_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    """The message says which digest is there, and which was asked for."""
    path = saved(linear_model(), tmp_path / "linear.onnx")

    def opening(pin: str) -> RuntimeRequest:
        reference = Reference(path=str(path), digest=f"sha256:{pin}")
        return RuntimeRequest(model=Model(name="m"), reference=reference, provider=Provider.CPU, threads=1)

    assert open_reference(opening(digest_of(path))).artefact.digest == digest_of(path)
    with pytest.raises(OperatorError, match=f"is sha256:{digest_of(path)}, but .* pins sha256:{'0' * 64}"):
        open_reference(opening("0" * 64))


def _outside(folder: Path) -> str:
    (folder.parent / "secret.bin").write_bytes(bytes(64))
    return "../secret.bin"


def _link(folder: Path) -> str:
    (folder / "link.bin").symlink_to(folder / _outside(folder))
    return "link.bin"


def _pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe.bin")
    return "pipe.bin"


def _sparse(folder: Path) -> str:
    with (folder / "sparse.bin").open("wb") as file:
        file.truncate((1 << 40) + 1)
    return "sparse.bin"


@pytest.mark.parametrize(
    "make",
    [
        lambda _: "/dev/zero",
        lambda _: "../../../../../../../../../../dev/zero",
        lambda _: "/etc/passwd",
        lambda _: "missing.bin",
        lambda _: "a\x1b[31m\u202e.bin",
        _outside,
        _link,
        _pipe,
        _sparse,
    ],
    ids=["device", "device above", "elsewhere", "missing", "escapes", "above", "link", "pipe", "sparse"],
)
def test_hostile_external_data_is_refused_before_it_is_read(
    make: Callable[[Path], str], tmp_path: Path
) -> None:
    """A device or a pipe never ends, and a file elsewhere is none of the model's: also for `diagnose` and `repair`, in words."""
    folder = tmp_path / "model"
    folder.mkdir()
    weight = TensorProto(
        name="w", data_type=TensorProto.FLOAT, dims=[4, 4], data_location=TensorProto.EXTERNAL
    )
    weight.external_data.add(key="location", value=make(folder))
    weight.external_data.add(key="length", value="64")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [X], [Y], [weight])
    (folder / "model.onnx").write_bytes(model_of(graph).SerializeToString())
    for read in (inspect, lambda path: loaded(path, "candidate")):
        with pytest.raises(OperatorError, match="external data") as refused:
            read(folder / "model.onnx")
        assert not set("\x1b\u202e") & set(str(refused.value))

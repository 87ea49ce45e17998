"""What `quantdrift init` reads of a file, and the configuration that follows."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantdrift.core.config.load import config_of
from quantdrift.core.config.parts import Parts
from quantdrift.core.config.schema import MIB, Config, OutputKind, Slice
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Protocol
from quantdrift.core.tasks import Task
from quantdrift.init.files import read_model_file
from quantdrift.init.proposal import Choice, Proposal, choose, people_note, rate_of, use_traffic
from quantdrift.init.toml import differences, text_of
from quantdrift.init.traffic import SeenAttribute, SeenModel, Source, Traffic

pytestmark = pytest.mark.unit

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
WEIGHT = np.random.default_rng(1).normal(size=(4, 16)).astype(np.float32)


def _file(
    directory: Path,
    nodes: list[onnx.NodeProto],
    outputs: dict[str, tuple[int, list[int | str]]],
    weights: dict[str, npt.NDArray[Any]] | None = None,
) -> Path:
    """Write a graph that takes `x` : (n, 4), and return its path."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, ["n", 4])],
        [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (weights or {"w": WEIGHT}).items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
    path = directory / "model-fp32.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


PRODUCT = helper.make_node("MatMul", ["x", "w"], ["y"])
ROW: list[int | str] = ["n", 16]
Outputs = dict[str, tuple[int, list[int | str]]]
CASES: dict[str, tuple[list[onnx.NodeProto], Outputs, tuple[Task, str, OutputKind | None]]] = {
    "a product: logits": (
        [helper.make_node("MatMul", ["x", "w"], ["scores"])],
        {"scores": (FLOAT, ROW)},
        (Task.CLASSIFICATION, "", OutputKind.LOGITS),
    ),
    "a softmax: probabilities": (
        [PRODUCT, helper.make_node("Softmax", ["y"], ["p"])],
        {"p": (FLOAT, ROW)},
        (Task.CLASSIFICATION, "", OutputKind.PROBABILITIES),
    ),
    "a sigmoid for each of several: labels": (
        [PRODUCT, helper.make_node("Sigmoid", ["y"], ["p"])],
        {"p": (FLOAT, ROW)},
        (Task.MULTILABEL, "", OutputKind.PROBABILITIES),
    ),
    "a length divided out: an embedding": (
        [
            PRODUCT,
            helper.make_node("ReduceL2", ["y", "axis"], ["length"], keepdims=1),
            helper.make_node("Clip", ["length", "least"], ["divisor"]),
            helper.make_node("Div", ["y", "divisor"], ["vector"]),
        ],
        {"vector": (FLOAT, ROW)},
        (Task.EMBEDDING, "", None),
    ),
    "one number: regression": (
        [PRODUCT, helper.make_node("ReduceSum", ["y", "axis"], ["value"], keepdims=1)],
        {"value": (FLOAT, ["n", 1])},
        (Task.REGRESSION, "", None),
    ),
    "a label beside probabilities: the probabilities": (
        [
            PRODUCT,
            helper.make_node("ArgMax", ["y"], ["label"], axis=1, keepdims=0),
            helper.make_node("Softmax", ["y"], ["probabilities"]),
        ],
        {"label": (INT64, ["n"]), "probabilities": (FLOAT, ROW)},
        (Task.CLASSIFICATION, "probabilities", OutputKind.PROBABILITIES),
    ),
    "what no operator tells: classes, with a doubt": (
        [PRODUCT, helper.make_node("Relu", ["y"], ["z"])],
        {"z": (FLOAT, ROW)},
        (Task.CLASSIFICATION, "", OutputKind.LOGITS),
    ),
}
WEIGHTS: dict[str, npt.NDArray[Any]] = {
    "w": WEIGHT,
    "axis": np.array([1]),
    "least": np.array(1e-6, np.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_the_last_operators_tell_what_is_compared(case: str, tmp_path: Path) -> None:
    """The task, the output and its kind; and a configuration of it is sound."""
    nodes, outputs, (task, output, kind) = CASES[case]
    path = _file(tmp_path, nodes, outputs, WEIGHTS)
    choice = choose(read_model_file(path))
    assert (choice.task, choice.output, choice.output_kind) == (task, output, kind)
    assert bool(choice.doubts) == ("doubt" in case)
    proposal = Proposal(
        listen="127.0.0.1:8000", backend="127.0.0.1:8001", name="m", choice=choice, reference=path.name
    )
    (model,) = _config(proposal, tmp_path).models
    assert (model.task, model.output) == (task, output)
    assert kind is None or model.output_kind is kind


def test_what_the_last_linear_layer_takes_can_be_clustered(tmp_path: Path) -> None:
    """Behind a softmax, too; the input itself is no embedding, and an embedding is one. With the comment taken away it is an option."""
    deep = [
        helper.make_node("Relu", ["x"], ["hidden"]),
        helper.make_node("Gemm", ["hidden", "w"], ["y"]),
        helper.make_node("Softmax", ["y"], ["p"]),
    ]
    choice = choose(read_model_file(_file(tmp_path, deep, {"p": (FLOAT, ROW)})))
    assert choice.embedding == "hidden"
    proposal = Proposal(listen="a:1", backend="b:1", name="m", choice=choice, reference="r.onnx")
    text = text_of(proposal)
    assert not tomllib.loads(text)["models"][0].get("embedding")
    assert tomllib.loads(text.replace("# embedding", "embedding"))["models"][0]["embedding"] == "hidden"
    found = {}
    for case in ("a product: logits", "a length divided out: an embedding"):
        nodes, outputs, _ = CASES[case]
        found[case] = choose(read_model_file(_file(tmp_path, nodes, outputs, WEIGHTS))).embedding
    assert list(found.values()) == ["", "vector"]


def test_rows_tell_what_no_operator_does(tmp_path: Path) -> None:
    """Rows that add up to 1 are probabilities, rows of length 1 vectors, others logits."""
    nodes, outputs, _ = CASES["what no operator tells: classes, with a doubt"]
    file = read_model_file(_file(tmp_path, nodes, outputs, WEIGHTS))
    rng = np.random.default_rng(2)
    rows = rng.dirichlet(np.ones(16), size=40)
    assert choose(file, {"z": rows}).output_kind is OutputKind.PROBABILITIES
    assert choose(file, {"z": rows * 7}).output_kind is OutputKind.LOGITS
    vectors = rng.normal(size=(40, 16))
    assert (
        choose(file, {"z": vectors / np.linalg.norm(vectors, axis=1, keepdims=True)}).task is Task.EMBEDDING
    )
    assert choose(file, {"z": vectors}).doubts == ()


def test_a_file_without_numbers_to_compare_is_refused(tmp_path: Path) -> None:
    """The error names its outputs."""
    nodes, outputs, _ = CASES["a label beside probabilities: the probabilities"]
    file = read_model_file(_file(tmp_path, nodes[:2], {"label": outputs["label"]}, WEIGHTS))
    with pytest.raises(OperatorError, match=r"no output of floating-point numbers.*label: int64"):
        choose(file)


def test_a_quantised_file_is_no_reference(tmp_path: Path) -> None:
    """Its form is named."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale"], ["xq"]),
        helper.make_node("MatMul", ["xq", "w"], ["logits"]),
    ]
    path = _file(tmp_path, nodes, {"logits": (FLOAT, ROW)}, {"w": WEIGHT, "scale": np.array(0.1, np.float32)})
    file = read_model_file(path)
    assert (file.precision, file.is_full_precision) == ("INT8 in QDQ form", False)


def test_no_onnx_file_is_an_error(tmp_path: Path) -> None:
    """In words, with its path."""
    (tmp_path / "m.onnx").write_text("no model")
    with pytest.raises(OperatorError, match=r"m\.onnx"):
        read_model_file(tmp_path / "m.onnx")


def _config(proposal: Proposal, directory: Path) -> Config:
    return config_of(Parts(tomllib.loads(text_of(proposal)), {}), directory / "config.toml", {})


def _header(name: str, values: dict[str, int], n_values: int | None = None) -> SeenAttribute:
    return _attribute(Source.HEADER, name, values, n_values)


def _attribute(
    source: Source, name: str, values: dict[str, int], n_values: int | None = None
) -> SeenAttribute:
    return SeenAttribute(source=source, name=name, values=values, n=1000, n_values=n_values or len(values))


def _proposal() -> Proposal:
    choice = Choice(task=Task.CLASSIFICATION, output_kind=OutputKind.LOGITS, why="of a test")
    return Proposal(
        listen="0.0.0.0:8000", backend="127.0.0.1:8001", name="m", choice=choice, reference="r.onnx"
    )


def _traffic(*attributes: SeenAttribute, largest_bytes: int = 3000) -> Traffic:
    model = SeenModel(
        protocol=Protocol.OIP_REST,
        name="m",
        versions=("1",),
        n=1000,
        attributes=attributes,
    )
    return Traffic(seconds=20.0, models=(model,), kept=(), largest_bytes=largest_bytes, unread={})


def test_headers_become_slices_a_person_and_nothing_else(tmp_path: Path) -> None:
    """Few values: slices, the rare one sampled whole. A person: observations. Secrets and what every proxy sets: nothing."""
    proposal = _proposal()
    headers = (
        _header("accept-encoding", {"gzip": 500, "br": 500}),
        _header("authorization", {"Bearer a": 500, "Bearer b": 500}),
        _header("x-api-key", {"a": 500, "b": 500}),
        _header("x-request-id", {}, 65),
        _header("x-scanner", {"office": 985, 'a "rare" one': 15}),
        _header("x-user-id", {f"u{number}": 50 for number in range(20)}),
        _header("x-constant", {"1": 1000}),
    )
    use_traffic(proposal, _traffic(*headers), {})
    text = text_of(proposal)
    assert list(proposal.groups) == [(Source.HEADER, "x-scanner")]
    assert "Bearer" not in text
    assert "api-key" not in text
    assert "u1" not in text
    config = _config(proposal, tmp_path)
    assert config.capture.headers == ("x-scanner",)
    assert config.sampling.sticky_header == "x-user-id"
    assert [(stratum.headers, stratum.rate) for stratum in config.sampling.header_strata] == [
        ({"x-scanner": 'a "rare" one'}, 1.0)
    ]
    assert [rule.name for rule in config.slices] == ["scanner"]
    assert config.sampling.rate == rate_of(50.0) == 0.2
    assert people_note("x-user-id").startswith("x-user-id names a person: requests of one within 30 minutes")


@pytest.mark.parametrize(
    ("requests_per_s", "rate"), [(0.1, 1.0), (10, 1.0), (25, 0.5), (37, 0.2), (100, 0.1), (1e6, 0.01)]
)
def test_some_ten_replays_a_second_are_left(requests_per_s: float, rate: float) -> None:
    """A step of the rate, never above 20 nor below 7 replays a second where that is possible."""
    assert rate_of(requests_per_s) == rate


def test_large_exchanges_raise_the_limit_of_the_sidecar(tmp_path: Path) -> None:
    """Where the largest exchange that came, and half as much, is above the default; one option, and what is held follows it."""
    small, large = _proposal(), _proposal()
    use_traffic(small, _traffic(largest_bytes=1_300_000), {})
    use_traffic(large, _traffic(largest_bytes=5_000_000), {})
    assert "max_exchange_bytes" not in text_of(small)
    assert _config(small, tmp_path).sidecar.held_bytes == 16 * MIB
    sidecar = _config(large, tmp_path).sidecar
    assert (sidecar.max_exchange_bytes, sidecar.max_held_bytes, sidecar.held_bytes) == (8 * MIB, 0, 64 * MIB)


def test_parameters_and_values_of_the_json_become_slices(tmp_path: Path) -> None:
    """Each by its own option, with its source in the name where a header has it; persons, secrets and texts are not recorded."""
    proposal = _proposal()
    halves = {"a": 500, "b": 500}
    use_traffic(
        proposal,
        _traffic(
            _header("x-site", halves),
            _attribute(Source.PARAMETER, "site", halves),
            _attribute(Source.PARAMETER, "api_token", halves),
            _attribute(Source.JSON, "context.channel", {"web": 990, "phone": 10}),
            _attribute(Source.JSON, "context.user", {}, 65),
            _attribute(Source.JSON, "prompt", {"p" * 80: 500, "q" * 80: 500}),
        ),
        {},
    )
    config = _config(proposal, tmp_path)
    assert (config.capture.headers, config.capture.parameters, config.capture.json) == (
        ("x-site",),
        ("site",),
        ("context.channel",),
    )
    assert {(rule.name, rule.header, rule.parameter, rule.json) for rule in config.slices} == {
        ("site", "x-site", "", ""),
        ("parameter site", "", "site", ""),
        ("context.channel", "", "", "context.channel"),
    }
    assert "# Not recorded, since too many values came: context.user" in text_of(proposal)
    assert not proposal.rare  # strata are chosen by headers, before a body is read
    assert (proposal.person, "ppp" in text_of(proposal)) == ("", False)


def test_columns_with_few_values_become_slices(tmp_path: Path) -> None:
    """Each value is a group; a column of any numbers is left alone, and missing numbers are a slice."""
    rng = np.random.default_rng(3)
    table = np.stack([rng.normal(size=300), rng.integers(0, 3, size=300), np.ones(300)], axis=1)
    table[::10, 0] = np.nan
    proposal = _proposal()
    use_traffic(proposal, _traffic(), {"x": table})
    assert [(rule.feature, rule.column, rule.edges, rule.values) for rule in proposal.features] == [
        ("missing", None, (1e-9,), ()),
        ("value", 1, (), ("0", "1", "2")),
    ]
    assert _config(proposal, tmp_path).slices[1] == Slice(
        name="column 1", feature="value", column=1, values=("0", "1", "2")
    )


def test_a_file_that_is_there_is_compared_option_by_option() -> None:
    """What differs, what is missing, and nothing else."""
    proposal = _proposal()
    text = text_of(proposal)
    assert differences(text, text) == []
    proposal.flip, proposal.person = 0.02, "x-user"
    assert differences(text, text_of(proposal)) == [
        'sampling.sticky_header = "x-user"  (not in the file)',
        "models[m].budget.flip = 0.02  (in the file: 0.01)",
    ]

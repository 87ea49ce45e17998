"""Weights in blocks, INT8 whose ranges are found while it runs, and 16 bits: the copy, one injected fault, and the repaired file."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from benchmarks.repair.kinds import FORMS, compare, in_blocks, inject
from benchmarks.repair.network import INPUT, OUTPUT, Images, drawn, pages, write
from benchmarks.repair.shapes import Shape, write_shape
from quantdrift.core.errors import OperatorError
from quantdrift.facts.diagnosis import Cause, WeightsOrigin
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.diagnose.blame import diagnose
from quantdrift.release.diagnose.copies import changed, check, joined
from quantdrift.release.halves import HalfCopy, is_half
from quantdrift.release.origin import origins_of
from quantdrift.release.repair.edits import CandidateEdits
from quantdrift.release.sites import SwitchableCopy
from quantdrift.release.trees import copy_of_onnx

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a perceptron with LayerNorm and GELU in FP32."""
    path = tmp_path_factory.mktemp("forms") / "fp32.onnx"
    write_shape(Shape.PERCEPTRON, path, pages())
    return path


@pytest.fixture(scope="module")
def images() -> Images:
    """Draw pages that no calibration has seen."""
    return drawn(pages().held_out, 400, np.random.default_rng(2))


@pytest.mark.parametrize("form", FORMS)
def test_the_copy_is_the_reference_or_the_candidate(
    form: str, reference: Path, images: Images, tmp_path: Path
) -> None:
    """With all sites in FP32 it is the reference, with none what ONNX Runtime's kernels decide; a factor of 1 changes nothing."""
    candidate = tmp_path / "candidate.onnx"
    FORMS[form][0](reference, candidate)
    copy = copy_of_onnx(candidate, reference)
    inputs = {INPUT: images}
    assert check(copy, inputs).holds
    assert copy.unmatched == ()
    assert origins_of(copy.weights).origin is WeightsOrigin.ROUNDED
    few = {INPUT: images[:16]}
    ones = np.ones(len(copy.sites))
    np.testing.assert_array_equal(copy.run(few)[OUTPUT], copy.run(few, factors=ones)[OUTPUT])
    assert (copy.run(few)[OUTPUT] != copy.run(few, factors=1.03 * ones)[OUTPUT]).any()


def test_convolutions_of_dynamic_int8_are_switched(images: Images, tmp_path: Path) -> None:
    """ConvInteger behind DynamicQuantizeLinear, each page with a range of its own, as in a request of one page."""
    reference, candidate = tmp_path / "fp32.onnx", tmp_path / "int8.onnx"
    write(reference, pages(), 1)
    FORMS["dynamic"][0](reference, candidate)
    assert "ConvInteger" in {node.op_type for node in onnx.load(candidate).graph.node}
    copy = SwitchableCopy(candidate, reference)
    inputs = {INPUT: images[:100]}
    assert check(copy, inputs).holds
    one = copy.served({INPUT: images[:1]})[OUTPUT]
    np.testing.assert_array_equal(copy.served(inputs)[OUTPUT][:1], one)
    assert all(site.is_dynamic for site in copy.sites if site.name.startswith("A:"))


@pytest.mark.parametrize("form", ["blocks", "blocks_int8", "dynamic", "fp16"])
def test_a_fault_is_named_and_repaired(form: str, reference: Path, images: Images, tmp_path: Path) -> None:
    """A fault that changes 5 % of the answers is the first site, and the file with this site in FP32 answers like the reference."""
    candidate, faulty = tmp_path / "candidate.onnx", tmp_path / "faulty.onnx"
    FORMS[form][0](reference, candidate)
    site, _ = inject(candidate, reference, images, np.random.default_rng(3), faulty)
    parent = tmp_path / "faulty-reference.onnx"
    copy = copy_of_onnx(faulty, parent)
    found = diagnose(copy, compare, {INPUT: images}, budget=0.02, keep_aside=False)
    assert [blamed.site for blamed in found.blamed][:1] == [site]
    edits = copy if isinstance(copy, HalfCopy) else CandidateEdits(faulty, parent)
    model = edits.in_fp32([site])
    onnx.checker.check_model(model)
    inputs = {INPUT: images}
    repaired = copy.runner(model.SerializeToString())(inputs)
    before, after = (
        changed(compare(answers, copy.expected(inputs))).mean() for answers in (copy.served(inputs), repaired)
    )
    assert before >= 0.05
    assert after < before / 3
    whole = edits.in_fp32([each.name for each in copy.sites])
    expected = copy.expected(inputs)[OUTPUT]
    difference = np.abs(copy.runner(whole.SerializeToString())(inputs)[OUTPUT] - expected).max()
    assert difference <= 1e-4 * np.abs(expected).max()


def test_rounding_in_blocks_is_named_where_the_answers_need_it(reference: Path, tmp_path: Path) -> None:
    """What 4 bits do to a slice of faint pages is found in weights, with the size of the blocks for the words."""
    candidate = tmp_path / "candidate.onnx"
    in_blocks(reference, candidate)
    images = drawn(pages().held_out, 1_500, np.random.default_rng(5)) * np.float32(0.3)
    copy = SwitchableCopy(candidate, reference)
    found = diagnose(copy, compare, {INPUT: images}, budget=0.001, keep_aside=False)
    assert all(site.startswith("W:") for site in found.one_off)
    assert all(blamed.block_size == 32 and blamed.cause is Cause.WEIGHTS for blamed in found.blamed)


def test_rows_in_another_order_and_zero_points_in_floating_point_are_read(
    reference: Path, images: Images, tmp_path: Path
) -> None:
    """GPTQ with act-order gives each row the number of its block, HQQ a zero point that is no integer."""
    candidate, turned = tmp_path / "candidate.onnx", tmp_path / "turned.onnx"
    in_blocks(reference, candidate)
    model = onnx.load(candidate)
    rng = np.random.default_rng(1)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    node = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    width, columns = (
        next(attribute.i for attribute in node.attribute if attribute.name == name) for name in ("K", "N")
    )
    index = rng.permutation(np.arange(width) // 32).astype(np.int32)
    scales = numpy_helper.to_array(stored[node.input[2]])
    zero = np.full(scales.shape, 7.5, np.float32)
    for name, array in (("order", index), ("zero", zero)):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    node.input[3] = "zero"
    node.input.append("order")
    onnx.save(model, turned)
    copy = SwitchableCopy(turned, reference)
    assert check(copy, {INPUT: images}).agreement >= 0.999
    assert copy.weights[0].served.shape == (width, columns)


def test_a_weight_in_blocks_that_the_reference_lacks_stays_as_it_is(
    reference: Path, images: Images, tmp_path: Path
) -> None:
    """It is said, the copy computes what is served, and a repair of another site leaves it."""
    candidate, other = tmp_path / "candidate.onnx", tmp_path / "other.onnx"
    in_blocks(reference, candidate)
    model = onnx.load(reference)
    node = next(node for node in model.graph.node if node.op_type == "MatMul")
    node.name = "stranger"
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == node.input[1])
    array = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(array[::-1].copy(), "stranger"))
    node.input[1] = "stranger"
    onnx.save(model, other)
    copy = SwitchableCopy(candidate, other)
    assert len(copy.unmatched) == 1
    inputs = {INPUT: images[:100]}
    np.testing.assert_allclose(copy.run(inputs)[OUTPUT], copy.served(inputs)[OUTPUT], atol=1e-4)
    repaired = CandidateEdits(candidate, other).in_fp32([copy.sites[0].name]).SerializeToString()
    np.testing.assert_allclose(
        copy.runner(repaired)(inputs)[OUTPUT], copy.run(inputs, [0])[OUTPUT], atol=1e-4
    )


def test_bf16_is_computed_by_the_copy(reference: Path, images: Images, tmp_path: Path) -> None:
    """ONNX Runtime has hardly any kernels for it on the processor; the copy rounds each result to 8 bits."""
    candidate = tmp_path / "bf16.onnx"
    _in_bf16(reference, candidate)
    assert is_half(candidate)
    copy = HalfCopy(candidate, reference)
    assert copy.kind == "BF16"
    inputs = {INPUT: images}
    assert check(copy, inputs).difference <= 1e-4
    difference = np.abs(copy.served(inputs)[OUTPUT] - copy.expected(inputs)[OUTPUT]).max()
    assert 0.01 < difference < 2.0


def test_a_table_of_integers_is_switched(tmp_path: Path) -> None:
    """`quantize_dynamic` gathers rows of an embedding before it dequantises them; here token ids are the input."""
    reference, candidate = tmp_path / "fp32.onnx", tmp_path / "int8.onnx"
    _tokens(reference)
    FORMS["dynamic"][0](reference, candidate)
    copy = SwitchableCopy(candidate, reference)
    tokens = np.random.default_rng(1).integers(0, 50, (64, 6))
    found = check(copy, {"tokens": tokens})
    assert "W:embed" in [site.name for site in copy.sites]
    assert found.holds


def test_texts_of_different_lengths_are_filled_up_where_a_mask_says_so() -> None:
    """Without an attention mask a model would read the zeros."""
    parts = [
        {name: np.ones((2, length), np.int64) for name in ("input_ids", "attention_mask")}
        for length in (3, 5)
    ]
    together = joined(parts)
    assert together["input_ids"].shape == (4, 5)
    assert together["attention_mask"].sum() == 2 * 3 + 2 * 5
    with pytest.raises(OperatorError, match="different shapes"):
        joined([{"input_ids": part["input_ids"]} for part in parts])


def _in_bf16(reference: Path, candidate: Path) -> None:
    """Convert stored tensors and everything between to BF16."""
    model = onnx.load(reference)
    kinds = onnx.TensorProto
    for tensor in model.graph.initializer:
        if tensor.data_type == kinds.FLOAT:
            array = numpy_helper.to_array(tensor)
            half = helper.make_tensor(tensor.name, kinds.BFLOAT16, array.shape, array.reshape(-1).tolist())
            tensor.CopyFrom(half)
    for node in model.graph.node:
        node.input[:] = ["image.half" if name == INPUT else name for name in node.input]
        node.output[:] = ["logits.half" if name == OUTPUT else name for name in node.output]
    nodes: list[Any] = [
        helper.make_node("Cast", [INPUT], ["image.half"], name="in", to=kinds.BFLOAT16),
        *model.graph.node,
        helper.make_node("Cast", ["logits.half"], [OUTPUT], name="out", to=kinds.FLOAT),
    ]
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    onnx.save(model, candidate)


def _tokens(path: Path) -> None:
    """Write a network that reads six token ids."""
    rng = np.random.default_rng(1)
    stored: dict[str, Array] = {
        "table": rng.normal(0, 1, (50, 16)).astype(np.float32),
        "weight": rng.normal(0, 0.3, (96, 5)).astype(np.float32),
        "flat": np.array([-1, 96], np.int64),
    }
    nodes = [
        helper.make_node("Gather", ["table", "tokens"], ["rows"], name="embed"),
        helper.make_node("Reshape", ["rows", "flat"], ["long"], name="join"),
        helper.make_node("MatMul", ["long", "weight"], [OUTPUT], name="last"),
    ]
    graph = helper.make_graph(
        nodes,
        "tokens",
        [helper.make_tensor_value_info("tokens", onnx.TensorProto.INT64, ["n", 6])],
        [helper.make_tensor_value_info(OUTPUT, onnx.TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)

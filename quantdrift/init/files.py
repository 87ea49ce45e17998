"""What an ONNX file says of its model, without running it: tensors, what each output holds, and precision."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from quantdrift.core.errors import OperatorError
from quantdrift.models.runtimes.onnx.output_kind import LastOperator, last_operator
from quantdrift.models.runtimes.onnx.precision import findings
from quantdrift.models.tensors.arrays import TensorSpec

_PAIRS: Final = frozenset({"QuantizeLinear", "DequantizeLinear"})
_BLOCKS: Final = frozenset({"MatMulNBits", "MatMulBnb4", "MatMulFpQ4", "GatherBlockQuantized"})
_WITHOUT_SITES: Final = (
    *("DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "GatherBlockQuantized", "MatMulBnb4", "MatMulFpQ4"),
    *("MatMulIntegerToFloat", "QAttention", "QEmbed", "QGemm", "QLinear", "QMoE", "QOrdered"),
)
_SCALED: Final = frozenset(
    {"Clip", "Max", "Expand", "Add", "Identity", "Cast", "Reshape", "Unsqueeze", "Sqrt"}
)
_AFTER_LINEAR: Final = frozenset({"Softmax", "LogSoftmax", "Sigmoid", "Identity", "Add"})
_MOST_STEPS: Final = 6


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """One ONNX file.

    Parameters
    ----------
    inputs, outputs
        In the order of the file. Outputs that are no tensors are in `maps` instead.
    maps
        Outputs that are lists or dictionaries, such as the probabilities that scikit-learn's converter writes by default.
    kinds
        What each output holds, as far as its last operators tell.
    pooled
        The vector of each item that the last linear layer of an output takes, by output.
    unit_vectors
        Outputs whose rows are divided by their own length.
    precision
        In words: `FP32`, `INT8 in QDQ form`.
    is_full_precision
        Whether it may be a reference.
    is_trees
        Whether it is made of decision trees.
    has_sites
        Whether a diagnosis can name layers: pairs, weights in blocks, dynamic INT8, or 16 bits.
    """

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    maps: tuple[str, ...]
    kinds: dict[str, LastOperator | None]
    unit_vectors: frozenset[str]
    pooled: dict[str, str] = {}
    precision: str
    is_full_precision: bool
    is_trees: bool
    has_sites: bool


def read_model_file(path: Path) -> ModelFile:
    """Return what an ONNX file says; its external data is not read.

    Raises
    ------
    OperatorError
        It cannot be read, or is no ONNX file.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise OperatorError(f"{path} cannot be read: {error.strerror or error}") from error
    except DecodeError as error:
        raise OperatorError(f"{path} is not an ONNX file") from error
    stored = {tensor.name for tensor in model.graph.initializer}
    outputs = tuple(_specs(model.graph.output, set()))
    operators = {node.op_type for node in model.graph.node}
    reduced = {finding.precision for finding in findings(model)}
    makers = {name: node for node in model.graph.node for name in node.output}
    return ModelFile(
        path=path,
        inputs=tuple(_specs(model.graph.input, stored)),
        outputs=outputs,
        maps=tuple(value.name for value in model.graph.output if not value.type.HasField("tensor_type")),
        kinds={spec.name: last_operator(path, spec.name) for spec in outputs if spec.dtype.kind == "f"},
        pooled={spec.name: tensor for spec in outputs if (tensor := _pooled(spec.name, makers, stored))},
        unit_vectors=frozenset(spec.name for spec in outputs if _is_unit(spec.name, makers)),
        precision=_precision(operators, reduced),
        is_full_precision=not reduced,
        is_trees=any(operator.startswith("TreeEnsemble") for operator in operators),
        has_sites=bool(reduced) and not any(operator.startswith(_WITHOUT_SITES) for operator in operators),
    )


def _specs(values: Any, stored: set[str]) -> Iterator[TensorSpec]:
    for value in values:
        if value.name in stored or not value.type.HasField("tensor_type"):
            continue
        kind = value.type.tensor_type
        is_text = kind.elem_type == TensorProto.STRING
        dtype = (
            np.dtype(object) if is_text else np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
        )
        shape = tuple(
            dimension.dim_value if dimension.HasField("dim_value") and dimension.dim_value > 0 else None
            for dimension in kind.shape.dim
        )
        yield TensorSpec(name=value.name, dtype=dtype, shape=shape)


def _precision(operators: set[str], reduced: set[str]) -> str:
    if operators & _BLOCKS:
        return "weights in blocks of few bits"
    if operators >= _PAIRS:
        return "INT8 in QDQ form"
    if "quantised" in reduced:
        return "INT8 operators"
    floats = sorted(reduced & {"float16", "bfloat16"})
    return " and ".join(floats).upper().replace("FLOAT", "FP") or "FP32"


def _is_unit(name: str, makers: Mapping[str, Any]) -> bool:
    """Return whether an output ends in a division by the length of its own rows."""
    node = makers.get(name)
    if node is None:
        return False
    if node.op_type == "LpNormalization" or (node.op_type == "Normalizer" and _norm_of(node) == "L2"):
        return True
    if node.op_type in {"Identity", "Cast", "Reshape", "Flatten"}:
        return _is_unit(node.input[0], makers)
    if node.op_type != "Div":
        return False
    divisor = makers.get(node.input[1])
    for _ in range(_MOST_STEPS):
        if divisor is None or divisor.op_type == "ReduceL2":
            break
        if divisor.op_type not in _SCALED:
            return False
        divisor = makers.get(divisor.input[0])
    return divisor is not None and divisor.op_type == "ReduceL2"


def _pooled(name: str, makers: Mapping[str, Any], stored: set[str]) -> str:
    """Return the tensor that the last linear layer before an output takes; empty: there is none, or it takes the model's input."""
    for _ in range(_MOST_STEPS):
        node = makers.get(name)
        if node is None:
            return ""
        if node.op_type in {"Gemm", "MatMul"}:
            taken = str(node.input[0])
            return taken if node.input[1] in stored and taken in makers else ""
        if node.op_type not in _AFTER_LINEAR:
            return ""
        name = next((tensor for tensor in node.input if tensor not in stored), "")
    return ""


def _norm_of(node: Any) -> str:
    return next((attribute.s.decode() for attribute in node.attribute if attribute.name == "norm"), "MAX")

"""Small ONNX graphs and exchanges for them."""

import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from quantdrift.core.records import Exchange, HeaderStratum, Policy, Sampling, Tensor

N_FEATURES = 4
N_CLASSES = 3
WEIGHT = np.random.default_rng(7).normal(size=(N_FEATURES, N_CLASSES)).astype(np.float32)
BIAS = np.linspace(-0.1, 0.1, N_CLASSES, dtype=np.float32)
POLICY = Policy(epoch="e1", header_strata=(HeaderStratum(name="default", rate=0.5),), body_strata=())


def linear_model(*, batch: int | str = "n", weight: npt.NDArray[Any] = WEIGHT) -> onnx.ModelProto:
    """Return `logits = x @ weight + bias` with a dynamic or fixed number of items."""
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["xw"], name="product"),
            helper.make_node("Add", ["xw", "b"], ["logits"], name="sum"),
        ],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, N_FEATURES])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, N_CLASSES])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(BIAS, "b")],
    )
    return model_of(graph)


def model_of(graph: onnx.GraphProto, functions: list[onnx.FunctionProto] | None = None) -> onnx.ModelProto:
    """Return a model that holds `graph`."""
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("local", 1)],
        ir_version=10,
        producer_name="tests",
        producer_version="1",
        functions=functions or [],
    )


def saved(model: onnx.ModelProto, path: Path) -> Path:
    """Write `model` and return its path."""
    onnx.save(model, path)
    return path


def tensor(name: str, array: npt.NDArray[Any], datatype: str = "FP32") -> Tensor:
    """Return an array in its wire form."""
    return Tensor(name=name, datatype=datatype, shape=array.shape, data=array.tobytes())


def logits_of(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return what the linear model gives for `x`."""
    logits: npt.NDArray[np.float32] = x @ WEIGHT + BIAS
    return logits


def inputs_of(n_items: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return random items : (n_items, N_FEATURES)."""
    return np.random.default_rng(seed).normal(size=(n_items, N_FEATURES)).astype(np.float32)


def exchange_of(
    x: npt.NDArray[np.float32],
    outputs: npt.NDArray[np.float32] | None = None,
    *,
    version: str = "int8",
    model: str = "digits",
    captured_at: datetime | None = None,
    attributes: dict[str, str] | None = None,
) -> Exchange:
    """Return an exchange whose candidate answered `outputs`, by default exactly what the linear model gives."""
    return Exchange(
        id=uuid.uuid4().hex,
        captured_at=captured_at or datetime.now(UTC),
        source="pod",
        model=model,
        version=version,
        protocol="oip-v2-rest",
        inputs=(tensor("x", x),),
        outputs=(tensor("logits", logits_of(x) if outputs is None else outputs),),
        sampling=Sampling(
            policy=POLICY,
            header_stratum="default",
            body_stratum="default",
            pi1=0.5,
            pi2=1.0,
            u1=0.25,
            u2=0.25,
        ),
        attributes=attributes or {},
    )

"""Small forests as ONNX files, drawn at random: no library trains them."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

N_COLUMNS: Final = 6
_DEPTH: Final = 4
Forest = dict[str, Any]


def drawn_forest(seed: int, n_trees: int = 20) -> Forest:
    """Return the attributes of complete trees over columns in [0, 1], with thresholds and leaves drawn at random."""
    rng = np.random.default_rng(seed)
    inner, every = 2**_DEPTH - 1, 2 ** (_DEPTH + 1) - 1
    ids = np.arange(every)
    is_leaf = ids >= inner
    forest: Forest = {
        "nodes_treeids": np.repeat(np.arange(n_trees), every),
        "nodes_nodeids": np.tile(ids, n_trees),
        "nodes_featureids": np.where(is_leaf, 0, rng.integers(0, N_COLUMNS, (n_trees, every))).ravel(),
        "nodes_modes": np.tile(np.where(is_leaf, "LEAF", "BRANCH_LEQ"), n_trees),
        "nodes_values": np.where(is_leaf, 0.0, rng.uniform(0.05, 0.95, (n_trees, every))).ravel(),
        "nodes_truenodeids": np.tile(np.where(is_leaf, 0, 2 * ids + 1), n_trees),
        "nodes_falsenodeids": np.tile(np.where(is_leaf, 0, 2 * ids + 2), n_trees),
    }
    leaves = np.tile(ids[is_leaf], n_trees)
    return forest | {
        "class_treeids": np.repeat(np.arange(n_trees), every - inner),
        "class_nodeids": leaves,
        "class_ids": np.zeros(len(leaves), np.int64),
        "class_weights": rng.normal(0, 1, len(leaves)),
    }


def on_grid(forest: Forest, n_steps: int, highest: float = 1.0, column: int | None = None) -> Forest:
    """Return the forest with thresholds in multiples of 1 / n_steps, those of one column at most `highest`."""
    values = np.rint(forest["nodes_values"] * n_steps) / n_steps
    here = forest["nodes_featureids"] == column
    return forest | {"nodes_values": np.where(here, np.minimum(values, highest), values)}


def save_forest(forest: Forest, path: Path) -> Path:
    """Write a classifier with two classes whose score is the sum of the leaves."""
    attributes: dict[str, Any] = {
        name: [str(entry) if name == "nodes_modes" else entry for entry in np.asarray(values).tolist()]
        for name, values in forest.items()
    }
    node = helper.make_node(
        "TreeEnsembleClassifier",
        ["x"],
        ["label", "probabilities"],
        domain="ai.onnx.ml",
        classlabels_int64s=[0, 1],
        post_transform="LOGISTIC",
        **attributes,
    )
    graph = helper.make_graph(
        [node],
        "forest",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, N_COLUMNS])],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, [None]),
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, [None, 2]),
        ],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def drawn_rows(n: int, seed: int) -> NDArray[np.float32]:
    """Return rows whose columns are evenly spread over [0, 1]."""
    return np.random.default_rng(seed).random((n, N_COLUMNS), dtype=np.float32)

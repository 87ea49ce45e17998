"""`python -m examples.tabular.make`: train a model of customers and write it with two smaller candidates, and inputs to judge them by.

| file | what it is |
|---|---|
| `credit-fp32.onnx` | the reference: trees of LightGBM, or of scikit-learn with `--library scikit-learn` |
| `credit-rounded.onnx` | thresholds of 10 bits, whose ranges come from customers among whom no one was rich: it goes bad for the rich alone |
| `credit-fp16.onnx` | leaves in FP16: it is sound |
| `recorded.npz` | 40,000 customers, as `quantdrift gate`, `diagnose` and `repair` read them |
| `config.toml` | watches the model |

LightGBM, onnxmltools and skl2onnx are in the extra `examples`.
"""

import argparse
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from examples.tabular.customers import CHANNELS, COLUMNS, RICH, SHARES, Rows, draw

LIBRARIES = ("lightgbm", "scikit-learn")
REFERENCE, ROUNDED, HALF = "credit-fp32.onnx", "credit-rounded.onnx", "credit-fp16.onnx"
_TRAINED_ON = 8_000
_RECORDED = 40_000
_TREES = 40
_BITS = 10


def make(directory: Path, library: str = LIBRARIES[0]) -> None:
    """Write the files to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    rows, paid = draw(_TRAINED_ON, 1)
    reference = (_lightgbm if library == LIBRARIES[0] else _scikit_learn)(rows, paid)
    (directory / REFERENCE).write_bytes(reference.SerializeToString())
    common = rows[rows[:, COLUMNS.index("income")] < RICH]
    (directory / ROUNDED).write_bytes(rounded(reference, common, _BITS).SerializeToString())
    (directory / HALF).write_bytes(halved(reference).SerializeToString())
    recorded, _ = draw(_RECORDED, 2)
    channels = np.random.default_rng(3).choice(CHANNELS, _RECORDED, p=SHARES)
    # `group`: each row is a person of their own, so none counts for another.
    np.savez(directory / "recorded.npz", features=recorded, channel=channels, group=np.arange(_RECORDED))
    shutil.copy(Path(__file__).with_name("config.toml"), directory)


def _lightgbm(rows: Rows, paid: Any) -> Any:
    import lightgbm
    import onnxmltools
    from onnxmltools.convert.common.data_types import FloatTensorType

    model = lightgbm.LGBMClassifier(
        n_estimators=_TREES, num_leaves=31, min_child_samples=10, random_state=1, n_jobs=1, verbose=-1
    ).fit(rows, paid)
    inputs = [("features", FloatTensorType([None, len(COLUMNS)]))]
    return onnxmltools.convert_lightgbm(model, initial_types=inputs, zipmap=False)


def _scikit_learn(rows: Rows, paid: Any) -> Any:
    from skl2onnx import to_onnx
    from sklearn.ensemble import RandomForestClassifier

    model = RandomForestClassifier(_TREES, min_samples_leaf=5, random_state=1).fit(rows, paid)
    # Without `zipmap: False` the probabilities would be dictionaries, which no server of tensors gives.
    named = model.__class__, {"zipmap": False}
    exported = to_onnx(model, rows[:1], options=dict([named]), target_opset={"": 18, "ai.onnx.ml": 3})
    exported.graph.input[0].name = "features"
    for node in exported.graph.node:
        node.input[:] = ["features" if name == "X" else name for name in node.input]
    return exported


def rounded(reference: Any, rows: Rows, bits: int) -> Any:
    """Return the trees with thresholds of so many bits for each column, between the ends of its values in `rows`."""
    model, trees = _copy(reference)
    values, columns, modes = (
        np.array(_list(trees, name)) for name in ("nodes_values", "nodes_featureids", "nodes_modes")
    )
    steps = 2**bits - 1
    for column in range(rows.shape[1]):
        low, high = np.nanmin(rows[:, column]), np.nanmax(rows[:, column])
        here = (columns == column) & (modes != b"LEAF") & np.isfinite(values)
        step = (high - low) / steps
        values[here] = low + np.clip(np.rint((values[here] - low) / step), 0, steps) * step
    _set(trees, "nodes_values", values)
    return model


def halved(reference: Any) -> Any:
    """Return the trees with leaves in FP16."""
    model, trees = _copy(reference)
    name = "class_weights" if trees.op_type == "TreeEnsembleClassifier" else "target_weights"
    _set(trees, name, np.array(_list(trees, name)).astype(np.float16))
    return model


def _copy(reference: Any) -> tuple[Any, Any]:
    model = onnx.ModelProto.FromString(reference.SerializeToString())
    return model, next(node for node in model.graph.node if node.op_type.startswith("TreeEnsemble"))


def _list(trees: Any, name: str) -> Any:
    return onnx.helper.get_attribute_value(next(each for each in trees.attribute if each.name == name))


def _set(trees: Any, name: str, values: Any) -> None:
    attribute = next(each for each in trees.attribute if each.name == name)
    attribute.floats[:] = np.asarray(values, np.float32).tolist()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Train a model of customers, and write it with two candidates."
    )
    parser.add_argument("--library", choices=LIBRARIES, default=LIBRARIES[0])
    parser.add_argument("--out", type=Path, default=Path("out/tabular"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of the converters, about versions
    make(arguments.out, arguments.library)
    print(f"{arguments.out} has {REFERENCE}, {ROUNDED}, {HALF}, recorded.npz and config.toml")

"""A small network that reads digits, as it was trained and as several tools have quantised it."""

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from torch import nn

from tests.quantised.digits import Digits

_STEPS = 300
_HELD_OUT = 597


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    """Train a network on scikit-learn's digits, some two seconds, and export it."""
    images, labels = _scans()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    learnt, truth = torch.from_numpy(images[_HELD_OUT:]), torch.from_numpy(labels[_HELD_OUT:])
    rng = np.random.default_rng(1)
    for _ in range(_STEPS):
        batch = rng.integers(len(learnt), size=64)
        loss = nn.functional.cross_entropy(network(learnt[batch]), truth[batch])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # torch has no types for it
        optimiser.step()
    network.eval()
    path = tmp_path_factory.mktemp("digits") / "fp32.onnx"
    _export(network, path)
    return Digits(
        network=network,
        path=path,
        images=images[:_HELD_OUT],
        labels=labels[:_HELD_OUT],
        calibration=images[_HELD_OUT:],
    )


def _scans() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    from sklearn.datasets import load_digits

    bundled = load_digits()
    order = np.random.default_rng(0).permutation(len(bundled.target))
    images = (bundled.images[order, np.newaxis] / 16).astype(np.float32)
    return images, bundled.target[order].astype(np.int64)


def _export(network: Any, path: Path) -> None:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # deprecations inside the exporter
        torch.onnx.export(
            network,
            (torch.zeros(2, 1, 8, 8),),
            str(path),
            input_names=["image"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("items")},),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    # What the exporter says of the shape of folded weights is that before folding; the quantisers check it.
    model = onnx.load(path)
    del model.graph.value_info[:]
    onnx.save(model, path)

"""The runtime `npz-linear` passes the tests of every runtime."""

from pathlib import Path

import numpy as np
import pytest

from quantdrift.plugins.runtimes import Array, OperatorError, ReferenceRuntime
from quantdrift.testing.runtimes import RuntimeCase, RuntimeSuite
from quantdrift_forecast.runtime import NpzLinear, NpzOptions

_WEIGHT = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
_BIAS = np.array([1, 2, 3], np.float32)


def _made(directory: Path) -> ReferenceRuntime:
    path = directory / "linear.npz"
    np.savez(path, weight=_WEIGHT, bias=_BIAS)
    return NpzLinear(path, NpzOptions())


def _inputs(n_items: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(2).normal(size=(n_items, 4)).astype(np.float32)}


class TestNpzLinear(RuntimeSuite):
    """What quantdrift asks of every runtime."""

    cases = (RuntimeCase("npz-linear", _made, _inputs),)


def test_the_output_is_the_linear_map(tmp_path: Path) -> None:
    """To float32."""
    inputs = _inputs(5)
    np.testing.assert_allclose(
        _made(tmp_path).run(inputs)["forecast"], inputs["x"] @ _WEIGHT + _BIAS, rtol=1e-5, atol=1e-6
    )


def test_an_archive_of_doubles_is_refused(tmp_path: Path) -> None:
    """A reference is float32."""
    np.savez(tmp_path / "linear.npz", weight=_WEIGHT.astype(float), bias=_BIAS)
    with pytest.raises(OperatorError, match="both float32"):
        NpzLinear(tmp_path / "linear.npz", NpzOptions())

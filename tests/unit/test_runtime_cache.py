"""The cache of reference runtimes with a limit on memory."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quantdrift.core.config.schema import Provider
from quantdrift.models.runtimes.cache import CachedRuntime, RuntimeCache, files_bytes
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
from quantdrift.models.runtimes.protocol import BrokenRuntimeError, ReferenceRuntime
from tests.support.shadow.onnx_models import BIAS, WEIGHT, inputs_of, linear_model, logits_of, saved

pytestmark = pytest.mark.unit

SIZE = 1 << 40  # far above what a small graph adds to the process when it is opened and when it is run
ROOM = SIZE // 2


class _Bench:
    """A shelf, and which references were opened and closed."""

    def __init__(self, tmp_path: Path, memory_bytes: int) -> None:
        self.shelf = RuntimeCache(memory_bytes)
        self.said: list[str] = []
        self._tmp_path = tmp_path

    def add(self, name: str, scale: float) -> CachedRuntime:
        """Return a reference whose logits are `scale` times those of the linear model, but for the bias."""
        path = saved(linear_model(weight=np.float32(scale) * WEIGHT), self._tmp_path / f"{name}.onnx")
        return CachedRuntime(self.shelf, self._load(name, path), SIZE)

    def _load(self, name: str, path: Path) -> Callable[[], ReferenceRuntime]:
        said = self.said

        class Watched(OnnxRuntime):
            def close(self) -> None:
                said.append(f"close {name}")
                super().close()

        def load() -> ReferenceRuntime:
            said.append(f"open {name}")
            return Watched(path, provider=Provider.CPU, threads=1)

        return load


def test_the_one_used_longest_ago_gives_way(tmp_path: Path) -> None:
    """Never are more open than there is room for, and every answer is that of the reference that was asked."""
    bench = _Bench(tmp_path, 2 * SIZE + ROOM)
    references = {scale: bench.add(f"x{scale}", scale) for scale in (1.0, 2.0, 3.0)}
    assert bench.said == ["open x1.0", "open x2.0", "open x3.0", "close x1.0"]
    bench.said.clear()
    x = inputs_of(2)
    for scale in (3.0, 2.0, 3.0, 1.0, 1.0, 2.0):
        found = references[scale].run({"x": x})["logits"]
        np.testing.assert_allclose(found - BIAS, scale * (logits_of(x) - BIAS), rtol=1e-4)
        assert bench.shelf.n_bytes <= 2 * SIZE + ROOM
    assert bench.said == ["close x2.0", "open x1.0", "close x3.0", "open x2.0"]
    references[1.0].close()
    assert bench.shelf.n_open == 0


@pytest.mark.parametrize(("memory_bytes", "n_open"), [(0, 3), (1, 1)])
def test_without_a_bound_all_stay_and_the_one_in_use_always_does(
    tmp_path: Path, memory_bytes: int, n_open: int
) -> None:
    """A reference above the bound is open alone."""
    bench = _Bench(tmp_path, memory_bytes)
    references = [bench.add(f"x{scale}", scale) for scale in (1.0, 2.0, 3.0)]
    x = inputs_of(1)
    for one in references:
        assert one.run({"x": x})["logits"].shape == (1, 3)
    assert bench.shelf.n_open == n_open


def test_a_reference_that_changed_meanwhile_ends_the_worker(tmp_path: Path) -> None:
    """What is recorded of it would not be true any more; nor is one that is gone to be waited for."""
    bench = _Bench(tmp_path, SIZE)
    first, second = bench.add("first", 1.0), bench.add("second", 2.0)
    x = {"x": inputs_of(1)}
    second.run(x)
    saved(linear_model(weight=np.float32(5) * WEIGHT), tmp_path / "first.onnx")
    with pytest.raises(BrokenRuntimeError, match="has changed since the start"):
        first.run(x)
    (tmp_path / "first.onnx").unlink()
    with pytest.raises(BrokenRuntimeError, match="could be opened at the start"):
        first.run(x)


def test_a_reference_without_files_takes_no_room(tmp_path: Path) -> None:
    """What a server holds stays open: closing it would free nothing."""
    bench = _Bench(tmp_path, SIZE)
    remote = CachedRuntime(bench.shelf, lambda: LinearRuntime(WEIGHT, BIAS), files_bytes(""))
    for scale in (1.0, 2.0):
        bench.add(f"x{scale}", scale)
    assert (remote.n_bytes, bench.shelf.n_open) == (0, 2)


def test_external_data_counts(tmp_path: Path) -> None:
    """The size of a reference is that of its file with those beside it that begin with its name, or of its folder."""
    (tmp_path / "m.onnx").write_bytes(bytes(10))
    (tmp_path / "m.onnx.data").write_bytes(bytes(1000))
    (tmp_path / "other.onnx").write_bytes(bytes(7))
    assert files_bytes(str(tmp_path / "m.onnx")) == 1010
    assert files_bytes(str(tmp_path / "gone.onnx")) == 0
    assert files_bytes(str(tmp_path)) == 1017

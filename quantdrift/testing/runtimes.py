"""What every reference runtime must do.

class TestNpzLinear(RuntimeSuite):
    cases = (RuntimeCase("npz-linear", make, inputs),)
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import pytest

from quantdrift.core.errors import QuarantineError
from quantdrift.models.runtimes.protocol import ReferenceRuntime, replayed_by
from quantdrift.models.tensors.arrays import Array


class RuntimeCase(NamedTuple):
    """A runtime with a reference, and inputs that it takes.

    Parameters
    ----------
    name
        For the test's id.
    make
        Writes a reference into a directory and opens it: the same reference each time, without an embedding.
    inputs
        Returns inputs of so many items by name, the same ones each time.
    atol
        How far a result may be off in another batch.
    """

    name: str
    make: Callable[[Path], ReferenceRuntime]
    inputs: Callable[[int], dict[str, Array]]
    atol: float = 1e-6


class RuntimeSuite:
    """Derive a class `Test...` from it, and give it `cases`."""

    cases: ClassVar[Sequence[RuntimeCase]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test with each case."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases, ids=[case.name for case in self.cases])

    def test_results_do_not_depend_on_the_batch(self, case: RuntimeCase, tmp_path: Path) -> None:
        """An item gives the same alone, in another order and among others, with the types and shapes that the specs say."""
        runtime, inputs = case.make(tmp_path), case.inputs(64)
        together = runtime.run(inputs)
        order = np.random.default_rng(3).permutation(64)
        # Of an item that is alone, another kernel may add up in another order.
        parts: list[tuple[Any, float]] = [(order, 0.0), (slice(5, 12), 0.0)]
        parts += [(slice(number, number + 1), 1e-5) for number in range(9)]
        for items, rtol in parts:
            outputs = runtime.run(_items(inputs, items))
            for name, array in together.items():
                np.testing.assert_allclose(outputs[name], array[items], rtol=rtol, atol=case.atol)
        assert set(together) == {spec.name for spec in runtime.outputs}
        for spec in runtime.outputs:
            assert together[spec.name].dtype == spec.dtype
            assert len(together[spec.name].shape) == len(spec.shape)

    def test_inputs_that_cannot_be_computed_are_refused_as_replay_errors(
        self, case: RuntimeCase, tmp_path: Path
    ) -> None:
        """A wrong name and a wrong shape raise `QuarantineError` with the reason `replay`."""
        runtime, inputs = case.make(tmp_path), case.inputs(2)
        with pytest.raises(QuarantineError, match="replay"):
            runtime.run({f"not-{name}": array for name, array in inputs.items()})
        with pytest.raises(QuarantineError, match="replay"):
            runtime.run({name: array[..., np.newaxis] for name, array in inputs.items()})

    def test_a_runtime_says_what_it_is(self, case: RuntimeCase, tmp_path: Path) -> None:
        """The digest is the same for the same reference, specs name every input, and all of it can be recorded."""
        (tmp_path / "again").mkdir()
        first, second = case.make(tmp_path), case.make(tmp_path / "again")
        assert first.artefact.digest == second.artefact.digest
        assert len(first.artefact.digest) == 64
        assert {spec.name for spec in first.inputs} == set(case.inputs(1))
        assert first.provenance.runtime
        assert first.provenance.provider
        assert first.artefact.precision == "float32"
        for record in (replayed_by(first), first.artefact):
            assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record

    def test_inputs_may_be_views_and_read_only(self, case: RuntimeCase, tmp_path: Path) -> None:
        """What comes from a message cannot be written to, and a part of it need not be contiguous; neither is changed."""
        runtime, inputs = case.make(tmp_path), case.inputs(6)
        views = {name: np.repeat(np.repeat(array, 2, axis=0), 2, axis=-1) for name, array in inputs.items()}
        for array in views.values():
            array.flags.writeable = False
        outputs = runtime.run({name: array[::2, ..., ::2] for name, array in views.items()})
        for name, array in runtime.run(inputs).items():
            np.testing.assert_allclose(outputs[name], array, rtol=1e-5, atol=case.atol)

    def test_a_closed_runtime_may_be_closed_again(self, case: RuntimeCase, tmp_path: Path) -> None:
        """Closing leaves nothing behind that would complain."""
        runtime = case.make(tmp_path)
        runtime.close()
        runtime.close()

    def test_without_an_embedding_there_is_none(self, case: RuntimeCase, tmp_path: Path) -> None:
        """It is asked for by name."""
        assert case.make(tmp_path).embedding == ""


def _items(inputs: dict[str, Array], items: Any) -> dict[str, Array]:
    return {name: array[items] for name, array in inputs.items()}

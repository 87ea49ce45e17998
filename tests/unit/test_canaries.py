"""References that are checked with canaries."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from quantdrift.core.clock import ManualClock
from quantdrift.core.config.schema import Model, Reference, Runtime
from quantdrift.core.errors import OperatorError, QuarantineError, QuarantineReason, RetryError
from quantdrift.models.runtimes.canaries.canaries import (
    deviations,
    random_inputs,
    read_canaries,
    read_inputs,
    record,
    write_canaries,
)
from quantdrift.models.runtimes.canaries.check import CanaryCheckedRuntime, CanaryOutcome, with_canary_checks
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.models.tensors.arrays import Array, TensorSpec
from tests.support.shadow.onnx_models import BIAS, WEIGHT, inputs_of, logits_of

pytestmark = pytest.mark.unit

MODEL = Model(name="digits")
_TENSOR = b'{"input.x":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
HALF = len(_TENSOR).to_bytes(8, "little") + _TENSOR + bytes(4)  # a safetensors file that numpy cannot hold


class _Served(LinearRuntime):
    """Somebody may change it, and it may be away."""

    def __init__(self) -> None:
        super().__init__(WEIGHT, BIAS)
        self.factor = np.float32(1)
        self.away = self.refuses = False
        self.n_runs = 0

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        self.n_runs += 1
        if self.away:
            raise RetryError("away")
        if self.refuses:
            raise QuarantineError(QuarantineReason.REPLAY, "no")
        return {"logits": super().run(inputs)["logits"] * self.factor}


def _recorded(path: Path, n_items: int = 4) -> Path:
    runtime = LinearRuntime(WEIGHT, BIAS)
    canaries = record(runtime, random_inputs(runtime.inputs, n_items=n_items, seed=3))
    write_canaries(canaries, path, {"runtime": "linear"})
    return path


class _Bench:
    """A served reference, held to its canaries every 60 s."""

    def __init__(self, tmp_path: Path, **options: float) -> None:
        self.served = _Served()
        self.clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
        self.told: list[CanaryOutcome] = []
        self.reference = msgspec.structs.replace(
            Reference(
                runtime=Runtime.OIP_HTTP,
                url="http://127.0.0.1:1",
                canaries=str(_recorded(tmp_path / "c.safetensors")),
            ),
            **options,
        )
        self.runtime = with_canary_checks(
            MODEL,
            self.reference,
            self.served,
            clock=self.clock,
            on_check=lambda _, outcome: self.told.append(outcome),
        )

    def ask(self) -> Array:
        return self.runtime.run({"x": inputs_of(2)})["logits"]


def test_a_set_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """And its digest is that of the file."""
    canaries = read_canaries(_recorded(tmp_path / "c.safetensors"))
    np.testing.assert_allclose(canaries.outputs["logits"], logits_of(canaries.inputs["x"]), rtol=1e-5)
    assert len(canaries.digest) == 64
    (found,) = deviations(LinearRuntime(WEIGHT, BIAS), canaries)
    assert (found.output, found.ratio) == ("logits", 0.0)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("factor", [1e-6, 1e-3, 0.5])
def test_a_deviation_is_the_largest_difference_over_the_largest_magnitude(
    tmp_path: Path, factor: float
) -> None:
    """In closed form: outputs that are larger by a share are off by that share."""
    canaries = read_canaries(_recorded(tmp_path / "c.safetensors"))
    larger = {name: array.astype(np.float64) * (1 + factor) for name, array in canaries.outputs.items()}
    exact = LinearRuntime(WEIGHT, BIAS)
    (found,) = deviations(exact, msgspec.structs.replace(canaries, outputs=larger))
    assert found.ratio == pytest.approx(factor / (1 + factor), rel=1e-2)
    item, place = (int(one) for one in np.unravel_index(np.argmax(np.abs(larger["logits"])), (4, 3)))
    assert found.worst == (
        f"at [{item}, {place}] it gives {float(canaries.outputs['logits'][item, place]):.8g}, recorded is "
        f"{larger['logits'][item, place]:.8g}"
    )


@pytest.mark.parametrize(
    ("outputs", "worst"),
    [
        ({"scores": np.ones((4, 3))}, "it gives no such numbers"),
        ({"logits": np.ones((4, 2))}, "it gives [4, 3], recorded is [4, 2]"),
        ({"logits": np.zeros((4, 3))}, "recorded is 0"),
        ({"logits": np.where(np.arange(12).reshape(4, 3) == 5, np.nan, 1e9)}, "at [1, 2] it gives"),
    ],
    ids=["name", "shape", "magnitude", "number"],
)
def test_what_cannot_be_compared_is_infinitely_off(
    tmp_path: Path, outputs: dict[str, Array], worst: str
) -> None:
    """An output that is gone or of another shape is none that could be tolerated."""
    canaries = read_canaries(_recorded(tmp_path / "c.safetensors"))
    (found,) = deviations(LinearRuntime(WEIGHT, BIAS), msgspec.structs.replace(canaries, outputs=outputs))
    assert found.ratio == float("inf")
    assert worst in found.worst


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (None, "cannot be read"),
        (b"\x80\x04pickle", "not a safetensors file"),
        ({"x": np.ones(2)}, "is not a set of canaries"),
        (HALF, "not a safetensors file.*BF16"),
    ],
)
def test_what_is_no_set_is_the_operators_to_mend(
    tmp_path: Path, content: bytes | dict[str, Array] | None, hint: str
) -> None:
    """With the file's name."""
    path = tmp_path / "c.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        save_file(content, path)
    with pytest.raises(OperatorError, match=hint):
        read_canaries(path)


def test_inputs_are_read_without_running_anything(tmp_path: Path) -> None:
    """Safetensors and npz hold arrays; a pickle in an npz is refused."""
    x = inputs_of(3)
    save_file({"x": x}, tmp_path / "i.safetensors")
    np.savez(tmp_path / "i.npz", x=x)
    for name in ("i.safetensors", "i.npz"):
        np.testing.assert_array_equal(read_inputs(tmp_path / name)["x"], x)
    np.savez(tmp_path / "p.npz", x=np.array([print], dtype=object))
    with pytest.raises(OperatorError, match=r"p\.npz"):
        read_inputs(tmp_path / "p.npz")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.npz", b"PK\x03\x04" + bytes(200)),
        ("empty.npz", b""),
        (
            "array.npz",
            b"\x93NUMPY\x01\x00F\x00{'descr': '<f8', 'fortran_order': False, 'shape': (0,), }".ljust(80),
        ),
        ("half.safetensors", HALF),
    ],
)
def test_inputs_that_cannot_be_read_are_the_operators_to_mend(
    tmp_path: Path, name: str, content: bytes
) -> None:
    """An archive that was cut off, nothing at all, a single array, and a type that numpy has not."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OperatorError, match=name):
        read_inputs(tmp_path / name)


def test_what_holds_against_nothing_is_not_recorded() -> None:
    """Other inputs than the reference takes, outputs that are not finite, and text."""
    runtime = LinearRuntime(WEIGHT, BIAS)
    with pytest.raises(OperatorError, match=r"\['x'\], but got \['y'\]"):
        record(runtime, {"y": inputs_of(2)})
    with pytest.raises(OperatorError, match="not finite"):
        record(runtime, {"x": np.full((2, 4), np.nan, np.float32)})
    with pytest.raises(OperatorError, match="only numbers"):
        random_inputs((TensorSpec(name="t", dtype=np.dtype(object), shape=(None,)),), n_items=2, seed=1)


def test_a_reference_that_does_not_reproduce_them_is_refused(tmp_path: Path) -> None:
    """Whatever holds it, with how far it is off."""
    reference = Reference(path="m.onnx", canaries=str(_recorded(tmp_path / "c.safetensors")))
    other = LinearRuntime(WEIGHT, BIAS + 1)
    with pytest.raises(
        OperatorError,
        match=r"does not reproduce.*`logits` is off by 0\.\d+, allowed is 0\.0001: at \[\d, \d\] it gives .*, recorded is ",
    ):
        with_canary_checks(
            MODEL, reference, other, clock=ManualClock(datetime.now(UTC)), on_check=lambda *_: None
        )


def test_a_file_is_checked_once(tmp_path: Path) -> None:
    """It stays what it was; the record tells which canaries it has reproduced."""
    served = _Served()
    clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
    path = _recorded(tmp_path / "c.safetensors")
    runtime = with_canary_checks(
        MODEL, Reference(path="m.onnx", canaries=str(path)), served, clock=clock, on_check=lambda *_: None
    )
    clock.advance(1e9)
    runtime.run({"x": inputs_of(2)})
    assert served.n_runs == 2
    assert runtime.artefact.canaries == read_canaries(path).digest
    assert isinstance(runtime, CanaryCheckedRuntime)


def test_a_server_is_checked_again_while_it_works(tmp_path: Path) -> None:
    """Once in each interval, behind a replay."""
    bench = _Bench(tmp_path)
    for later_s, n_runs in ((0, 2), (59, 3), (1, 5), (59, 6), (1, 8)):
        bench.clock.advance(later_s)
        bench.ask()
        assert bench.served.n_runs == n_runs
    assert bench.told == [CanaryOutcome.REPRODUCED] * 3


def test_another_model_at_the_server_stops_comparing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was replayed when it is found is not given out, exchanges wait, and go on when it is right again."""
    bench = _Bench(tmp_path, canary_interval_s=0.0)
    good = bench.ask()
    bench.served.factor = np.float32(1.001)
    for _ in range(2):
        with pytest.raises(RetryError, match=r"does not reproduce its canaries .*`logits` is off by 0\.001"):
            bench.ask()
    assert caplog.text.count("no longer reproduces") == 1
    assert "between 2026-01-01T00:00:00+00:00 and" in caplog.text
    bench.served.factor = np.float32(1)
    np.testing.assert_array_equal(bench.ask(), good)
    assert bench.told.count(CanaryOutcome.FAILED) == 2
    assert "reproduces its canaries again" in caplog.text


def test_a_server_that_fails_on_its_canaries_does_not_reproduce_them(tmp_path: Path) -> None:
    """And one that is away has not failed: it is waited for as ever."""
    bench = _Bench(tmp_path)
    bench.clock.advance(60)
    bench.served.away = True
    with pytest.raises(RetryError, match=r"^away$"):
        bench.ask()
    bench.served.away = False
    original = bench.served.run

    def refusing(inputs: dict[str, Array]) -> dict[str, Array]:
        bench.served.refuses = len(inputs["x"]) == 4  # the canaries
        return original(inputs)

    bench.served.run = refusing  # type: ignore[method-assign]
    with pytest.raises(RetryError, match="does not compute them: no"):
        bench.ask()
    assert bench.told == [CanaryOutcome.REPRODUCED, CanaryOutcome.FAILED]

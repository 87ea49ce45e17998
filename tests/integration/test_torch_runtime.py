"""References on PyTorch: what is refused, and what is computed with."""

import gc
import json
import logging
import pickle
import zipfile
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quantdrift.core.config.schema import Model, ModelTensor, Provider
from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.runtimes.onnx.device import cuda_devices
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.pytorch.determinism import device_for
from quantdrift.models.runtimes.pytorch.runtime import TorchRuntime
from quantdrift.models.runtimes.registry import open_reference
from quantdrift.models.runtimes.self_test import SelfTestedRuntime
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import VersionReference
from quantdrift.shadow.replay.replay import assemble, replay
from tests.support.shadow.onnx_models import N_FEATURES, WEIGHT, exchange_of, inputs_of, logits_of
from tests.support.shadow.torch_models import (
    FACTORY,
    MODEL,
    Hungry,
    Linear,
    exported,
    of_factory,
    opening,
    pin,
    scripted,
    weights,
)

pytestmark = pytest.mark.integration

HERE = "tests.integration.test_torch_runtime"
TWO = msgspec.structs.replace(
    MODEL, outputs=(ModelTensor(name="logits", datatype="FP32"), ModelTensor(name="sums", datatype="FP32"))
)


class Pair(Linear):
    """Returns two tensors without names."""

    def forward(self, x: torch.Tensor) -> Any:
        """Return logits, and the sum of each item."""
        return super().forward(x)["logits"], x.sum(dim=1)


class Autocast(Linear):
    """Computes its product in bfloat16, whatever it is called in."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return logits that were rounded on the way."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return {"logits": self.product(x).float() + self.bias}


class Emulated(Linear):
    """Rounds its input as int8 would."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return logits of what is left of `x`."""
        return super().forward(torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127))


class Tied(torch.nn.Module):
    """Holds one tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = (torch.nn.Linear(N_FEATURES, N_FEATURES, bias=False) for _ in range(2))
        self.back.weight = self.there.weight

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `x` with the weight applied twice."""
        return {"logits": self.back(self.there(x))}


class Fussy(Linear):
    """Raises what nobody expects on negative numbers."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return logits, or fail as a look-up does."""
        if bool((x < 0).any()):
            raise KeyError("negative")
        return super().forward(x)


def nothing() -> str:
    """Return no module."""
    return "nothing"


def failing() -> Linear:
    """Fail."""
    raise RuntimeError("no disk")


@pytest.mark.parametrize("form", ["exported", "torchscript"])
def test_code_that_is_not_pinned_is_not_loaded(tmp_path: Path, form: str) -> None:
    """The message says what to pin; what is not the pinned file is refused before PyTorch sees a byte of it."""
    path = tmp_path / f"linear.{'pt2' if form == 'exported' else 'pt'}"
    path.write_bytes(b"no archive")
    with pytest.raises(OperatorError, match=f'which is code.*digest = "{pin(path)}"'):
        TorchRuntime(opening(path, digest=""))
    with pytest.raises(OperatorError, match="pins sha256:0000"):
        TorchRuntime(opening(path, digest=f"sha256:{'0' * 64}"))
    with pytest.raises(OperatorError, match="cannot load"):
        TorchRuntime(opening(path))


class _Pickled:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self._path), "w")


@pytest.mark.parametrize("name", ["linear.pt2", "linear.pt", "linear.safetensors"])
def test_a_pickle_in_a_file_of_somebody_else_is_never_opened(tmp_path: Path, name: str) -> None:
    """An archive of pickles is code, and nobody pinned it; called weights, it is no file of weights."""
    path = tmp_path / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("linear/data.pkl", pickle.dumps(_Pickled(tmp_path / "PWNED")))
    options: dict[str, Any] = {"factory": FACTORY} if path.suffix == ".safetensors" else {"digest": ""}
    with pytest.raises(OperatorError):
        TorchRuntime(opening(path, **options))
    assert not (tmp_path / "PWNED").exists()


def test_compiled_code_in_an_archive_is_refused(tmp_path: Path) -> None:
    """Of a shared library nothing can be proven."""
    path = exported(tmp_path / "linear.pt2")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("linear/data/aotinductor/model/model.so", b"\x7fELF")
    with pytest.raises(OperatorError, match="compiled code"):
        TorchRuntime(opening(path))


def test_a_changed_file_is_not_the_pinned_one(tmp_path: Path) -> None:
    """Safetensors are data, and are pinned where one likes; the factory's source belongs to the digest."""
    path = weights(tmp_path / "linear.safetensors")
    runtime = TorchRuntime(opening(path, factory=FACTORY))
    pinned = f"sha256:{runtime.artefact.digest}"
    assert pinned != pin(path)
    TorchRuntime(opening(path, factory=FACTORY, digest=pinned))
    weights(path, bias=torch.ones(3))
    with pytest.raises(OperatorError, match="pins"):
        TorchRuntime(opening(path, factory=FACTORY, digest=pinned))


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """What is missing and what is too much, both at once; and a shape that differs."""
    path = tmp_path / "linear.safetensors"
    save_file({"bias": torch.zeros(3), "other": torch.zeros(1)}, path)
    with pytest.raises(OperatorError, match=r"missing `product\.weight`, unexpected `other`"):
        TorchRuntime(opening(path, factory=FACTORY))
    weights(path, bias=torch.zeros(2))
    with pytest.raises(OperatorError, match="size mismatch for bias"):
        TorchRuntime(opening(path, factory=FACTORY))
    path.write_bytes(b"no safetensors")
    with pytest.raises(OperatorError, match="cannot be read as safetensors"):
        TorchRuntime(opening(path, factory=FACTORY))
    with pytest.raises(OperatorError, match=r"gone.*cannot be read.*models\.references\.path"):
        TorchRuntime(opening(tmp_path / "gone.safetensors", factory=FACTORY))


def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    """What was read from the file is let go when it has been looked at: it is as large as the reference."""

    def held() -> set[int]:
        gc.collect()
        tensors = [one for one in gc.get_objects() if type(one) in {torch.Tensor, torch.nn.Parameter}]
        return {one.data_ptr() for one in tensors if one.shape == WEIGHT.T.shape}

    before = held()
    runtime = of_factory(tmp_path)
    assert len(held() - before) == 1
    runtime.close()
    assert held() <= before


def test_weights_may_be_in_parts(tmp_path: Path) -> None:
    """An index names the files; each of them belongs to the digest, and none lies elsewhere."""
    save_file({"bias": Linear().bias.detach()}, tmp_path / "1.safetensors")
    save_file({"product.weight": Linear().product.weight.detach().contiguous()}, tmp_path / "2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"bias": "1.safetensors", "product.weight": "2.safetensors"}}))
    runtime = TorchRuntime(opening(index, factory=FACTORY))
    np.testing.assert_allclose(
        runtime.run({"x": inputs_of(3)})["logits"], logits_of(inputs_of(3)), rtol=1e-5, atol=1e-6
    )
    save_file({"bias": torch.ones(3)}, tmp_path / "1.safetensors")
    assert TorchRuntime(opening(index, factory=FACTORY)).artefact.digest != runtime.artefact.digest
    index.write_text(json.dumps({"weight_map": {"bias": "../1.safetensors"}}))
    with pytest.raises(OperatorError, match="outside"):
        TorchRuntime(opening(index, factory=FACTORY))
    index.write_text("[]")
    with pytest.raises(OperatorError, match="weight_map"):
        TorchRuntime(opening(index, factory=FACTORY))


def test_a_tensor_with_two_names_is_stored_once(tmp_path: Path) -> None:
    """As safetensors do it."""
    path = tmp_path / "tied.safetensors"
    save_file({"there.weight": torch.eye(N_FEATURES) * 2}, path)
    runtime = TorchRuntime(opening(path, factory=f"{HERE}:Tied"))
    np.testing.assert_array_equal(runtime.run({"x": inputs_of(3)})["logits"], inputs_of(3) * 4)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("tests.nowhere:made", "no module `tests.nowhere`"),
        ("nowhere.at.all:made", "cannot be imported"),
        ("os:system", "no module `os`"),
        (f"{HERE}:gone", "AttributeError"),
        (f"{HERE}:failing", "no disk"),
        (f"{HERE}:nothing", "returned str"),
    ],
)
def test_a_factory_that_gives_no_module_is_named(tmp_path: Path, factory: str, said: str) -> None:
    """With what was wrong about it."""
    with pytest.raises(OperatorError, match=said):
        of_factory(tmp_path, factory)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_reduced_weights_are_refused_though_they_would_be_cast_up(tmp_path: Path, dtype: torch.dtype) -> None:
    """A module of float32 takes them silently; by name they are allowed, and said."""
    path = weights(tmp_path / "linear.safetensors", bias=torch.zeros(3, dtype=dtype))
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(OperatorError, match=f"not full precision: stored tensor `bias` is {name}"):
        TorchRuntime(opening(path, factory=FACTORY))
    allowed = TorchRuntime(opening(path, factory=FACTORY, allow_reduced_precision=(name,)))
    assert allowed.artefact.precision == f"float32+{name}"


def test_what_is_computed_in_less_is_refused(tmp_path: Path) -> None:
    """A cast inside of the code is seen by watching it, in each form; the weights would tell nothing of it."""
    runtimes: list[Callable[..., TorchRuntime]] = [
        lambda **options: of_factory(tmp_path, f"{HERE}:Autocast", **options),
        lambda **options: TorchRuntime(opening(exported(tmp_path / "a.pt2", Autocast()), **options)),
        lambda **options: TorchRuntime(opening(scripted(tmp_path / "a.pt", Autocast()), **options)),
    ]
    for runtime in runtimes:
        with pytest.raises(OperatorError, match=r"operator `aten.* is bfloat16"):
            runtime()
        allowed = runtime(allow_reduced_precision=("bfloat16",))
        assert allowed.artefact.precision == "float32+bfloat16"


def test_a_quantised_module_is_refused(tmp_path: Path) -> None:
    """By its operators: the weights may be hidden in packed objects."""
    with pytest.raises(OperatorError, match=r"quantize_per_tensor.* is quantised"):
        of_factory(tmp_path, f"{HERE}:Emulated")
    allowed = of_factory(tmp_path, f"{HERE}:Emulated", allow_reduced_precision=("int8",))
    assert allowed.artefact.precision == "float32+quantised"


def test_outputs_without_names_take_those_of_the_configuration(tmp_path: Path) -> None:
    """In order; where there are not as many, that is an error that says both."""
    model = msgspec.structs.replace(MODEL, outputs=())
    with pytest.raises(
        OperatorError, match=r"2 tensors without names, and \[\[models.outputs\]\] names \[\]"
    ):
        of_factory(tmp_path, f"{HERE}:Pair", model=model)
    runtime = of_factory(tmp_path, f"{HERE}:Pair", model=TWO)
    assert [str(spec) for spec in runtime.outputs] == ["logits: float32[?, 3]", "sums: float32[?]"]
    np.testing.assert_allclose(
        runtime.run({"x": inputs_of(3)})["sums"], inputs_of(3).sum(axis=1), rtol=1e-5, atol=1e-6
    )
    program = TorchRuntime(opening(exported(tmp_path / "pair.pt2", Pair()), model=TWO))
    assert [spec.name for spec in program.outputs] == ["logits", "sums"]


def test_an_input_is_named_as_configured(tmp_path: Path) -> None:
    """A factory's module is called in order where its arguments have other names."""
    pixels = ModelTensor(name="pixels:0", datatype="FP32", shape=(-1, N_FEATURES))
    runtime = of_factory(tmp_path, model=msgspec.structs.replace(MODEL, inputs=(pixels,)))
    found = runtime.run({"pixels:0": inputs_of(2)})["logits"]
    np.testing.assert_allclose(found, logits_of(inputs_of(2)), rtol=1e-5, atol=1e-6)


def test_a_wrong_input_is_reported_with_both_shapes(tmp_path: Path) -> None:
    """A type that PyTorch would cast, and a shape that it would broadcast, are the exchange's fault."""
    runtime = of_factory(tmp_path)
    with pytest.raises(
        QuarantineError, match=r"the reference takes x: float32\[\?, 4\], but got x: float64\[2, 4\]"
    ):
        runtime.run({"x": inputs_of(2).astype(np.float64)})
    with pytest.raises(QuarantineError, match=r"the reference takes .*but got x: float32\[2, 1\]"):
        runtime.run({"x": inputs_of(2)[:, :1]})
    with pytest.raises(QuarantineError, match=r"the reference takes \['x'\], but got \['y'\]"):
        runtime.run({"y": inputs_of(2)})


def test_whatever_the_module_raises_concerns_the_exchange_alone(tmp_path: Path) -> None:
    """It is anybody's code."""
    runtime = of_factory(tmp_path, f"{HERE}:Fussy")
    with pytest.raises(QuarantineError, match="KeyError"):
        runtime.run({"x": -np.ones((1, N_FEATURES), np.float32)})
    runtime.run({"x": np.ones((1, N_FEATURES), np.float32)})
    runtime.close()
    with pytest.raises(QuarantineError, match="closed"):
        runtime.run({"x": np.ones((1, N_FEATURES), np.float32)})


def test_without_memory_smaller_batches_are_tried_and_have_room(tmp_path: Path) -> None:
    """What the failed call had computed is gone before the next one, and only what fails alone is set aside.

    It would be there for as long as the error. On a GPU even the smallest input might find no room then: taken for a dead
    device, that would end the worker.
    """
    Hungry.held.clear()
    runtime = SelfTestedRuntime(of_factory(tmp_path, "tests.support.shadow.torch_models:Hungry"))
    with pytest.raises(QuarantineError, match="memory") as caught:
        runtime.run({"x": inputs_of(4)})
    assert [one() for one in Hungry.held] == [None] * len(Hungry.held)
    assert caught.value.__cause__ is caught.value.__context__ is None
    model = Model(name="digits", top_k=2)
    version_reference = VersionReference(model=model, runtime=runtime, comparator=comparator_of(model))
    batch = [
        PreparedExchange(
            stream_sequence=n,
            payload=b"",
            exchange=exchange_of(x),
            version_reference=version_reference,
            inputs={"x": x},
        )
        for n, x in enumerate([inputs_of(1), inputs_of(4), inputs_of(1) + np.float32(5000), inputs_of(1, 3)])
    ]
    answers = replay(assemble(batch), most_items=64)
    assert [isinstance(answer, QuarantineError) for answer in answers] == [False, False, True, False]


def test_a_module_that_does_not_take_the_configured_shape_is_refused(tmp_path: Path) -> None:
    """Before the first exchange comes."""
    narrow = ModelTensor(name="x", datatype="FP32", shape=(-1, 2))
    with pytest.raises(OperatorError, match=r"does not compute zeros.*x: float32\[\?, 2\]"):
        of_factory(tmp_path, model=msgspec.structs.replace(MODEL, inputs=(narrow,)))


def test_a_fixed_number_of_items_is_known(tmp_path: Path) -> None:
    """The replay fills batches up to it."""
    program = torch.export.export(Linear().eval(), (torch.zeros(8, N_FEATURES),))
    torch.export.save(program, tmp_path / "eight.pt2")
    runtime = TorchRuntime(opening(tmp_path / "eight.pt2"))
    assert (str(runtime.inputs[0]), str(runtime.outputs[0])) == ("x: float32[8, 4]", "logits: float32[8, 3]")


def test_an_unknown_layer_is_named_with_those_that_come_near(tmp_path: Path) -> None:
    """TorchScript shows no layers at all."""
    with pytest.raises(OperatorError, match="did you mean `product`"):
        of_factory(tmp_path, embedding="produkt")
    with pytest.raises(OperatorError, match="did you mean `product`"):
        TorchRuntime(opening(exported(tmp_path / "linear.pt2"), embedding="produkt"))
    with pytest.raises(OperatorError, match="TorchScript shows no layers"):
        TorchRuntime(opening(scripted(tmp_path / "linear.pt"), embedding="product"))


def test_everything_that_could_round_is_switched_off(tmp_path: Path) -> None:
    """Also after PyTorch itself has been at the switches, as an export is."""
    for _ in range(2):
        exported(tmp_path / "linear.pt2")
        TorchRuntime(opening(tmp_path / "linear.pt2"))
        for name in ("cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv"):
            assert attrgetter(name)(torch.backends).fp32_precision == "ieee"
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cudnn.benchmark
        assert torch.are_deterministic_algorithms_enabled()


def test_autocast_around_it_changes_nothing(tmp_path: Path) -> None:
    """Nor do gradients: they are not even recorded."""
    runtime = of_factory(tmp_path)
    x = inputs_of(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        np.testing.assert_allclose(runtime.run({"x": x})["logits"], logits_of(x), rtol=1e-5, atol=1e-6)


def test_it_says_what_replays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Library, version and device; the runtime is chosen by the configuration."""
    caplog.set_level(logging.INFO)
    path = weights(tmp_path / "linear.safetensors")
    runtime: ReferenceRuntime = open_reference(opening(path, factory=FACTORY))
    told = runtime.provenance
    assert (told.runtime, told.version, told.provider, told.device, told.driver) == (
        "torch",
        torch.__version__,
        "cpu",
        "cpu",
        "",
    )
    assert (runtime.artefact.producer, runtime.artefact.path) == (FACTORY, str(path))
    assert "PyTorch on cpu, TF32 off" in caplog.text


def test_a_device_is_named_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's limit of memory takes none without."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert str(device_for(Provider.CUDA)) == "cuda:0"


@pytest.mark.skipif(bool(cuda_devices()), reason="this machine has a CUDA device")
def test_cuda_without_a_device_refuses_to_start(tmp_path: Path) -> None:
    """Nothing falls back to the CPU unless it may."""
    given = opening(weights(tmp_path / "linear.safetensors"), factory=FACTORY)
    with pytest.raises(OperatorError, match=r"no CUDA device.*none"):
        TorchRuntime(msgspec.structs.replace(given, provider=Provider.CUDA))
    assert TorchRuntime(msgspec.structs.replace(given, provider=Provider.AUTO)).provenance.device == "cpu"

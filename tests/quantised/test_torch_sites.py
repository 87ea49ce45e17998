"""Copies of candidates in PyTorch: the reference with all sites in FP32, the candidate with none, and faults of known place."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantdrift.core.config.models import OutputKind
from quantdrift.core.config.schema import Reference, Runtime
from quantdrift.core.errors import OperatorError
from quantdrift.facts.diagnosis import DAMAGED, Cause, Diagnosis, DiagnosisVerdict
from quantdrift.models.comparators.classes.classification import ClassificationComparator
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.tensors.arrays import Outputs
from quantdrift.release.diagnose.blame import diagnose
from quantdrift.release.diagnose.copies import Copy, check
from quantdrift.release.diagnose.diagnose import open_copy
from quantdrift.release.diagnose.pytorch.switches import LayerSwitch, RangeSwitch, WeightSwitch
from tests.quantised.layers import (
    INPUT,
    MODEL,
    OUTPUT,
    damage,
    exported,
    pages_unlike,
    quantised,
    reference,
    saved,
    static,
    written,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

HERE = "tests.quantised.layers"
COMPARATOR = ClassificationComparator(OutputKind.LOGITS, 5)
LINEAR = ("first", *(f"blocks.{number}.{side}" for number in range(3) for side in "ab"), "last")
WEIGHTS = {f"W:{name}" for name in LINEAR}
RANGES = {f"A:{name}" for name in LINEAR}
WHOLE = {f"L:{name}" for name in LINEAR}
IN_PLACE: dict[str, tuple[Callable[[], torch.nn.Module], set[str]]] = {
    "weights": (lambda: quantised("Int8WeightOnlyConfig"), WEIGHTS),
    "ranges of each row": (lambda: quantised("Int8DynamicActivationInt8WeightConfig"), WEIGHTS | RANGES),
    "calibrated ranges": (static, WEIGHTS | RANGES),
    "weights of groups": (lambda: quantised("IntxWeightOnlyConfig"), WEIGHTS),
    "not known what goes in": (lambda: quantised("Int8DynamicActivationIntxWeightConfig"), WHOLE),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the weights in FP32."""
    made = tmp_path_factory.mktemp("torch")
    written(made / "fp32.safetensors")
    return made


def _compare(candidate: Outputs, expected: Outputs) -> Divergences:
    return COMPARATOR.compare(candidate[OUTPUT], expected[OUTPUT])


def _copy(folder: Path, candidate: Path, *, factory: str = f"{HERE}:layers", digest: str = "") -> Copy:
    given = reference(folder / "fp32.safetensors")
    return open_copy(MODEL, given, candidate, factory=factory, digest=digest, threads=1)


def _diagnosed(copy: Copy, *, n_items: int = 1_500, budget: float = 0.015, draw: int = 2) -> Diagnosis:
    return diagnose(copy, _compare, {INPUT: pages_unlike(n_items, draw)}, budget=budget)


@pytest.mark.parametrize("form", IN_PLACE)
def test_the_copy_is_the_reference_or_what_torchao_computes(form: str, folder: Path, tmp_path: Path) -> None:
    """Its sites are the quantised layers, and one site alone changes some answers."""
    make, names = IN_PLACE[form]
    copy = _copy(folder, saved(make(), tmp_path / "int8.safetensors"))
    found = check(copy, {INPUT: pages_unlike(1_000, 2)})
    assert found.holds
    assert found.agreement == 1.0
    assert {site.name for site in copy.sites} == names
    assert copy.unmatched == ()
    costs = [cost or 0.0 for site, cost in zip(copy.sites, copy.costs, strict=True) if site.name[0] in "WL"]
    assert 0.9 < sum(costs) < 1, "the convolution is not quantised"
    inputs = {INPUT: pages_unlike(64, 3)}
    before = copy.run(inputs)[OUTPUT]
    for number in copy.everywhere:
        assert (copy.run(inputs, (number,))[OUTPUT] != before).any()
    np.testing.assert_array_equal(before, copy.run(inputs, factors=np.ones(len(copy.sites)))[OUTPUT])
    assert (before != copy.run(inputs, factors=np.full(len(copy.sites), 1.03))[OUTPUT]).any()


@pytest.mark.parametrize("ranges", ["calibrated", "found while it is computed"])
def test_the_copy_of_an_exported_program_folds_batch_norms(ranges: str, folder: Path, tmp_path: Path) -> None:
    """The convolution's weight is not the reference's but that with its batch norm; the copy finds it."""
    digest = exported(tmp_path / "int8.pt2", dynamic=ranges != "calibrated")
    copy = _copy(folder, tmp_path / "int8.pt2", factory="", digest=digest)
    assert check(copy, {INPUT: pages_unlike(1_000, 2)}).holds
    assert {site.name for site in copy.sites} == {*WEIGHTS, *RANGES, "W:conv", "A:conv"}
    assert copy.unmatched == ()


def test_layers_of_pytorch_itself_are_sites_as_a_whole(folder: Path) -> None:
    """A factory that takes an argument loads the file itself; its layers of another class take the reference's places."""
    copy = _copy(folder, folder / "fp32.safetensors", factory=f"{HERE}:in_place")
    assert {site.name for site in copy.sites} == WHOLE
    assert check(copy, {INPUT: pages_unlike(500, 2)}).holds


def test_a_repaired_module_has_the_references_weights_in_the_named_layer(
    folder: Path, tmp_path: Path
) -> None:
    """They are safetensors by the name in the module; the candidate with them computes with its own kernels, and has recovered."""
    copy: Any = _copy(
        folder, saved(damage(static(), "blocks.1.a", "coarse"), tmp_path / "faulty.safetensors")
    )
    inputs = {INPUT: pages_unlike(1_000, 3)}
    expected = copy.expected(inputs)
    model = copy.in_fp32(["W:blocks.1.a"])
    (tmp_path / "patch.safetensors").write_bytes(model)
    kept = load_file(tmp_path / "patch.safetensors")
    fp32 = load_file(folder / "fp32.safetensors")
    assert kept
    assert all(torch.equal(tensor, fp32[name]) for name, tensor in kept.items())
    answers = (copy.served(inputs), copy.runner(model)(inputs))
    before, after = (float(_compare(answer, expected).flip.mean()) for answer in answers)
    assert before >= 0.02
    assert after < before / 3


def test_a_layer_of_another_class_cannot_be_filled(folder: Path) -> None:
    """That is said, with what helps."""
    copy: Any = _copy(folder, folder / "fp32.safetensors", factory=f"{HERE}:in_place")
    assert "of another class" in copy.unfillable(["L:last"])


@pytest.mark.parametrize(
    ("layer", "kind", "cause"),
    [
        ("blocks.1.a", "coarse", Cause.WEIGHTS),
        ("last", "channel", Cause.WEIGHTS),
        ("blocks.2.b", "narrow", Cause.SATURATION),
        ("first", "wide", Cause.RESOLUTION),
    ],
)
def test_a_fault_in_one_layer_is_named_first(
    layer: str, kind: str, cause: Cause, folder: Path, tmp_path: Path
) -> None:
    """Weights and ranges are told apart, and so is why."""
    copy = _copy(folder, saved(damage(static(), layer, kind), tmp_path / "int8.safetensors"))
    found = _diagnosed(copy)
    assert (found.verdict, found.causes[0]) == (DiagnosisVerdict.NAMED, cause)
    first = found.blamed[0]
    assert first.site == f"{'W' if cause is Cause.WEIGHTS else 'A'}:{layer}"
    assert first.restores > first.placebo
    assert (first.weight_error is None) == (cause is not Cause.WEIGHTS)
    assert (first.outside or 0.0) > 0.05 or cause is not Cause.SATURATION


def test_ranges_of_all_layers_that_are_too_narrow_are_the_cause(folder: Path, tmp_path: Path) -> None:
    """As in an ONNX file: those that are named leave damage, and all the other ranges together restore what is left."""
    network = static()
    for layer in LINEAR:
        damage(network, layer, "narrow")
    found = _diagnosed(_copy(folder, saved(network, tmp_path / "int8.safetensors")))
    assert (found.verdict, found.causes[0]) == (DiagnosisVerdict.NAMED, Cause.SATURATION)
    assert found.clipping is not None
    assert len(found.clipping.ranges) + len(found.blamed) == found.clipping.n_ranges == len(LINEAR)
    assert found.clipping.restores > found.clipping.placebo
    assert found.clipping.flips_left is not None
    assert found.clipping.flips_left < found.budget < found.flips


def test_a_fault_is_named_where_only_weights_are_quantised(folder: Path, tmp_path: Path) -> None:
    """Placebos change how weights are rounded: there are no ranges."""
    network = damage(quantised("Int8WeightOnlyConfig"), "blocks.0.b", "coarse")
    found = _diagnosed(_copy(folder, saved(network, tmp_path / "int8.safetensors")))
    assert [one.site for one in found.blamed][:1] == ["W:blocks.0.b"]
    assert found.causes[0] is Cause.WEIGHTS


def test_a_fault_is_named_where_layers_cannot_be_divided(folder: Path, tmp_path: Path) -> None:
    """The cause is the layer: nothing is said of weights or ranges."""
    network = quantised("Int8DynamicActivationIntxWeightConfig")
    found = _diagnosed(
        _copy(folder, saved(damage(network, "last", "channel"), tmp_path / "int8.safetensors"))
    )
    first = found.blamed[0]
    assert (first.site, first.cause) == ("L:last", Cause.LAYER)
    assert (first.weight_error, first.used) == (None, None)


@pytest.mark.parametrize(
    ("fault", "site", "cause"),
    [
        ({"coarse": "blocks.1.a"}, "W:blocks.1.a", Cause.WEIGHTS),
        pytest.param({"coarse": "conv"}, "W:conv", Cause.WEIGHTS, marks=pytest.mark.release),
        ({"scales": {"relu_1": 0.05}}, "A:blocks.0.a", Cause.SATURATION),
        pytest.param({"scales": {"image": 60.0}}, "A:conv", Cause.RESOLUTION, marks=pytest.mark.release),
    ],
    ids=["weight", "folded weight", "range too narrow", "range too wide"],
)
def test_a_fault_in_an_exported_program_is_named_first(
    fault: dict[str, Any], site: str, cause: Cause, folder: Path, tmp_path: Path
) -> None:
    """As in an ONNX file."""
    digest = exported(tmp_path / "int8.pt2", **fault)
    found = _diagnosed(_copy(folder, tmp_path / "int8.pt2", factory="", digest=digest))
    assert (found.blamed[0].site, found.blamed[0].cause) == (site, cause)


@pytest.mark.parametrize(("form", "draw"), [("weights", 2), ("not known what goes in", 3)])
def test_no_site_of_a_sound_candidate_is_named(form: str, draw: int, folder: Path, tmp_path: Path) -> None:
    """Rounding that is spread over all layers has no culprit, even where it is over a budget.

    In other draws, of a dozen changed answers each, the layer is named whose rounding changes most of them.
    """
    copy = _copy(folder, saved(IN_PLACE[form][0](), tmp_path / "int8.safetensors"))
    found = _diagnosed(copy, n_items=12_000, budget=0.0001, draw=draw)
    assert found.n_damaged >= 8
    assert found.blamed == ()
    assert found.verdict is (
        DiagnosisVerdict.NOBODY if found.n_damaged == DAMAGED else DiagnosisVerdict.TOO_FEW
    )


def test_what_cannot_be_diagnosed_says_why(folder: Path, tmp_path: Path) -> None:
    """No names on both sides, nothing quantised, no digest, another reference, or files of different kinds."""
    fp32 = folder / "fp32.safetensors"
    with pytest.raises(OperatorError, match="nothing is quantised there"):
        _copy(folder, fp32, factory=f"{HERE}:plain")
    digest = exported(tmp_path / "int8.pt2")
    with pytest.raises(OperatorError, match=f"--digest {digest}"):
        _copy(folder, tmp_path / "int8.pt2", factory="")
    with pytest.raises(OperatorError, match="--factory package"):
        _copy(folder, fp32, factory="")
    with pytest.raises(OperatorError, match="must be `package"):
        _copy(folder, fp32, factory="layers.py")
    with pytest.raises(OperatorError, match="no module `os`"):
        _copy(folder, fp32, factory="os:system")
    with pytest.raises(OperatorError, match=r"--factory `tests.quantised.layers:nothing` fails"):
        _copy(folder, fp32, factory=f"{HERE}:nothing")
    given = Reference(runtime=Runtime.TORCH, path=str(tmp_path / "int8.pt2"), digest=digest)
    with pytest.raises(OperatorError, match="has no factory"):
        open_copy(MODEL, given, fp32, factory=f"{HERE}:layers", digest="", threads=1)
    onnx = Reference(path="fp32.onnx")
    with pytest.raises(OperatorError, match="in PyTorch, too"):
        open_copy(MODEL, onnx, fp32, factory=f"{HERE}:layers", digest="", threads=1)
    other = {name: one.flip(0).contiguous() for name, one in load_file(fp32).items()}
    shutil.copy(fp32, tmp_path / "own.safetensors")
    save_file(other, tmp_path / "fp32.safetensors")
    candidate = saved(quantised("Int8WeightOnlyConfig"), tmp_path / "int8.safetensors")
    with pytest.raises(OperatorError, match="was not made from this reference"):
        _diagnosed(_copy(tmp_path, candidate))


def test_a_factor_changes_the_rounding_of_a_weight_and_keeps_its_fault() -> None:
    """With the factor f it is wrong by as much as before, within one step; in FP32 it is the reference's."""
    raw = torch.linspace(-1, 1, 41)
    fault = torch.zeros(41)
    fault[7] = 5.0
    step = torch.tensor(0.1)
    switch = WeightSwitch(raw, torch.round(raw / step) * step + fault, step)
    switch.set(restored=False, factor=1.04)
    other = switch()
    assert (other != switch.served).any()
    assert torch.all((other - raw - fault).abs() <= 0.105)
    switch.set(restored=True, factor=1.04)
    assert torch.equal(switch(), raw)


def test_a_range_clips_and_rounds_as_it_says() -> None:
    """Steps of 0.5 from -1 to 1; in FP32 values pass."""
    switch = RangeSwitch(lambda _: (torch.tensor(0.5), torch.tensor(0.0)), -2, 2, is_dynamic=False)
    values = torch.tensor([-3.0, -0.6, 0.2, 0.3, 2.0])
    assert switch(values).tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]
    switch.set(restored=True, factor=1.0)
    assert torch.equal(switch(values), values)


def test_a_layer_that_gets_a_quantised_tensor_is_refused() -> None:
    """The reference's layer could not take its place."""
    layer = torch.nn.Linear(2, 2)
    given = torch.quantize_per_tensor(torch.ones(1, 2), 0.1, 0, torch.quint8)
    with pytest.raises(OperatorError, match="Export the model with PyTorch 2 Export"):
        LayerSwitch(layer, layer)(given)


def test_a_placebo_of_a_layer_gives_each_row_the_error_of_another() -> None:
    """The errors are the same ones, at other rows."""
    served, plain = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    switch = LayerSwitch(served, plain)
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    errors = served(values) - plain(values)
    switch.set(restored=False, factor=1.02)
    moved = switch(values) - plain(values)
    assert not torch.allclose(moved, errors)
    assert torch.allclose(moved.sort(dim=0).values, errors.sort(dim=0).values, atol=1e-5)

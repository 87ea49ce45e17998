"""Changed copies of a candidate: sites in FP32, other activation ranges."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.repair.network import INPUT, OUTPUT, Images, drawn, pages, quantise, write
from quantdrift.core.errors import OperatorError
from quantdrift.release.repair.edits import CandidateEdits, quantised_range
from quantdrift.release.sites import Site, SiteKind, SwitchableCopy, outputs_of, session_of

pytestmark = pytest.mark.integration

VARIANTS: dict[str, dict[str, Any]] = {
    "int8 by channel": {},
    "uint8 by tensor": {"per_channel": False, "unsigned": True},
    "uint8 weights": {"per_channel": False, "unsigned": True, "unsigned_weights": True},
}


@pytest.fixture(scope="module")
def images() -> Images:
    """Draw pages that no calibration has seen."""
    return drawn(pages().held_out, 1_000, np.random.default_rng(2))


@pytest.fixture(
    scope="module",
    params=["int8 by channel", *(pytest.param(name, marks=pytest.mark.release) for name in [*VARIANTS][1:])],
)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make the residual network in FP32, and a candidate of one kind."""
    folder = tmp_path_factory.mktemp("edits")
    reference, candidate = folder / "fp32.onnx", folder / "int8.onnx"
    write(reference, pages(), 1)
    quantise(reference, candidate, pages().learnable, **VARIANTS[request.param])
    return candidate, reference


def _logits(model: onnx.ModelProto, images: Images, *, keep_pairs: bool = False) -> Images:
    onnx.checker.check_model(model)
    session = session_of(model.SerializeToString(), "edited", 1, keep_pairs=keep_pairs)
    return outputs_of(session, [OUTPUT], {INPUT: images})[OUTPUT]


@pytest.mark.release
def test_with_all_sites_in_fp32_it_is_the_reference(models: tuple[Path, Path], images: Images) -> None:
    """No pair is left, each Relu and Clip is back, and the outputs are those of the reference."""
    copy = SwitchableCopy(*models)
    model = CandidateEdits(*models).in_fp32([site.name for site in copy.sites])
    kinds = {node.op_type for node in model.graph.node}
    assert not kinds & {"QuantizeLinear", "DequantizeLinear"}
    assert {"Relu", "Clip"} <= kinds
    expected = copy.expected({INPUT: images})[OUTPUT]
    assert np.abs(_logits(model, images) - expected).max() <= 1e-4 * np.abs(expected).max()


def test_a_site_in_fp32_computes_what_the_diagnosis_has_measured(
    models: tuple[Path, Path], images: Images
) -> None:
    """For each site alone, as the switchable copy with this site on: the same decisions on 99.8 % of the pages."""
    copy = SwitchableCopy(*models)
    edits = CandidateEdits(*models)
    for number, site in enumerate(copy.sites):
        made = _logits(edits.in_fp32([site.name]), images, keep_pairs=True)
        same = made.argmax(axis=1) == copy.run({INPUT: images}, [number])[OUTPUT].argmax(axis=1)
        assert same.mean() >= 0.998, site.name


def test_the_ranges_that_it_has_give_the_candidate_bit_by_bit(
    models: tuple[Path, Path], images: Images
) -> None:
    """With integer kernels, and with the biases whose scales follow the ranges."""
    copy = SwitchableCopy(*models)
    ranges = {
        site.name: (float(site.low), float(site.high))
        for site in copy.sites
        if site.kind is SiteKind.ACTIVATION and site.axis is None
    }
    model = CandidateEdits(*models).with_ranges(ranges)
    np.testing.assert_array_equal(_logits(model, images), copy.served({INPUT: images})[OUTPUT])


def test_new_ranges_serve_pages_that_the_old_ones_cut_off(models: tuple[Path, Path], images: Images) -> None:
    """Pages of eight times the brightness: most answers change; with ranges from 64 of them hardly any does."""
    copy = SwitchableCopy(*models)
    bright = {INPUT: 8 * images}
    truth = copy.expected(bright)[OUTPUT].argmax(axis=1)
    found = copy.extremes({INPUT: bright[INPUT][:64]})
    model = CandidateEdits(*models).with_ranges({copy.sites[site].name: ends for site, ends in found.items()})
    assert (copy.served(bright)[OUTPUT].argmax(axis=1) != truth).mean() > 0.3
    assert (_logits(model, bright[INPUT]).argmax(axis=1) != truth).mean() < 0.05


def test_ranges_hold_the_share_of_the_values_that_was_asked_for(
    models: tuple[Path, Path], images: Images
) -> None:
    """They are quantiles of all values, to a bin of a histogram; a share of 1 is the smallest and the largest value."""
    copy = SwitchableCopy(*models)
    inputs = {INPUT: images[:40]}
    whole, most = copy.ranges(inputs, [1.0, 0.99])
    assert whole == copy.extremes(inputs)
    values = copy.raw(inputs, copy.everywhere)
    for number, (low, high) in most.items():
        if len(copy.sites[number].tensors) > 1:
            continue  # `raw` has the first tensor alone
        bin_width = (whole[number][1] - whole[number][0]) / 16_384
        ordered = np.sort(values[number], axis=None)
        for found, share in ((low, 0.005), (high, 0.995)):
            place = int(share * len(ordered))
            near = ordered[max(place - 1, 0) : place + 2]
            assert near[0] - bin_width <= found <= near[-1] + bin_width, copy.sites[number].name


def test_a_site_that_is_not_there_is_an_error(models: tuple[Path, Path]) -> None:
    """Nothing is guessed."""
    with pytest.raises(OperatorError, match=r"has no site `A:nowhere`"):
        CandidateEdits(*models).in_fp32(["A:nowhere"])


@pytest.mark.parametrize(
    ("lowest", "highest", "zero_point", "ends", "expected"),
    [
        (0, 255, 0, (0.0, 2.55), (0.01, 0)),
        (0, 255, 7, (-1.0, 1.55), (0.01, 100)),
        (0, 255, 7, (0.5, 2.55), (0.01, 0)),
        (-128, 127, -128, (0.0, 2.55), (0.01, -128)),
        (-128, 127, 0, (-1.0, 1.27), (0.01, 0)),
        (0, 255, 0, (0.0, 0.0), (1e-30, 0)),
    ],
    ids=["from 0", "asymmetric", "0 is in the range", "int8 of a Relu", "symmetric", "nothing"],
)
def test_a_range_becomes_a_scale_and_a_zero_point(
    lowest: int, highest: int, zero_point: int, ends: tuple[float, float], expected: tuple[float, int]
) -> None:
    """As ONNX Runtime's calibration does it; symmetric where the candidate is."""
    site = Site(
        kind=SiteKind.ACTIVATION,
        place="x",
        tensors=("x",),
        nodes=(),
        scale=np.array(1.0),
        zero_point=np.array(zero_point),
        axis=None,
        lowest=lowest,
        highest=highest,
    )
    assert quantised_range(site, *ends) == pytest.approx(expected)

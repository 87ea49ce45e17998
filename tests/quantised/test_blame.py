"""The ranking of sites on known answers: one fault, one beside a louder harmless one, two faults, and a healthy candidate."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.repair.faults import Fault, Kind, Patient
from benchmarks.repair.network import INPUT, OUTPUT, drawn, pages, quantise, write
from quantdrift.core.config.models import OutputKind
from quantdrift.core.errors import OperatorError
from quantdrift.facts.diagnosis import FEWEST_DAMAGED, Cause, Diagnosis, DiagnosisVerdict
from quantdrift.models.comparators.classes.classification import ClassificationComparator
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.tensors.arrays import Outputs
from quantdrift.release.diagnose import blame
from quantdrift.release.diagnose.blame import diagnose
from quantdrift.release.diagnose.probes import range_use
from quantdrift.release.sites import SwitchableCopy

pytestmark = pytest.mark.integration

BUDGET = 0.03
COMPARATOR = ClassificationComparator(OutputKind.LOGITS, 5)
WEIGHT = Fault(site="W:node_side1_conv", kind=Kind.ROUNDING, strength=2)
CHANNEL = Fault(site="W:node_block4.a_conv", kind=Kind.CHANNEL, strength=3, channel=2)
NARROW = Fault(site="A:image", kind=Kind.NARROW, strength=5)
WIDE = Fault(site="A:stem_relu", kind=Kind.WIDE, strength=7)
COARSE = Fault(site="A:image", kind=Kind.WIDE, strength=7)
FAINT = 0.15
"""So much fainter pages are damaged less."""
DECOY = Fault(site="A:block2.b_norm", kind=Kind.WIDE, strength=4)


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Patient:
    """Make the residual network, its healthy candidate, whose kernels are exact on every processor, and pages that no calibration has seen."""
    folder = tmp_path_factory.mktemp("blame")
    write(folder / "fp32.onnx", pages(), 1)
    quantise(folder / "fp32.onnx", folder / "int8.onnx", pages().learnable, reduced=True)
    images = drawn(pages().held_out, 1_500, np.random.default_rng(2))
    return Patient(folder / "fp32.onnx", folder / "int8.onnx", images, folder)


def _compare(candidate: Outputs, reference: Outputs) -> Divergences:
    return COMPARATOR.compare(candidate[OUTPUT], reference[OUTPUT])


def _diagnosed(
    patient: Patient, faults: Iterable[Fault], *, budget: float = BUDGET, seed: int = 1
) -> Diagnosis:
    copy = SwitchableCopy(patient.write(faults), patient.reference)
    return diagnose(copy, _compare, {INPUT: patient.images}, budget=budget, seed=seed)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (WEIGHT, Cause.WEIGHTS),
        pytest.param(CHANNEL, Cause.WEIGHTS, marks=pytest.mark.release),
        (NARROW, Cause.SATURATION),
        pytest.param(WIDE, Cause.RESOLUTION, marks=pytest.mark.release),
    ],
    ids=["rounded weight", "one channel", "range too narrow", "range too wide"],
)
def test_an_injected_fault_is_named_first_with_its_cause(
    fault: Fault, cause: Cause, patient: Patient
) -> None:
    """Its site is the first, restores more than any placebo, and heals items that were not used to choose it."""
    assert patient.flips([fault]) > BUDGET
    found = _diagnosed(patient, [fault])
    first = found.blamed[0]
    assert (found.verdict, first.site) == (DiagnosisVerdict.NAMED, fault.site)
    assert found.causes[0] is first.cause is cause
    assert first.restores > first.placebo
    assert found.fresh_flips is not None
    assert first.flips_left is not None
    assert first.flips_left < found.fresh_flips / 2


@pytest.mark.release
def test_a_louder_error_that_harms_nobody_is_not_blamed(patient: Patient) -> None:
    """The decoy has the larger error at its own site, and changes nearly no decision: the culprit is the first."""
    assert patient.error(DECOY) > patient.error(WEIGHT)
    assert patient.flips([DECOY]) - patient.healthy < 0.005
    assert _diagnosed(patient, [WEIGHT, DECOY]).order[0] == WEIGHT.site


@pytest.mark.release
def test_a_part_of_the_exemplars_chooses_among_many_sites(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a transformer of hundreds of sites: the culprit is still the first, and the named sites are measured on all exemplars."""
    monkeypatch.setattr(blame, "_MANY", 8)
    monkeypatch.setattr(blame, "_CHOSEN", 3)
    found = _diagnosed(patient, [WEIGHT])
    assert found.blamed[0].site == WEIGHT.site
    assert len(found.one_off) == found.n_sites


@pytest.mark.release
def test_two_faults_are_the_first_two(patient: Patient) -> None:
    """Each hides what the other one does; the greedy search names both before any other site."""
    found = _diagnosed(patient, [WEIGHT, CHANNEL])
    assert {one.site for one in found.blamed[:2]} == {WEIGHT.site, CHANNEL.site}


@pytest.mark.parametrize(
    ("n_images", "seed", "verdict"),
    [
        pytest.param(12_000, 4, DiagnosisVerdict.NOBODY, marks=pytest.mark.release),
        pytest.param(6_000, 15, DiagnosisVerdict.TOO_FEW, marks=pytest.mark.release),
    ],
)
def test_no_site_of_a_healthy_candidate_is_named(
    patient: Patient, n_images: int, seed: int, verdict: DiagnosisVerdict
) -> None:
    """Rounding that is spread over all sites has no culprit, even where it is over a budget.

    With the second seed a site restores more loss than each placebo; of the items that were kept aside it heals too few. There are too
    few damaged ones to say that it is none.
    """
    images = drawn(pages().held_out, n_images, np.random.default_rng(100 + seed))
    copy = SwitchableCopy(patient.candidate, patient.reference)
    found = diagnose(copy, _compare, {INPUT: images}, budget=0.003, seed=seed)
    assert (found.verdict, found.blamed) == (verdict, ())
    assert found.causes == ((Cause.INPUT,) if verdict is DiagnosisVerdict.NOBODY else ())
    assert found.clipping is None
    assert found.together.keys() == {"A", "W"}
    assert max(found.together.values()) > 0.3


def _all_narrow(patient: Patient) -> list[Fault]:
    """Return a fault at each range but the input's: each is a fifth of what it was."""
    ranges = [name for name in patient.sites if name.startswith("A:") and name != NARROW.site]
    return [Fault(site=name, kind=Kind.NARROW, strength=6) for name in ranges]


@pytest.mark.release
def test_ranges_that_are_too_narrow_together_are_the_cause(patient: Patient) -> None:
    """One site alone restores little, since the next range clips, too; the values tell which ones do.

    Some restore more than chance and are named; the group is all the others. The other pages are fainter and within the budget, although
    some of the ranges cut off more of their values: that does not clear these ranges.
    """
    faults = _all_narrow(patient)
    copy = SwitchableCopy(patient.write(faults), patient.reference)
    here, there = np.array_split(patient.images, 2)
    elsewhere = {INPUT: (FAINT * there).astype(np.float32)}
    found = diagnose(copy, _compare, {INPUT: here}, budget=0.05, elsewhere=elsewhere, seed=2)
    assert (found.verdict, found.causes) == (DiagnosisVerdict.NAMED, (Cause.SATURATION,))
    assert (found.elsewhere or 0.0) < found.budget < found.flips
    assert len(found.blamed) < len(faults) / 2
    clipping = found.clipping
    assert clipping is not None
    named = [one.site for one in found.blamed] + [one.site for one in clipping.ranges]
    assert sorted(named) == sorted(fault.site for fault in faults)
    assert clipping.n_ranges == len(faults) + 1
    assert clipping.restores > 0.5 > clipping.placebo
    assert clipping.flips_left is not None
    assert clipping.flips_left < BUDGET
    worst = clipping.ranges[0]
    assert worst.outside == max(one.outside for one in clipping.ranges) > 0.3
    assert any(one.outside < (one.elsewhere or 0.0) for one in clipping.ranges)
    assert any(one.outside > 2 * (one.elsewhere or 0.0) for one in clipping.ranges)


@pytest.mark.release
def test_ranges_that_clip_everywhere_are_the_cause_of_all_slices(patient: Patient) -> None:
    """Other slices that clip as much are no excuse where their answers change as well."""
    copy = SwitchableCopy(patient.write(_all_narrow(patient)), patient.reference)
    here, there = ({INPUT: part} for part in np.array_split(patient.images, 2))
    found = diagnose(copy, _compare, here, budget=BUDGET, elsewhere=there, seed=2)
    assert found.causes == (Cause.SATURATION, Cause.NOT_THIS_SLICE)
    assert found.clipping is not None
    assert len(found.clipping.ranges) > found.clipping.n_ranges / 2


@pytest.mark.release
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.release) for seed in range(1, 4))]
)
def test_ranges_that_clip_a_little_are_not_accused(seed: int, patient: Patient, tmp_path: Path) -> None:
    """Sixteen pages calibrate ranges that others leave a little; that harms nobody, and rounding does what damage there is."""
    quantise(patient.reference, tmp_path / "few.onnx", pages().learnable[:16], reduced=True)
    copy = SwitchableCopy(tmp_path / "few.onnx", patient.reference)
    images = drawn(pages().held_out, 3_000, np.random.default_rng(500 + seed))
    uses = range_use(copy, {INPUT: images[:64]})
    assert any(use.outside.mean() > 0 for use in uses.values())
    found = diagnose(copy, _compare, {INPUT: images}, budget=0.0005, seed=seed)
    assert found.n_damaged >= FEWEST_DAMAGED
    assert (found.blamed, found.clipping) == ((), None)


def test_a_slice_within_its_budget_has_nothing_to_blame(patient: Patient) -> None:
    """A fault whose flips the budget allows is not looked for."""
    found = _diagnosed(patient, [WEIGHT], budget=0.5)
    assert (found.verdict, found.causes, found.order) == (DiagnosisVerdict.NOBODY, (Cause.WITHIN_BUDGET,), ())


def test_too_few_items_or_flips_name_nobody(patient: Patient) -> None:
    """Fewer than 32 items, or fewer than 8 that flip, are too few exemplars."""
    copy = SwitchableCopy(patient.write([WEIGHT]), patient.reference)
    few = diagnose(copy, _compare, {INPUT: patient.images[:31]}, budget=0.001)
    truth, own = (side({INPUT: patient.images}) for side in (copy.expected, copy.run))
    flip = np.nan_to_num(_compare(own, truth).flip) > 0
    kept = np.concatenate([np.flatnonzero(flip)[:7], np.flatnonzero(~flip)[:200]])
    rare = diagnose(copy, _compare, {INPUT: patient.images[kept]}, budget=0.001)
    assert few.verdict is rare.verdict is DiagnosisVerdict.TOO_FEW
    assert (rare.n_items, rare.blamed) == (207, ())


@pytest.mark.release
def test_other_slices_that_flip_alike_are_said(patient: Patient) -> None:
    """Where other slices are over the budget too and flip as often, the cause is not in this slice."""
    copy = SwitchableCopy(patient.write([WEIGHT]), patient.reference)
    here, there = ({INPUT: part} for part in np.array_split(patient.images, 2))
    found = diagnose(copy, _compare, here, budget=BUDGET, elsewhere=there)
    assert found.blamed[0].site == WEIGHT.site
    assert found.causes[-1] is Cause.NOT_THIS_SLICE


@pytest.mark.release
def test_the_same_seed_gives_the_same_diagnosis(patient: Patient) -> None:
    """Inputs and seed determine everything, and the progress ends at its total."""
    seen: list[tuple[int, int]] = []
    copy = SwitchableCopy(patient.write([WEIGHT]), patient.reference)
    inputs = {INPUT: patient.images[:600]}
    first = diagnose(copy, _compare, inputs, budget=BUDGET, progress=lambda *one: seen.append(one))
    assert first == diagnose(copy, _compare, inputs, budget=BUDGET)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.release
def test_rounding_that_decides_answers_is_no_other_candidate(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs lie between two integers of a very coarse range: no two programs agree on them, and the diagnosis says so.

    Kernels that compute something else in as many answers are still refused where rounding decides nothing.
    """
    copy = SwitchableCopy(patient.write([COARSE]), patient.reference)
    site = {one.name: one for one in copy.sites}[COARSE.site]
    between = ((np.floor(patient.images / site.scale) + 0.5) * site.scale).astype(np.float32)
    factors = 1.0 + 2.0**-23 * np.where(np.arange(len(copy.sites)) % 2, 1, -1)
    monkeypatch.setattr(copy, "served", lambda inputs: copy.run(inputs, (), factors))
    found = diagnose(copy, _compare, {INPUT: between}, budget=BUDGET)
    assert found.reproduced < 0.999
    assert found.rounding > 0.001
    monkeypatch.setattr(copy, "served", patient.copy.served)
    with pytest.raises(OperatorError, match="something else than its file says"):
        diagnose(copy, _compare, {INPUT: patient.images}, budget=BUDGET)


def test_a_candidate_of_another_reference_is_refused(patient: Patient, tmp_path: Path) -> None:
    """In FP32 it differs from a reference that computes one more step: the flips have no site."""
    model = onnx.load(patient.reference)
    model.graph.node[-1].output[0] = "before"
    model.graph.node.append(onnx.helper.make_node("Neg", ["before"], [OUTPUT]))
    onnx.save(model, tmp_path / "other.onnx")
    copy = SwitchableCopy(patient.candidate, tmp_path / "other.onnx")
    with pytest.raises(OperatorError, match="was not made from this reference"):
        diagnose(copy, _compare, {INPUT: patient.images[:64]}, budget=BUDGET)


@pytest.mark.release
def test_a_candidate_with_weights_of_another_reference_is_refused(patient: Patient, tmp_path: Path) -> None:
    """The same graph with other weights: the copy would take the reference's, and explain another model."""
    write(tmp_path / "other.onnx", pages(), 7)
    quantise(tmp_path / "other.onnx", tmp_path / "int8.onnx", pages().learnable)
    copy = SwitchableCopy(tmp_path / "int8.onnx", patient.reference)
    with pytest.raises(
        OperatorError, match=r"weights are not those of the reference, rounded.*was not made from"
    ):
        diagnose(copy, _compare, {INPUT: patient.images[:64]}, budget=BUDGET)

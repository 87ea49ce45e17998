"""From alert to fix: faults that are injected into a quantised network, and whether `quantdrift diagnose` names them.

    python -m benchmarks.repair [--quick] [--part PART]...

A residual network of 32 sites is quantised by ONNX Runtime. At one site a scale, a zero point, a channel or the rounding is
spoiled until at least 5 % of the answers change. Then, as `quantdrift diagnose` does it, with 32 changed and 32 other pages:

- `culprit_first`: share of faults that are named first; `culprit_first_digits`: in the demo's network of nine sites.
- `culprit_first_decoy`: the same beside a harmless fault elsewhere that has a larger error. `both_of_two`: share of pairs of faults
  that are the first two.
- `healthy_accused`: share of diagnoses that name a site though nothing is wrong: the worst of 50 random slices of a sound candidate,
  with no budget that would hide it.
- `ort_first`, `ort_first_decoy`: the same faults, by the ranking of ONNX Runtime's own debugger, among sites of the same kind: the
  smallest ratio of signal to noise against the reference (`onnxruntime.quantization.qdq_loss_debug`).
- `nncf_first`, `nncf_first_decoy`: whether the fault is in the group of sites that NNCF would put into FP32 first, where NNCF is
  installed (`pip install nncf`); its groups are fewer than the sites (`nncf_groups`).
- `diagnose_s`: the seconds of the command on 2,000 pages of the demo's archive, on one core and with its start; `archive_named` sites
  take `archive_restored` of its changed answers away. `residual_s`: of one diagnosis of the residual network, without a start.
- `transformer_restored`: of a sentence transformer's damage, the share that the first six of its 132 sites restore, and `transformer_s`
  how long the diagnosis took; `transformer_ort_restored`: the six with the smallest ratios of signal to noise. Not with `--quick`.
- `refused_ordinary`, `culprit_first_shapes`, `false_cause`, `moved_damage_unsaid`, `sound_repairs_passing`, `routed_false_pass`: other networks,
  other checkpoints, and what a repair must not do; see `strangers`.
- `culprit_first_kinds`, `accused_kinds`, `refused_kinds`: weights in blocks, dynamic INT8 and FP16; see `kinds`.
- `gate_*`: the false passes of `quantdrift gate`, and how many samples it needs; see `gates`.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import click
import msgspec
import numpy as np

from benchmarks.repair.demo import Reader
from benchmarks.repair.faults import Fault, Patient
from benchmarks.repair.gates import gate_figures
from benchmarks.repair.kinds import QUICK as QUICK_KINDS
from benchmarks.repair.kinds import Kinds, kind_figures
from benchmarks.repair.network import INPUT, OUTPUT, drawn, pages, quantise, write
from benchmarks.repair.peers import best_group, groups, ratios
from benchmarks.repair.strangers import QUICK as QUICK_STRANGERS
from benchmarks.repair.strangers import Strangers, stranger_figures
from benchmarks.result import Goal, finish
from quantdrift.core.config.schema import OutputKind
from quantdrift.facts.diagnosis import Diagnosis, DiagnosisVerdict
from quantdrift.models.comparators.classes.classification import ClassificationComparator
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.tensors.arrays import Outputs
from quantdrift.release.diagnose.blame import diagnose
from quantdrift.release.sites import SwitchableCopy

N_PAGES: Final = 2_000
BUDGET: Final = 0.01
_POOL: Final = 40_000
_SLICES: Final = 50
_COMPARATOR: Final = ClassificationComparator(OutputKind.LOGITS, 3)


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How many of each are tried."""

    single: int = 100
    decoy: int = 100
    pairs: int = 50
    healthy: int = 100


QUICK: Final = Scale(single=4, decoy=1, pairs=2, healthy=3)


def compare(candidate: Outputs, reference: Outputs) -> Divergences:
    """Compare logits."""
    return _COMPARATOR.compare(candidate[OUTPUT], reference[OUTPUT])


def found_in(patient: Patient, faults: Sequence[Fault], seed: int) -> Diagnosis:
    """Return the diagnosis of the candidate with some faults."""
    copy = SwitchableCopy(patient.write(faults), patient.reference)
    return diagnose(copy, compare, {INPUT: patient.images}, budget=BUDGET, seed=seed)


def first_by_error(patient: Patient, faults: Sequence[Fault]) -> bool:
    """Return whether ONNX Runtime's debugger ranks the first fault's site above all others of its kind, activations or weights."""
    copy = SwitchableCopy(patient.write(faults), patient.reference)
    found = ratios(copy, {INPUT: patient.images[:64]}, patient.sites[faults[0].site].kind)
    return min(found, key=lambda name: found[name]) == faults[0].site


def in_best_group(patient: Patient, faults: Sequence[Fault]) -> bool | None:
    """Return whether the first fault's site is in the group that NNCF would put into FP32 first; None where NNCF is not installed."""
    copy = SwitchableCopy(patient.write(faults), patient.reference)
    group = best_group(copy, {INPUT: patient.images}, OUTPUT)
    return None if group is None else faults[0].site in {copy.sites[number].name for number in group}


def _healthy(patient: Patient, seed: int) -> Diagnosis:
    """Return the diagnosis of the worst of some random slices of the sound candidate."""
    rng = np.random.default_rng(seed)
    pool = drawn(pages().held_out, _POOL, rng)
    copy = patient.copy
    flips = compare(copy.served({INPUT: pool}), copy.expected({INPUT: pool})).flip
    slices = np.array_split(rng.permutation(_POOL), _SLICES)
    worst = max(slices, key=lambda rows: float(np.nansum(flips[rows])))
    return diagnose(copy, compare, {INPUT: pool[worst]}, budget=0.0, seed=seed)


def _each(label: str, n: int) -> Iterator[int]:
    with click.progressbar(range(n), label=label, file=sys.stderr) as bar:
        yield from bar


def _patient(folder: Path) -> Patient:
    reference, candidate = folder / "fp32.onnx", folder / "int8.onnx"
    write(reference, pages(), 1)
    quantise(reference, candidate, pages().learnable)
    images = drawn(pages().held_out, N_PAGES, np.random.default_rng(2))
    return Patient(reference, candidate, images, folder)


class _Found(msgspec.Struct, kw_only=True):
    """Diagnoses of one fault each: whether it is first, for others too, and how long they took."""

    first: list[bool] = []
    by_error: list[bool] = []
    by_group: list[bool | None] = []
    seconds: list[float] = []

    def add(self, patient: Patient, faults: Sequence[Fault], seed: int) -> None:
        """Diagnose the candidate with some faults, of which the first does the damage; say on standard error what is missed."""
        begin = time.monotonic()
        blamed = found_in(patient, faults, seed).blamed
        self.seconds.append(time.monotonic() - begin)
        self.first.append(bool(blamed) and blamed[0].site == faults[0].site)
        self.by_error.append(first_by_error(patient, faults))
        self.by_group.append(in_best_group(patient, faults))
        if not self.first[-1]:
            print(f"missed, seed {seed}: {faults}, named {[site.site for site in blamed]}", file=sys.stderr)


def _single(patient: Patient, n: int, label: str) -> _Found:
    found = _Found()
    for seed in _each(label, n):
        found.add(patient, [patient.draw(np.random.default_rng(seed))], seed)
    return found


def _digits(scale: Scale, folder: Path) -> dict[str, float]:
    reader = Reader(folder)
    single = _single(reader.patient(N_PAGES), scale.single, "one fault in the demo's network")
    return {"culprit_first_digits": float(np.mean(single.first)), **reader.command(N_PAGES)}


def _one_fault(scale: Scale, folder: Path) -> dict[str, float]:
    patient = _patient(folder)
    single = _single(patient, scale.single, "one fault")
    return {
        "sites": float(len(patient.sites)),
        "nncf_groups": float(len(groups(patient.copy.sites))),
        "culprit_first": float(np.mean(single.first)),
        "residual_s": float(np.median(single.seconds)),
        **_shares(ort_first=single.by_error, nncf_first=single.by_group),
    }


def _decoys(scale: Scale, folder: Path) -> dict[str, float]:
    patient = _patient(folder)
    found = _Found()
    seed = 10_000
    for _ in _each("beside a decoy", scale.decoy):
        decoy = None
        while decoy is None:
            seed += 1
            rng = np.random.default_rng(seed)
            fault = patient.draw(rng)
            decoy = patient.decoy(fault, rng)
        found.add(patient, [fault, decoy], seed)
    return _shares(
        culprit_first_decoy=found.first, ort_first_decoy=found.by_error, nncf_first_decoy=found.by_group
    )


def _pairs(scale: Scale, folder: Path) -> dict[str, float]:
    patient = _patient(folder)
    both = []
    for seed in _each("two faults", scale.pairs):
        rng = np.random.default_rng(20_000 + seed)
        one = patient.draw(rng)
        other = patient.draw(rng, besides=[one.site])
        found = found_in(patient, [one, other], seed)
        both.append({site.site for site in found.blamed[:2]} == {one.site, other.site})
        if not both[-1]:
            named = [site.site for site in found.blamed]
            print(f"missed, seed {20_000 + seed}: {one}, {other}, named {named}", file=sys.stderr)
    return _shares(both_of_two=both)


def _sound(scale: Scale, folder: Path) -> dict[str, float]:
    patient = _patient(folder)
    accused = [
        _healthy(patient, 30_000 + seed).verdict is DiagnosisVerdict.NAMED
        for seed in _each("nothing wrong", scale.healthy)
    ]
    return _shares(healthy_accused=accused)


def _shares(**found: Sequence[bool | None]) -> dict[str, float]:
    """Return the share of each list that is true; without lists of nothing but None."""
    known = {name: [one for one in given if one is not None] for name, given in found.items()}
    return {name: float(np.mean(given)) for name, given in known.items() if given}


def _transformer(scale: Scale, folder: Path) -> dict[str, float]:
    del folder
    if scale is QUICK:
        return {}
    from benchmarks.repair.transformer import transformer_figures  # noqa: PLC0415 - torch takes seconds

    return transformer_figures()


def _strangers(scale: Scale, folder: Path) -> dict[str, float]:
    return stranger_figures(QUICK_STRANGERS if scale is QUICK else Strangers(), folder)


def _kinds(scale: Scale, folder: Path) -> dict[str, float]:
    return kind_figures(QUICK_KINDS if scale is QUICK else Kinds(), folder)


def _gates(scale: Scale, folder: Path) -> dict[str, float]:
    del folder
    return {goal.name: float(goal.value) for goal in gate_figures(quick=scale is QUICK).goals()}


PARTS: Final[dict[str, Callable[[Scale, Path], dict[str, float]]]] = {
    "digits": _digits,
    "single": _one_fault,
    "decoys": _decoys,
    "pairs": _pairs,
    "sound": _sound,
    "strangers": _strangers,
    "kinds": _kinds,
    "transformer": _transformer,
    "gates": _gates,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="some minutes: fewer faults, no transformer")
    parser.add_argument("--part", action="append", choices=PARTS, help="this part alone; may be repeated")
    given = parser.parse_args()
    figures = dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        for part in given.part or PARTS:
            found = PARTS[part](QUICK if given.quick else Scale(), Path(folder))
            for name, value in found.items():
                print(f"{name:22} {value:.3g}", flush=True)
            figures |= found
    goals = [
        Goal(name=name, value=figures[name], bound=bound, unit=unit, at_most=at_most)
        for name, bound, unit, at_most in (
            ("culprit_first", 1.0, "share", False),
            ("culprit_first_digits", 1.0, "share", False),
            ("culprit_first_decoy", 1.0, "share", False),
            ("culprit_first_shapes", 1.0, "share", False),
            ("culprit_first_kinds", 1.0, "share", False),
            ("accused_kinds", 0.05, "share", True),
            ("refused_kinds", 0.0, "share", True),
            ("both_of_two", 0.9, "share", False),
            ("false_cause", 0.0, "share", True),
            ("refused_ordinary", 0.0, "share", True),
            ("moved_damage_unsaid", 0.0, "share", True),
            ("sound_repairs_passing", 0.8, "share", False),
            ("healthy_accused", 0.05, "share", True),
            ("diagnose_s", 30.0, "s", True),
            ("transformer_restored", 0.8, "share", False),
            ("transformer_s", 180.0, "s", True),
            ("gate_false_pass_at_budget", 0.05, "share", True),
            ("gate_samples_clean", 400, "samples", True),
            ("gate_samples_fail_p90", 250, "samples", True),
        )
        if name in figures
    ]
    finish("repair", dict(figures), goals)


if __name__ == "__main__":
    main()

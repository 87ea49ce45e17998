"""Faults in the residual network and in the demo's network, each case computed from its seed."""

import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from benchmarks.repair.demo import Reader
from benchmarks.repair.faults import Fault, Patient
from benchmarks.repair.network import INPUT, OUTPUT, drawn, pages, quantise, write
from benchmarks.repair.peers import best_group, ratios
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


@functools.cache
def residual(folder: Path) -> Patient:
    """Write the residual network and its candidate, once in each process."""
    reference, candidate = folder / "fp32.onnx", folder / "int8.onnx"
    write(reference, pages(), 1)
    quantise(reference, candidate, pages().learnable)
    images = drawn(pages().held_out, N_PAGES, np.random.default_rng(2))
    return Patient(reference, candidate, images, folder)


@functools.cache
def reader(models: Path, folder: Path) -> Patient:
    """Return the demo's network, whose models are in another folder, once in each process."""
    return Reader(models).patient(N_PAGES, folder)


class Diagnosed(msgspec.Struct, frozen=True, kw_only=True):
    """The diagnosis of one fault: whether it is first, for others too, and how long it took."""

    first: bool
    by_error: bool
    by_group: bool | None
    seconds: float


def _found(patient: Patient, faults: Sequence[Fault], seed: int) -> Diagnosed:
    """Diagnose the candidate with some faults, of which the first does the damage; say on standard error what is missed."""
    begin = time.monotonic()
    blamed = found_in(patient, faults, seed).blamed
    seconds = time.monotonic() - begin
    first = bool(blamed) and blamed[0].site == faults[0].site
    if not first:
        print(f"missed, seed {seed}: {faults}, named {[site.site for site in blamed]}", file=sys.stderr)
    return Diagnosed(
        first=first,
        by_error=first_by_error(patient, faults),
        by_group=in_best_group(patient, faults),
        seconds=seconds,
    )


def single(folder: Path, seed: int) -> Diagnosed:
    """Diagnose one fault in the residual network."""
    patient = residual(folder)
    return _found(patient, [patient.draw(np.random.default_rng(seed))], seed)


def single_digits(folder: Path, case: tuple[Path, int]) -> Diagnosed:
    """Diagnose one fault in the demo's network: the folder of its models, and a seed."""
    models, seed = case
    patient = reader(models, folder)
    return _found(patient, [patient.draw(np.random.default_rng(seed))], seed)


def decoy_of(folder: Path, number: int) -> Diagnosed:
    """Diagnose one fault beside a harmless one with a larger error."""
    patient, seed = residual(folder), 10_000 + 1_000 * number
    while True:
        rng = np.random.default_rng(seed)
        fault = patient.draw(rng)
        decoy = patient.decoy(fault, rng)
        if decoy is not None:
            return _found(patient, [fault, decoy], seed)
        seed += 1


def pair(folder: Path, seed: int) -> bool:
    """Return whether two faults are the first two."""
    patient, rng = residual(folder), np.random.default_rng(20_000 + seed)
    one = patient.draw(rng)
    other = patient.draw(rng, besides=[one.site])
    found = found_in(patient, [one, other], seed)
    both = {site.site for site in found.blamed[:2]} == {one.site, other.site}
    if not both:
        named = [site.site for site in found.blamed]
        print(f"missed, seed {20_000 + seed}: {one}, {other}, named {named}", file=sys.stderr)
    return both


def is_accused(folder: Path, seed: int) -> bool:
    """Return whether a site is named in a slice of the sound candidate."""
    return _healthy(residual(folder), 30_000 + seed).verdict is DiagnosisVerdict.NAMED

"""From alert to fix: faults that are injected into a quantised network, and whether `quantdrift diagnose` names them.

    python -m benchmarks.repair [--quick] [--part PART]... [--jobs N]

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
- `culprit_first_kinds`, `accused_kinds`, `named_kinds`, `refused_kinds`: weights in blocks, dynamic INT8 and FP16; see `kinds`.
- `culprit_first_language`, `both_of_two_language`, `accused_language`, `stale_language`: the weights of a language model; see `language`.
- `gate_*`: the false passes of `quantdrift gate`, and how many samples it needs; see `gates`.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from benchmarks.repair.cases import Cases
from benchmarks.repair.demo import Reader
from benchmarks.repair.gates import gate_figures
from benchmarks.repair.kinds import QUICK as QUICK_KINDS
from benchmarks.repair.kinds import Kinds, kind_figures
from benchmarks.repair.language import QUICK as QUICK_LANGUAGE
from benchmarks.repair.language import LanguageScale, language_figures
from benchmarks.repair.peers import groups
from benchmarks.repair.residual import N_PAGES, decoy_of, is_accused, pair, residual, single, single_digits
from benchmarks.repair.strangers import QUICK as QUICK_STRANGERS
from benchmarks.repair.strangers import Strangers, stranger_figures
from benchmarks.result import Goal, finish


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How many of each are tried."""

    single: int = 100
    decoy: int = 100
    pairs: int = 50
    healthy: int = 100


QUICK: Final = Scale(single=4, decoy=1, pairs=2, healthy=3)


def _digits(scale: Scale, cases: Cases) -> dict[str, float]:
    reader = Reader(cases.folder / "models")
    numbers = [(reader.models, seed) for seed in range(scale.single)]
    found = cases.each("one fault in the demo's network", single_digits, numbers)
    return {
        "culprit_first_digits": float(np.mean([one.first for one in found])),
        **reader.command(N_PAGES, cases.folder),
    }


def _one_fault(scale: Scale, cases: Cases) -> dict[str, float]:
    found = cases.each("one fault", single, range(scale.single))
    patient = residual(cases.folder)
    return {
        "sites": float(len(patient.sites)),
        "nncf_groups": float(len(groups(patient.copy.sites))),
        "culprit_first": float(np.mean([one.first for one in found])),
        "residual_s": float(np.median([one.seconds for one in found])),
        **_shares(ort_first=[one.by_error for one in found], nncf_first=[one.by_group for one in found]),
    }


def _decoys(scale: Scale, cases: Cases) -> dict[str, float]:
    found = cases.each("beside a decoy", decoy_of, range(scale.decoy))
    return _shares(
        culprit_first_decoy=[one.first for one in found],
        ort_first_decoy=[one.by_error for one in found],
        nncf_first_decoy=[one.by_group for one in found],
    )


def _pairs(scale: Scale, cases: Cases) -> dict[str, float]:
    return _shares(both_of_two=cases.each("two faults", pair, range(scale.pairs)))


def _sound(scale: Scale, cases: Cases) -> dict[str, float]:
    return _shares(healthy_accused=cases.each("nothing wrong", is_accused, range(scale.healthy)))


def _shares(**found: Sequence[bool | None]) -> dict[str, float]:
    """Return the share of each list that is true; without lists of nothing but None."""
    known = {name: [one for one in given if one is not None] for name, given in found.items()}
    return {name: float(np.mean(given)) for name, given in known.items() if given}


def _transformer(scale: Scale, cases: Cases) -> dict[str, float]:
    del cases
    if scale is QUICK:
        return {}
    from benchmarks.repair.transformer import transformer_figures  # noqa: PLC0415 - torch takes seconds

    return transformer_figures()


def _strangers(scale: Scale, cases: Cases) -> dict[str, float]:
    return stranger_figures(QUICK_STRANGERS if scale is QUICK else Strangers(), cases)


def _kinds(scale: Scale, cases: Cases) -> dict[str, float]:
    return kind_figures(QUICK_KINDS if scale is QUICK else Kinds(), cases)


def _language(scale: Scale, cases: Cases) -> dict[str, float]:
    return language_figures(QUICK_LANGUAGE if scale is QUICK else LanguageScale(), cases)


def _gates(scale: Scale, cases: Cases) -> dict[str, float]:
    del cases
    return {goal.name: float(goal.value) for goal in gate_figures(quick=scale is QUICK).goals()}


PARTS: Final[dict[str, Callable[[Scale, Cases], dict[str, float]]]] = {
    "digits": _digits,
    "single": _one_fault,
    "decoys": _decoys,
    "pairs": _pairs,
    "sound": _sound,
    "strangers": _strangers,
    "kinds": _kinds,
    "language": _language,
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
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="processes that compute cases; seconds that are measured beside others mean nothing",
    )
    given = parser.parse_args()
    figures = dict[str, float]()
    with tempfile.TemporaryDirectory() as folder, Cases(Path(folder), given.jobs) as cases:
        for part in given.part or PARTS:
            found = PARTS[part](QUICK if given.quick else Scale(), cases)
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
            ("culprit_first_language", 1.0, "share", False),
            ("both_of_two_language", 0.9, "share", False),
            ("accused_language", 0.05, "share", True),
            ("stale_language", 0.0, "share", True),
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

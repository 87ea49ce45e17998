"""Repairs of a candidate for a damaged slice: records of what was built, and of what each does."""

from enum import StrEnum
from typing import Final

import msgspec

from quantdrift.facts.diagnosis import Diagnosis
from quantdrift.facts.gate import Decision


class RepairKind(StrEnum):
    """What is changed."""

    RECALIBRATE = "recalibrate"
    OWN_COPY = "own-copy"
    FP32_SITES = "fp32-sites"
    REFERENCE = "reference"
    ROLL_BACK = "roll-back"


class RepairOutcome(StrEnum):
    """What a repair achieves."""

    PASSES = "passes"
    RESTORES = "restores"
    MORE_ITEMS = "more items needed"
    OTHERS_BAD = "other slices stay bad"
    NOT_ENOUGH = "not enough"
    MOVES = "moves the damage"
    NO_HELP = "does not help"


_RANK: Final = {result: rank for rank, result in enumerate(RepairOutcome)}
_RANK[RepairOutcome.RESTORES] = _RANK[
    RepairOutcome.PASSES
]  # both end the damage: the cheaper one comes first


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """One repair.

    Parameters
    ----------
    kind
        What is changed.
    model
        The file that it adds: an ONNX model, or weights of layers of a module; empty: the reference is used.
    is_routed
        Only the slice is served by it, and the candidate serves the rest.
    sites
        The sites in FP32.
    calibrated_on
        Numbers of the items that its ranges come from.
    kept
        Share of the values of these items that the ranges hold; 1: from the smallest to the largest.
    tried
        Shares that were tried, each with the share of flips by which one was chosen; empty: there were too few items left to choose by.
    ranges
        The smallest and the largest value that each of its new ranges represents, by the name of the site.
    suffix
        Of the file: `.onnx`, or `.safetensors` for weights of layers.
    """

    kind: RepairKind
    model: bytes
    is_routed: bool
    sites: tuple[str, ...] = ()
    calibrated_on: tuple[int, ...] = ()
    kept: float = 1.0
    tried: tuple[tuple[float, float], ...] = ()
    ranges: dict[str, tuple[float, float]] = {}
    suffix: str = ".onnx"

    @property
    def is_beside(self) -> bool:
        """Whether the candidate stays in memory beside its file."""
        return self.is_routed or (bool(self.model) and self.suffix != ".onnx")

    def file(self, number: int) -> str:
        """Return the name of its file, as the repair of this number."""
        return f"{number}-{self.kind.value}{self.suffix}"


class FlipChange(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of flips in a slice, as served and with a repair.

    Parameters
    ----------
    n
        Items.
    before, after
        Shares of flips.
    """

    n: int
    before: float
    after: float


class MeasuredRepair(msgspec.Struct, frozen=True, kw_only=True):
    """A repair with what it does.

    Parameters
    ----------
    result
        What it achieves.
    flips
        By the name of the slice.
    worse
        Slices in which it does harm by the gate's verdict, and those that stay above the budget.
    is_above
        The share of flips of some slice is above the budget, as far as it is known.
    time_ratio
        Processor time of an answer, over all traffic as recorded, relative to that of the candidate.
    n_bytes
        Length of the model files that must be in memory.
    decision
        The gate's verdict; None where the reference serves: its answers are right by definition.
    cut
        Shares of flips among the items of which new ranges cut values off that the old ones represent, and among a tenth and a hundredth
        of them, of which they cut most; by name.
    """

    repair: Repair
    result: RepairOutcome
    flips: dict[str, FlipChange]
    worse: tuple[str, ...]
    is_above: bool
    time_ratio: float
    n_bytes: int
    decision: Decision | None
    cut: dict[str, FlipChange] = {}

    @property
    def is_of_use(self) -> bool:
        """Whether its model may be of use: it does not fail in the slice itself, nor by damage elsewhere."""
        return bool(self.repair.model) and self.result in {
            RepairOutcome.PASSES,
            RepairOutcome.MORE_ITEMS,
            RepairOutcome.OTHERS_BAD,
        }

    @property
    def order(self) -> tuple[float, ...]:
        """Repairs that end the damage come first, the cheapest first; then the others, by what they achieve so far."""
        return (_RANK[self.result], self.is_above, self.time_ratio, self.n_bytes)


class NotBuilt(msgspec.Struct, frozen=True, kw_only=True):
    """A repair that was not built, and why."""

    kind: RepairKind
    why: str


class Repaired(msgspec.Struct, frozen=True, kw_only=True):
    """The repairs of a candidate for a slice.

    Parameters
    ----------
    candidate, n_bytes
        The file, and its length.
    out
        The folder of the models.
    diagnosis
        The cause, on the inputs that calibrate.
    measured, not_built
        The repairs, those that work first, and those that were not built.
    source
        What the inputs are, in words.
    n_work, n_fresh
        Inputs that find the cause and calibrate, and those that measure.
    n_chosen
        Of the first those that are kept because they are damaged.
    is_weighted
        Whether the inputs are exemplars, each drawn with a probability of its own.
    remarks
        What counts less than it seems, in words.
    gate_options
        Options with which the gate judges the same model, and writes its verdict to the same alert.
    """

    model: str
    slice: str
    candidate: str
    n_bytes: int
    out: str
    diagnosis: Diagnosis
    measured: tuple[MeasuredRepair, ...] = ()
    not_built: tuple[NotBuilt, ...] = ()
    source: str
    n_work: int
    n_fresh: int
    n_chosen: int
    is_weighted: bool
    remarks: tuple[str, ...] = ()
    gate_options: tuple[str, ...] = ()

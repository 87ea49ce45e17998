"""Quantised models that were tried for a reference: records of each recipe, of what it costs and changes, and of the choice."""

from enum import StrEnum

import msgspec

from quantdrift.core.slices import ALL
from quantdrift.facts.gate import Decision, Outcome


class Family(StrEnum):
    """What a recipe does to the weights and activations."""

    FP32 = "fp32"
    FP16 = "fp16"
    STATIC = "static"
    DYNAMIC = "dynamic"
    BLOCKS = "blocks"


class Ranges(StrEnum):
    """Which values of the calibration inputs an activation range holds."""

    ALL = "min-max"
    MOST = "99.99 %"
    MANY = "99.9 %"
    ENTROPY = "entropy"


class CostKind(StrEnum):
    """What makes one model cheaper than another."""

    SIZE = "size"
    TIME = "time"


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """One way to quantise a model.

    Parameters
    ----------
    family
        FP32: the reference as it is. FP16: all numbers. Static and dynamic: weights and activations in INT8. Blocks: weights alone.
    bits
        Of the weights.
    per_channel
        A weight has one scale for each output channel, in place of one.
    symmetric
        The zero point is 0: of activations where they are quantised, else of weights.
    ranges
        Of static recipes: what the activation ranges hold.
    operators
        Types of operators that are quantised; empty: all that the quantiser knows.
    block
        Of blocks: weights that share a scale.
    left_out
        Names of nodes that are not quantised.
    left_bits
        Bits of their numbers: 32, or 16 for FP16.
    """

    family: Family
    bits: int = 8
    per_channel: bool = False
    symmetric: bool = False
    ranges: Ranges = Ranges.ALL
    operators: tuple[str, ...] = ()
    block: int = 0
    left_out: tuple[str, ...] = ()
    left_bits: int = 32


class SliceChange(msgspec.Struct, frozen=True, kw_only=True):
    """Share of the answers of a slice that are changed, as the gate counts them, of so many observations."""

    n: int
    share: float


class TriedRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe with what it costs, and what it changes on the inputs that choose.

    Parameters
    ----------
    n_bytes
        Length of the file.
    time_ratio
        Processor time of an answer, relative to the reference.
    changes
        By the name of the slice.
    within
        In no slice are more answers changed than the budget allows, as far as these inputs tell.
    problem
        Why it cannot be used, in words; empty: it can.
    decision
        The gate's verdict on the inputs that chose nothing; None: it was not judged.
    """

    recipe: Recipe
    n_bytes: int = 0
    time_ratio: float = 0.0
    changes: dict[str, SliceChange] = {}
    within: bool = False
    problem: str = ""
    decision: Decision | None = None

    @property
    def worst(self) -> tuple[str, SliceChange]:
        """The slice with the largest share of changed answers, by its name; of equal ones the first."""
        some = {name: change for name, change in self.changes.items() if change.n}
        if not some:
            return ALL, SliceChange(n=0, share=0.0)
        name = max(some, key=lambda each: some[each].share)
        return name, some[name]

    def cost(self, prefer: CostKind) -> tuple[float, float]:
        """Return what it costs; of equal costs the other one decides."""
        size, time = float(self.n_bytes), self.time_ratio
        return (size, time) if prefer is CostKind.SIZE else (time, size)


class Quantised(msgspec.Struct, frozen=True, kw_only=True):
    """What was found for a reference.

    Parameters
    ----------
    model
        Name of the model.
    reference
        The file that was quantised.
    n_bytes
        Its length.
    budget
        Share of changed answers that is allowed in each slice.
    prefer
        What makes one cheaper.
    tried
        All recipes, in the order in which they were tried.
    sequence
        Numbers of those in `tried` that the gate judged, in that order: it ends with the first that did not pass.
    chosen
        Number of the cheapest that passed; None: none did.
    verdict
        Pass, fail or insufficient.
    out
        The folder of the record, and of the file.
    file
        The file that was written; empty: none.
    n_calibration, n_choosing, n_judging
        Inputs that calibrated, that chose, and that judged.
    not_tried
        What was not tried and why, in words.
    ended
        Why the search ended before all recipes were tried; empty: it did not.
    remarks
        What counts less than it seems, in words.
    gate_options
        Options with which the gate judges the same model.
    """

    model: str
    reference: str
    n_bytes: int
    budget: float
    prefer: CostKind
    tried: tuple[TriedRecipe, ...]
    sequence: tuple[int, ...] = ()
    chosen: int | None = None
    verdict: Outcome
    out: str
    file: str = ""
    n_calibration: int
    n_choosing: int
    n_judging: int
    not_tried: tuple[str, ...] = ()
    ended: str = ""
    remarks: tuple[str, ...] = ()
    gate_options: tuple[str, ...] = ()

    @property
    def usable(self) -> tuple[TriedRecipe, ...]:
        """Recipes that gave a model which answers."""
        return tuple(each for each in self.tried if not each.problem)

    def front(self) -> tuple[TriedRecipe, ...]:
        """Return the recipes of which none is cheaper and changes as few answers of its worst slice, the cheapest first."""
        ordered = sorted(self.usable, key=lambda each: (each.cost(self.prefer)[0], each.worst[1].share))
        front: list[TriedRecipe] = []
        for each in ordered:
            if not front or each.worst[1].share < front[-1].worst[1].share:
                front.append(each)
        return tuple(front)

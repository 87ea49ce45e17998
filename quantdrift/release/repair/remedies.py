"""Repairs of a quantised candidate for one slice: built, measured on items that nothing was chosen by, and judged by the gate.

Which repairs are built depends on the cause (`diagnose`):

| repair | what changes | built where the cause is |
|---|---|---|
| `recalibrate` | all activation ranges, from items of all traffic and of the slice | not in weights alone |
| `own-copy` | a second copy whose activation ranges are those of the slice; the slice is routed to it | not in weights alone |
| `fp32-sites` | the named sites run in FP32: the first, the first two, ...; of decision trees all of them, where none is named | any named site, or trees |
| `reference` | the slice is routed to the reference | always |
| `roll-back` | the reference serves everything | always |

A range holds all values of the items that it comes from, or 99.99, 99.9 or 99 % of them: what has the fewest flips on the rest of
the items to work on, which no range came from. Weights are never quantised a second time, so no repair of ranges helps against `weights`.

**What is measured.** The recording is split once, by observation, into a half to work on and a half to judge by. Diagnosis and
calibration see the first half only; flips of every slice and the gate's verdict come from the second. Of exemplars, those that are kept
because they are damaged find the cause and calibrate, and measure nothing; a slice is measured by those that were drawn for it,
weighted by 1 / pi. Each of K built repairs is
judged at alpha / K, so that a repair that is not good enough on some slice passes with a probability of at most alpha, however
many are tried (Bonferroni). A copy that serves one slice changes no other, so of the others harm alone is asked. New ranges may cut off
values that the old ones represent, of items that no slice tells apart: these items are a group, with a tenth and a hundredth of which most is cut
off. Harm there fails a repair; too few items for a verdict hold up none, and are shown. Processor time is that of one thread of ONNX Runtime on this machine's processor, all models in turn,
and bytes are those of the model files that must be in memory together.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.random import Generator

from quantdrift.core.slices import ALL
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray
from quantdrift.drift.gate import Question
from quantdrift.facts.diagnosis import FEWEST_ITEMS, Cause, Diagnosis
from quantdrift.facts.gate import Decision, Kind, Outcome
from quantdrift.facts.repairs import FlipChange, MeasuredRepair, NotBuilt, Repair, RepairKind, RepairOutcome
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.diagnose.blame import Compare
from quantdrift.release.diagnose.copies import RepairableCopy, changed
from quantdrift.release.diagnose.samples import Recording, thinned
from quantdrift.release.gate.judge import Asked, Observed, judge
from quantdrift.release.gate.observations import united
from quantdrift.release.halves import HalfCopy
from quantdrift.release.repair.edits import CandidateEdits, quantised_range
from quantdrift.release.sites import SiteKind, SwitchableCopy
from quantdrift.release.timing import times_in_turn
from quantdrift.release.trees import OnnxCopy, TreeCopy

_Run = Callable[[Mapping[str, Array]], dict[str, Array]]
MOST_OF_SLICE: Final = 64
"""Items of the slice that ranges are calibrated on, at most."""
FEWEST_OF_SLICE: Final = 8
MOST_OF_TRAFFIC: Final = 256
"""Items of all traffic that ranges are calibrated on, at most."""
_BATCH: Final = 32
_KEPT: Final = (
    1.0,
    0.9999,
    0.999,
    0.99,
)  # shares of the values that ranges hold; of equally good ones the first
_MOST_TRIED: Final = 1_024  # items by which ranges are chosen, inside the slice and elsewhere
_HEALED: Final = 0.5  # a repair that heals a smaller share of the flips does not help
_STEP: Final = 16  # items whose activations are in memory together
_SLACK: Final = 1e-6  # of a range: its ends are rounded to float32
CUT: Final = "cut off by the new ranges"
_MOST_CUT: Final = {"the tenth that is cut most": 0.1, "the hundredth that is cut most": 0.01}
_FEWEST_CUT: Final = 4


_ROUTED: Final = frozenset({RepairKind.OWN_COPY, RepairKind.REFERENCE})
_OF_REFERENCE: Final = frozenset({RepairKind.REFERENCE, RepairKind.ROLL_BACK})


class Workbench:
    """Builds repairs of a candidate for a slice, and measures them.

    Parameters
    ----------
    copy, compare
        The switchable copy, and the comparison of outputs with the reference's.
    candidate, reference
        The ONNX files of the copy.
    recording
        The items.
    work, fresh
        Numbers of the items to work on, and of those to judge by.
    rng
        Draws calibration items, and the batches that are timed.
    """

    def __init__(
        self,
        copy: RepairableCopy,
        compare: Compare,
        *,
        candidate: Path,
        reference: Path,
        recording: Recording,
        slice_name: str,
        work: IntArray,
        fresh: IntArray,
        rng: Generator,
    ) -> None:
        self._copy = copy
        self._compare = compare
        self._candidate = candidate
        self._reference = reference
        self._inputs = {name: recording.inputs[name] for name in copy.inputs}
        self._items = recording.items
        self._share = recording.share
        self._chosen = recording.chosen
        self._slice = slice_name
        self._work = work
        self._fresh = fresh
        self._rng = rng
        self._edits: Any = CandidateEdits(candidate, reference) if isinstance(copy, SwitchableCopy) else copy
        self._inside: BoolArray = np.isin(fresh, recording.inside)
        self._of_slice = np.intersect1d(work, recording.inside)

    def build(
        self, found: Diagnosis, *, only: Iterable[RepairKind], is_routable: bool
    ) -> tuple[list[Repair], list[NotBuilt]]:
        """Return the repairs that the cause allows, and those that were not built.

        Parameters
        ----------
        found
            The diagnosis, made on the items to work on.
        only
            The kinds that are wanted.
        is_routable
            Whether requests of the slice can be told before they are computed.
        """
        repairs: list[Repair] = []
        skipped: list[NotBuilt] = []
        for kind in dict.fromkeys(only):
            why = self._obstacle(kind, found, is_routable=is_routable)
            if why:
                skipped.append(NotBuilt(kind=kind, why=why))
            else:
                repairs += self._built(kind, found)
        return repairs, skipped

    def measure(
        self,
        repairs: Sequence[Repair],
        *,
        model: str,
        budget: float,
        at: datetime,
        alpha: float,
        progress: Callable[[], None],
    ) -> list[MeasuredRepair]:
        """Return what each repair does, the best first.

        Parameters
        ----------
        repairs
            Those that were built.
        model
            The model's name.
        budget
            Share of flips that is allowed in each slice.
        at
            When it was judged.
        alpha
            Probability of a false pass among all repairs, at most.
        progress
            Called after each repair.
        """
        n_built = sum(bool(repair.model) for repair in repairs)
        runs: dict[bytes, _Run] = {b"": self._copy.expected}
        for repair in repairs:
            if repair.model not in runs:
                runs[repair.model] = self._copy.runner(repair.model)
        taken = self._taken(self._fresh)
        expected = self._copy.expected(taken)
        before = self._flips(self._copy.served(taken), expected)
        served_s, *times = self._times(self._clocked(runs))
        of_model = dict(zip(runs, times, strict=True))
        size, reference_size = (_n_bytes(path) for path in (self._candidate, self._reference))
        share = self._share
        measured = []
        for repair in repairs:
            after = self._flips(runs[repair.model](taken), expected)
            if repair.is_routed:
                after = np.where(self._inside, after, before)
            items = self._items.part(self._fresh, flip=after, served_flip=before)
            harm = Question.harm(budget / 2)
            asked = Asked(slices=(Question.flips(budget), harm))
            if repair.is_routed:
                asked = msgspec.structs.replace(asked, routed=frozenset({self._slice}), unrouted=(harm,))
            candidate = f"sha256:{hashlib.sha256(repair.model).hexdigest()}"
            decision = (
                judge(asked, items, model=model, candidate=candidate, at=at, alpha=alpha / n_built)
                if repair.model
                else None
            )
            cut = msgspec.structs.replace(items, members=self._cut(repair))
            flips = _changes(items)
            result, worse = _achieved(decision, flips, self._slice, budget)
            if cut.members:
                of_cut = judge(
                    Asked(slices=(harm,)), cut, model=model, candidate=candidate, at=at, alpha=alpha / n_built
                )
                failed = tuple(answer.slice for answer in of_cut.slices if answer.verdict is Outcome.FAIL)
                result, worse = (RepairOutcome.MOVES, (*worse, failed[0])) if failed else (result, worse)
            cost = of_model[repair.model] / served_s
            measured.append(
                MeasuredRepair(
                    repair=repair,
                    result=result,
                    flips=flips,
                    worse=worse,
                    is_above=any(change.after > budget for change in flips.values()),
                    time_ratio=share * cost + 1 - share if repair.is_routed else cost,
                    n_bytes=(len(repair.model) or reference_size) + (size if repair.is_beside else 0),
                    decision=decision,
                    cut=_changes(cut),
                )
            )
            progress()
        return sorted(measured, key=lambda entry: entry.order)

    def _obstacle(self, kind: RepairKind, found: Diagnosis, *, is_routable: bool) -> str:
        """Return why a repair is not built; empty: it is."""
        if kind in _ROUTED and self._slice == ALL:
            return "there is nothing to route: the slice is all traffic"
        if kind in _ROUTED and not is_routable:
            return "requests of the slice cannot be told before they are computed, so none can be routed"
        if kind in _OF_REFERENCE:
            return ""
        if kind is not RepairKind.FP32_SITES:
            return self._uncalibrated(found)
        names = self._named(found)
        return self._unfillable(names[0]) if names else "no single site is to blame"

    def _unfillable(self, names: Sequence[str]) -> str:
        """Return why layers of a module cannot get the reference's weights; empty: they can, or it is none."""
        unfillable: Callable[[Sequence[str]], str] | None = getattr(self._copy, "unfillable", None)
        return "" if unfillable is None else unfillable(names)

    def _named(self, found: Diagnosis) -> list[tuple[str, ...]]:
        """Return the sites to put into FP32: the first named one, the first two, and so on; of trees in which none is named, all."""
        names = [blamed.site for blamed in found.blamed]
        if not names and isinstance(self._copy, TreeCopy):
            return [tuple(site.name for site in self._copy.sites)]
        return [tuple(names[:count]) for count in range(1, len(names) + 1)]

    def _uncalibrated(self, found: Diagnosis) -> str:
        """Return why calibration cannot help; empty: it may."""
        if why := _without_ranges(self._copy):
            return why
        if found.blamed and all(blamed.cause is Cause.WEIGHTS for blamed in found.blamed):
            return "the damage is in weights, and calibration changes activation ranges only"
        if len(self._of_slice) < FEWEST_OF_SLICE:
            return f"there are {len(self._of_slice)} items of the slice to calibrate on, and {FEWEST_OF_SLICE} are needed"
        return ""

    def _built(self, kind: RepairKind, found: Diagnosis) -> list[Repair]:
        if kind is RepairKind.REFERENCE:
            return [Repair(kind=kind, model=b"", is_routed=True)]
        if kind is RepairKind.ROLL_BACK:
            return [Repair(kind=kind, model=b"", is_routed=False)]
        if kind is RepairKind.FP32_SITES:
            return [
                Repair(
                    kind=kind,
                    model=_bytes_of(self._edits.in_fp32(names)),
                    is_routed=False,
                    sites=names,
                    suffix=".onnx" if isinstance(self._copy, OnnxCopy) else ".safetensors",
                )
                for names in self._named(found)
                if not self._unfillable(names)
            ]
        return [self._calibrated(kind)]

    def _calibrated(self, kind: RepairKind) -> Repair:
        """Return the candidate with the ranges of some items: of several ranges those with fewest flips on the rest of the items to work on."""
        assert isinstance(self._copy, SwitchableCopy)
        assert isinstance(self._edits, CandidateEdits)
        rows = self._rng.permutation(self._of_slice)[:MOST_OF_SLICE]
        if kind is RepairKind.RECALIBRATE:
            rows = np.union1d(rows, self._rng.permutation(self._work)[:MOST_OF_TRAFFIC])
        rows = np.sort(rows)
        left = np.setdiff1d(self._work, [*rows, *self._chosen])
        inside = thinned(np.intersect1d(left, self._of_slice), _MOST_TRIED)
        elsewhere = thinned(np.setdiff1d(left, self._of_slice), _MOST_TRIED)
        sides = [inside] if kind is RepairKind.OWN_COPY else [inside, elsewhere]
        kept = _KEPT if len(inside) >= FEWEST_OF_SLICE else _KEPT[:1]
        every = [
            {self._copy.sites[number].name: limits for number, limits in ranges.items()}
            for ranges in self._copy.ranges(self._taken(rows), kept)
        ]
        models = [self._edits.with_ranges(ranges).SerializeToString() for ranges in every]
        flips = [self._flips_of(model, sides) for model in models] if len(models) > 1 else []
        best = int(np.argmin(flips)) if flips else 0
        return Repair(
            kind=kind,
            model=models[best],
            is_routed=kind is RepairKind.OWN_COPY,
            calibrated_on=tuple(rows.tolist()),
            kept=kept[best],
            tried=tuple(zip(kept, flips, strict=True)) if flips else (),
            ranges=self._represented(every[best]),
        )

    def _represented(self, ranges: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """Return the ends of the ranges as the sites represent them, by the name of the site."""
        ends = {}
        for site in self._copy.sites:
            if site.name in ranges and site.axis is None:
                scale, zero = quantised_range(site, *ranges[site.name])
                ends[site.name] = ((site.lowest - zero) * scale, (site.highest - zero) * scale)
        return ends

    def _cut(self, repair: Repair) -> dict[str, IntArray]:
        """Return the fresh items of which new ranges cut values off that the old ones represent, with a tenth and a hundredth that are cut most.

        How much is the mean square of what is cut off, in that of rounding by the old range, at the worst range.
        """
        if not repair.ranges:
            return {}
        amounts = [
            self._amount(repair, self._taken(self._fresh[begin : begin + _STEP]))
            for begin in range(0, len(self._fresh), _STEP)
        ]
        amount = np.concatenate(amounts) if amounts else np.zeros(0)
        if repair.is_routed:
            amount = np.where(self._inside, amount, 0.0)
        rows = np.flatnonzero(amount > 0)
        rows = rows[np.argsort(-amount[rows], kind="stable")]
        members = {CUT: rows}
        for name, share in _MOST_CUT.items():
            if len(most := rows[: round(share * len(rows))]) >= _FEWEST_CUT:
                members[name] = most
        return members

    def _amount(self, repair: Repair, inputs: Mapping[str, Array]) -> FloatArray:
        """Return how much of each item the new ranges cut off beside the old ones : (items,)."""
        worst = np.zeros(len(next(iter(inputs.values()))))
        for number, raw in self._copy.raw(inputs, self._copy.everywhere).items():
            site = self._copy.sites[number]
            if site.name not in repair.ranges or len(raw) != len(worst):
                continue
            low, high = repair.ranges[site.name]
            values = np.clip(raw.astype(np.float64).reshape(len(raw), -1), site.low, site.high)
            slack = _SLACK * (high - low)
            cut = np.maximum(values - high - slack, 0.0) + np.maximum(low - slack - values, 0.0)
            worst = np.maximum(worst, np.square(cut).mean(axis=1) / (float(site.scale) ** 2 / 12))
        return worst

    def _flips_of(self, model: bytes, sides: Sequence[IntArray]) -> float:
        """Return the share of flips on some items of the slice, or on some others where it is larger: a repair must not damage them."""
        run = self._copy.runner(model)
        shares = []
        for rows in sides:
            if len(rows):
                taken = self._taken(rows)
                flips = self._flips(run(taken), self._copy.expected(taken))
                shares.append(float(np.nan_to_num(flips).mean()))
        return max(shares)

    def _taken(self, rows: IntArray) -> dict[str, Array]:
        return {name: array[rows] for name, array in self._inputs.items()}

    def _flips(self, outputs: Mapping[str, Array], expected: Mapping[str, Array]) -> FloatArray:
        """Return which answers change : (items,), 1 or 0; NaN: the comparator does not say."""
        found = self._compare(outputs, expected)
        return np.where(changed(found), 1.0, found.flip)

    def _clocked(self, runs: Mapping[bytes, _Run]) -> list[_Run]:
        """Return what computes the candidate and each model as a server on this machine does."""
        if not isinstance(self._copy, HalfCopy):
            return [self._copy.served, *runs.values()]
        kernels = [self._copy.expected if not model else self._copy.kernels(model) for model in runs]
        return [self._copy.kernels(b""), *kernels]

    def _times(self, runs: Sequence[_Run]) -> list[float]:
        """Return the processor time of a batch of each model, in seconds: the median of rounds in which all run in turn."""
        rows = self._rng.choice(self._fresh, min(_BATCH, len(self._fresh)), replace=False)
        taken = self._taken(rows)
        return times_in_turn([partial(run, taken) for run in runs])


def halves(recording: Recording, slice_name: str, rng: Generator) -> tuple[IntArray, IntArray]:
    """Return the numbers of the items to work on, and of those to judge by: each observation is in one half as a whole, with all copies.

    Items that are kept because they are damaged judge nothing. So that a cause can be found, `FEWEST_ITEMS` of the slice are to work on, if
    there are so many.
    """
    items = recording.items
    group = items.group if items.copy is None else united(items.group, items.copy)
    groups, of_item = np.unique(group, return_inverse=True)
    fair = np.setdiff1d(np.arange(len(of_item)), recording.chosen)
    fair_groups = np.unique(of_item[fair])
    drawn = rng.permutation(len(fair_groups)) < len(fair_groups) / 2
    first = np.ones(len(groups), dtype=bool)
    first[fair_groups] = drawn
    here = of_item[items.members[slice_name]]
    if first[here].sum() < FEWEST_ITEMS:
        for group in rng.permutation(np.unique(here)):
            first[group] = True
            if first[here].sum() >= FEWEST_ITEMS:
                break
    return np.flatnonzero(first[of_item]), np.intersect1d(np.flatnonzero(~first[of_item]), fair)


def _bytes_of(model: Any) -> bytes:
    return model if isinstance(model, bytes) else bytes(model.SerializeToString())


def _n_bytes(path: Path) -> int:
    """Return the length of a file, or of all in a folder."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.stat().st_size for each in files)


def _without_ranges(copy: RepairableCopy) -> str:
    """Return why a candidate has no range that could be calibrated; empty: it has."""
    if isinstance(copy, TreeCopy):
        return "decision trees have no activation ranges that could be calibrated"
    if isinstance(copy, HalfCopy):
        return f"numbers in {copy.kind} have no ranges that could be calibrated"
    if not isinstance(copy, SwitchableCopy):
        return "the ranges of a module are set by the function that makes it: calibrate there"
    ranges = [site for site in copy.sites if site.kind is SiteKind.ACTIVATION]
    if not ranges:
        return "no activation is quantised, so there is no range that could be calibrated"
    if all(site.is_dynamic for site in ranges):
        return "its ranges are found while it runs, so there is nothing to calibrate"
    return ""


def _changes(items: Observed) -> dict[str, FlipChange]:
    assert items.served_flip is not None
    weight = np.ones(len(items.flip)) if items.weight is None else items.weight
    changes = {}
    for name, rows in items.members.items():
        if len(rows):
            before, after = (
                float(np.average(np.nan_to_num(side[rows]), weights=weight[rows]))
                for side in (items.served_flip, items.flip)
            )
            changes[name] = FlipChange(n=len(rows), before=before, after=after)
    return changes


def _achieved(
    decision: Decision | None, flips: Mapping[str, FlipChange], slice_name: str, budget: float
) -> tuple[RepairOutcome, tuple[str, ...]]:
    """Return what a repair achieves, and the slices that are worse or stay bad."""
    if decision is None:
        return RepairOutcome.RESTORES, ()
    if decision.verdict is Outcome.PASS:
        return RepairOutcome.PASSES, ()
    failed = {(answer.slice, answer.question) for answer in decision.slices if answer.verdict is Outcome.FAIL}
    here = flips.get(slice_name)
    if here is not None and (slice_name, Kind.FLIPS) in failed:
        healed = 1.0 - here.after / here.before if here.before else 0.0
        return (RepairOutcome.NO_HELP if healed < _HEALED else RepairOutcome.NOT_ENOUGH), ()
    names = dict.fromkeys(name for name, _ in failed)
    harmed = [name for name in names if (name, Kind.HARM) in failed or flips[name].before <= budget]
    if harmed:
        return RepairOutcome.MOVES, tuple(harmed)
    return (RepairOutcome.OTHERS_BAD, tuple(names)) if names else (RepairOutcome.MORE_ITEMS, ())

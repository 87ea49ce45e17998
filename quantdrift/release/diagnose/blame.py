"""Which sites of a candidate cause the flips of a slice: causal swaps on split halves, against a placebo.

For the exemplars of a slice (half of them damaged, half drawn at random) the loss is the divergence from the reference. Three
figures say what a site does to it:

- one-off: the gain when this site alone is in FP32;
- one-on: the loss when this site alone is quantised;
- greedy: with the sites so far in FP32, the gain of one more. It finds two faults that hide each other. Only the eight sites that
  lead by one-off or by one-on are tried.

With more than 64 sites a quarter of the exemplars chooses some two dozen of them, by one-off and by one-on, and all exemplars
measure these again.

**When a site is named.** Exemplars are split into two halves. In each direction the site with the largest gain on one half is
judged on the other: its gain must exceed that of each of 39 placebos there. A placebo multiplies all scales that are still
quantised by factors of 1 to 1.05, drawn at random: it repairs nothing, and still heals some 40 % of items that were chosen
because they flip. (Of decision trees it gives thresholds and leaves that are rounded other errors of the same size: `release.trees`.) Where at least 100 items of the slice were kept aside, putting the named sites into FP32 must also heal more of
those than it breaks: the last named site ends the search at which it does.

Assumption: on the judging half, a site that repairs nothing gains no more than placebos do (their gains are exchangeable).
Bound: such a site is then named with a probability of at most 2 / 40 = 5 % at each step, because one rank of 40 is reserved in
each direction. Where no item was kept aside that could confirm it, 79 placebos make that 2.5 %. Source: the Monte Carlo test (Dwass,
Annals of Mathematical Statistics 28, 1957), with sample splitting.

**When ranges are said to clip.** Ranges that are too narrow together hide each other: with one in FP32 the next one still cuts its
values off, so no site alone restores more than chance. This needs no search, because the values tell which ranges clip: on the damaged
exemplars, what such a range cuts off has a larger mean square than what it rounds, as for a named site. How much it cuts off elsewhere is
shown and is no criterion: of the same values outside, other inputs may bear the loss.

All of these ranges in FP32, beside the named sites, must restore more than each of 39 (or 79) placebos, and half of the loss that is left:
a sound candidate has a few ranges that clip a little, beside rounding everywhere. And they must heal more items than they break, where
some were kept aside.

Assumption: these ranges are chosen by their values and not by the loss, so if they repair nothing, their gain and those of the
placebos are exchangeable. Bound: they are accused with a probability of at most 1 / 40, or 1 / 80 with 79 placebos.

Assumption on the items that were kept aside: they are independent. Bound: if nothing heals more than it breaks, a site or a group of
ranges is named with a probability of at most 5 %, over all steps, because each of k steps and the group are tested at 5 % / (k + 1).
Source: the exact sign test on discordant pairs (McNemar, Psychometrika 12, 1947). All bounds are for one diagnosis; nothing is named
where the slice is within its budget.

Where no site is named with fewer than 32 damaged exemplars, nothing is said of the others either: of the demo's faults, which are real,
half were missed with 12.

Everything is determined by the inputs and the seed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from quantdrift.core.errors import OperatorError
from quantdrift.facts.diagnosis import (
    DAMAGED,
    FEWEST_DAMAGED,
    FEWEST_ITEMS,
    Blamed,
    Cause,
    Clipped,
    Clipping,
    Diagnosis,
    DiagnosisVerdict,
)
from quantdrift.models.comparators.protocol import Divergences, Flags, Values
from quantdrift.models.tensors.arrays import Array, Outputs
from quantdrift.release.diagnose.copies import AGREEMENT, CLOSENESS, Copy, changed, difference_of, joined
from quantdrift.release.diagnose.kernels import REMEDY, REMEDY_OF_BLOCKS, kernels_of, others_among, said_of
from quantdrift.release.diagnose.probes import RangeUse, range_use, weight_errors
from quantdrift.release.diagnose.steps import CountedRuns, Progress, SearchStep, judged, leading, sign_test
from quantdrift.release.halves import HalfCopy
from quantdrift.release.origin import Origins, named, origins_of
from quantdrift.release.sites import Site, SiteKind

Compare = Callable[[Outputs, Outputs], Divergences]
"""Compares outputs of the candidate with the reference's."""
Rows = npt.NDArray[np.intp]
_FlipOf = Callable[[Iterable[int]], Flags | None]
"""Returns which items flip with some sites in FP32; None where there are no items."""

_MOST_DAMAGED: Final = 64
"""Exemplars whose decision flips that are used, and as many that are drawn at random from all others. With 32 no site of the demo is named in one
of twelve diagnoses of a recording, with 64 in none of twelve; they take a quarter more time."""
_MOST_FRESH: Final = 4_096
_FEWEST_FRESH: Final = 100
_PLACEBOS: Final = 39  # the largest is exceeded with a probability of 1 / 40
_PLACEBOS_ALONE: Final = 79  # where no item was kept aside that could confirm a site
_MOST_FACTOR: Final = 1.05
_LEADERS: Final = 8  # by one-off and by one-on in turn
_MANY: Final = 64  # sites, above which a part of the exemplars chooses those that all measure
_PART: Final = 4
_CHOSEN: Final = 12  # by one-off, and as many by one-on
_MOST_NAMED: Final = 6
_ENOUGH: Final = (
    0.9  # of the loss, and of the flips: where exemplars alone are there, nothing is left to be named
)
_ALPHA: Final = 0.05
_SPREAD: Final = 0.5  # a first site that restores less of the flips is not the only cause
_FOREIGN: Final = 0.5  # relative error of half of the weights; 4 bits have some 0.15
_ALIKE: Final = 2.0  # a slice with fewer times the flips of the others is not special
_JITTER: Final = (
    1e-4  # of a scale: less than anybody means by a range, and more than kernels differ by in floating point
)
_ROUNDINGS: Final = 4
_STEPS_ALONE: Final = (
    0.05  # decisions that steps of one integer may change together, where no kernel alone is off by more
)
_OWN_CAUSE: Final = {
    SiteKind.LAYER: Cause.LAYER,
    SiteKind.THRESHOLDS: Cause.THRESHOLDS,
    SiteKind.LEAVES: Cause.LEAVES,
}
_STEPPING: Final = (
    0.01  # of the results of an operator that are a step apart: so many can add up to other decisions
)
_MOST_REST: Final = 4_096


class _Exemplars:
    """The exemplars of a slice, their losses under swaps, and their two halves."""

    def __init__(
        self, copy: Copy, compare: Compare, inputs: Mapping[str, Array], halves: Flags, cap: float
    ) -> None:
        self.inputs = inputs
        self.halves = (halves, ~halves)
        self._copy = copy
        self._compare = compare
        self._expected = copy.expected(inputs)
        self._cap = cap
        divergences = compare(copy.run(inputs), self._expected)
        self.base_flip: Flags = changed(divergences)
        self._n_flips = float(self.base_flip.sum())
        self.base = _loss(divergences, cap)

    def flip(self, restored: Iterable[int]) -> Flags:
        """Return which exemplars flip with some sites in FP32."""
        divergences = self._compare(self._copy.run(self.inputs, restored), self._expected)
        flips: Flags = changed(divergences)
        return flips

    def placebos(
        self, restored: Iterable[int], n_placebos: int, rng: Generator, runs: CountedRuns
    ) -> list[Values]:
        """Return the losses with some sites in FP32 and all other scales changed at random, for each placebo."""
        losses = []
        for _ in range(n_placebos):
            factors = rng.uniform(1.0, _MOST_FACTOR, len(self._copy.sites))
            losses.append(self.loss(restored, factors))
            runs.one()
        return losses

    def part(self, step: int) -> "_Exemplars":
        """Return one exemplar in so many."""
        rows = np.arange(0, len(self.halves[0]), step)
        return _Exemplars(
            self._copy, self._compare, _taken(self.inputs, rows), self.halves[0][rows], self._cap
        )

    def loss(self, restored: Iterable[int], factors: Array | None = None) -> Values:
        """Return the loss of each exemplar with some sites in FP32."""
        divergences = self._compare(self._copy.run(self.inputs, restored, factors), self._expected)
        return _loss(divergences, self._cap)

    def left(self, restored: Iterable[int], loss: Values) -> float:
        """Return the share of the loss that is left with some sites in FP32, or of the flips where more of these are."""
        flips = float(self.flip(restored).sum())
        return max(self.share(loss), flips / self._n_flips if self._n_flips else 0.0)

    def share(self, loss: Values, half: int | None = None) -> float:
        """Return a mean loss as a share of the candidate's, on a half or on all."""
        rows = np.ones(len(loss), dtype=bool) if half is None else self.halves[half]
        whole = float(self.base[rows].mean())
        return float(loss[rows].mean()) / whole if whole else 0.0


def diagnose(
    copy: Copy,
    compare: Compare,
    inside: Mapping[str, Array],
    *,
    budget: float,
    elsewhere: Mapping[str, Array] | None = None,
    damaged: Mapping[str, Array] | None = None,
    keep_aside: bool = True,
    seed: int = 1,
    progress: Progress | None = None,
) -> Diagnosis:
    """Return which sites cause the flips of a slice.

    Parameters
    ----------
    copy, compare
        The switchable copy, and the comparison of its outputs with the reference's.
    inside, elsewhere
        Inputs of the slice, and of other slices : (items, ...) by name.
    budget
        Share of flips that is allowed.
    damaged
        Further inputs of the slice that were chosen because their answer changed: they rank sites, and estimate nothing. They also
        stand for the damage, so that few other items within the budget are no reason to end.
    keep_aside
        Keep a half of the slice's items for the estimate of flips and for the test that a named site heals. Without it sites are named by
        the placebo alone: for a caller that judges what it makes of them by other items.
    seed
        Of the exemplars, the halves and the placebos.

    Raises
    ------
    OperatorError
        The weights are not those of the reference, the copy reproduces less than 99.9 % of the candidate's decisions, and rounding alone
        does not explain it, or it is not the reference in FP32.
    """
    origins = origins_of(copy.weights)
    if origins.refusal:
        raise OperatorError(origins.refusal)
    rng = np.random.default_rng(seed)
    elsewhere = elsewhere if elsewhere is not None and _n_items(elsewhere) else None
    n_items = _n_items(inside)
    pool = inside if damaged is None else joined([inside, damaged])
    inputs = pool if elsewhere is None else joined([pool, elsewhere])
    expected, own = copy.expected(inputs), copy.run(inputs)
    checked = _checked(copy, compare, inputs, expected=expected, own=own, rng=rng)
    divergences = compare(own, expected)
    flips = changed(divergences)
    n_pool = _n_items(pool)
    flip, others = flips[:n_items], None if elsewhere is None else float(flips[n_pool:].mean())
    fresh = _reserved(flip, rng) if keep_aside else np.arange(0)
    bad, random = _chosen(flips[:n_pool], n_items, fresh, rng)
    diagnosis = Diagnosis(
        verdict=DiagnosisVerdict.TOO_FEW,
        causes=(),
        flips=float(flip.mean()) if n_items else 0.0,
        budget=budget,
        elsewhere=others,
        n_items=n_items,
        n_damaged=len(bad),
        n_random=len(random),
        n_sites=len(copy.sites),
        reproduced=checked.reproduced,
        rounding=checked.rounding,
        origin=origins.origin,
        off=named(origins, copy.sites),
        n_moved=len(origins.off),
        n_tensors=origins.n_tensors,
        difference=checked.difference,
        unmatched=copy.unmatched,
        emulated=copy.kind if isinstance(copy, HalfCopy) else "",
    )
    if n_items < FEWEST_ITEMS:
        return diagnosis
    if diagnosis.flips <= budget and damaged is None:
        return msgspec.structs.replace(
            diagnosis, verdict=DiagnosisVerdict.NOBODY, causes=(Cause.WITHIN_BUDGET,)
        )
    if len(bad) < FEWEST_DAMAGED:
        return diagnosis
    chosen = np.concatenate([bad, random])
    halves = np.concatenate([_half(len(bad), rng), _half(len(random), rng)])
    exemplars = _Exemplars(copy, compare, _taken(pool, chosen), halves, _cap(divergences.part(0, n_pool)))
    again = 2 * _CHOSEN if len(copy.sites) > _MANY else 0
    n_placebos = _PLACEBOS_ALONE if keep_aside and not len(fresh) else _PLACEBOS
    n_runs = 2 * (len(copy.sites) + again) + _MOST_NAMED * (_LEADERS + n_placebos) + n_placebos
    runs = CountedRuns(progress, n_runs)
    one_off, one_on = _alone(copy, exemplars, runs)
    rows = np.setdiff1d(np.arange(n_items), fresh)[:_MOST_REST]
    rest = _Fresh(copy, compare, _taken(inside, rows), _taken(expected, rows)) if damaged is None else None
    steps = _greedy(
        exemplars,
        one_off=one_off,
        one_on=one_on,
        n_placebos=n_placebos,
        rest=rest,
        budget=budget,
        rng=rng,
        runs=runs,
    )
    left = _Fresh(copy, compare, _taken(inside, fresh), _taken(expected, fresh))
    steps_named = [step for step in steps if step.is_named]
    alpha = _ALPHA / (len(steps_named) + 1)
    kept = _healing(steps_named, left, alpha)
    uses = _uses(copy, _taken(pool, bad), elsewhere)
    flip_of: _FlipOf = exemplars.flip if left.flip(()) is None else left.flip
    others_left = (
        None
        if elsewhere is None
        else _Fresh(copy, compare, elsewhere, _taken(expected, np.arange(n_pool, _n_items(inputs))))
    )
    blamed = _blamed(
        copy,
        kept,
        uses=uses,
        origins=origins,
        left=left,
        others_left=others_left,
        flip_of=flip_of,
        damaged=_taken(pool, bad),
    )
    clipping = _clipping(
        copy,
        exemplars=exemplars,
        restored=[step.site for step in kept],
        flip_of=flip_of,
        n_placebos=n_placebos,
        uses=uses,
        left=left,
        alpha=alpha,
        rng=rng,
        runs=runs,
    )
    runs.finish()
    diagnosis = msgspec.structs.replace(
        diagnosis, fresh_flips=float(flip[fresh].mean()) if len(fresh) else None
    )
    is_named = bool(kept) or clipping is not None
    verdict = (
        DiagnosisVerdict.NAMED
        if is_named
        else DiagnosisVerdict.NOBODY
        if len(bad) >= DAMAGED
        else DiagnosisVerdict.TOO_FEW
    )
    return msgspec.structs.replace(
        diagnosis,
        verdict=verdict,
        causes=() if verdict is DiagnosisVerdict.TOO_FEW else _causes(diagnosis, blamed, clipping),
        blamed=blamed,
        clipping=clipping,
        order=tuple(copy.sites[step.site].name for step in steps),
        one_off=_by_name(copy.sites, 1.0 - one_off),
        one_on=_by_name(copy.sites, one_on),
        together={} if kept else _together(copy, flip_of),
    )


class _Checked(msgspec.Struct, frozen=True, kw_only=True):
    """How well a copy stands for both models; see `Diagnosis`."""

    reproduced: float
    rounding: float
    difference: float


def _checked(
    copy: Copy,
    compare: Compare,
    inputs: Mapping[str, Array],
    *,
    expected: Outputs,
    own: Outputs,
    rng: Generator,
) -> _Checked:
    """Return how well the copy stands for the candidate, and for the reference in FP32.

    Some candidates are so coarse that the last place of a float32 decides between two integers, and an answer follows. No two
    programs agree on their decisions. There the copy may differ from the candidate by twice as many as it differs from itself, at most,
    when each scale changes by a ten-thousandth or not at all. So many elementwise operators are quantised in others that the steps of one
    integer, which kernels take, add up: ONNX Runtime's softmax of 8-bit numbers is one too low in 6 % of its results. Where no kernel alone
    is off by more than a step, the copy may differ in 5 % of decisions, or in as many as the candidate has wrong.
    """
    n_items = _n_items(inputs)
    if not n_items:
        return _Checked(reproduced=1.0, rounding=0.0, difference=0.0)
    by_kernels = compare(own, copy.served(inputs))
    others = _n_changed(by_kernels)
    reproduced = 1.0 - others / n_items
    rounding = 0.0
    # One may be a tie that rounds otherwise, however few items there are.
    if others > 1 and reproduced < AGREEMENT:
        counts = []
        for _ in range(_ROUNDINGS):
            factors = 1.0 + _JITTER * rng.integers(-1, 2, len(copy.sites))
            counts.append(_n_changed(compare(copy.run(inputs, (), factors), own)))
        rounding = max(counts) / n_items
        if others > 2 * max(counts):
            flips = _n_changed(compare(copy.served(inputs), expected)) / n_items
            at_these = _taken(inputs, np.flatnonzero(changed(by_kernels)))
            _check_kernels(copy, at_these, reproduced=reproduced, rounding=rounding, flips=flips)
    errors = [error.relative for error in weight_errors(copy).values()]
    if errors and float(np.median(errors)) > _FOREIGN:
        raise OperatorError(
            f"the weights of the candidate differ from those of the reference by {float(np.median(errors)):.0%} in half of all layers:"
            " the candidate was not made from this reference"
        )
    difference = difference_of(copy, inputs, expected)
    if difference > CLOSENESS and not copy.unmatched:
        raise OperatorError(
            f"the candidate with all sites in FP32 differs from the reference by {difference:.2g} of its largest output, and"
            f" {CLOSENESS:g} is allowed: the candidate was not made from this reference, or its graph was changed on the way"
        )
    return _Checked(reproduced=reproduced, rounding=rounding, difference=difference)


def _check_kernels(
    copy: Copy, inputs: Mapping[str, Array], *, reproduced: float, rounding: float, flips: float
) -> None:
    """Refuse a copy that differs from the candidate on these inputs, with the operators whose kernels do; not if none is off by more than a step."""
    kernels = () if copy.file is None else kernels_of(copy.file, inputs)
    others = others_among(kernels)
    is_stepping = any(kernel.steps > _STEPPING for kernel in kernels)
    if is_stepping and not others and 1.0 - reproduced <= max(_STEPS_ALONE, flips):
        return
    head = (
        f"the copy of the candidate reproduces {100 * reproduced:.2f} % of its decisions, and {100 * AGREEMENT:.1f} % are needed (rounding alone"
        f" changes {100 * rounding:.2f} %): its kernels compute something else than its file says"
    )
    if others:
        raise OperatorError(f"{head}, in {said_of(others)}. {REMEDY}")
    raise OperatorError(
        f"{head}, though no operator does where it is run alone. No site can be named with these kernels."
        f" {REMEDY_OF_BLOCKS if any(site.block_size for site in copy.sites) else REMEDY}"
    )


def _n_changed(found: Divergences) -> int:
    """Return the number of items whose decision differs."""
    return int(changed(found).sum())


def _reserved(flip: Flags, rng: Generator) -> Rows:
    """Return the items that are kept for the estimate of flips; none where too few would be left.

    They are a random half of those that flip and of those that do not, so that chance leaves neither half without damage.
    """
    halves = [
        rng.permutation(rows)[: len(rows) // 2] for rows in (np.flatnonzero(flip), np.flatnonzero(~flip))
    ]
    share = min(1.0, _MOST_FRESH / max(sum(map(len, halves)), 1))
    fresh = np.sort(np.concatenate([rows[: round(len(rows) * share)] for rows in halves]))
    enough = len(fresh) >= _FEWEST_FRESH and flip.sum() - flip[fresh].sum() >= FEWEST_DAMAGED
    return fresh if enough else fresh[:0]


def _n_items(inputs: Mapping[str, Array]) -> int:
    return len(next(iter(inputs.values())))


def _chosen(flip: Flags, n_items: int, fresh: Rows, rng: Generator) -> tuple[Rows, Rows]:
    """Return the damaged exemplars, and as many drawn at random from all other of the first `n_items`, without the reserved ones."""
    free = np.setdiff1d(np.arange(len(flip)), fresh)
    damaged = rng.permutation(free[flip[free]])[:_MOST_DAMAGED]
    others = np.setdiff1d(free[free < n_items], damaged)
    return damaged, rng.permutation(others)[:_MOST_DAMAGED]


def _half(n_items: int, rng: Generator) -> Flags:
    flags: Flags = rng.permutation(n_items) < n_items / 2
    return flags


def _taken(inputs: Mapping[str, Array], rows: Rows) -> dict[str, Array]:
    return {name: array[rows] for name, array in inputs.items()}


def _cap(found: Divergences) -> float:
    """Return the largest loss of an item: the largest finite one of the candidate."""
    finite = found.divergence[np.isfinite(found.divergence)]
    return float(finite.max(initial=0.0)) or 1.0


def _loss(found: Divergences, cap: float) -> Values:
    return np.minimum(np.nan_to_num(found.divergence, nan=cap, posinf=cap), cap)


def _alone(copy: Copy, exemplars: _Exemplars, runs: CountedRuns) -> tuple[Values, Values]:
    """Return the exemplars' loss with each site alone in FP32, and with each alone quantised : (sites,), as shares."""
    off, on = np.empty(len(copy.sites)), np.empty(len(copy.sites))

    def measure(sites: Iterable[int], on_these: _Exemplars) -> None:
        for site in sites:
            off[site] = on_these.share(on_these.loss((site,)))
            on[site] = on_these.share(on_these.loss([other for other in copy.everywhere if other != site]))
            runs.one()
            runs.one()

    if len(copy.sites) <= _MANY:
        measure(copy.everywhere, exemplars)
    else:
        measure(copy.everywhere, exemplars.part(_PART))
        measure(leading(off, on, 2 * _CHOSEN), exemplars)
    return off, on


def _greedy(
    exemplars: _Exemplars,
    *,
    one_off: Values,
    one_on: Values,
    n_placebos: int,
    rest: "_Fresh | None",
    budget: float,
    rng: Generator,
    runs: CountedRuns,
) -> list[SearchStep]:
    """Return the steps of the greedy search; the last one is not named, if the damage did not end before.

    It ends where the flips of `rest` are within the budget; None: there are only exemplars, and it ends where a tenth of their loss is left.
    """
    tried = leading(one_off, one_on, _LEADERS)
    steps: list[SearchStep] = []
    current: list[int] = []
    before = exemplars.base
    while tried and len(steps) < _MOST_NAMED:
        flips = None if rest is None else rest.flips(current)
        if exemplars.left(current, before) <= 1 - _ENOUGH if flips is None else flips <= budget:
            break
        losses = {}
        for site in tried:
            losses[site] = exemplars.loss([*current, site])
            runs.one()
        placebos = exemplars.placebos(current, n_placebos, rng, runs)
        step = judged(exemplars, before, losses, placebos)
        steps.append(step)
        if not step.is_named:
            break
        current.append(step.site)
        tried.remove(step.site)
        before = losses[step.site]
    return steps


def _together(copy: Copy, flip_of: _FlipOf) -> dict[str, float]:
    """Return the share of changed answers that heal with all sites of a kind in FP32, by kind."""
    return {
        kind.value: _healed(flip_of(()), flip_of(numbers))
        for kind in SiteKind
        if (numbers := [number for number, site in enumerate(copy.sites) if site.kind is kind])
    }


def _healed(before: Flags | None, after: Flags | None) -> float:
    """Return the share of changed answers that are those of the reference afterwards."""
    assert before is not None
    assert after is not None
    return float((before & ~after).sum() / before.sum()) if before.any() else 0.0


class _Fresh:
    """The items that no exemplar was drawn from: flips that are left there are an honest estimate."""

    def __init__(self, copy: Copy, compare: Compare, inputs: Mapping[str, Array], expected: Outputs) -> None:
        self._copy = copy
        self._compare = compare
        self._inputs = inputs
        self._expected = expected

    def flip(self, restored: Iterable[int]) -> Flags | None:
        """Return which items flip with some sites in FP32 : (items,); None where there are no such items."""
        if not _n_items(self._inputs):
            return None
        divergences = self._compare(self._copy.run(self._inputs, restored), self._expected)
        flips: Flags = changed(divergences)
        return flips

    def flips(self, restored: Iterable[int]) -> float | None:
        """Return the share of flips with some sites in FP32; None where there are no such items."""
        flip = self.flip(restored)
        return None if flip is None else float(flip.mean())


def _healing(steps: Sequence[SearchStep], left: _Fresh, alpha: float) -> list[SearchStep]:
    """Return the steps up to the last one that heals more than it breaks; all of them where no items were kept aside.

    A step is compared with the last one before it that does: of two faults that hide each other, the first may heal nothing alone.
    """
    before = left.flip(())
    if before is None:
        return list(steps)
    kept = 0
    for number in range(1, len(steps) + 1):
        after = left.flip([step.site for step in steps[:number]])
        if after is not None and sign_test(before & ~after, after & ~before) <= alpha:
            kept, before = number, after
    return list(steps[:kept])


class _Uses(msgspec.Struct, frozen=True, kw_only=True):
    """How activation ranges are used, by the number of the site: on the damaged exemplars, and on items of other slices.

    `elsewhere` is None where no items of other slices were given.
    """

    damaged: dict[int, RangeUse]
    elsewhere: dict[int, RangeUse] | None


def _uses(copy: Copy, damaged: Mapping[str, Array], elsewhere: Mapping[str, Array] | None) -> _Uses:
    if not any(site.kind is SiteKind.ACTIVATION for site in copy.sites):
        return _Uses(damaged={}, elsewhere=None)
    return _Uses(
        damaged=range_use(copy, damaged),
        elsewhere=None if elsewhere is None else range_use(copy, _first(elsewhere)),
    )


def _saturates(use: RangeUse) -> bool:
    return bool(use.clipping.mean() > use.rounding.mean())


def _clipping(
    copy: Copy,
    *,
    exemplars: _Exemplars,
    restored: Sequence[int],
    flip_of: _FlipOf,
    n_placebos: int,
    uses: _Uses,
    left: _Fresh,
    alpha: float,
    rng: Generator,
    runs: CountedRuns,
) -> Clipping | None:
    """Return the ranges that clip beside the restored sites, if together they restore more than chance and half of what is left."""
    numbers = sorted({number for number, use in uses.damaged.items() if _saturates(use)}.difference(restored))
    if not numbers:
        return None
    loss = exemplars.loss(restored)
    after = exemplars.loss([*restored, *numbers])
    restores = exemplars.share(loss - after)
    if restores <= _SPREAD * exemplars.share(loss):
        return None
    placebo = max(
        exemplars.share(loss - changed) for changed in exemplars.placebos(restored, n_placebos, rng, runs)
    )
    if restores <= placebo:
        return None
    flip, flip_left = left.flip(restored), left.flip([*restored, *numbers])
    if flip is not None and flip_left is not None and sign_test(flip & ~flip_left, flip_left & ~flip) > alpha:
        return None
    ranges = [_clipped(copy.sites[number], number, uses) for number in numbers]
    return Clipping(
        ranges=tuple(sorted(ranges, key=lambda clipped: -clipped.outside)),
        n_ranges=sum(site.kind is SiteKind.ACTIVATION for site in copy.sites),
        restores=restores,
        placebo=placebo,
        heals=_healed(flip_of(()), flip_of([*restored, *numbers])) - _healed(flip_of(()), flip_of(restored)),
        flips_left=None if flip_left is None else float(flip_left.mean()),
    )


def _clipped(site: Site, number: int, uses: _Uses) -> Clipped:
    is_one = site.axis is None
    return Clipped(
        site=site.name,
        outside=float(uses.damaged[number].outside.mean()),
        elsewhere=None if uses.elsewhere is None else float(uses.elsewhere[number].outside.mean()),
        low=float(site.low) if is_one else None,
        high=float(site.high) if is_one else None,
    )


def _blamed(
    copy: Copy,
    steps: Sequence[SearchStep],
    *,
    uses: _Uses,
    origins: Origins,
    left: _Fresh,
    others_left: _Fresh | None,
    flip_of: _FlipOf,
    damaged: Mapping[str, Array],
) -> tuple[Blamed, ...]:
    """Return the named sites with what explains each."""
    if not steps:
        return ()
    errors = weight_errors(copy)
    blamed_sites = []
    before = 0.0
    for number, step in enumerate(steps):
        site = copy.sites[step.site]
        restored = [each.site for each in steps[: number + 1]]
        healed = _healed(flip_of(()), flip_of(restored))
        blamed = Blamed(
            site=site.name,
            cause=Cause.WEIGHTS,
            restores=step.restores,
            placebo=step.placebo,
            heals=healed - before,
            flips_left=left.flips(restored),
            elsewhere_left=None if others_left is None else others_left.flips(restored),
            cost=copy.costs[step.site],
        )
        before = healed
        if site.kind is SiteKind.WEIGHT:
            blamed = msgspec.structs.replace(
                blamed,
                weight_error=errors[step.site].relative,
                off=tuple(tensor for tensor in origins.off if tensor.site == step.site),
                is_by_channel=site.axis is not None,
                block_size=site.block_size,
            )
        elif isinstance(copy, HalfCopy):
            off = tuple(tensor for tensor in origins.off if tensor.site == step.site)
            blamed = msgspec.structs.replace(
                blamed,
                cause=Cause.WEIGHTS if off else Cause.PRECISION,
                off=off,
                half=copy.use_of(step.site, damaged),
            )
        elif site.kind in _OWN_CAUSE:
            blamed = msgspec.structs.replace(blamed, cause=_OWN_CAUSE[site.kind], values=site.values)
        else:
            other = None if uses.elsewhere is None else uses.elsewhere[step.site]
            blamed = _explained(blamed, site, uses.damaged[step.site], other)
        blamed_sites.append(blamed)
    return tuple(blamed_sites)


def _first(inputs: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array[: 2 * DAMAGED] for name, array in inputs.items()}


def _explained(one: Blamed, site: Site, use: RangeUse, other: RangeUse | None) -> Blamed:
    """Return a named activation range with how it is used."""
    is_one = site.axis is None and not site.is_dynamic
    return msgspec.structs.replace(
        one,
        cause=Cause.SATURATION if _saturates(use) else Cause.RESOLUTION,
        outside=float(use.outside.mean()),
        used=float(use.used.mean()),
        levels=float(use.levels.mean()),
        low=float(site.low) if is_one else None,
        high=float(site.high) if is_one else None,
        step=float(site.scale) if is_one else None,
        elsewhere_used=float(other.used.mean()) if other is not None else None,
        elsewhere_levels=float(other.levels.mean()) if other is not None else None,
        is_dynamic=site.is_dynamic,
        contrast=_contrast(use, other) if other is not None else None,
    )


def _contrast(use: RangeUse, other: RangeUse) -> float | None:
    sides = [float((part.error / np.maximum(part.variance, 1e-30)).mean()) for part in (use, other)]
    return sides[0] / sides[1] if sides[1] else None


def _causes(told: Diagnosis, blamed: Sequence[Blamed], clipping: Clipping | None) -> tuple[Cause, ...]:
    if not blamed and clipping is None:
        return (Cause.INPUT,)
    causes = [blamed[0].cause] if blamed else []
    if clipping is not None and Cause.SATURATION not in causes:
        causes.append(Cause.SATURATION)
    if len(blamed) > 1 and blamed[0].heals < _SPREAD:
        causes.append(Cause.SPREAD)
    if told.elsewhere is not None and told.elsewhere > told.budget and told.flips < _ALIKE * told.elsewhere:
        causes.append(Cause.NOT_THIS_SLICE)
    return tuple(causes)


def _by_name(sites: Sequence[Site], shares: Values) -> dict[str, float]:
    return {site.name: float(share) for site, share in zip(sites, shares, strict=True)}

"""Which layers of a language model make answers diverge, and which of their matrices: causal swaps on halves, against a placebo.

The loss of an answer is its divergence per token. A **layer** is a block of the network, or a part outside of the blocks such as the
embedding. A layer is restored by the reference's weights; the search is that of `quantdrift.release.diagnose.blame`, with these
differences:

- Answers are drawn at random and not because they diverge, since the mean is what counts. One half of them is kept aside and nothing is
  chosen by it; of the other half at most 128 choose and judge.
- A placebo gives all weights that are not restored the change of another rounding of the same size.
- A layer must also restore more than its share of the weights explains: more than twice as much, or, with a large share s, more than
  (1 + s) / 2. Where all layers are rounded alike each restores its share, and none of them is a cause.
- In a named layer the matrices are searched in the same way. If they do not heal four fifths of what the layer does, it is the cause as a
  whole.

Assumption: on the half that judges, a layer that repairs nothing gains no more than placebos do. Bound: such a layer is named with a
probability of at most 2 / 40 = 5 % at each step. On the half that is kept aside more answers must get better than worse (the exact sign
test, 5 % over all steps): the last named layer is the last one with which they do.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from quantdrift.models.comparators.protocol import Flags, Values
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.diagnose.steps import CountedRuns, Progress, SearchStep, judged, leading, sign_test

Rows = npt.NDArray[np.intp]
LossOf = Callable[[Rows, Collection[int], Array | None], Values]
"""Returns the divergence of answers by their numbers, with some weights of the reference and factors of the others' steps."""

MOST_EXAMINED: Final = 128
_PLACEBOS: Final = 39  # the largest is exceeded with a probability of 1 / 40
_MOST_FACTOR: Final = 1.05
_LEADERS: Final = 8
_MOST_NAMED: Final = 6
_ENOUGH: Final = 0.8  # of a layer's gain: what is left of it needs no further matrix
_ALPHA: Final = 0.05


class FoundMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """A named matrix, by its number; see `NamedMatrix`."""

    weight: int
    restores: float
    placebo: float
    heals: float


class FoundLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A named layer, by its number, with its matrices; see `BlamedLayer`."""

    layer: int
    restores: float
    placebo: float
    heals: float
    left: float
    matrices: tuple[FoundMatrix, ...]


class SearchResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What was found.

    Parameters
    ----------
    one_off, one_on
        (layers,), share of the loss that is left with a layer alone restored, and with all others restored.
    order
        Layers in the order of the search.
    n_examined, n_fresh
        Answers that chose and judged, and that nothing was chosen by.
    fresh
        The divergence of the latter.
    """

    layers: tuple[FoundLayer, ...]
    one_off: Values
    one_on: Values
    order: tuple[int, ...]
    n_examined: int
    n_fresh: int
    fresh: float


class _Examined:
    """The answers that choose and judge, in two halves."""

    def __init__(self, loss_of: LossOf, rows: Rows, halves: Flags) -> None:
        self._loss_of, self._rows, self._halves = loss_of, rows, (halves, ~halves)
        self.base = loss_of(rows, (), None)

    def loss(self, restored: Collection[int], factors: Array | None = None) -> Values:
        return self._loss_of(self._rows, restored, factors)

    def share(self, loss: Values, half: int | None = None) -> float:
        """Return a mean loss as a share of the candidate's, on a half or on all."""
        rows = np.ones(len(loss), dtype=bool) if half is None else self._halves[half]
        whole = float(self.base[rows].mean())
        return float(loss[rows].mean()) / whole if whole else 0.0


class _Search:
    """One search."""

    def __init__(
        self,
        loss_of: LossOf,
        examined: _Examined,
        sizes: Sequence[int],
        *,
        rng: Generator,
        runs: CountedRuns,
    ) -> None:
        self.loss_of, self._sizes = loss_of, sizes
        self._rng, self._runs = rng, runs
        self.examined = examined

    def greedy(
        self,
        groups: Sequence[Sequence[int]],
        tried: Sequence[int],
        *,
        besides: Sequence[int],
        is_done: Callable[[Values], bool],
    ) -> list[SearchStep]:
        """Return the steps that are named, of groups of weights by their numbers.

        Parameters
        ----------
        tried
            Numbers of the groups.
        besides
            Weights that are restored already.
        is_done
            Whether nothing is left to be explained, by the loss.
        """
        left = list(tried)
        restored = list(besides)
        before = self.examined.loss(restored) if restored else self.examined.base
        steps: list[SearchStep] = []
        sizes = [sum(self._sizes[weight] for weight in group) for group in groups]
        every = {*besides, *(weight for group in groups for weight in group)}
        # What no group of these can restore.
        floor = 0.0 if len(every) == len(self._sizes) else self.examined.share(self.examined.loss(every))
        while left and len(steps) < _MOST_NAMED and not is_done(before):
            losses = {}
            for number in left:
                losses[number] = self.examined.loss([*restored, *groups[number]])
                self._runs.one()
            placebos = []
            for _ in range(_PLACEBOS):
                factors = self._rng.uniform(1.0, _MOST_FACTOR, len(self._sizes))
                placebos.append(self.examined.loss(restored, factors))
                self._runs.one()
            step = judged(self.examined, before, losses, placebos)
            taken = sum(sizes[one.site] for one in steps)
            share = sizes[step.site] / max(sum(sizes) - taken, 1)
            least = min(2 * share, (1 + share) / 2) if len(groups) > 1 else 0.0
            relative = step.restores / max(self.examined.share(before) - floor, 1e-12)
            if not step.is_named or relative <= least:
                break
            steps.append(step)
            left.remove(step.site)
            restored += groups[step.site]
            before = losses[step.site]
        return steps


def searched(
    loss_of: LossOf,
    layers: Sequence[Sequence[int]],
    sizes: Sequence[int],
    n_items: int,
    *,
    budget: float,
    seed: int,
    progress: Progress | None = None,
) -> SearchResult:
    """Return the layers and matrices that make answers diverge.

    Parameters
    ----------
    loss_of
        The divergence of answers.
    layers
        The numbers of the weights of each layer.
    sizes
        The number of values of each weight.
    n_items
        Answers.
    budget
        Mean divergence that is allowed.
    seed
        Of the halves and the placebos.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(n_items)
    fresh, examined = np.sort(order[: n_items // 2]), order[n_items // 2 :][:MOST_EXAMINED]
    n_tried = min(len(layers), _LEADERS)
    runs = CountedRuns(progress, 2 * len(layers) + 2 * (n_tried + _PLACEBOS))
    items = _Examined(loss_of, examined, rng.permutation(len(examined)) < len(examined) / 2)
    search = _Search(loss_of, items, sizes, rng=rng, runs=runs)
    one_off, one_on = np.empty(len(layers)), np.empty(len(layers))
    for number, layer in enumerate(layers):
        others = [weight for other in layers if other is not layer for weight in other]
        one_off[number], one_on[number] = items.share(items.loss(layer)), items.share(items.loss(others))
        runs.one()
        runs.one()
    steps = search.greedy(
        layers,
        leading(one_off, one_on, _LEADERS),
        besides=(),
        is_done=lambda loss: float(loss.mean()) <= budget,
    )
    kept, losses = _kept(loss_of, fresh, [layers[step.site] for step in steps])
    found = []
    whole = float(losses[0].mean())
    restored: list[int] = []
    for number, step in enumerate(steps[:kept]):
        before, after = (float(losses[place].mean()) for place in (number, number + 1))
        matrices = _matrices(search, layers[step.site], restored, fresh, losses[number], whole=whole)
        if sum(matrix.heals for matrix in matrices) < _ENOUGH * (before - after) / whole:
            matrices = ()
        restored += layers[step.site]
        found.append(
            FoundLayer(
                layer=step.site,
                restores=step.restores,
                placebo=step.placebo,
                heals=(before - after) / whole,
                left=after,
                matrices=matrices,
            )
        )
    runs.finish()
    return SearchResult(
        layers=tuple(found),
        one_off=one_off,
        one_on=one_on,
        order=tuple(step.site for step in steps),
        n_examined=len(examined),
        n_fresh=len(fresh),
        fresh=whole,
    )


def _kept(loss_of: LossOf, fresh: Rows, groups: Sequence[Sequence[int]]) -> tuple[int, list[Values]]:
    """Return how many groups are kept, and the losses of the answers that were kept aside after each of them, from none on.

    The last one that is kept lets more answers get better than worse.
    """
    losses, kept = [loss_of(fresh, (), None)], 0
    alpha = _ALPHA / (len(groups) + 1)
    restored: list[int] = []
    for number, group in enumerate(groups, start=1):
        restored += group
        losses.append(loss_of(fresh, tuple(restored), None))
        before = losses[kept]
        if sign_test(losses[number] < before, losses[number] > before) <= alpha:
            kept = number
    return kept, losses


def _matrices(
    search: _Search,
    layer: Sequence[int],
    restored: Sequence[int],
    fresh: Rows,
    fresh_before: Values,
    *,
    whole: float,
) -> tuple[FoundMatrix, ...]:
    """Return the matrices that do the damage of a layer, with the layers before it restored; none: it does as a whole."""
    items = search.examined
    if len(layer) == 1:
        return ()
    before = items.share(items.loss(restored) if restored else items.base)
    after = items.share(items.loss([*restored, *layer]))
    enough = before - _ENOUGH * (before - after)
    groups = [(weight,) for weight in layer]
    gains = np.array([items.share(items.loss([*restored, weight])) for weight in layer])
    tried = np.argsort(gains, kind="stable")[:_LEADERS].tolist()
    steps = search.greedy(groups, tried, besides=restored, is_done=lambda loss: items.share(loss) <= enough)
    found: list[FoundMatrix] = []
    last = fresh_before
    taken = list(restored)
    for step in steps:
        taken += groups[step.site]
        losses = search.loss_of(fresh, tuple(taken), None)
        if sign_test(losses < last, losses > last) > _ALPHA / (len(steps) + 1):
            break
        found.append(
            FoundMatrix(
                weight=layer[step.site],
                restores=step.restores,
                placebo=step.placebo,
                heals=float(last.mean() - losses.mean()) / whole,
            )
        )
        last = losses
    return tuple(found)

"""The search for the cheapest quantised model whose answers every slice accepts, and the judgement of what it found.

**Three parts.** The recorded items are split once, by observation with all copies of its inputs. One half works: a few hundred of
its items calibrate, all others of it choose. The other half judges, and is not looked at before the order of judgement is fixed.

**Search.** Every recipe that fits the graph is built and measured on the items that choose. Where a family is cheaper than what
keeps the budget but does not keep it itself, its best recipe is tried with groups of layers in FP32: each group alone, then the
best ones together; what keeps the budget so is tried with these layers in FP16, too.

**Judgement.** Of the recipes that keep the budget on the items that choose, those are judged of which none is cheaper and changes as few
answers of its worst slice: the one with the fewest changed answers first, each further one cheaper. The gate judges
one after the other at level alpha, on the items that chose nothing, and ends with the first that does not pass. The last one
that passed is the result.

Bound: the result is not good enough on some slice with a probability of at most alpha, however many recipes were tried. Given the items
that worked, the order is fixed. Let k be the first recipe in it with a mean of changed answers at the budget, or above it, in some slice. A
recipe that is not good enough is the result only if k was judged, and passed; the gate passes k with a probability of at
most alpha (an intersection-union test, see `quantdrift.drift.gate`). So no correction for the number of recipes is needed: a fixed
sequence of tests. Source: Maurer, Hothorn and Lehmacher, Multiple comparisons in drug clinical trials and preclinical assays, Biometrie in
der chemisch-pharmazeutischen Industrie 6, 1995; for choices of models: Angelopoulos et al., Learn then test, Annals of Applied Statistics 19,
2025. Assumption: observations are independent of each other, and the traffic is like the recording. The price: where the first
one does not pass by bad luck, no other is judged.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.random import Generator

from quantdrift.core.config.schema import Config
from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.core.slices import ALL
from quantdrift.drift.evidence.observations import FloatArray, IntArray
from quantdrift.drift.gate import ALPHA, Question
from quantdrift.facts.gate import Decision, Outcome
from quantdrift.facts.quantised import CostKind, Family, Recipe, SliceChange, TriedRecipe
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.gate.judge import Asked, Observed, judge, observed
from quantdrift.release.gate.observations import united
from quantdrift.release.gate.offline import AnsweredRows, Compared, answered_rows, open_candidate
from quantdrift.release.quantise.recipes import Quantiser, without
from quantdrift.release.sites import session_of
from quantdrift.release.timing import times_in_turn
from quantdrift.shadow.replay.references import VersionReference

MOST_CALIBRATION: Final = 256
"""Items of all traffic that calibrate, at most."""
MOST_OF_SLICE: Final = 32
"""Further items of each slice that calibrate, at most."""
_LARGEST_CALIBRATION: Final = 0.25  # of the half that works, and of each slice in it
_TIMED_ROUNDS: Final = 7
_MOST_GROUPS: Final = 12  # of layers that are left in FP32
_FAMILIES: Final = (Family.STATIC, Family.DYNAMIC, Family.BLOCKS)  # whose layers can be left in FP32


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of the items that calibrate, that choose, and that judge, ascending."""

    calibrate: IntArray
    choose: IntArray
    judge: IntArray


def split(items: Observed, rng: Generator) -> Split:
    """Return the three parts: each observation is in one of them as a whole, with all copies of its inputs."""
    group = items.group if items.copy is None else united(items.group, items.copy)
    groups, of_item = np.unique(group, return_inverse=True)
    works = np.zeros(len(groups), dtype=np.bool_)
    works[rng.permutation(len(groups))[: len(groups) // 2]] = True
    work = np.flatnonzero(works[of_item])
    rows = list(_some(work, MOST_CALIBRATION, rng))
    for name, members in items.members.items():
        if name != ALL:
            rows += list(_some(np.intersect1d(members, work), MOST_OF_SLICE, rng))
    calibrate = np.unique(np.array(rows, dtype=np.intp))
    beside = np.isin(of_item, of_item[calibrate])  # the rest of their observations, and their copies
    return Split(calibrate=calibrate, choose=work[~beside[work]], judge=np.flatnonzero(~works[of_item]))


def _some(rows: IntArray, most: int, rng: Generator) -> IntArray:
    return rng.permutation(rows)[: min(most, int(np.ceil(_LARGEST_CALIBRATION * len(rows))))]


def part_of_files(files: Sequence[Compared], rows: IntArray) -> list[Compared]:
    """Return some items of the files, by their numbers through all files; a file without any is left out."""
    parts, begin = [], 0
    for file in files:
        chosen = rows[(rows >= begin) & (rows < begin + len(file.items))] - begin
        begin += len(file.items)
        if len(chosen):
            parts.append(_rows_of(file, chosen))
    return parts


def _rows_of(file: Compared, rows: IntArray) -> Compared:
    items = file.items
    numbers = rows.tolist()
    return msgspec.structs.replace(
        file,
        items=msgspec.structs.replace(
            items,
            inputs={name: array[rows] for name, array in items.inputs.items()},
            attributes={key: [values[row] for row in numbers] for key, values in items.attributes.items()},
            groups=None if items.groups is None else [items.groups[row] for row in numbers],
        ),
        features=[file.features[row] for row in numbers],
        flip=file.flip[rows],
        divergence=file.divergence[rows],
        learned=[file.learned[row] for row in numbers],
    )


def keeps(changes: Mapping[str, SliceChange], budget: float) -> bool:
    """Return whether no slice has more changed answers than the budget allows: one may be changed in each, however few it has."""
    return all(change.share * change.n <= max(budget * change.n, 1.0) for change in changes.values())


def order_of_judgement(tried: Sequence[TriedRecipe], prefer: CostKind) -> list[int]:
    """Return the numbers of the recipes to judge: the one with the fewest changed answers first, each further one cheaper.

    The recipes are those that keep the budget and cost less than the first one, the reference in FP32; where none keeps it, the one with the
    fewest changed answers alone.
    """
    usable = [
        number
        for number, each in enumerate(tried)
        if not each.problem
        and each.recipe.family is not Family.FP32
        and each.cost(prefer) < tried[0].cost(prefer)
    ]

    def changed(number: int) -> tuple[float, float]:
        every = tried[number].changes.get(ALL)
        return tried[number].worst[1].share, every.share if every else 0.0

    within = [number for number in usable if tried[number].within]
    if not within:
        return sorted(usable, key=changed)[:1]
    front: list[int] = []
    for number in sorted(within, key=lambda each: (tried[each].cost(prefer), changed(each))):
        if not front or changed(number)[0] < changed(front[-1])[0]:
            front.append(number)
    fewest = min(within, key=lambda each: (changed(each), tuple(-cost for cost in tried[each].cost(prefer))))
    front.reverse()
    return front if fewest in front else [fewest, *front]


def judged_in_turn(
    order: Sequence[int], decide: Callable[[int], Decision]
) -> tuple[dict[int, Decision], int | None]:
    """Return the decisions about the recipes of an order, up to the first that does not pass, and the last that passed."""
    decisions: dict[int, Decision] = {}
    chosen = None
    for number in order:
        decisions[number] = decide(number)
        if decisions[number].verdict is not Outcome.PASS:
            break
        chosen = number
    return decisions, chosen


class Search:
    """Tries recipes on the items that choose, and judges on those that chose nothing.

    Parameters
    ----------
    config
        With the slices that are judged.
    reference
        What is right, with its comparator.
    model
        The file that is quantised.
    files
        The recorded items.
    items
        Their slices and observations.
    parts
        The split.
    quantiser
        Makes the files.
    folder
        Where they are written, one at a time.
    prefer
        What makes one cheaper.
    most
        Recipes, at most.
    seconds
        Time of the search, at most.
    rows
        Items of a run that is timed.
    """

    def __init__(
        self,
        config: Config,
        reference: VersionReference,
        model: Path,
        *,
        files: Sequence[Compared],
        items: Observed,
        parts: Split,
        quantiser: Quantiser,
        folder: Path,
        prefer: CostKind,
        most: int,
        seconds: float,
        rows: int,
        alpha: float = ALPHA,
    ) -> None:
        self._config, self._reference, self._model = config, reference, model
        self._files, self._items, self._parts = files, items, parts
        self._quantiser, self._path = quantiser, folder / "recipe.onnx"
        self._prefer, self._most, self._alpha = prefer, most, alpha
        self._end = time.monotonic() + seconds
        self._budget = reference.model.budget.flip
        self._digests: set[str] = set()
        self._choosing = list(self._answered(part_of_files(files, parts.choose)))
        self._session = session_of(str(model), str(model), 1)
        names = {node.name for node in self._session.get_inputs()}
        feeds = _feeds(part_of_files(files, parts.choose), reference.model.batched, rows)
        longest = max(feeds, key=lambda feed: len(np.atleast_1d(feed[next(iter(feed))])))
        self._feed = {name: array for name, array in _as_fed(longest).items() if name in names}
        self.tried: list[TriedRecipe] = []
        self.ended = ""

    def try_all(self, recipes: Sequence[Recipe], progress: Callable[[int], None]) -> None:
        """Try the reference itself, and the recipes.

        Parameters
        ----------
        progress
            Called after each recipe with 1.

        Raises
        ------
        OperatorError
            The file that is quantised does not answer as the reference does.
        """
        base = self._measured(Recipe(family=Family.FP32, bits=32), self._model)
        if not base.within:
            name, change = base.worst
            raise OperatorError(
                f"{self._model} is not the reference of model `{self._reference.model.name}`: {change.share:.2%} of its answers in {name} differ"
                f" from those of {self._reference.runtime.artefact.path} before anything is quantised. Give the FP32 file of the same weights"
            )
        self.tried.append(base)
        for recipe in recipes:
            self._try(recipe)
            progress(1)

    def try_layers(self, step: Callable[[Family], None]) -> None:
        """Try the best recipe of each family with layers in FP32, where it would be cheaper than all that keeps the budget.

        Parameters
        ----------
        step
            Called when a family begins.
        """
        for family in _FAMILIES:
            base = self._base(family)
            if base is not None and not self.ended:
                step(family)
                self._leave_layers_out(base)

    def judge(self, rebuilt: Callable[[int], Path]) -> tuple[dict[int, Decision], int | None]:
        """Return the decisions on the items that chose nothing, and the number of the recipe that is the result, or None.

        Parameters
        ----------
        rebuilt
            Builds the file of a recipe again, and returns its path.
        """
        files = part_of_files(self._files, self._parts.judge)
        answers = list(self._answered(files))

        def decide(number: int) -> Decision:
            path = rebuilt(number)
            flip, divergence = self._compared(path, answers)
            ends = np.cumsum([len(file.items) for file in files])[:-1]
            found = [
                msgspec.structs.replace(file, flip=part, divergence=other)
                for file, part, other in zip(
                    files, np.split(flip, ends), np.split(divergence, ends), strict=True
                )
            ]
            # Sliced and grouped again: with the divergence more is seen of what is alike.
            items = observed(self._config, self._reference.model.name, found)
            return self._decision(items, f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}")

        return judged_in_turn(order_of_judgement(self.tried, self._prefer), decide)

    def _try(self, recipe: Recipe) -> TriedRecipe | None:
        """Build and measure a recipe; None where there is no time for it, or another one gives the same file."""
        if self.ended:
            return None
        if len(self.tried) > self._most:
            self.ended = f"after {self._most:,} recipes"
            return None
        if time.monotonic() > self._end:
            self.ended = "when its time was over"
            return None
        try:
            self._quantiser.build(recipe, self._path)
            digest = hashlib.sha256(self._path.read_bytes()).hexdigest()
            if digest in self._digests:
                return None
            self._digests.add(digest)
            tried = self._measured(recipe, self._path)
        except OperatorError as error:
            tried = TriedRecipe(recipe=recipe, problem=str(error))
        except QuarantineError as error:
            tried = TriedRecipe(recipe=recipe, problem=error.detail)
        finally:
            self._path.unlink(missing_ok=True)
        self.tried.append(tried)
        return tried

    def _base(self, family: Family) -> TriedRecipe | None:
        """Return the recipe of a family with the fewest changed answers that is cheaper than all that keeps the budget; None: there is none."""
        least = self._least_cost()
        cheaper = [
            each
            for each in self.tried
            if each.recipe.family is family and not each.problem and each.cost(self._prefer) < least
        ]
        return min(cheaper, key=lambda each: (each.worst[1].share, each.cost(self._prefer)), default=None)

    def _leave_layers_out(self, base: TriedRecipe) -> None:
        """Try a recipe with each group of layers in FP32, then with the best ones together, until it keeps the budget or costs too much."""
        nodes = self._quantiser.nodes
        alone: dict[tuple[str, ...], TriedRecipe] = {}
        for numbers in np.array_split(np.arange(len(nodes)), min(len(nodes), _MOST_GROUPS)):
            group = tuple(nodes[number] for number in numbers)
            tried = self._try(without(base.recipe, group))
            if tried and not tried.problem:
                alone[group] = tried
        if within := [tried for tried in alone.values() if tried.within]:
            self._halve_layers(within)
            return
        ranked = sorted(alone, key=lambda group: alone[group].worst[1].share)
        for count in range(2, len(ranked)):
            chosen = {node for group in ranked[:count] for node in group}
            least = self._least_cost()
            tried = self._try(without(base.recipe, [node for node in nodes if node in chosen]))
            if tried and not tried.problem and tried.within:
                self._halve_layers([tried])
            if tried and not tried.problem and (tried.within or tried.cost(self._prefer) >= least):
                return

    def _halve_layers(self, within: Sequence[TriedRecipe]) -> None:
        """Try the cheapest recipe that keeps the budget by its layers in FP32 with these layers in FP16."""
        cheapest = min(within, key=lambda each: each.cost(self._prefer))
        self._try(msgspec.structs.replace(cheapest.recipe, left_bits=16))

    def _least_cost(self) -> tuple[float, float]:
        """Return the cost of the cheapest model that keeps the budget."""
        return min(each.cost(self._prefer) for each in self.tried if each.within)

    def _measured(self, recipe: Recipe, path: Path) -> TriedRecipe:
        """Return what a file costs, and what it changes on the items that choose."""
        flip, divergence = self._compared(path, self._choosing)
        items = self._items.part(self._parts.choose, flip=flip, divergence=divergence)
        decision = self._decision(items, "")
        changes = {
            answer.slice: SliceChange(n=answer.n, share=answer.mean or 0.0) for answer in decision.slices
        }
        session = self._session if path == self._model else session_of(str(path), str(path), 1)
        of_reference, of_recipe = times_in_turn(
            [partial(each.run, None, self._feed) for each in (self._session, session)], _TIMED_ROUNDS
        )
        return TriedRecipe(
            recipe=recipe,
            n_bytes=path.stat().st_size,
            time_ratio=1.0 if path == self._model else of_recipe / max(of_reference, 1e-9),
            changes=changes,
            within=decision.verdict is not Outcome.FAIL and keeps(changes, self._budget),
        )

    def _decision(self, items: Observed, candidate: str) -> Decision:
        return judge(
            Asked(slices=(Question.flips(self._budget),)),
            items,
            model=self._reference.model.name,
            candidate=candidate,
            at=datetime.now(UTC),
            alpha=self._alpha,
        )

    def _answered(self, files: Sequence[Compared]) -> Iterator[AnsweredRows]:
        """Yield the items with the answers of the reference, in order."""
        step = self._config.shadow.batch_items if self._reference.model.batched else 1
        for file in files:
            for begin in range(0, len(file.items), step):
                rows = slice(begin, min(begin + step, len(file.items)))
                try:
                    yield answered_rows(self._reference, file.items, rows)
                except QuarantineError as error:
                    raise OperatorError(f"{file.items.path}: {error.detail}") from error

    def _compared(self, path: Path, answers: Sequence[AnsweredRows]) -> tuple[FloatArray, FloatArray]:
        """Return the flips and the divergences of a file : (items,) each."""
        shadow = self._config.shadow
        runtime = open_candidate(path, what="candidate", provider=shadow.provider, threads=shadow.threads)
        try:
            found = [rows.judged(runtime) for rows in answers]
        finally:
            runtime.close()
        return np.concatenate([flip for flip, _, _ in found]), np.concatenate([each for _, each, _ in found])


def calibration_feeds(
    files: Sequence[Compared], *, batched: bool, rows: int, inputs: Sequence[str]
) -> Callable[[], Iterator[dict[str, Array]]]:
    """Return what yields the calibration inputs.

    Parameters
    ----------
    files
        The items that calibrate.
    batched
        The model's inputs have a dimension of items.
    rows
        Items of one run; what is left over of a file is left out.
    inputs
        The names of the inputs.
    """

    def feeds() -> Iterator[dict[str, Array]]:
        for feed in _feeds(files, batched, rows):
            if batched and len(next(iter(feed.values()))) < rows:
                continue
            yield {name: array for name, array in _as_fed(feed).items() if name in inputs}

    return feeds


def _feeds(files: Sequence[Compared], batched: bool, rows: int) -> Iterator[dict[str, Array]]:  # noqa: FBT001 - three words
    """Yield the inputs of the items, of so many in a run; without a dimension of items one by one."""
    for file in files:
        for begin in range(0, len(file.items), rows if batched else 1):
            chosen: Any = slice(begin, begin + rows) if batched else begin
            yield {name: array[chosen] for name, array in file.items.inputs.items()}


def _as_fed(feed: Mapping[str, Array]) -> dict[str, Array]:
    """Return inputs as ONNX Runtime takes them: texts are objects."""
    return {
        name: array.astype(object) if np.asarray(array).dtype.kind in "US" else np.asarray(array)
        for name, array in feed.items()
    }

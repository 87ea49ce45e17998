"""Whether what a reference gives looks like what its model's configuration says. It is told, and never acted on.

Most such mistakes make all look well: probabilities that are taken for logits hardly diverge, a mask of them is one class
throughout, and beside the score of what fills a ranking up all others look equal. Another one makes healthy candidates flip. The first 256 items of a reference's compared output are looked at,
once for each start of a worker. No comparison depends on it: what a figure means stays what it is while a version is
watched.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np

from quantdrift.core.config.schema import Model, OutputKind
from quantdrift.core.errors import QuarantineError
from quantdrift.core.tasks import Task
from quantdrift.shadow.comparators.protocol import Values
from quantdrift.shadow.comparators.vision.class_map import MapReader
from quantdrift.shadow.replay.exchange import Answer, PreparedExchange
from quantdrift.shadow.replay.pairing import OutputPair, pair_of
from quantdrift.shadow.tensors.arrays import Array
from quantdrift.storage.shadow.rows import ConfigWarningRow

N_ITEMS: Final = 256

_SUM_TOLERANCE: Final = 1e-3
_NEAR: Final = 0.1  # of the usual size of an output: what is smaller is near zero
_OFTEN: Final = 0.02  # of the items
_EITHER_SIGN: Final = 0.05
_FAR: Final = 10.0  # times the range of all other scores
_MANY: Final = 0.25  # of the items
_MOST_OUTPUTS: Final = 4096  # of an item, of which the first so many are looked at
_LOG = logging.getLogger(__name__)


class _Look(Protocol):
    """Looks at a reference's output for one mistake."""

    @property
    def option(self) -> str:
        """Return the option that may be wrong."""
        ...

    def add(self, output: Array) -> bool:
        """Look at items, (items, ...), and return whether it is of any use to look at more."""
        ...

    def doubt(self) -> str:
        """Return what seems to be wrong with those that were looked at, and what to do; empty: nothing."""
        ...


class ConfigWarnings:
    """Looks at what references give. One thread at a time calls it, but for `found`.

    Attributes
    ----------
    found : dict
        What seems to be wrong, in words, by model and option.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], str] = {}
        self._seen: list[ConfigWarningRow] = []
        self._looks: dict[tuple[str, str], _Look | None] = {}
        self._n_items: dict[tuple[str, str], int] = {}

    def look(self, batch: Sequence[PreparedExchange], outputs: Sequence[Answer]) -> None:
        """Look at what a reference gave for exchanges of one version; at most at 256 items of each reference.

        Parameters
        ----------
        batch, outputs
            Exchanges, and what the reference gave for each, or why it gave nothing.
        """
        for entry, answer in zip(batch, outputs, strict=True):
            model = entry.judge.model
            key = (model.name, entry.judge.runtime.artefact.digest)
            if key not in self._looks:
                self._looks[key] = _look_of(model)
                if self._looks[key] is None:
                    self._tell(key, "", "")
            look = self._looks[key]
            if look is None:
                return
            pair = pair_of(entry, answer, {})
            if isinstance(pair, OutputPair) and not self._goes_on(key, look, pair.reference):
                self._looks[key] = None
                self._tell(key, look.option, look.doubt())

    def take(self) -> tuple[ConfigWarningRow, ...]:
        """Return of which references it is known since the last call whether anything seems to be wrong."""
        seen, self._seen = self._seen, []
        return tuple(seen)

    def _goes_on(self, key: tuple[str, str], look: _Look, reference: Mapping[str, Array]) -> bool:
        (output,) = reference.values()
        n_before = self._n_items.get(key, 0)
        some = output[: N_ITEMS - n_before]
        self._n_items[key] = n_before + len(some)
        try:
            return look.add(some) and self._n_items[key] < N_ITEMS
        except QuarantineError:
            return True  # no such output: its exchange is set aside for that

    def _tell(self, key: tuple[str, str], option: str, doubt: str) -> None:
        model, digest = key
        self._seen.append(
            ConfigWarningRow(
                model=model, reference_digest=digest, option=option if doubt else "", doubt=doubt
            )
        )
        if doubt and (model, option) not in self.found:
            self.found[model, option] = doubt
            _LOG.warning("models `%s`: %s", model, doubt)


def _look_of(model: Model) -> _Look | None:
    if model.task is Task.REGRESSION:
        return _Floor(model.regression.floor)
    if model.task is Task.RANKING:
        return _Padding(model.ranking.padding)
    if model.output_kind is OutputKind.LOGITS:
        if model.task in {Task.CLASSIFICATION, Task.MULTILABEL}:
            return _Kind(sums=model.task is Task.CLASSIFICATION)
        if model.task is Task.SEGMENTATION:
            return _Mask(model)
    return None


class _Kind:
    """Whether what is said to be logits is probabilities: all are from 0 to 1 and, of classes, add up to 1.

    Parameters
    ----------
    sums
        Whether they are of classes of which one is right.
    """

    def __init__(self, *, sums: bool) -> None:
        self._sums = sums
        self._n_seen = 0
        self._fits = True
        self._is_graded = False  # some are neither 0 nor 1

    @property
    def option(self) -> str:
        """Return the option that may be wrong."""
        return "output_kind"

    def add(self, output: Array) -> bool:
        """Look at items; the first that is none ends it."""
        values = _finite_rows(output)
        self._n_seen += len(values)
        self._fits &= bool(values.min(initial=0) >= 0 and values.max(initial=1) <= 1 + _SUM_TOLERANCE)
        if self._sums:
            sums = values.sum(axis=1, dtype=np.float64)
            self._fits &= bool(np.all(np.abs(sums - 1) <= _SUM_TOLERANCE))
        self._is_graded = self._is_graded or bool(np.any((values > 0) & (values < 1)))
        return self._fits

    def doubt(self) -> str:
        """Return that they are probabilities, if so."""
        if not (self._fits and self._is_graded and self._n_seen):
            return ""
        return (
            f"the reference's outputs are probabilities, all of {self._n_seen} items, and output_kind says logits: what "
            'differs looks far smaller than it is, or does not show at all. Set output_kind = "probabilities"'
        )


class _Mask(_Kind):
    """The same of a mask, or whether it is class numbers; of scores of classes the largest has the pixel either way.

    Parameters
    ----------
    model
        How its output is read.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(sums=False)
        self._reader = MapReader(model.segmentation, model.output_kind)
        self._are_whole = True
        self._largest = 0.0

    def add(self, output: Array) -> bool:
        """Look at items; what is no mask ends it."""
        n_classes, _ = self._reader.layout(output, "reference")
        if n_classes != 1:
            self._fits = self._are_whole = False
            return False
        values = _finite_rows(output)
        whole = values.min(initial=0) >= 0 and np.array_equal(values, np.rint(values))
        self._are_whole = self._are_whole and bool(whole)
        self._largest = max(self._largest, float(values.max(initial=0)))
        return super().add(output) or self._are_whole

    @property
    def option(self) -> str:
        """Return the option that may be wrong."""
        return "segmentation.classes_axis" if self._is_numbers else super().option

    def doubt(self) -> str:
        """Return that they are class numbers, or probabilities, if so."""
        if not self._is_numbers:
            return super().doubt()
        return (
            f"the reference's outputs are whole numbers from 0 to {self._largest:g}, all of {self._n_seen} items, and are read "
            "as a mask: every class but 0 is the same. Set segmentation.classes_axis = 0 if they are class numbers"
        )

    @property
    def _is_numbers(self) -> bool:
        return self._are_whole and self._largest > 1


class _Floor:
    """Whether outputs go through zero, where their relative errors are large whatever a candidate does.

    Parameters
    ----------
    floor
        Where relative errors end.
    """

    option = "regression.floor"

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self._rows: list[Values] = []

    def add(self, output: Array) -> bool:
        """Look at items, all of them."""
        self._rows.append(_finite_rows(output)[:, :_MOST_OUTPUTS].astype(np.float64))
        return True

    def doubt(self) -> str:
        """Return which share of an output is near zero, and a floor that is of its size."""
        rows = [row for row in self._rows if row.size]
        if not rows or len({row.shape[1] for row in rows}) > 1:
            return ""
        values = np.concatenate(rows)
        with np.errstate(over="ignore"):
            size = np.sqrt((values**2).mean(axis=0))
        signs = np.minimum((values > 0).mean(axis=0), (values < 0).mean(axis=0))
        close = ((np.abs(values) < _NEAR * size) & (np.abs(values) > self._floor)).mean(axis=0)
        close[(signs < _EITHER_SIGN) | ~np.isfinite(size)] = 0.0
        worst = int(close.argmax())
        if close[worst] < _OFTEN:
            return ""
        return (
            f"{100 * close[worst]:.0f} % of the reference's values (of output {worst}, counted from 0; their usual size is "
            f"{size[worst]:.2g}, of either sign) are so near zero that a small error is a large relative one: healthy candidates "
            f"flip there. Set regression.floor, which is {self._floor:g}, to the smallest value whose relative error matters, "
            f"such as {_NEAR * size[worst]:.1g}"
        )


class _Padding:
    """Whether one score lies so far below all others of its item that these look equal beside it.

    Parameters
    ----------
    padding
        What is known to fill up.
    """

    option = "ranking.padding"

    def __init__(self, padding: float) -> None:
        self._padding = padding
        self._n_seen = self._n_far = 0
        self._least = 0.0

    def add(self, output: Array) -> bool:
        """Look at items, all of them."""
        if output.dtype.kind not in "fiu" or output.ndim != 2:
            return True
        scores = output.astype(np.float64)
        scores[~(scores > max(self._padding, np.finfo(np.float64).min))] = np.inf  # fills up, or is no number
        scores.sort(axis=1)
        for row in scores:
            there = row[np.isfinite(row)]
            self._n_seen += 1
            others = there[there > there[0]] if len(there) else there
            if len(others) > 1 and others[0] / 2 - there[0] / 2 > _FAR / 2 * (others[-1] - others[0]) > 0:
                self._n_far += 1
                self._least = min(self._least, float(there[0]))
        return True

    def doubt(self) -> str:
        """Return that there is such a score in many items."""
        if self._n_far <= _MANY * self._n_seen:
            return ""
        return (
            f"in {self._n_far} of {self._n_seen} items the reference's least score, down to {self._least:g}, is so far below all "
            f"others that these look equal beside it. If it fills up, set ranking.padding, which is {self._padding:g}, above it"
        )


def _finite_rows(output: Array) -> Array:
    """Return the numbers of the items that hold nothing else : (items, numbers), of the output's type."""
    if output.dtype.kind not in "fiu" or not output.size:
        return np.empty((0, 0))
    values = output.reshape(len(output), -1)
    finite = np.isfinite(values).all(axis=1)
    return values if finite.all() else values[finite]

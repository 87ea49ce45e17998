"""Warnings about options that do not fit a reference's outputs. They are logged and stored; nothing else depends on them.

Most such mistakes hide drift: probabilities that are read as logits hardly diverge, a mask of probabilities is one class
throughout, and next to the padding score of a ranking all other scores look equal. Another mistake makes healthy
candidates flip. The first 256 items of a reference's compared output are checked, once for each start of a worker. No
comparison changes, so that a metric keeps its meaning while a version is monitored.
"""

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np

from quantdrift.core.config.schema import Model, OutputKind
from quantdrift.core.errors import QuarantineError
from quantdrift.core.logs import of_model
from quantdrift.core.tasks import Task
from quantdrift.models.comparators.protocol import Values
from quantdrift.models.comparators.vision.class_map import MapReader
from quantdrift.models.tensors.arrays import Array
from quantdrift.shadow.replay.exchange import Answer, PreparedExchange
from quantdrift.shadow.replay.pairing import OutputPair, pair_of
from quantdrift.storage.comparisons.rows import ConfigWarningRow

N_ITEMS: Final = 256

_SUM_TOLERANCE: Final = 1e-3
_NEAR: Final = 0.1  # of the root mean square of an output: smaller values count as near zero
_OFTEN: Final = 0.02  # of the items
_EITHER_SIGN: Final = 0.05
_FAR: Final = 10.0  # times the range of all other scores
_MANY: Final = 0.25  # of the items
_MOST_OUTPUTS: Final = 4096  # the outputs of an item that are checked: its first ones
_LOG = logging.getLogger(__name__)


class _OptionCheck(Protocol):
    """Checks a reference's output for one configuration mistake."""

    @property
    def option(self) -> str:
        """Return the option that may be wrong."""
        ...

    def add(self, output: Array) -> bool:
        """Check items : (items, ...). Return whether the result can still change with more of them."""
        ...

    def warning(self) -> str:
        """Return the warning, with what to do; empty if the option seems right."""
        ...


TOKENIZER: Final = "references.path"
"""The option of a warning about the tokenizer of a language model."""


class ConfigWarnings:
    """Checks the references' outputs. Not thread-safe, except for reading `found`.

    Parameters
    ----------
    at_start
        What was found when a reference was opened, by model and digest: of its tokenizer. Others add to it.

    Attributes
    ----------
    found : dict
        The warnings, by model and option.
    """

    def __init__(self, at_start: Mapping[tuple[str, str], str] = MappingProxyType({})) -> None:
        self._at_start = at_start
        self.found: dict[tuple[str, str], str] = {}
        self._seen: list[ConfigWarningRow] = []
        self._checks: dict[tuple[str, str], _OptionCheck | None] = {}
        self._n_items: dict[tuple[str, str], int] = {}

    def check(self, batch: Sequence[PreparedExchange], outputs: Sequence[Answer]) -> None:
        """Check the reference's outputs for exchanges of one version; at most 256 items of each reference.

        Parameters
        ----------
        batch, outputs
            Exchanges, and the reference's outputs for each, or its error.
        """
        for entry, answer in zip(batch, outputs, strict=True):
            model = entry.version_reference.model
            key = (model.name, entry.version_reference.runtime.artefact.digest)
            if key not in self._checks:
                self._checks[key] = _check_of(model)
                if self._checks[key] is None:
                    doubt = self._at_start.get(key, "")
                    self._report(key, TOKENIZER if doubt else "", doubt)
            check = self._checks[key]
            if check is None:
                return
            pair = pair_of(entry, answer, {})
            if isinstance(pair, OutputPair) and not self._needs_more(key, check, pair.reference):
                self._checks[key] = None
                self._report(key, check.option, check.warning())

    def take(self) -> tuple[ConfigWarningRow, ...]:
        """Return a row for each reference whose check ended since the last call, with its warning or an empty one."""
        seen, self._seen = self._seen, []
        return tuple(seen)

    def _needs_more(self, key: tuple[str, str], check: _OptionCheck, reference: Mapping[str, Array]) -> bool:
        (output,) = reference.values()
        n_before = self._n_items.get(key, 0)
        some = output[: N_ITEMS - n_before]
        self._n_items[key] = n_before + len(some)
        try:
            return check.add(some) and self._n_items[key] < N_ITEMS
        except QuarantineError:
            return True  # the output is missing: the comparison quarantines the exchange

    def _report(self, key: tuple[str, str], option: str, doubt: str) -> None:
        model, digest = key
        self._seen.append(
            ConfigWarningRow(
                model=model, reference_digest=digest, option=option if doubt else "", doubt=doubt
            )
        )
        if doubt and (model, option) not in self.found:
            self.found[model, option] = doubt
            if option != TOKENIZER:  # that one is in the log since the start
                _LOG.warning("model %s, option %s: %s", model, option, doubt, extra=of_model(model))


def _check_of(model: Model) -> _OptionCheck | None:
    if model.task is Task.REGRESSION:
        return _FloorCheck(model.regression.floor)
    if model.task is Task.RANKING:
        return _PaddingCheck(model.ranking.padding)
    if model.output_kind is OutputKind.LOGITS:
        if model.task in {Task.CLASSIFICATION, Task.MULTILABEL}:
            return _OutputKindCheck(sums=model.task is Task.CLASSIFICATION)
        if model.task is Task.SEGMENTATION:
            return _MaskKindCheck(model)
    return None


class _OutputKindCheck:
    """Checks whether "logits" are probabilities: all lie in [0, 1] and, for exclusive classes, add up to 1.

    Parameters
    ----------
    sums
        Whether the classes are exclusive, so that probabilities add up to 1.
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
        """Check items; the first one that cannot be probabilities ends the check."""
        values = _finite_rows(output)
        self._n_seen += len(values)
        self._fits &= bool(values.min(initial=0) >= 0 and values.max(initial=1) <= 1 + _SUM_TOLERANCE)
        if self._sums:
            sums = values.sum(axis=1, dtype=np.float64)
            self._fits &= bool(np.all(np.abs(sums - 1) <= _SUM_TOLERANCE))
        self._is_graded = self._is_graded or bool(np.any((values > 0) & (values < 1)))
        return self._fits

    def warning(self) -> str:
        """Return a warning if all items are probabilities."""
        if not (self._fits and self._is_graded and self._n_seen):
            return ""
        return (
            f"the reference's outputs are probabilities in all of {self._n_seen} items, but output_kind is `logits`: "
            'divergences look far smaller than they are, or do not show at all. Set output_kind = "probabilities"'
        )


class _MaskKindCheck(_OutputKindCheck):
    """Checks whether the "logits" of a mask are probabilities, or class numbers.

    Scores of several classes need no check: the largest score wins a pixel either way.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(sums=False)
        self._reader = MapReader(model.segmentation, model.output_kind, model.background)
        self._are_whole = True
        self._largest = 0.0

    def add(self, output: Array) -> bool:
        """Check items; an output that is not a mask ends the check."""
        n_classes, _ = self._reader.layout(output, "reference")
        if n_classes != 1:
            self._fits = self._are_whole = False
            return False
        values = _finite_rows(output)
        integers = values.min(initial=0) >= 0 and np.array_equal(values, np.rint(values))
        self._are_whole = self._are_whole and bool(integers)
        self._largest = max(self._largest, float(values.max(initial=0)))
        return super().add(output) or self._are_whole

    @property
    def option(self) -> str:
        """Return the option that may be wrong."""
        return "segmentation.classes_axis" if self._is_numbers else super().option

    def warning(self) -> str:
        """Return a warning if the items are class numbers, or probabilities."""
        if not self._is_numbers:
            return super().warning()
        return (
            f"the reference's outputs are whole numbers from 0 to {self._largest:g} in all of {self._n_seen} items, but are "
            "read as a mask, in which all classes except 0 are the same. If they are class numbers, set "
            "segmentation.classes_axis = 0"
        )

    @property
    def _is_numbers(self) -> bool:
        return self._are_whole and self._largest > 1


class _FloorCheck:
    """Checks whether outputs cross zero, where even small errors are large relative errors.

    Parameters
    ----------
    floor
        `regression.floor`: smallest magnitude that a relative error is taken of.
    """

    option = "regression.floor"

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self._rows: list[Values] = []

    def add(self, output: Array) -> bool:
        """Check items; all 256 are needed."""
        self._rows.append(_finite_rows(output)[:, :_MOST_OUTPUTS].astype(np.float64))
        return True

    def warning(self) -> str:
        """Return a warning if many values of an output are near zero, with a floor that fits its size."""
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
            f"{100 * close[worst]:.0f} % of the reference's values of output {worst} (counted from 0; root mean square "
            f"{size[worst]:.2g}, both signs) are so near zero that a small error is a large relative one: healthy candidates "
            f"flip there. Set regression.floor, now {self._floor:g}, to the smallest value whose relative error matters, "
            f"such as {_NEAR * size[worst]:.1g}"
        )


class _PaddingCheck:
    """Checks whether one score lies so far below all others of its item that those look equal.

    Parameters
    ----------
    padding
        `ranking.padding`: scores up to it are known to be padding.
    """

    option = "ranking.padding"

    def __init__(self, padding: float) -> None:
        self._padding = padding
        self._n_seen = self._n_far = 0
        self._least = 0.0

    def add(self, output: Array) -> bool:
        """Check items; all 256 are needed."""
        if output.dtype.kind not in "fiu" or output.ndim != 2:
            return True
        scores = output.astype(np.float64)
        scores[~(scores > max(self._padding, np.finfo(np.float64).min))] = np.inf  # padding, or not a number
        scores.sort(axis=1)
        for row in scores:
            finite = row[np.isfinite(row)]
            self._n_seen += 1
            others = finite[finite > finite[0]] if len(finite) else finite
            if len(others) > 1 and others[0] / 2 - finite[0] / 2 > _FAR / 2 * (others[-1] - others[0]) > 0:
                self._n_far += 1
                self._least = min(self._least, float(finite[0]))
        return True

    def warning(self) -> str:
        """Return a warning if many items have such a score."""
        if self._n_far <= _MANY * self._n_seen:
            return ""
        return (
            f"in {self._n_far} of {self._n_seen} items the reference's lowest score, down to {self._least:g}, is so far below "
            f"all others that those look equal. If it is padding, set ranking.padding, now {self._padding:g}, above it"
        )


def _finite_rows(output: Array) -> Array:
    """Return the items whose values are all finite : (items, values), of the output's type."""
    if output.dtype.kind not in "fiu" or not output.size:
        return np.empty((0, 0))
    values = output.reshape(len(output), -1)
    finite = np.isfinite(values).all(axis=1)
    return values if finite.all() else values[finite]

"""Sites of a candidate that is made of decision trees, and a copy of it in which each site can be switched to FP32.

Such a candidate has the trees of its reference with other numbers: thresholds on a grid, leaves in FP16. A **site** is all thresholds that
are compared with one column of the input (`T:`), or all leaves (`V:`). With a site in FP32 its numbers are those of the reference.

A placebo of a site (`run` with factors) gives each number another rounding error of the size that its site has. A number that is off by
more than rounding explains, because the range of the grid ends before it, stays as it is: new rounding would not bring it back. The size
comes from the lower quartile of the errors, absolute or relative to the value, whichever allows more: for errors that are evenly spread
over a step it is an eighth of the step, and three quarters of the numbers may be cut off without moving it past that.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from quantdrift.core.errors import OperatorError
from quantdrift.facts.diagnosis import OffValues
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.halves import HalfCopy, is_half
from quantdrift.release.sites import Site, SiteKind, SwitchableCopy, Weight, loaded, outputs_of, session_of

_OPERATORS: Final = {"TreeEnsembleClassifier": "class", "TreeEnsembleRegressor": "target"}
_SHAPE: Final = ("nodes_featureids", "nodes_modes", "nodes_truenodeids", "nodes_falsenodeids")
_LEAF: Final = b"LEAF"
_STEP: Final = (
    4.0  # times the lower quartile: the largest error of numbers that are rounded to the nearest step
)
_FAR: Final = 2.0  # times the largest error of rounding
_SESSIONS: Final = 32  # of copies that are kept: the search asks for the same ones again


class _Numbers(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The numbers of one attribute of one node: (numbers,) of the candidate and of the reference, in the order of the candidate.

    `size` is the largest error that rounding explains.
    """

    node: int
    name: str
    site: npt.NDArray[np.intp]
    candidate: Array
    reference: Array
    size: Array

    @property
    def is_far(self) -> npt.NDArray[np.bool_]:
        """Which numbers are off by more than rounding explains."""
        return np.asarray(_errors(self.candidate, self.reference) > _FAR * self.size)


def has_trees(path: Path) -> bool:
    """Return whether decision trees compute the outputs of an ONNX file; False where it cannot be read."""
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception:  # noqa: BLE001 - whoever opens it says what is wrong
        return False
    return any(node.op_type.startswith("TreeEnsemble") for node in model.graph.node)


class TreeCopy:
    """A copy of a candidate of decision trees in which each site can be switched to FP32.

    Parameters
    ----------
    candidate, reference
        ONNX files with operators TreeEnsembleClassifier or TreeEnsembleRegressor.
    threads
        CPU threads, 0 for one per core.
    columns
        Names of the columns of the input; empty: they are numbers from 0.

    Raises
    ------
    OperatorError
        A file cannot be read, or the candidate has not the trees of the reference.
    """

    weights: Sequence[Weight] = ()
    unmatched: tuple[str, ...] = ()

    def __init__(
        self, candidate: Path, reference: Path, *, threads: int = 1, columns: Sequence[str] = ()
    ) -> None:
        self.file: Path | None = None  # its kernels compute what it says
        self._name, self._threads = str(candidate), threads
        self._model = loaded(candidate, "candidate")
        parent = loaded(reference, "reference")
        self._numbers, self.sites = _matched(self._model, parent, candidate, columns)
        self.costs: tuple[float | None, ...] = (None,) * len(self.sites)
        stored = {tensor.name for tensor in self._model.graph.initializer}
        self.inputs = tuple(node.name for node in self._model.graph.input if node.name not in stored)
        self.outputs = tuple(node.name for node in self._model.graph.output if _is_float(node))
        self._sessions: OrderedDict[frozenset[int], Any] = OrderedDict()
        self._expected = session_of(str(reference), str(reference), threads)

    @property
    def everywhere(self) -> range:
        """The numbers of all sites."""
        return range(len(self.sites))

    def run(
        self, inputs: Mapping[str, Array], restored: Iterable[int] = (), factors: Array | None = None
    ) -> dict[str, Array]:
        """Return the outputs with some sites in FP32; `factors` are the seed of a placebo at all others."""
        chosen = frozenset(restored)
        if factors is not None:
            rng = np.random.default_rng(np.frombuffer(factors.astype(np.float64).tobytes(), np.uint32))
            return outputs_of(self._session(chosen, rng), self.outputs, inputs)
        session = self._sessions.pop(chosen, None) or self._session(chosen)
        self._sessions[chosen] = session
        if len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)
        return outputs_of(session, self.outputs, inputs)

    def raw(self, inputs: Mapping[str, Array], restored: Iterable[int] = ()) -> dict[int, Array]:
        """Return nothing: trees have no activations."""
        return {}

    def served(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return what the candidate computes."""
        return self.run(inputs)

    def runner(self, model: bytes) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        """Return what computes a changed candidate."""
        session = session_of(model, "repaired", 1)
        return lambda inputs: outputs_of(session, self.outputs, inputs)

    def expected(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return what the reference computes."""
        return outputs_of(self._expected, self.outputs, inputs)

    def in_fp32(self, names: Iterable[str]) -> Any:
        """Return the candidate's model with the sites of these names in FP32."""
        numbers = {site.name: number for number, site in enumerate(self.sites)}
        return self._edited(frozenset(numbers[name] for name in names))

    def _session(self, restored: frozenset[int], rng: np.random.Generator | None = None) -> Any:
        return session_of(self._edited(restored, rng).SerializeToString(), self._name, self._threads)

    def _edited(self, restored: frozenset[int], rng: np.random.Generator | None = None) -> Any:
        model = type(self._model).FromString(self._model.SerializeToString())
        nodes = _trees_of(model)
        for numbers in self._numbers:
            values = numbers.candidate
            if rng is not None:
                errors = rng.uniform(-1.0, 1.0, len(values)) * numbers.size
                is_new = ~numbers.is_far & (values != numbers.reference)
                values = np.where(is_new, numbers.reference + errors, values)
            values = np.where(np.isin(numbers.site, [*restored]), numbers.reference, values)
            _write(nodes[numbers.node], numbers.name, values)
        return model


OnnxCopy = SwitchableCopy | HalfCopy | TreeCopy


def copy_of_onnx(
    candidate: Path, reference: Path, *, threads: int = 1, columns: Sequence[str] = ()
) -> OnnxCopy:
    """Return the switchable copy of an ONNX file: of its operators in 16 bits or its trees if it has some, else of its pairs.

    Raises
    ------
    OperatorError
        A file cannot be read, or no site of it can be named.
    """
    if is_half(candidate):
        return HalfCopy(candidate, reference, threads=threads)
    if has_trees(candidate):
        return TreeCopy(candidate, reference, threads=threads, columns=columns)
    return SwitchableCopy(candidate, reference, threads=threads)


def _matched(
    model: Any, parent: Any, candidate: Path, columns: Sequence[str]
) -> tuple[list[_Numbers], tuple[Site, ...]]:
    """Return the numbers that differ, with their sites."""
    pairs = list(zip(_trees_of(model), _trees_of(parent), strict=False))
    if not pairs or len(_trees_of(model)) != len(_trees_of(parent)):
        raise OperatorError(
            f"the candidate {candidate} and the reference have not as many operators of decision trees: it was not made from this reference"
        )
    places: dict[str, int] = {}
    parts: list[tuple[int, str, list[str], Array, Array]] = []
    for node, (own, other) in enumerate(pairs):
        order, others = (
            _order(_attributes(side), ("nodes_treeids", "nodes_nodeids")) for side in (own, other)
        )
        sides = _attributes(own), _attributes(other)
        if own.op_type not in _OPERATORS or "nodes_values" not in sides[0]:
            raise OperatorError(
                f"the candidate {candidate} has the operator {own.op_type} in a form whose thresholds cannot be read: export it with"
                " TreeEnsembleClassifier or TreeEnsembleRegressor"
            )
        if own.op_type != other.op_type or not all(_same(sides, name, order, others) for name in _SHAPE):
            raise OperatorError(
                f"the candidate {candidate} has other trees than the reference: it was not made from this reference. What is left: serve the"
                " slice by the reference, or roll the candidate back"
            )
        is_leaf = np.array([mode == _LEAF for mode in sides[0]["nodes_modes"]])
        names = [
            "" if leaf else f"{SiteKind.THRESHOLDS.value}:{_column(int(column), columns)}"
            for leaf, column in zip(is_leaf, sides[0]["nodes_featureids"], strict=True)
        ]
        parts.append((node, "nodes_values", names, *_values(sides, "nodes_values", order, others)))
        kind = _OPERATORS[own.op_type]
        keys = tuple(f"{kind}_{part}" for part in ("treeids", "nodeids", "ids"))
        order, others = (_order(side, keys) for side in sides)
        leaves = _values(sides, f"{kind}_weights", order, others)
        parts.append((node, f"{kind}_weights", [f"{SiteKind.LEAVES.value}:leaves"] * len(leaves[0]), *leaves))
    for _, _, names, own_values, other_values in parts:
        for name in dict.fromkeys(
            name for name, off in zip(names, own_values != other_values, strict=True) if off and name
        ):
            places.setdefault(name, len(places))
    if not places:
        raise OperatorError(
            f"the candidate {candidate} has the thresholds and leaves of the reference: nothing of it is rounded"
        )
    numbers = []
    for node, attribute, names, own_values, other_values in parts:
        site = np.array([places.get(name, -1) for name in names], dtype=np.intp)
        size = np.zeros(len(site))
        for place in np.unique(site[site >= 0]):
            here = site == place
            size[here] = _size(own_values[here], other_values[here])
        numbers.append(
            _Numbers(
                node=node, name=attribute, site=site, candidate=own_values, reference=other_values, size=size
            )
        )
    return numbers, tuple(_site(name, place, numbers) for name, place in places.items())


def _size(candidate: Array, reference: Array) -> Array:
    """Return the largest error that rounding explains, of each number."""
    errors = _errors(candidate, reference)
    is_off = (errors > 0) & np.isfinite(errors)
    if not is_off.any():
        return np.zeros(len(errors))
    relative = errors[is_off] / np.maximum(np.abs(reference[is_off]), np.finfo(np.float32).tiny)
    absolute, by_value = (float(np.quantile(part, 0.25)) for part in (errors[is_off], relative))
    finite = np.where(np.isfinite(reference), np.abs(reference), 0.0)
    return np.asarray(_STEP * np.maximum(absolute, by_value * finite))


def _errors(candidate: Array, reference: Array) -> Array:
    """Return how far numbers are off; thresholds that no number reaches are infinite on both sides."""
    with np.errstate(invalid="ignore"):
        return np.where(candidate == reference, 0.0, np.abs(candidate - reference))


def _site(name: str, place: int, numbers: Sequence[_Numbers]) -> Site:
    """Return a site with how its numbers differ."""
    kind, _, of = name.partition(":")
    rows = [(part, part.site == place) for part in numbers]
    own, other = (
        np.concatenate([side[here] for side, here in sides])
        for sides in (
            [(part.candidate, here) for part, here in rows],
            [(part.reference, here) for part, here in rows],
        )
    )
    far = np.concatenate([part.is_far[here] for part, here in rows])
    return Site(
        kind=SiteKind(kind),
        place=of,
        tensors=(),
        nodes=(),
        scale=np.ones(()),
        zero_point=np.zeros((), np.int64),
        axis=None,
        lowest=0,
        highest=0,
        values=OffValues(
            n=len(own),
            n_off=int((own != other).sum()),
            n_far=int(far.sum()),
            low=float(_finite(own).min(initial=np.inf)),
            high=float(_finite(own).max(initial=-np.inf)),
            reference_low=float(_finite(other).min(initial=np.inf)),
            reference_high=float(_finite(other).max(initial=-np.inf)),
            rounding=float(_errors(own, other)[~far].max(initial=0.0)),
        ),
    )


def _finite(values: Array) -> Array:
    return values[np.isfinite(values)]


def _column(number: int, columns: Sequence[str]) -> str:
    return columns[number] if number < len(columns) else f"column {number}"


def _trees_of(model: Any) -> list[Any]:
    return [node for node in model.graph.node if node.op_type.startswith("TreeEnsemble")]


def _attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of a node; those that are tensors under the name of the list that they stand for."""
    values = {}
    for attribute in node.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        is_tensor = attribute.name.endswith("_as_tensor")
        values[attribute.name.removesuffix("_as_tensor")] = (
            numpy_helper.to_array(value) if is_tensor else value
        )
    return values


def _order(attributes: Mapping[str, Any], keys: Sequence[str]) -> npt.NDArray[np.intp]:
    """Return the places of the entries in the order of their keys."""
    columns = [np.asarray(attributes.get(key, ())) for key in reversed(keys)]
    return np.lexsort(columns)


def _same(
    sides: tuple[Mapping[str, Any], Mapping[str, Any]],
    name: str,
    order: npt.NDArray[np.intp],
    others: npt.NDArray[np.intp],
) -> bool:
    own, other = (np.asarray(side.get(name, ())) for side in sides)
    return len(own) == len(other) and np.array_equal(own[order], other[others])


def _values(
    sides: tuple[Mapping[str, Any], Mapping[str, Any]],
    name: str,
    order: npt.NDArray[np.intp],
    others: npt.NDArray[np.intp],
) -> tuple[Array, Array]:
    """Return an attribute's numbers of both sides, float64, in the order of the candidate."""
    own, other = (np.asarray(side[name], np.float64) for side in sides)
    if len(own) != len(other):
        raise OperatorError(
            f"the candidate has {len(own)} entries in {name}, and the reference {len(other)}: it was not made from this reference"
        )
    paired = np.empty_like(own)
    paired[order] = other[others]
    return own, paired


def _write(node: Any, name: str, values: Array) -> None:
    for attribute in node.attribute:
        if attribute.name == name:
            attribute.floats[:] = values.astype(np.float32).tolist()
        elif attribute.name == f"{name}_as_tensor":
            old = numpy_helper.to_array(attribute.t)
            attribute.t.CopyFrom(numpy_helper.from_array(values.astype(old.dtype), attribute.t.name))


def _is_float(node: Any) -> bool:
    kind = node.type.tensor_type.elem_type
    return kind in {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE}

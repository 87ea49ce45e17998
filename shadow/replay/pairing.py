"""The pairing of outputs: which of the candidate's and the reference's are compared, read from each side."""

from collections.abc import Mapping

import msgspec
import numpy as np

from quantdrift.core.config.schema import Reference
from quantdrift.core.errors import QuarantineError
from quantdrift.core.records import Tensor
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.tensors.arrays import Array, Outputs, output_error
from quantdrift.models.tensors.codec import decode
from quantdrift.models.tensors.items import item_columns, itemised
from quantdrift.models.tensors.mapping import dequantised
from quantdrift.shadow.replay.exchange import Answer, PreparedExchange
from quantdrift.shadow.replay.references import VersionReference


class OutputPair(msgspec.Struct, frozen=True, kw_only=True):
    """The compared outputs of both sides.

    Parameters
    ----------
    version_reference, n_items
        Reference and number of items of the exchange.
    names
        The candidate's name of each output, to the reference's.
    candidate, reference
        By name : (items, ...) each. They may be views of the arrays of a whole batch.
    embedding
        As in `ReplayResult`.
    """

    version_reference: VersionReference
    n_items: int
    names: Mapping[str, str]
    candidate: Outputs
    reference: Outputs
    embedding: Array | None

    @property
    def signature(self) -> tuple[object, ...]:
        """What pairs must share to be compared together: types and shapes."""
        arrays = (*self.candidate.values(), *self.reference.values())
        return tuple([(array.dtype.str, array.shape[1:]) for array in arrays])


def pair_of(
    entry: PreparedExchange, outputs: Answer, chosen: dict[tuple[object, ...], Mapping[str, str]]
) -> OutputPair | QuarantineError:
    """Return the compared outputs of an exchange; `chosen` caches the names of the compared outputs."""
    if isinstance(outputs, QuarantineError):
        return outputs
    try:
        key = (id(entry.version_reference), *[tensor.name for tensor in entry.exchange.outputs])
        names = chosen.get(key)
        if names is None:
            compared = entry.version_reference.comparator.outputs
            names = chosen[key] = (
                dict(zip(compared, compared, strict=True)) if compared else dict([_output_names(entry)])
            )
        candidate = entry.candidate or {name: captured_of(entry, name) for name in names}
        reference = {name: replayed_of(entry, outputs, own) for name, own in names.items()}
    except QuarantineError as error:
        return output_error(error.detail)
    return OutputPair(
        version_reference=entry.version_reference,
        n_items=entry.n_items,
        names=names,
        candidate=candidate,
        reference=reference,
        embedding=embedding_of(entry, outputs),
    )


def embedding_of(entry: PreparedExchange, outputs: Outputs) -> Array | None:
    """Return the reference's embedding : (items, ...), or None if it has none with one entry per item."""
    embedding = outputs.get(entry.version_reference.runtime.embedding)
    return embedding if embedding is None or entry.batched else _one_row(embedding)


def captured_of(entry: PreparedExchange, name: str) -> Array:
    """Return an output of the candidate : (items, ...)."""
    named = [tensor for tensor in entry.exchange.outputs if tensor.name == name]
    if not named:
        names = [tensor.name for tensor in entry.exchange.outputs]
        raise output_error(f"the candidate's outputs are {names}: `{name}` is not among them")
    tensor = named[0]
    candidate = _dequantised(tensor, entry.version_reference.reference)
    if not entry.version_reference.model.batched:
        candidate = candidate[np.newaxis]
    n_items = entry.n_items
    column = item_columns(entry.version_reference.model).get(name)
    if not candidate.size and len(candidate) != n_items:
        # An empty array of any shape means no rows for each item.
        candidate = np.empty((n_items, 0), candidate.dtype)
    elif column is not None:
        candidate = itemised(candidate, column, n_items)
    if candidate.shape[:1] != (n_items,):
        raise output_error(
            f"the candidate's `{name}` is {list(candidate.shape)}, the exchange has {n_items} items"
        )
    return candidate if entry.version_reference.model.batched else _one_row(candidate)


def replayed_of(entry: PreparedExchange, outputs: Mapping[str, Array], name: str) -> Array:
    """Return an output of the reference : (items, ...)."""
    if name not in outputs:
        raise output_error(f"the reference's `{name}` does not hold one entry per item")
    return outputs[name] if entry.batched else _one_row(outputs[name])


def _one_row(output: Array) -> Array:
    """Return the output of a single item : (1, ...), without a further leading dimension of 1."""
    return output[0] if output.ndim > 2 and output.shape[1] == 1 else output


def _dequantised(captured: Tensor, reference: Reference) -> Array:
    candidate = decode(captured)
    if not reference.output_scale:
        return candidate
    if candidate.dtype.kind not in "iu":
        raise output_error(
            f"the candidate's `{captured.name}` is {captured.datatype}, but `models.references.output_scale` is only for "
            "quantised integers: remove it, or check `models.output`"
        )
    return dequantised(candidate, reference.output_scale, reference.output_zero_point)


def _output_names(entry: PreparedExchange) -> tuple[str, str]:
    """Return the names of the compared output: the candidate's and the reference's."""
    names = [tensor.name for tensor in entry.exchange.outputs]
    wanted = entry.version_reference.model.output
    runtime = entry.version_reference.runtime
    pairs = possible_outputs(wanted, entry.version_reference.reference.output, runtime)
    common = [pair for pair in pairs if pair[0] in names]
    if not common:
        reference_names = [spec.name for spec in runtime.outputs]
        missing = f"`{wanted}`, as configured, is not" if wanted else "none is"
        raise output_error(
            f"the candidate's outputs are {names}, the reference's {reference_names}: {missing} on both sides. "
            "Set `models.output` and `models.references.output`"
        )
    return common[0]


def possible_outputs(
    wanted: str, wanted_of_reference: str, runtime: ReferenceRuntime
) -> list[tuple[str, str]]:
    """Return the outputs that may be compared, as the candidate's name and the reference's: the first that the candidate has is.

    Parameters
    ----------
    wanted, wanted_of_reference
        `models.output` and `models.references.output`; empty: not configured.
    """
    if wanted_of_reference:
        return [(wanted, wanted_of_reference)]
    # An embedding is compared only if no other output can be.
    names = sorted((spec.name for spec in runtime.outputs), key=lambda name: name == runtime.embedding)
    return [(name, name) for name in names if wanted in ("", name)]

"""The precision check of a PyTorch module: a reference must be free of quantisation and of reduced precision.

Stored tensors are checked one by one. The precision of the computation is recorded during a replay: each operator that ran,
with the element types of its results. A branch that this replay does not take is not checked.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quantdrift.core.errors import OperatorError

_SMALL_INTEGERS: Final = frozenset({"int8", "uint8"})
_QUANTISED: Final = "quantised"
_QUANTISING: Final = re.compile(r"quantize|quantise|^quantized|int8pack|int4pack|_scaled_mm|^torchao")
_SHOWN: Final = 3

Finding = tuple[str, str]


def stored_findings(tensors: Mapping[str, torch.Tensor]) -> Iterator[Finding]:
    """Return the stored tensors that are not full precision, each with its element type."""
    for name, tensor in tensors.items():
        precision = _name(tensor.dtype)
        if tensor.is_quantized:
            yield f"stored tensor `{name}`", _QUANTISED
        elif _reduced(tensor.dtype) or precision in _SMALL_INTEGERS:
            yield f"stored tensor `{name}`", precision


class PrecisionRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records, inside its `with` block, each operator that quantises or returns a reduced element type."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: dict[Finding, None] = {}

    @property
    def findings(self) -> list[Finding]:
        """The findings, each once, in the order of appearance."""
        return list(self._found)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if _QUANTISING.search(name):
            self._found[f"operator `{name}`", _QUANTISED] = None
        for output in result if isinstance(result, tuple | list) else (result,):
            if isinstance(output, torch.Tensor) and _reduced(output.dtype):
                self._found[f"operator `{name}`", _name(output.dtype)] = None
        return result


def precision_of(path: object, findings: Iterable[Finding], allowed: tuple[str, ...]) -> str:
    """Return the precision of a reference: `float32`, followed by the reduced precisions that were found.

    Parameters
    ----------
    path
        The reference, for the message.
    findings
        The places that are not full precision.
    allowed
        Element types accepted by name. Any small integer type among them accepts quantising operators too.

    Raises
    ------
    OperatorError
        A finding is not allowed.
    """
    all_findings = list(findings)
    accepted = {*allowed, *((_QUANTISED,) if _SMALL_INTEGERS & set(allowed) else ())}
    if unfit := [finding for finding in all_findings if finding[1] not in accepted]:
        listed = "; ".join(f"{where} is {precision}" for where, precision in unfit[:_SHOWN])
        more = f" and {len(unfit) - _SHOWN} more" if len(unfit) > _SHOWN else ""
        raise OperatorError(
            f"the reference {path} is not full precision: {listed}{more}. Configure the FP32 model that the candidate "
            "was made from, or name the types in `models.references.allow_reduced_precision`"
        )
    return "+".join(["float32", *sorted({precision for _, precision in all_findings})])


def _reduced(dtype: torch.dtype) -> bool:
    """Return whether the type is a float of less than 32 bits, or a complex number of such floats."""
    return (dtype.is_floating_point and dtype.itemsize < 4) or (dtype.is_complex and dtype.itemsize < 8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""What the runtime of a plug-in is made of; see docs/how-to/plugins.md."""

from quantdrift.core.errors import OperatorError, QuarantineError, QuarantineReason, RetryError
from quantdrift.models.runtimes.protocol import (
    Artefact,
    Provenance,
    ReferenceRuntime,
    check_inputs,
    check_pin,
    digest_of,
)
from quantdrift.models.runtimes.registry import RuntimePlugin, RuntimeRequest
from quantdrift.models.tensors.arrays import Array, TensorSpec

__all__ = [
    "Array",
    "Artefact",
    "OperatorError",
    "Provenance",
    "QuarantineError",
    "QuarantineReason",
    "ReferenceRuntime",
    "RetryError",
    "RuntimePlugin",
    "RuntimeRequest",
    "TensorSpec",
    "check_inputs",
    "check_pin",
    "digest_of",
]

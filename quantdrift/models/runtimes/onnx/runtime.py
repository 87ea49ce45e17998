"""References in ONNX Runtime: strict FP32, on the configured device or not at all."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError

from quantdrift.core.config.schema import Provider
from quantdrift.core.errors import OperatorError, QuarantineError, QuarantineReason
from quantdrift.core.tasks import Build
from quantdrift.models.runtimes.embedding import check_spec, tensor_name, with_output
from quantdrift.models.runtimes.onnx.device import cuda_devices, driver_version
from quantdrift.models.runtimes.onnx.precision import check_external, external_files, findings
from quantdrift.models.runtimes.onnx.session import ERRORS, ON_GPU, Engine, open_session, run_bound
from quantdrift.models.runtimes.protocol import Artefact, Provenance, check_pin, digest_of, failure_text
from quantdrift.models.runtimes.registry import RuntimeRequest
from quantdrift.models.tensors.arrays import Array, TensorSpec

_LOG = logging.getLogger(__name__)
_SHOWN = 3
_REFERENCE = "reference"
_DTYPES: dict[str, type[Any]] = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(int16)": np.int16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
    "tensor(uint16)": np.uint16,
    "tensor(uint32)": np.uint32,
    "tensor(uint64)": np.uint64,
    "tensor(bool)": np.bool_,
    "tensor(string)": np.object_,
}


class OnnxRuntime:
    """A reference in an ONNX file.

    Parameters
    ----------
    path
        The file; external data lies next to it.
    provider
        `cuda` and `tensorrt` refuse to start without the device; `auto` logs the device in use.
    threads
        CPU threads, 0 for one per core.
    allow_reduced_precision
        Element types accepted in the graph by name.
    embedding
        Output or layer whose vectors make learned slices; an inner tensor becomes a further output. The graph can then
        not be fused across it, and other outputs may change in their last bit. Empty: none.
    gpu_bytes, engine_cache
        As of `Engine`.
    what
        What the file is, for messages.

    Raises
    ------
    OperatorError
        The file is missing or not a valid graph, is itself quantised or of reduced precision, has unsupported types, has
        no such embedding; or the device is missing.
    """

    def __init__(
        self,
        path: Path,
        *,
        provider: Provider = Provider.AUTO,
        threads: int = 0,
        allow_reduced_precision: tuple[str, ...] = (),
        embedding: str = "",
        gpu_bytes: int = 0,
        engine_cache: str = "",
        what: str = _REFERENCE,
    ) -> None:
        model = _read(path, what)
        self.artefact = _artefact(path, model, allow_reduced_precision, what)
        self.embedding, graph = _embedding(path, model, embedding)
        engine = Engine(
            provider=provider,
            threads=threads,
            gpu_bytes=gpu_bytes,
            engine_cache=engine_cache,
        )
        self._session = open_session(path, graph, engine, few_shapes=_has_few_shapes(model), what=what)
        provider_used = self._session.get_providers()[0]
        devices = cuda_devices() if provider_used in ON_GPU else ()
        self.provenance = Provenance(
            runtime="onnxruntime",
            version=onnxruntime.__version__,
            provider=provider_used,
            device=devices[0] if devices else "cpu",
            driver=driver_version() if devices else "",
            build=Build.TREES.value if _has_trees(model) else "",
        )
        self.inputs = tuple(_spec(path, node, what) for node in self._session.get_inputs())
        self.outputs = tuple(_spec(path, node, what) for node in self._session.get_outputs())
        for spec in self.outputs:
            if spec.name == self.embedding:
                check_spec(spec)
        # Text cannot lie on a GPU.
        self._bound = bool(devices) and all(spec.dtype != np.dtype(object) for spec in self.inputs)
        _LOG.info("%s %s: %s on %s, TF32 off", what, path.name, provider_used, self.provenance.device)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return every output by name.

        Raises
        ------
        QuarantineError
            Reason `replay`: ONNX Runtime failed on these inputs.
        """
        names = [spec.name for spec in self.outputs]
        try:
            if self._bound:
                results = run_bound(
                    self._session, inputs, {spec.name: spec.dtype for spec in self.outputs}, "cuda"
                )
            else:
                results = self._session.run(names, inputs)
        except ERRORS as error:
            message = failure_text(error)
        else:
            return {name: np.asarray(result) for name, result in zip(names, results, strict=True)}
        # Raised here, and not with the error as its cause: the error keeps device memory bound, which the next try needs.
        raise QuarantineError(QuarantineReason.REPLAY, message)

    def close(self) -> None:
        """Free the session."""
        self._session = None


def open_reference(request: RuntimeRequest) -> OnnxRuntime:
    """Return the reference in an ONNX file; errors as of `OnnxRuntime`, and if it is not the pinned one."""
    reference = request.reference
    path = Path(reference.path)
    if reference.digest:
        check_pin(path, inspect(path, reference.allow_reduced_precision).digest, reference.digest)
    return OnnxRuntime(
        path,
        provider=request.provider,
        threads=request.threads,
        allow_reduced_precision=reference.allow_reduced_precision,
        embedding=request.embedding,
        gpu_bytes=request.gpu_bytes,
        engine_cache=request.engine_cache,
    )


def inspect(path: Path, allowed: tuple[str, ...] = ()) -> Artefact:
    """Return the description of an ONNX file, after checking that it may be a reference.

    Raises
    ------
    OperatorError
        It is missing, not ONNX, lacks external data, or is of reduced precision beyond `allowed`.
    """
    return _artefact(path, _read(path), allowed)


def _read(path: Path, what: str = _REFERENCE) -> onnx.ModelProto:
    """Return the graph without its external data."""
    try:
        return onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise OperatorError(f"the {what} {path} is not an ONNX model") from error
    except OSError as error:
        raise _unreadable(path, error, what) from error


def _has_trees(model: onnx.ModelProto) -> bool:
    """Return whether decision trees compute the outputs of a graph."""
    return any(node.op_type.startswith("TreeEnsemble") for node in model.graph.node)


def _unreadable(path: Path, error: OSError, what: str) -> OperatorError:
    advice = ": check `models.references.path`" if what == _REFERENCE else ""
    return OperatorError(f"the {what} {error.filename or path} cannot be read ({error.strerror}){advice}")


def _artefact(
    path: Path, model: onnx.ModelProto, allowed: tuple[str, ...], what: str = _REFERENCE
) -> Artefact:
    check_external(path, model, what)
    try:
        digest = digest_of(path, external_files(model))
    except OSError as error:
        raise _unreadable(path, error, what) from error
    if unfit := findings(model, allowed):
        listed = "; ".join(f"{finding.where} is {finding.precision}" for finding in unfit[:_SHOWN])
        more = f" and {len(unfit) - _SHOWN} more" if len(unfit) > _SHOWN else ""
        raise OperatorError(
            f"the reference {path} is not full precision: {listed}{more}. Configure the FP32 model that the "
            "candidate was made from, or name the types in `models.references.allow_reduced_precision`"
        )
    reduced = sorted({finding.precision for finding in findings(model)})
    opset = max((entry.version for entry in model.opset_import if entry.domain in {"", "ai.onnx"}), default=0)
    return Artefact(
        path=str(path),
        digest=digest,
        precision="+".join(["float32", *reduced]),
        opset=opset,
        producer=f"{model.producer_name} {model.producer_version}".strip(),
    )


def _has_few_shapes(model: onnx.ModelProto) -> bool:
    """Return whether only the number of items differs from batch to batch."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [node for node in model.graph.input if node.name not in weights]
    return all(
        dim.HasField("dim_value") for node in inputs for dim in node.type.tensor_type.shape.dim[1:]
    ) and all(node.type.tensor_type.HasField("shape") for node in inputs)


def _embedding(path: Path, model: onnx.ModelProto, wanted: str) -> tuple[str, bytes | None]:
    """Return the tensor that `wanted` names, and a graph with it as an output; None if the file's own graph has it."""
    if not wanted:
        return "", None
    try:
        name = tensor_name(model.graph, wanted)
    except OperatorError as error:
        raise OperatorError(f"{path}: {error}") from error
    widened = with_output(model, name)
    return name, None if widened is model else widened.SerializeToString()


def _spec(path: Path, node: Any, what: str) -> TensorSpec:
    if node.type not in _DTYPES:
        raise OperatorError(
            f"the {what} {path} has `{node.name}` of type {node.type}, which is not supported: export it with float32 "
            "inputs and outputs"
        )
    return TensorSpec(
        name=node.name,
        dtype=np.dtype(_DTYPES[node.type]),
        shape=tuple(dim if isinstance(dim, int) and dim >= 0 else None for dim in node.shape),
    )

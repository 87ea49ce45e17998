"""References on ONNX Runtime: strictly FP32, on the device that was asked for, or not at all."""

import contextlib
import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from quantdrift.core.config.schema import Provider
from quantdrift.core.errors import OperatorError, QuarantineError, QuarantineReason
from shadow.device import cuda_devices, driver_version
from shadow.embedding import check_spec, tensor_name, with_output
from shadow.opening import Opening
from shadow.precision import external_files, findings
from shadow.runtime import Array, Artefact, Provenance, TensorSpec, check_pin, digest_of, said_by

_LOG = logging.getLogger(__name__)
_FATAL = 4  # ONNX Runtime writes to the console itself; what matters comes as an exception and is logged here
_CUDA = "CUDAExecutionProvider"
_CPU = "CPUExecutionProvider"
_EXTERNAL = "session.model_external_initializers_file_folder_path"
_SHOWN = 3
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
# They share no base class but Exception.
_ERRORS: tuple[type[Exception], ...] = (
    ort_errors.EPFail,
    ort_errors.EngineError,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoModel,
    ort_errors.NoSuchFile,
    ort_errors.NotFound,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
    RuntimeError,
    ValueError,
    MemoryError,
)


class OnnxRuntime:
    """A reference in an ONNX file.

    Parameters
    ----------
    path
        The file; external data lies beside it.
    provider
        `cuda` refuses to start without a device, `auto` says in the log what it got.
    threads
        CPU threads, 0 for one per core.
    allow_reduced_precision
        Element types accepted in the graph by name.
    embedding
        Output or layer whose vectors make learned slices; an inner tensor becomes a further output. Then the
        graph cannot be fused across it, and other outputs may change in their last bit. Empty: none.

    Raises
    ------
    OperatorError
        The file is missing or no valid graph, is itself quantised or of reduced precision, has types that
        cannot be fed, has no such embedding, or the device is not there.
    """

    def __init__(
        self,
        path: Path,
        *,
        provider: Provider = Provider.AUTO,
        threads: int = 0,
        allow_reduced_precision: tuple[str, ...] = (),
        embedding: str = "",
    ) -> None:
        self.artefact = inspect(path, allow_reduced_precision)
        onnxruntime.set_default_logger_severity(_FATAL)
        self.embedding, graph = _embedding(path, embedding)
        self._session = _session(path, graph, provider, threads)
        taken = self._session.get_providers()[0]
        devices = cuda_devices() if taken == _CUDA else ()
        self.provenance = Provenance(
            runtime="onnxruntime",
            version=onnxruntime.__version__,
            provider=taken,
            device=devices[0] if devices else "cpu",
            driver=driver_version() if devices else "",
        )
        self.inputs = tuple(_spec(path, node) for node in self._session.get_inputs())
        self.outputs = tuple(_spec(path, node) for node in self._session.get_outputs())
        for spec in self.outputs:
            if spec.name == self.embedding:
                check_spec(spec)
        _LOG.info("reference %s: %s on %s, TF32 off", path.name, taken, self.provenance.device)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return every output by name.

        Raises
        ------
        QuarantineError
            Reason `replay`: ONNX Runtime failed on these inputs.
        """
        names = [spec.name for spec in self.outputs]
        try:
            results = self._session.run(names, inputs)
        except _ERRORS as error:
            raise QuarantineError(QuarantineReason.REPLAY, said_by(error)) from error
        return {name: np.asarray(result) for name, result in zip(names, results, strict=True)}

    def close(self) -> None:
        """Let go of the session."""
        self._session = None


def open_reference(opening: Opening) -> OnnxRuntime:
    """Return the reference of an ONNX file; errors as of `OnnxRuntime`, and where it is not the pinned one."""
    reference = opening.reference
    path = Path(reference.path)
    if reference.digest:
        check_pin(path, inspect(path, reference.allow_reduced_precision).digest, reference.digest)
    return OnnxRuntime(
        path,
        provider=opening.provider,
        threads=opening.threads,
        allow_reduced_precision=reference.allow_reduced_precision,
        embedding=opening.embedding,
    )


def inspect(path: Path, allowed: tuple[str, ...] = ()) -> Artefact:
    """Return what an ONNX file is, having checked that it may be a reference.

    Raises
    ------
    OperatorError
        It is missing, not ONNX, lacks external data, or is of reduced precision beyond `allowed`.
    """
    try:
        model = onnx.load(path, load_external_data=False)
        external = external_files(model)
        digest = digest_of(path, external)
    except DecodeError as error:
        raise OperatorError(f"the reference {path} is not an ONNX model") from error
    except OSError as error:
        raise OperatorError(
            f"the reference {error.filename or path} cannot be read ({error.strerror}): "
            "check `models.references.path`"
        ) from error
    if unfit := findings(model, allowed):
        shown = "; ".join(f"{finding.where} is {finding.precision}" for finding in unfit[:_SHOWN])
        more = f" and {len(unfit) - _SHOWN} more" if len(unfit) > _SHOWN else ""
        raise OperatorError(
            f"the reference {path} is not full precision: {shown}{more}. Configure the FP32 model that the "
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


def _embedding(path: Path, wanted: str) -> tuple[str, bytes | None]:
    """Return the tensor that `wanted` names, and the graph that has it as an output; None where the file's own has."""
    if not wanted:
        return "", None
    model = onnx.load(path, load_external_data=False)
    try:
        name = tensor_name(model.graph, wanted)
    except OperatorError as error:
        raise OperatorError(f"{path}: {error}") from error
    widened = with_output(model, name)
    return name, None if widened is model else widened.SerializeToString()


def _session(path: Path, graph: bytes | None, provider: Provider, threads: int) -> Any:
    """Load the file, or `graph` with the external data that lies beside the file."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = _FATAL
    options.use_deterministic_compute = True
    # The worker shares its host: threads that wait must sleep.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if graph is not None:
        options.add_session_config_entry(_EXTERNAL, str(path.resolve().parent))
    wanted: list[Any] = [_CPU]
    if provider is not Provider.CPU and (provider is Provider.CUDA or cuda_devices()):
        _preload()
        # Without a search by timing, which would choose another algorithm on another day.
        wanted = [(_CUDA, {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}), _CPU]
    try:
        session = onnxruntime.InferenceSession(
            str(path) if graph is None else graph, sess_options=options, providers=wanted, enable_fallback=0
        )
    except _ERRORS as error:
        raise OperatorError(f"ONNX Runtime cannot load the reference {path}: {error}") from error
    taken = session.get_providers()[0]
    if provider is Provider.CUDA and taken != _CUDA:
        raise OperatorError(
            f"shadow.provider is `cuda`, but ONNX Runtime took {taken}: no CUDA device or no fitting driver "
            f"(found: {', '.join(cuda_devices()) or 'none'}). onnxruntime-gpu {onnxruntime.__version__} needs a "
            "driver for CUDA 13; set `auto` or `cpu` to do without"
        )
    if provider is Provider.AUTO and taken != _CUDA and wanted != [_CPU]:
        _LOG.warning("there is a CUDA device, but ONNX Runtime could not use it: replaying on the CPU")
    return session


def _preload() -> None:
    """Load CUDA and cuDNN from their wheels; what is missing shows in the provider that is taken."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(OSError, RuntimeError):
        onnxruntime.preload_dlls()
    for line in said.getvalue().splitlines():
        _LOG.debug("%s", line)


def _spec(path: Path, node: Any) -> TensorSpec:
    if node.type not in _DTYPES:
        raise OperatorError(
            f"the reference {path} has `{node.name}` of type {node.type}, which cannot be exchanged with "
            "it: export it with float32 inputs and outputs"
        )
    return TensorSpec(
        name=node.name,
        dtype=np.dtype(_DTYPES[node.type]),
        shape=tuple(dim if isinstance(dim, int) and dim >= 0 else None for dim in node.shape),
    )

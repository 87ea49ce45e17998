"""Sessions of ONNX Runtime: strict FP32, on the configured provider, within the memory limit."""

import contextlib
import io
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from quantdrift.core.config.schema import Provider
from quantdrift.core.errors import OperatorError
from quantdrift.models.runtimes.onnx.device import cuda_devices
from quantdrift.models.runtimes.tf32 import disable_tf32
from quantdrift.models.tensors.arrays import Array

_LOG = logging.getLogger(__name__)
_FATAL = (
    4  # ONNX Runtime writes to the console itself; its errors also come as exceptions, and are logged here
)
TENSORRT: Final = "TensorrtExecutionProvider"
CUDA: Final = "CUDAExecutionProvider"
CPU: Final = "CPUExecutionProvider"
ON_GPU: Final = frozenset({TENSORRT, CUDA})
_ASKED: Final[Mapping[Provider, str]] = MappingProxyType({Provider.CUDA: CUDA, Provider.TENSORRT: TENSORRT})
_EXTERNAL = "session.model_external_initializers_file_folder_path"
_OTHERS_MAY_WRITE: Final = 0o022
# They share no base class but Exception.
ERRORS: tuple[type[Exception], ...] = (
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


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """The provider and the limits of a session.

    Parameters
    ----------
    provider
        The configured provider.
    threads
        CPU threads, 0 for one per core.
    gpu_bytes
        Most memory of its arena on the GPU, and of TensorRT's work space; 0 for no limit.
    engine_cache
        Directory for TensorRT's engines; empty: they are built at each start.
    """

    provider: Provider = Provider.AUTO
    threads: int = 0
    gpu_bytes: int = 0
    engine_cache: str = ""


def open_session(
    path: Path, graph: bytes | None, engine: Engine, *, few_shapes: bool, what: str = "reference"
) -> Any:
    """Load the file, or `graph` with the external data next to the file.

    Parameters
    ----------
    path, graph
        The file, and the graph to load in its place.
    few_shapes
        Whether the inputs have so few shapes that a memory plan may be kept for each.
    what
        What the file is, for messages.

    Raises
    ------
    OperatorError
        It cannot be loaded, or the configured provider is missing.
    """
    onnxruntime.set_default_logger_severity(_FATAL)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = engine.threads
    options.log_severity_level = _FATAL
    options.use_deterministic_compute = True
    # A memory plan is kept for ever, for each combination of lengths.
    options.enable_mem_pattern = few_shapes
    # The worker shares its host: threads that wait must sleep.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if graph is not None:
        options.add_session_config_entry(_EXTERNAL, str(path.resolve().parent))
    wanted: list[Any] = [CPU]
    if engine.provider in _ASKED or (engine.provider is Provider.AUTO and cuda_devices()):
        if engine.provider is Provider.TENSORRT:
            disable_tf32()
        _preload()
        wanted = providers(engine)
    session = _loaded(path, graph, options, wanted, what)
    _check_taken(session.get_providers()[0], wanted, engine)
    return session


def providers(engine: Engine) -> list[Any]:
    """Return the providers with their options, the first choice first: TF32 off in each, and memory bounded.

    Raises
    ------
    OperatorError
        Other users may write to the engine cache: an engine is code.
    """
    # Without the search by timing, which is not reproducible.
    cuda = {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}
    if engine.gpu_bytes:
        cuda |= {"gpu_mem_limit": str(engine.gpu_bytes), "arena_extend_strategy": "kSameAsRequested"}
    if engine.provider is not Provider.TENSORRT:
        return [(CUDA, cuda), CPU]
    # It has no switch for TF32: that is `refuse_tf32`.
    tensorrt = {"trt_fp16_enable": "0", "trt_bf16_enable": "0", "trt_int8_enable": "0"}
    if engine.gpu_bytes:
        tensorrt["trt_max_workspace_size"] = str(engine.gpu_bytes)
    if engine.engine_cache:
        tensorrt |= {"trt_engine_cache_enable": "1", "trt_engine_cache_path": _own(engine.engine_cache)}
    return [(TENSORRT, tensorrt), (CUDA, cuda), CPU]


def run_bound(
    session: Any, inputs: Mapping[str, Array], outputs: Mapping[str, np.dtype[Any]], device: str
) -> list[Array]:
    """Run with inputs and outputs bound to their devices, so that each is copied only once.

    Parameters
    ----------
    inputs
        By name; only numbers. They are copied to the device where the graph needs them, in the session's own memory: an
        `OrtValue` made on a device lies in an arena of the process, which has no limit and is never freed.
    outputs
        Names and types; text stays on the CPU.
    device
        `cuda` or `cpu`: where outputs are computed.

    Returns
    -------
    list
        The outputs in the order of `outputs`.
    """
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_cpu_input(name, np.ascontiguousarray(array))
    for name, dtype in outputs.items():
        binding.bind_output(name, "cpu" if dtype == np.dtype(object) else device)
    session.run_with_iobinding(binding)
    return [np.asarray(array) for array in binding.copy_outputs_to_cpu()]


def _loaded(path: Path, graph: bytes | None, options: Any, wanted: list[Any], what: str) -> Any:
    try:
        return onnxruntime.InferenceSession(
            str(path) if graph is None else graph, sess_options=options, providers=wanted, enable_fallback=0
        )
    except ERRORS as error:
        raise OperatorError(f"ONNX Runtime cannot load the {what} {path}: {error}".strip()) from error


def _check_taken(provider_used: str, wanted: list[Any], engine: Engine) -> None:
    requested = _ASKED.get(engine.provider, provider_used)
    if provider_used != requested:
        raise OperatorError(
            f"shadow.provider is `{engine.provider}`, but ONNX Runtime uses {provider_used}: there is no CUDA device, or no "
            f"fitting driver or library (devices: {', '.join(cuda_devices()) or 'none'}). onnxruntime-gpu "
            f"{onnxruntime.__version__} needs a driver for CUDA 13; to run without, set shadow.provider to `auto` or `cpu`"
        )
    if engine.provider is Provider.AUTO and provider_used != CUDA and wanted != [CPU]:
        _LOG.warning(
            "there is a CUDA device, but ONNX Runtime could not use it: replaying on the CPU. Check driver and libraries, "
            "or set shadow.provider"
        )


def _own(directory: str) -> str:
    try:
        status = Path(directory).stat()
    except OSError as error:
        raise OperatorError(
            f"shadow.engine_cache {directory} cannot be used: {error.strerror}. Create the directory"
        ) from error
    if status.st_uid not in {0, os.geteuid()} or status.st_mode & _OTHERS_MAY_WRITE:
        raise OperatorError(
            f"others may write to shadow.engine_cache {directory}, and an engine is code: chmod 700, as its owner"
        )
    return directory


def _preload() -> None:
    """Load CUDA and cuDNN from their wheels. A missing library shows in the provider that is used."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(OSError, RuntimeError):
        onnxruntime.preload_dlls()
    for line in output.getvalue().splitlines():
        _LOG.debug("%s", line)

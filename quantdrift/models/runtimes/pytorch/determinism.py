"""The process-wide settings of PyTorch: strict FP32, deterministic algorithms if they exist, device, memory limit."""

import importlib
import logging
import os
import warnings
from operator import attrgetter
from typing import Final

import torch

from quantdrift.core.config.schema import Provider
from quantdrift.core.errors import OperatorError
from quantdrift.models.runtimes.onnx.device import cuda_devices

_LOG = logging.getLogger(__name__)
_PRECISION: Final = "fp32_precision"
_IEEE: Final = "ieee"
_SKIPS_HOOKS: Final = "skip_nnmodule_hook_guards"
_MOST_COMPILED: Final = "recompile_limit"
_MANY: Final = 256  # as many as PyTorch compiles of one function at all
# By name: they publish no types.
_BACK_ENDS: Final = (
    "cuda.matmul",
    *("cudnn", "cudnn.conv", "cudnn.rnn"),
    *("mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"),
)
# cuBLAS is deterministic only with a work space of its own; it reads this when it is first used.
_WORKSPACE: Final = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def configure_torch(threads: int) -> None:
    """Set PyTorch's options for every reference in this process.

    TF32 and BF16 inside of float32 products are switched off in all back ends, cuDNN chooses no algorithm by timing, and
    deterministic algorithms are used if they exist.

    Parameters
    ----------
    threads
        CPU threads, 0 for PyTorch's own choice.

    Raises
    ------
    OperatorError
        This version of PyTorch does not keep the setting.
    """
    os.environ.setdefault(*_WORKSPACE)
    if threads:
        torch.set_num_threads(threads)
    # The old switches too, and first: PyTorch still reads them, and complains where they differ from the new ones.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    setattr(torch.backends, _PRECISION, _IEEE)
    for name in _BACK_ENDS:
        back_end = attrgetter(name)(torch.backends)
        setattr(back_end, _PRECISION, _IEEE)
        if getattr(back_end, _PRECISION) != _IEEE:
            raise OperatorError(
                f"PyTorch {torch.__version__} does not switch TF32 off in {name}: install another version"
            )
    torch.backends.cudnn.benchmark = False
    # Where there is no deterministic algorithm it warns and goes on.
    torch.use_deterministic_algorithms(True, warn_only=True)
    attrgetter("deterministic")(torch.utils).fill_uninitialized_memory = False


def configure_compiler() -> None:
    """Let compiled code be reused only for modules with the same hooks, and raise the limit of recompilations.

    By default PyTorch ignores hooks when it looks for compiled code, and would run a second module of a class without its own
    hooks, which read the embedding. And after eight compilations of a function it runs it uncompiled, without an error;
    references of one factory share a function, with all of their buckets.
    """
    compiler = importlib.import_module("torch._dynamo.config")  # only where it is needed: it takes a second
    setattr(compiler, _SKIPS_HOOKS, False)
    setattr(compiler, _MOST_COMPILED, _MANY)
    warnings.filterwarnings(
        "ignore", message="TensorFloat32 tensor cores"
    )  # it advises to take what we refuse


def limit_memory(device: torch.device, gpu_bytes: int) -> None:
    """Limit PyTorch's GPU memory in this process; above it, PyTorch raises an out-of-memory error. 0 for no limit."""
    if device.type == "cuda" and gpu_bytes:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(gpu_bytes / total, 1.0), device)


def device_for(provider: Provider) -> torch.device:
    """Return the device of references; for TensorRT, which PyTorch does not have, CUDA.

    Raises
    ------
    OperatorError
        CUDA is configured, PyTorch has no CUDA device.
    """
    if provider is Provider.CPU:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", 0)  # with its number: not everything of PyTorch takes one without
    devices = ", ".join(cuda_devices())
    if provider is not Provider.AUTO:
        raise OperatorError(
            f"shadow.provider is `{provider}`, but PyTorch {torch.__version__} has no CUDA device (the driver shows: "
            f"{devices or 'none'}): install a PyTorch for CUDA and a fitting driver, or set `auto` or `cpu`"
        )
    if devices:
        _LOG.warning(
            "PyTorch could not use a CUDA device: replaying on the CPU. Install a PyTorch for CUDA and a fitting driver, "
            "or set shadow.provider to `cpu`"
        )
    return torch.device("cpu")

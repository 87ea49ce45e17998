"""Which runtime opens a reference. Only that one is imported: torch alone is 200 MB and two seconds."""

import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from quantdrift.core.clusters import space_of
from quantdrift.core.config.schema import Config, Model, Provider, Reference, Runtime
from quantdrift.core.errors import OperatorError
from quantdrift.shadow.runtimes.protocol import ReferenceRuntime
from quantdrift.shadow.runtimes.tf32 import refuse_tf32

# Each module has an `open_reference(opening)`.
_MODULES: Final[Mapping[Runtime, str]] = MappingProxyType(
    {
        Runtime.ONNX: "quantdrift.shadow.runtimes.onnx.runtime",
        Runtime.TORCH: "quantdrift.shadow.runtimes.pytorch.runtime",
        Runtime.OIP_HTTP: "quantdrift.shadow.runtimes.remote.oip_http",
        Runtime.OIP_GRPC: "quantdrift.shadow.runtimes.remote.oip_grpc",
        Runtime.TRANSFORMERS: "quantdrift.shadow.runtimes.text.transformers",
        Runtime.OPENAI: "quantdrift.shadow.runtimes.text.openai",
    }
)

_PYTORCH: Final = frozenset({Runtime.TORCH, Runtime.TRANSFORMERS})


class RuntimeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime is told of a reference.

    Parameters
    ----------
    model, reference
        As configured.
    provider
        Where it is to run.
    threads
        CPU threads, 0 for one per core.
    embedding
        Output or layer whose vectors make learned slices; empty: none.
    gpu_bytes
        Most GPU memory of this reference, and of all references in PyTorch together; 0 for no limit.
    engine_cache, allow_fallback
        As configured.
    token
        Bearer token for a server, where `reference.token_file` names none.
    headers
        More headers of every request to a server, in small letters.
    is_copy
        Whether it is no reference but a copy of the candidate, which may be quantised.
    """

    model: Model
    reference: Reference
    provider: Provider = Provider.AUTO
    threads: int = 0
    embedding: str = ""
    gpu_bytes: int = 0
    engine_cache: str = ""
    allow_fallback: bool = False
    token: str = ""
    headers: Mapping[str, str] = MappingProxyType({})
    is_copy: bool = False

    def __repr__(self) -> str:
        return f"RuntimeRequest({self.reference.where(self.model.name)})"


def opening_of(config: Config, model: Model, reference: Reference, token: str = "") -> RuntimeRequest:
    """Return what `config` says of a reference of `model`, with the token for its server."""
    space, columns = space_of(config, model)
    return RuntimeRequest(
        model=model,
        reference=reference,
        provider=config.shadow.provider,
        threads=config.shadow.threads,
        embedding="" if columns else space,
        gpu_bytes=gpu_share(config, reference),
        engine_cache=config.shadow.engine_cache,
        allow_fallback=config.shadow.allow_fallback,
        token=token,
    )


def gpu_share(config: Config, reference: Reference) -> int:
    """Return how much of `shadow.gpu_bytes` a reference may take; PyTorch's are given theirs together, as one process.

    Parameters
    ----------
    config
        Names every reference that this worker opens.
    reference
        One of them.
    """
    here = [
        (model.name, one.runtime, one.path)
        for model in config.models
        for one in model.references
        if not one.url
    ]
    here += [
        (model.name, Runtime.TRANSFORMERS, one.copy.path)
        for model in config.models
        for one in model.references
        if one.copy.path
    ]
    together = 1
    if reference.runtime in _PYTORCH:
        together = sum(runtime in _PYTORCH for _, runtime, _ in here)
    return config.shadow.gpu_bytes * together // max(len(here), 1)


def open_reference(opening: RuntimeRequest) -> ReferenceRuntime:
    """Load a reference with its runtime.

    Raises
    ------
    OperatorError
        It cannot be loaded, is no reference, is not the one that is pinned, or PyTorch is not installed.
    RetryError
        The server that holds it is away, or not ready.
    """
    if opening.provider is Provider.TENSORRT and not opening.reference.url:
        refuse_tf32()  # before PyTorch, which may stand beside it, loads the libraries that are told so
    name = opening.reference.runtime
    try:
        module = importlib.import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise OperatorError(
            f"runtime `{name}` needs PyTorch, which the extra `cpu` does not install: pip install torch (on a machine without a "
            "GPU its build for the CPU), or use the extra `shadow` in place of `cpu`"
        ) from error
    runtime: ReferenceRuntime = module.open_reference(opening)
    return runtime


def check_mapping(
    model: Model, reference: Reference, runtime: ReferenceRuntime, compared: Sequence[str]
) -> None:
    """Check that what the configuration says of a reference's tensors fits those it has.

    Parameters
    ----------
    model, reference
        As configured.
    runtime
        The reference.
    compared
        The outputs that the task compares, where there are several.

    Raises
    ------
    OperatorError
        It names an input or output that the reference does not have, dequantises into what is no floating point, or names
        one output where the task compares several.
    """
    where = f"the reference {reference.where(model.name)}"
    inputs = {spec.name: spec for spec in runtime.inputs}
    for entry in reference.inputs:
        if entry.name not in inputs:
            raise OperatorError(
                f"models.references.inputs names `{entry.name}`, but {where} takes {sorted(inputs)}"
            )
        if entry.scale and inputs[entry.name].dtype.kind != "f":
            raise OperatorError(
                f"models.references.inputs gives a scale for `{entry.name}`, but {where} takes {inputs[entry.name]}: "
                "what is dequantised is floating point"
            )
    if compared and (reference.output or reference.output_scale):
        raise OperatorError(
            f"models.references.output and output_scale are for one compared output, but the task `{model.task}` of model "
            f"`{model.name}` compares {list(compared)}"
        )
    outputs = [spec.name for spec in runtime.outputs]
    if reference.output and reference.output not in outputs:
        raise OperatorError(f"models.references.output is `{reference.output}`, but {where} gives {outputs}")

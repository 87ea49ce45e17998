"""The registry of reference runtimes. Only the needed one is imported: torch alone takes 200 MB and two seconds."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from quantdrift.core.clusters import space_of
from quantdrift.core.config.schema import Config, Model, Provider, Reference, Runtime, Shadow
from quantdrift.core.config.wrong_values import options_of
from quantdrift.core.errors import OperatorError
from quantdrift.core.passed_secrets import variables
from quantdrift.core.plugins import NoOptions, plugin_record
from quantdrift.core.tls import Tls
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.tf32 import disable_tf32

# Each module has an `open_reference(request)`.
_MODULES: Final[Mapping[Runtime, str]] = MappingProxyType(
    {
        Runtime.ONNX: "quantdrift.models.runtimes.onnx.runtime",
        Runtime.TORCH: "quantdrift.models.runtimes.pytorch.runtime",
        Runtime.OIP_HTTP: "quantdrift.models.runtimes.remote.oip_http",
        Runtime.OIP_GRPC: "quantdrift.models.runtimes.remote.oip_grpc",
        Runtime.TRANSFORMERS: "quantdrift.models.runtimes.text.transformers",
        Runtime.OPENAI: "quantdrift.models.runtimes.text.openai",
    }
)

_PYTORCH: Final = frozenset({Runtime.TORCH, Runtime.TRANSFORMERS})


class RuntimeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to open a reference: its configuration, and the limits of this worker.

    Parameters
    ----------
    provider
        The configured back end, `shadow.provider`.
    threads
        CPU threads, 0 for one per core.
    embedding
        Output or layer whose vectors make learned slices; empty: none.
    gpu_bytes
        Most GPU memory of this reference, and of all references in PyTorch together; 0 for no limit.
    engine_cache
        As configured.
    token
        Bearer token for a server, if `reference.token_file` is empty.
    tls
        Certificates for the connections to a server.
    is_copy
        Whether it is a replica of the candidate, which may be quantised, and not a reference.
    """

    model: Model
    reference: Reference
    provider: Provider = Provider.AUTO
    threads: int = 0
    embedding: str = ""
    gpu_bytes: int = 0
    engine_cache: str = ""
    token: str = ""
    is_copy: bool = False
    tls: Tls = Tls.of_shadow(Shadow())

    def __repr__(self) -> str:
        return f"RuntimeRequest({self.reference.where(self.model.name)})"


class RuntimePlugin(msgspec.Struct, frozen=True, kw_only=True):
    """A runtime that a package adds, as its entry point in `quantdrift.runtimes` names it; the entry point's name is the runtime's.

    Parameters
    ----------
    open_reference
        Loads a reference, from the request and the options of `[models.references.options]`. What takes long to import is imported
        in it. It raises `OperatorError` for what a person must change, and `RetryError` while a server cannot be reached.
    options
        The type of those options.
    """

    open_reference: Callable[[RuntimeRequest, Any], ReferenceRuntime]
    options: type[msgspec.Struct] = NoOptions


def runtime_request(config: Config, model: Model, reference: Reference, token: str = "") -> RuntimeRequest:
    """Return the request for a reference of `model`, with the token for its server."""
    space, columns = space_of(config, model)
    return RuntimeRequest(
        model=model,
        reference=reference,
        provider=config.shadow.provider,
        threads=config.shadow.threads,
        embedding="" if columns else space,
        gpu_bytes=gpu_share(config, reference),
        engine_cache=config.shadow.engine_cache,
        token=token,
        tls=Tls.of_shadow(config.shadow),
    )


def opened_reference(config: Config, model: Model, reference: Reference) -> ReferenceRuntime:
    """Return a loaded reference, with the token of this process for its server; errors as of `open_reference`."""
    token = variables().get("QUANTDRIFT_REFERENCE_TOKEN", "")
    return open_reference(runtime_request(config, model, reference, token))


def gpu_share(config: Config, reference: Reference) -> int:
    """Return the part of `shadow.gpu_bytes` that a reference may take.

    Every reference of this worker gets an equal part; those in PyTorch share theirs, because PyTorch's limit is for the
    process.
    """
    in_process = [
        (model.name, reference.runtime, reference.path)
        for model in config.models
        for reference in model.references
        if not reference.url
    ]
    in_process += [
        (model.name, Runtime.TRANSFORMERS, reference.copy.path)
        for model in config.models
        for reference in model.references
        if reference.copy.path
    ]
    n_sharing = 1
    if reference.runtime in _PYTORCH:
        n_sharing = sum(runtime in _PYTORCH for _, runtime, _ in in_process)
    return config.shadow.gpu_bytes * n_sharing // max(len(in_process), 1)


def runtime_options(model: Model, reference: Reference) -> msgspec.Struct:
    """Return the options of a reference whose runtime is a plug-in's.

    Raises
    ------
    OperatorError
        They are wrong, or the plug-in cannot be imported or is not named.
    """
    plugin = plugin_record(reference.runtime, RuntimePlugin)
    return options_of(plugin.options, reference.options, f"models[{model.name}].references.options")


def open_reference(request: RuntimeRequest) -> ReferenceRuntime:
    """Load a reference with its runtime.

    Raises
    ------
    OperatorError
        It cannot be loaded, is not full precision, is not the pinned one, or PyTorch is not installed.
    RetryError
        Its server is unreachable, or not ready.
    """
    if request.provider is Provider.TENSORRT and not request.reference.url:
        disable_tf32()  # before PyTorch, which another reference may use, loads the same libraries
    name = request.reference.runtime
    if not name.is_built_in:
        options = runtime_options(request.model, request.reference)
        return plugin_record(name, RuntimePlugin).open_reference(request, options)
    try:
        module = importlib.import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise OperatorError(
            f"runtime `{name}` needs PyTorch, which the extra `cpu` does not install: pip install torch (on a machine without a "
            "GPU its build for the CPU), or use the extra `shadow` in place of `cpu`"
        ) from error
    runtime: ReferenceRuntime = module.open_reference(request)
    return runtime


def check_mapping(
    model: Model, reference: Reference, runtime: ReferenceRuntime, compared: Sequence[str]
) -> None:
    """Check that `models.references` names tensors that the reference has.

    Parameters
    ----------
    compared
        The outputs that the task compares, if there are several.

    Raises
    ------
    OperatorError
        The configuration names an input or output that the reference does not have, dequantises into an input that is not
        floating point, or names one output although the task compares several.
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
                "dequantised values are floating point; remove `scale` and `zero_point`"
            )
    if compared and (reference.output or reference.output_scale):
        raise OperatorError(
            f"models.references.output and output_scale are for one compared output, but the task `{model.task}` of model "
            f"`{model.name}` compares {list(compared)}"
        )
    outputs = [spec.name for spec in runtime.outputs]
    if reference.output and reference.output not in outputs:
        raise OperatorError(f"models.references.output is `{reference.output}`, but {where} gives {outputs}")

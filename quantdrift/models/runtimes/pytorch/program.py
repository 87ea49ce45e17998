"""The three forms of a PyTorch reference, and candidates, each loaded as a module that can be called with named arrays.

An exported program, TorchScript and a factory are code. In an exported program that is more than the pickles it may hold: the
expressions for its shapes are evaluated as Python, and its operators are looked up as attributes of `torch`. Blocking
unpickling would not make it safe, so it must be pinned by its digest.
"""

import hashlib
import importlib
import importlib.util
import inspect
import json
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from quantdrift.core.config.schema import Model, Reference
from quantdrift.core.errors import OperatorError
from quantdrift.models.runtimes.protocol import check_pin, digest_of, digest_of_parts, require_pin
from quantdrift.models.tensors.arrays import TensorSpec
from quantdrift.models.tensors.codec import specs_of

_INDEX: Final = ".safetensors.index.json"
_COMPILED: Final = "/data/aotinductor/"
_OF_TORCHAO: Final = "tensor_names"  # torchao notes there which tensors it has taken apart
_SHOWN: Final = 3

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded reference.

    Parameters
    ----------
    module
        The module, on its device.
    arguments
        Converts tensors, in the order of `inputs`, to the arguments of a call.
    stored
        Parameters, buffers and constants as stored in the artefact.
    digest
        The identity of the artefact.
    producer
        The tool that made the artefact, or the factory.
    """

    module: torch.nn.Module
    arguments: Callable[[list[torch.Tensor]], Arguments]
    inputs: tuple[TensorSpec, ...]
    stored: dict[str, torch.Tensor]
    digest: str
    producer: str


def load_program(model: Model, reference: Reference, device: torch.device) -> Program:
    """Return the reference on `device`.

    Raises
    ------
    OperatorError
        The artefact cannot be read or is not the pinned one; a factory cannot be imported or fails; weights do not fit the
        module; an input is not a tensor, or of an unsupported type.
    """
    path = Path(reference.path)
    try:
        if reference.factory:
            return _made(model, reference, path, device)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            if reference.is_torchscript:
                require_pin(path, digest, reference.digest, "TorchScript, which is code")
                return _scripted(model, path, file, digest, device)
            require_pin(path, digest, reference.digest, "an exported program, which is code")
            return _exported(path, file, digest, device)
    except OSError as error:
        raise OperatorError(
            f"the reference {error.filename or path} cannot be read ({error.strerror}): "
            "check `models.references.path`"
        ) from error


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """Return numpy's element type, None if it has no such type."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except (TypeError, RuntimeError):
        return None


def _exported(path: Path, file: IO[bytes], digest: str, device: torch.device) -> Program:
    try:
        with zipfile.ZipFile(file) as archive:
            compiled = any(_COMPILED in f"/{name}" for name in archive.namelist())
        file.seek(0)
        program = None if compiled else torch.export.load(file)
    except Exception as error:
        raise OperatorError(
            f"PyTorch {torch.__version__} cannot load the exported program {path}: {error!r}"
        ) from error
    if program is None:
        raise OperatorError(
            f"the reference {path} holds compiled code, whose precision cannot be checked: save it with torch.export.save"
        )
    if device.type != "cpu":
        program = move_to_device_pass(program, device)
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    names = program.graph_signature.user_inputs
    shape = program.call_spec.in_spec
    assert shape is not None

    def arguments(tensors: list[torch.Tensor]) -> Arguments:
        args, kwargs = pytree.tree_unflatten(tensors, shape)
        return tuple(args), dict(kwargs)

    return Program(
        module=program.module(),
        arguments=arguments,
        inputs=tuple(
            _input_spec(path, name, values.get(name) if isinstance(name, str) else None) for name in names
        ),
        stored={
            **program.state_dict,
            **{
                name: tensor for name, tensor in program.constants.items() if isinstance(tensor, torch.Tensor)
            },
        },
        digest=digest,
        producer="torch.export",
    )


def _input_spec(path: Path, name: object, value: object) -> TensorSpec:
    if not isinstance(value, torch.Tensor):
        raise OperatorError(
            f"the reference {path} has the input {name!r}, which is not a tensor: export it with only tensors as inputs"
        )
    dtype = numpy_dtype(value.dtype)
    if dtype is None:
        raise OperatorError(
            f"the reference {path} takes `{name}` of type {value.dtype}, which is not supported: export it with float32 "
            "inputs"
        )
    sizes: tuple[Any, ...] = tuple(value.shape)  # some of them symbols
    dims = tuple(size if isinstance(size, int) else None for size in sizes)
    return TensorSpec(name=str(name), dtype=dtype, shape=dims)


def _scripted(model: Model, path: Path, file: IO[bytes], digest: str, device: torch.device) -> Program:
    try:
        with warnings.catch_warnings():
            # TorchScript itself is deprecated, but the configuration names it.
            warnings.simplefilter("ignore", DeprecationWarning)
            module = torch.jit.load(file, map_location=device)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise OperatorError(
            f"PyTorch {torch.__version__} cannot load TorchScript from {path}: {error!r}"
        ) from error
    module.eval()
    names = [argument.name for argument in module.forward.schema.arguments[1:]]
    return Program(
        module=module,
        arguments=_calling(names, model),
        inputs=specs_of(model.inputs),
        stored=dict(module.state_dict()),
        digest=digest,
        producer="TorchScript",
    )


def _made(model: Model, reference: Reference, path: Path, device: torch.device) -> Program:
    weights_digest = digest_of(path, _parts(path))
    what = "models.references.factory"
    source_digest = digest_of(_source_of(reference.factory, what))
    digest = digest_of_parts([(path.name, weights_digest), (reference.factory, source_digest)])
    check_pin(path, digest, reference.digest)
    module = _returned(_function(reference.factory, what), reference.factory, what)
    weights = _weights(path)
    _fill(module, weights, reference.factory, path)
    module.eval().requires_grad_(requires_grad=False)
    return Program(
        module=module.to(device),
        arguments=_calling(list(inspect.signature(module.forward).parameters), model),
        inputs=specs_of(model.inputs),
        # With the stored types: a float16 weight that the module cast to float32 is still of reduced precision.
        stored={**module.state_dict(), **dict(module.named_buffers()), **weights},
        digest=digest,
        producer=reference.factory,
    )


def load_candidate(model: Model, path: Path, factory: str) -> Program:
    """Return a candidate that a factory makes, on the CPU; it may be quantised.

    Parameters
    ----------
    path
        The file of its weights. A factory that takes an argument gets the path and loads them itself; otherwise they are
        safetensors that its module is filled with. Tensors of torchao that torchao has written there are restored.
    factory
        `package.module:function`. Called again each time: two calls share nothing.

    Raises
    ------
    OperatorError
        The factory cannot be imported or fails, or the weights do not fit its module.
    """
    what = "--factory"
    _source_of(factory, what)
    function = _function(factory, what)
    if any(
        parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_POSITIONAL
        and parameter.kind is not parameter.VAR_KEYWORD
        for parameter in inspect.signature(function).parameters.values()
    ):
        module = _returned(lambda: function(path), factory, what)
    else:
        module = _returned(function, factory, what)
        weights, whole = _candidate_weights(path)
        _fill(module, weights, factory, path, assign=whole)
    module.eval().requires_grad_(requires_grad=False)
    return Program(
        module=module,
        arguments=_calling(list(inspect.signature(module.forward).parameters), model),
        inputs=specs_of(model.inputs),
        stored={},
        digest="",
        producer=factory,
    )


def load_quantised_program(path: Path, pin: str) -> Program:
    """Return an exported program that was quantised by PyTorch 2 Export, on the CPU.

    Raises
    ------
    OperatorError
        It cannot be read, or is not the pinned one.
    """
    # Registers the operators of such programs.
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            if pin != f"sha256:{digest}":
                raise OperatorError(
                    f"the candidate {path} is an exported program, which is code: loading it runs that code. If you trust it, give"
                    f" --digest sha256:{digest}"
                )
            return _exported(path, file, digest, torch.device("cpu"))
    except OSError as error:
        raise OperatorError(f"the candidate {path} cannot be read: {error.strerror}") from error


def _candidate_weights(path: Path) -> tuple[dict[str, Any], bool]:
    """Return the weights of a candidate, and whether some are tensors of torchao, which replace those of a module."""
    if _parts(path):
        return dict(_weights(path)), False
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
    except SafetensorError as error:
        raise OperatorError(f"{path} cannot be read as safetensors: {error}") from error
    weights = _weights(path)
    if _OF_TORCHAO not in about:
        return dict(weights), False
    try:
        support = importlib.import_module("torchao.prototype.safetensors.safetensors_support")
        restored, left = support.unflatten_tensor_state_dict(weights, about)
    except ImportError as error:
        raise OperatorError(f"the weights in {path} are tensors of torchao: pip install torchao") from error
    except Exception as error:
        raise OperatorError(
            f"this torchao cannot restore the tensors that another one wrote to {path}: {error!r}"
        ) from error
    return {**restored, **left}, True


def _function(factory: str, what: str) -> Callable[..., Any]:
    """Return a factory."""
    module_name, _, function = factory.partition(":")
    try:
        factory_function: Callable[..., Any] = getattr(importlib.import_module(module_name), function)
    except Exception as error:
        raise OperatorError(f"{what} `{factory}` fails: {error!r}") from error
    return factory_function


def _returned(function: Callable[[], Any], factory: str, what: str) -> torch.nn.Module:
    """Return the module that a factory makes."""
    try:
        module = function()
    except Exception as error:
        raise OperatorError(f"{what} `{factory}` fails: {error!r}") from error
    if not isinstance(module, torch.nn.Module):
        raise OperatorError(f"{what} `{factory}` returned {type(module).__name__}, not a torch.nn.Module")
    return module


def _source_of(factory: str, what: str) -> Path:
    """Return the file of a factory without running it; the parent packages of its module are imported."""
    module = factory.partition(":")[0]
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise OperatorError(f"{what}: `{module}` cannot be imported: {error!r}") from error
    if spec is None or not spec.has_location or spec.origin is None:
        raise OperatorError(
            f"{what}: there is no module `{module}`: put its directory on PYTHONPATH, or install it"
        )
    return Path(spec.origin)


def _parts(path: Path) -> tuple[str, ...]:
    """Return the files that an index names; none if `path` is the weights file itself."""
    if not path.name.endswith(_INDEX):
        return ()
    try:
        named = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OperatorError(f"{path} is not an index of safetensors: it has no `weight_map`") from error
    if any(Path(name).name != name for name in named):
        raise OperatorError(f"{path} names files outside of its directory")
    return tuple(named)


def _weights(path: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for file in [path.parent / name for name in _parts(path)] or [path]:
        try:
            weights |= load_file(file)
        except SafetensorError as error:
            raise OperatorError(f"{file} cannot be read as safetensors: {error}") from error
    return weights


def _fill(
    module: torch.nn.Module,
    weights: dict[str, torch.Tensor],
    factory: str,
    path: Path,
    *,
    assign: bool = False,
) -> None:
    try:
        missing, unexpected = module.load_state_dict(weights, strict=False, assign=assign)
    except RuntimeError as error:
        raise OperatorError(f"the weights in {path} do not fit what `{factory}` returns: {error}") from error
    state = module.state_dict()
    # Shared tensors are stored once.
    filled = {_place(state[name]) for name in weights if name in state}
    missing = [name for name in missing if _place(state[name]) not in filled]
    if missing or unexpected:
        raise OperatorError(
            f"the weights in {path} do not fit what `{factory}` returns: missing {_some(missing)}, unexpected "
            f"{_some(unexpected)}"
        )


def _place(tensor: Any) -> int:
    """Return what tells a tensor from all others; one of torchao has no address of its own."""
    return tensor.data_ptr() if type(tensor) is torch.Tensor else id(tensor)


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(f"`{name}`" for name in names[:_SHOWN]) or "none"
    return listed + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _calling(parameters: Sequence[str], model: Model) -> Callable[[list[torch.Tensor]], Arguments]:
    """Return the converter to a call's arguments: by name if the module has arguments of all names, else in order."""
    names = [tensor.name for tensor in model.inputs]
    if set(names) <= set(parameters):
        return lambda tensors: ((), dict(zip(names, tensors, strict=True)))
    return lambda tensors: (tuple(tensors), {})

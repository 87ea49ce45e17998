"""References in PyTorch: strict FP32, on the configured device or not at all."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import torch

from quantdrift.core.config.schema import Model, Reference
from quantdrift.core.errors import OperatorError, QuarantineError, QuarantineReason
from quantdrift.models.runtimes.embedding import check_spec, unknown_embedding
from quantdrift.models.runtimes.onnx.device import driver_version
from quantdrift.models.runtimes.protocol import Artefact, Provenance, check_inputs, error_text
from quantdrift.models.runtimes.pytorch.determinism import (
    configure_compiler,
    configure_torch,
    device_for,
    limit_memory,
)
from quantdrift.models.runtimes.pytorch.errors import ERRORS, computed
from quantdrift.models.runtimes.pytorch.gpu import Graphs, Staging, Tensors
from quantdrift.models.runtimes.pytorch.precision import (
    Finding,
    PrecisionRecorder,
    precision_of,
    stored_findings,
)
from quantdrift.models.runtimes.pytorch.program import Program, load_program, numpy_dtype
from quantdrift.models.runtimes.registry import RuntimeRequest
from quantdrift.models.tensors.arrays import Array, TensorSpec

_LOG = logging.getLogger(__name__)
# Sizes for the dimensions that vary; a dimension of an output that differs between them varies too.
_SIZES: Final = (2, 3)
_TAP: Final = "quantdrift_layer"


class TorchRuntime:
    """A reference in PyTorch: an exported program, a factory's module with safetensors weights, or TorchScript.

    Raises
    ------
    OperatorError
        It cannot be loaded, is itself quantised or of reduced precision, does not compute a batch of zeros, returns
        unnamed outputs or no tensors, has no such embedding; or the device is missing.
    """

    def __init__(self, request: RuntimeRequest) -> None:
        model, reference = request.model, request.reference
        configure_torch(request.threads)
        self._device = device_for(request.provider)
        limit_memory(self._device, request.gpu_bytes)
        self._path = reference.path
        program = load_program(model, reference, self._device)
        self._program: Program | None = program
        self._batched = model.batched
        self._names = tuple(tensor.name for tensor in model.outputs)
        self._layer: Layer | None = None
        self._buckets: tuple[int, ...] = ()
        self._graphs: Graphs | None = None
        self._staging = Staging(self._device, self._on_device) if self._device.type == "cuda" else None
        self.inputs = program.inputs
        self.embedding = ""
        with PrecisionRecorder() as recorder:
            self.outputs = self._probed()
        findings = [*stored_findings(program.stored), *_reduced_inputs(self.inputs), *recorder.findings]
        self.artefact = Artefact(
            path=reference.path,
            digest=program.digest,
            precision=precision_of(reference.path, findings, reference.allow_reduced_precision),
            opset=0,
            producer=program.producer,
        )
        # The stored tensors may be a second copy in memory, as large as the reference.
        self._program = msgspec.structs.replace(program, stored={})
        if request.embedding:
            self._embed(model, program, request.embedding)
        how = self._prepare(reference)
        on_gpu = self._device.type == "cuda"
        self.provenance = Provenance(
            runtime="torch",
            version=str(torch.__version__),  # a str subclass of PyTorch, which cannot be encoded
            provider=" ".join([self._device.type, *how]),
            device=torch.cuda.get_device_name(self._device) if on_gpu else "cpu",
            driver=driver_version() if on_gpu else "",
        )
        _LOG.info("reference %s: PyTorch on %s, TF32 off", reference.path, self.provenance.device)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return every output by name.

        Raises
        ------
        QuarantineError
            Reason `replay`: an input is not what the reference takes, or PyTorch failed on it.
        """
        check_inputs(inputs, self.inputs)
        return computed(lambda: self._split(inputs))

    @property
    def module(self) -> torch.nn.Module:
        """The module."""
        assert self._program is not None
        return self._program.module

    def close(self) -> None:
        """Free the module, and the device memory that PyTorch caches."""
        self._program = None
        self._layer = None
        self._graphs = None
        self._staging = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _split(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if not self._buckets:
            return self._computed([inputs])[0]
        steps = list(steps_of(len(next(iter(inputs.values()))), self._buckets))
        return joined(steps, self._computed([filled(inputs, step) for step in steps]))

    def _computed(self, steps: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        step_inputs = [[tensor_of(inputs[spec.name]) for spec in self.inputs] for inputs in steps]
        with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
            run = self._staging.run if self._staging is not None else partial(map, self._module)
            return [
                {name: tensor.detach().numpy() for name, tensor in outputs.items()}
                for outputs in run(step_inputs)
            ]

    def _on_device(self, tensors: list[torch.Tensor]) -> Tensors:
        return self._module(tensors) if self._graphs is None else self._graphs.run(tensors)

    def _module(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        program = self._program
        if program is None:
            raise QuarantineError(QuarantineReason.REPLAY, "the reference is closed")
        outputs = outputs_of(program, tensors, self._names)
        if self._layer is not None:
            outputs[self.embedding] = _known(self._layer.taken())
        return outputs

    def _prepare(self, reference: Reference) -> list[str]:
        """Compile the module and capture CUDA graphs as configured; errors show now, not with the first batch."""
        done = []
        graphs = reference.cuda_graphs and self._device.type == "cuda"
        if reference.buckets:
            check_buckets(self._path, self.inputs, graphs=graphs)
        others_vary = any(None in spec.shape[1:] for spec in self.inputs)
        if reference.compile and self._program is not None:
            configure_compiler()
            self._program.module.compile(dynamic=others_vary or not reference.buckets)
            self._compile(reference.buckets or _SIZES)
            done.append("compiled")
        self._buckets = reference.buckets
        if graphs:
            self._capture(reference.buckets)
            done.append("graphs")
        return done

    def _compile(self, sizes: Sequence[int]) -> None:
        try:
            self._outputs_of_sizes(sizes, different_sizes=self._batched)
        except (OperatorError, QuarantineError) as error:
            # It computed these inputs before, so the compiler failed; its message quotes all of its input.
            message = error_text(error.__cause__ or error, n_lines=2)
            raise OperatorError(
                f"the reference {self._path} cannot be compiled ({message}): for a CPU, install a C++ compiler such as g++, or "
                "remove `compile` from [[models.references]]"
            ) from error

    def _capture(self, sizes: Sequence[int]) -> None:
        captured = Graphs(self._device, self._module)
        try:
            with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
                for size in reversed(sizes):  # the largest first: one that does not fit is found at once
                    zeros = [tensor_of(zeros_of(spec, size)).to(self._device) for spec in self.inputs]
                    captured.capture(zeros)
        except ERRORS as error:
            raise OperatorError(
                f"the reference {self._path} cannot be captured as a CUDA graph ({error_text(error)}): remove `cuda_graphs`"
            ) from error
        self._graphs = captured

    def _probed(self) -> tuple[TensorSpec, ...]:
        """Compute zeros of two sizes, and return the specifications of the outputs."""
        first, second = self._outputs_of_sizes(_SIZES)
        return tuple(
            TensorSpec(name=name, dtype=tensor.dtype, shape=_common(tensor.shape, second[name].shape))
            for name, tensor in first.items()
        )

    def _outputs_of_sizes(
        self, sizes: Sequence[int], *, different_sizes: bool = False
    ) -> list[dict[str, Array]]:
        """Compute zeros for each number of items.

        Parameters
        ----------
        sizes
            Length of every dimension that varies.
        different_sizes
            Use `sizes` only for the first dimension; others are 2 or 3 long. Code compiled for equal lengths does not work for
            other lengths.
        """
        try:
            return [
                self._computed(
                    [
                        {
                            spec.name: zeros_of(spec, size, different_sizes=different_sizes)
                            for spec in self.inputs
                        }
                    ]
                )[0]
                for size in sizes
            ]
        except (OperatorError, QuarantineError):
            raise
        except Exception as error:
            raise OperatorError(
                f"the reference {self._path} does not compute zeros of the shapes that it is to take "
                f"({', '.join(map(str, self.inputs))}): {error_text(error, n_lines=2)}"
            ) from error

    def _embed(self, model: Model, program: Program, wanted: str) -> None:
        self.embedding = wanted
        if wanted not in {spec.name for spec in self.outputs}:
            self._layer = layer_of(program.module, wanted, [spec.name for spec in self.outputs])
            self.outputs = self._probed()
        for spec in self.outputs:
            if spec.name == wanted:
                check_spec(spec)


def open_reference(request: RuntimeRequest) -> TorchRuntime:
    """Return the reference; errors as of `TorchRuntime`."""
    return TorchRuntime(request)


def outputs_of(
    program: Program, tensors: list[torch.Tensor], names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return the outputs of a program by name, of types that numpy has.

    Parameters
    ----------
    tensors
        In the order of its inputs.
    names
        Of outputs that the module returns without names.
    """
    args, kwargs = program.arguments(tensors)
    return {name: _known(tensor) for name, tensor in _named(program.module(*args, **kwargs), names)}


def _named(result: Any, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a module returned: by their keys, else by the configured names, in order."""
    if hasattr(result, "_asdict"):
        result = result._asdict()
    if isinstance(result, Mapping):
        tensors = {str(name): tensor for name, tensor in result.items() if isinstance(tensor, torch.Tensor)}
        if tensors:
            yield from tensors.items()
            return
    returned = [result] if isinstance(result, torch.Tensor) else result
    if not isinstance(returned, list | tuple) or not all(
        isinstance(tensor, torch.Tensor) for tensor in returned
    ):
        raise OperatorError(
            f"the reference returns {type(result).__name__}: it must return a tensor, a tuple of tensors, or tensors by name"
        )
    if len(returned) != len(names):
        raise OperatorError(
            f"the reference returns {len(returned)} tensors without names, and [[models.outputs]] names "
            f"{list(names)}: name each of them, in order"
        )
    yield from zip(names, returned, strict=True)


def _reduced_inputs(specs: Sequence[TensorSpec]) -> Iterator[Finding]:
    for spec in specs:
        if spec.dtype == np.dtype(np.float16):
            yield f"input `{spec.name}`", spec.dtype.name


def zeros_of(spec: TensorSpec, size: int, *, different_sizes: bool = False) -> Array:
    """Return zeros for an input, `size` long in each dimension that varies; else as of `_outputs_of_sizes`."""
    other = next(other_size for other_size in _SIZES if other_size != size) if different_sizes else size
    lengths = (size, *[other] * (len(spec.shape) - 1))
    shape = [length if dim is None else dim for length, dim in zip(lengths, spec.shape, strict=False)]
    return np.zeros(shape, dtype=spec.dtype)


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int | None, ...]:
    return tuple(a if a == b else None for a, b in zip(first, second, strict=True))


def tensor_of(array: Array) -> torch.Tensor:
    """Return an array as a tensor; PyTorch shares memory only with writeable arrays."""
    own = np.ascontiguousarray(array)
    return torch.from_numpy(own if own.flags.writeable else own.copy())


def _known(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a type that numpy has: bfloat16 and narrower types, if allowed, become float32."""
    return tensor if numpy_dtype(tensor.dtype) is not None else tensor.to(torch.float32)


class Layer:
    """A layer with the output of its last call."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._taken: torch.Tensor | None = None
        module.register_forward_hook(self._take)

    def taken(self) -> torch.Tensor:
        """Return the output of the last call, and forget it.

        Raises
        ------
        OperatorError
            The layer was not called, or returned no tensor.
        """
        taken, self._taken = self._taken, None
        if taken is None:
            raise OperatorError(
                "the layer that `models.embedding` names returns no tensor in a replay: name another layer"
            )
        return taken

    def _take(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, list | tuple) and output else output
        self._taken = first if isinstance(first, torch.Tensor) else None


def layer_of(module: torch.nn.Module, wanted: str, outputs: Sequence[str]) -> Layer:
    """Return the layer `wanted`: a submodule by its path; in an exported program also a node of its graph.

    Raises
    ------
    OperatorError
        There is no such layer, or the module is TorchScript, which gives access only to its outputs.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise OperatorError(
            f"{unknown_embedding(wanted, list(outputs))}. TorchScript shows no layers: export the model"
        )
    if isinstance(module, torch.fx.GraphModule):
        return Layer(_tapped(module, wanted, outputs))
    layers = {name: layer for name, layer in module.named_modules() if name}
    if wanted not in layers:
        raise OperatorError(unknown_embedding(wanted, [*outputs, *layers]))
    return Layer(layers[wanted])


def _tapped(module: torch.fx.GraphModule, wanted: str, outputs: Sequence[str]) -> torch.nn.Module:
    """Insert a module into the graph that is called with the layer's output, and return it."""
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    # The last node of a submodule gives its output.
    layers = {
        path: node for node in nodes for path, _ in (node.meta.get("nn_module_stack") or {}).values() if path
    }
    layers |= {node.name: node for node in nodes}
    if wanted not in layers:
        raise OperatorError(unknown_embedding(wanted, [*outputs, *layers]))
    tap = torch.nn.Identity()
    module.add_submodule(_TAP, tap)
    with module.graph.inserting_after(layers[wanted]):
        module.graph.call_module(_TAP, (layers[wanted],))
    module.recompile()
    return tap


class PaddedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Items of a batch that are computed together.

    Parameters
    ----------
    begin, n_items
        The first item, and their number.
    size
        Number of computed items: copies of the last item pad the step.
    """

    begin: int
    n_items: int
    size: int


def steps_of(n_items: int, buckets: Sequence[int]) -> Iterator[PaddedPart]:
    """Yield steps that cover every item once, in order.

    Each step uses the smallest bucket that holds all remaining items, unless more than half of it would be padding and a
    smaller bucket can be filled first.

    Parameters
    ----------
    n_items
        At least 1.
    buckets
        Sizes, in rising order.
    """
    begin = 0
    while begin < n_items:
        left = n_items - begin
        size = next((bucket for bucket in buckets if bucket >= left), buckets[-1])
        full = [bucket for bucket in buckets if bucket <= left]
        if full and 2 * left < size:
            size = full[-1]
        step = PaddedPart(begin=begin, n_items=min(left, size), size=size)
        yield step
        begin += step.n_items


def filled(inputs: Mapping[str, Array], step: PaddedPart) -> dict[str, Array]:
    """Return the inputs of a step, padded : (size, ...)."""
    rows = np.minimum(np.arange(step.size), step.n_items - 1) + step.begin
    if step.size == step.n_items:
        return {name: array[step.begin : step.begin + step.size] for name, array in inputs.items()}
    return {name: array[rows] for name, array in inputs.items()}


def joined(steps: Sequence[PaddedPart], outputs_of_steps: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Return the outputs of all steps without padding; an output without a dimension of items is that of the first step.

    Parameters
    ----------
    steps, outputs_of_steps
        The steps, and the outputs of each.
    """
    joined_outputs: dict[str, Array] = {}
    for name, first in outputs_of_steps[0].items():
        pairs = list(zip(steps, (outputs[name] for outputs in outputs_of_steps), strict=True))
        if all(array.shape[:1] == (step.size,) for step, array in pairs):
            joined_outputs[name] = np.concatenate([array[: step.n_items] for step, array in pairs])
        else:
            joined_outputs[name] = first
    return joined_outputs


def check_buckets(path: str, inputs: Sequence[TensorSpec], *, graphs: bool) -> None:
    """Check that a reference takes batches of several sizes.

    Parameters
    ----------
    graphs
        Whether CUDA graphs are captured, for which no other dimension may vary.

    Raises
    ------
    OperatorError
        An input has a first dimension that does not vary, or, with graphs, another one that does.
    """
    for spec in inputs:
        if not spec.shape or spec.shape[0] is not None:
            raise OperatorError(
                f"models.references.buckets: the reference {path} takes {spec}, whose first dimension does not vary"
            )
        if graphs and None in spec.shape[1:]:
            raise OperatorError(
                f"models.references.cuda_graphs: the reference {path} takes {spec}: a graph is captured for each bucket, "
                "and no other dimension may vary"
            )

"""Which options of a reference fit its runtime."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from types import MappingProxyType
from typing import Final

import msgspec

from quantdrift.core.config.address import without_mark
from quantdrift.core.config.copies import CandidateCopy
from quantdrift.core.config.models import Model, Reference, Runtime
from quantdrift.core.tasks import Task

WEIGHTS: Final = (".safetensors", ".safetensors.index.json")
_MAPPING: Final = frozenset({"inputs", "output", "output_scale", "output_zero_point"})
_EVERYWHERE: Final = frozenset(
    {
        "runtime",
        "options",
        "versions",
        "digest",
        "allow_reduced_precision",
        "canaries",
        "canary_tolerance",
        *_MAPPING,
    }
)
# Text has no tensors to map.
_OF_TEXT: Final = (_EVERYWHERE - _MAPPING) | {"copy"}
_OF_SERVER: Final = ("model", "token_file")
_FILE: Final = frozenset({"path"})
_SERVER: Final = frozenset({"url", "model", "model_version", "timeout_s", "token_file", "canary_interval_s"})
_FITTING: Final[Mapping[Runtime, frozenset[str]]] = MappingProxyType(
    {
        Runtime.ONNX: _EVERYWHERE | _FILE,
        Runtime.TORCH: _EVERYWHERE | _FILE | {"factory", "compile", "buckets", "cuda_graphs"},
        Runtime.OIP_HTTP: _EVERYWHERE | _SERVER,
        Runtime.OIP_GRPC: _EVERYWHERE | _SERVER,
        Runtime.TRANSFORMERS: _OF_TEXT | _FILE,
        Runtime.OPENAI: _OF_TEXT | (_SERVER - {"model_version"}) | {"media"},
    }
)
_OF_PLUGIN: Final = _EVERYWHERE | _FILE | _SERVER
_TASKS: Final[Mapping[Runtime, frozenset[Task]]] = MappingProxyType(
    {
        Runtime.TRANSFORMERS: frozenset({Task.GENERATION}),
        Runtime.OPENAI: frozenset({Task.GENERATION, Task.EMBEDDING}),
    }
)
_SCHEMES: Final[Mapping[Runtime, tuple[str, ...]]] = MappingProxyType(
    {
        Runtime.OIP_HTTP: ("https://", "http://"),
        Runtime.OIP_GRPC: ("grpcs://", "grpc://"),
        Runtime.OPENAI: ("https://", "http://"),
    }
)
# Types that numpy does not have, so that PyTorch cannot take them from us.
_NO_ARRAY: Final = frozenset({"BYTES", "BF16"})


def reference_problems(model: Model) -> Iterator[str]:
    """Return what does not go together in the references of `model`, each as a sentence that says what to change."""
    for reference in model.references:
        where = f"models `{model.name}`: the reference {reference.where(model.name) or 'without a path'}"
        yield from (f"{where}: {problem}" for problem in _problems(model, reference))


def _problems(model: Model, reference: Reference) -> Iterator[str]:
    fitting = _FITTING.get(reference.runtime, _OF_PLUGIN)
    for field in msgspec.structs.fields(reference):
        if field.name not in fitting and getattr(reference, field.name) != field.default:
            fits = " or ".join(f"`{runtime}`" for runtime, names in _FITTING.items() if field.name in names)
            yield (
                f"`{field.name}` belongs to runtime {fits}, and the runtime here is `{reference.runtime}`: "
                "remove it, or set `runtime`"
            )
    if reference.media and model.task is not Task.GENERATION:
        yield f"`media` belongs to task `generation`, and this model's task is `{model.task}`: remove it"
    if reference.canaries and reference.runtime is Runtime.OPENAI and model.task is Task.EMBEDDING:
        yield "embeddings of texts at a server cannot have canaries: remove `canaries`"
    yield from _mapping(model, reference)
    yield from _copy(model, reference)
    if not _replays(reference.runtime, model.task):
        fits = " or ".join(f"`{runtime}`" for runtime in Runtime if _replays(runtime, model.task))
        yield (
            f"runtime `{reference.runtime}` and task `{model.task}` do not go together: use runtime {fits}"
        )
    if reference.runtime.is_built_in:  # another says itself what it needs
        yield from _location(model, reference)


def _location(model: Model, reference: Reference) -> Iterator[str]:
    if reference.options:
        yield f"`options` belong to the runtime of a plug-in, and the runtime here is `{reference.runtime}`: remove them"
    if schemes := _SCHEMES.get(reference.runtime):
        if not without_mark(reference.url).startswith(schemes):
            yield f"runtime `{reference.runtime}` needs `url`, {' or '.join(f'{scheme}HOST:PORT' for scheme in schemes)}"
    elif not reference.path:
        yield f"runtime `{reference.runtime}` needs `path`"
    elif reference.runtime is Runtime.TORCH:
        yield from _torch(model, reference)


def _replays(runtime: Runtime, task: Task) -> bool:
    tasks = _TASKS.get(runtime)
    return task is not Task.GENERATION if tasks is None else task in tasks


def _mapping(model: Model, reference: Reference) -> Iterator[str]:
    for what, names in (
        ("gives", [entry.name for entry in reference.inputs]),
        ("takes from", [entry.captured or entry.name for entry in reference.inputs]),
    ):
        yield from (
            f"`inputs` {what} `{name}` {count} times" for name, count in Counter(names).items() if count > 1
        )
    for entry in reference.inputs:
        if entry.zero_point and not entry.scale:
            yield f"inputs `{entry.name}`: `zero_point` needs `scale`"
        if entry.cast and entry.scale:
            yield f"inputs `{entry.name}`: `scale` casts already: remove `cast`"
    if reference.output and not model.output:
        yield "`output` is the reference's: name the candidate's output in `models.output` too"
    if reference.output_zero_point and not reference.output_scale:
        yield "`output_zero_point` needs `output_scale`"


def _copy(model: Model, reference: Reference) -> Iterator[str]:
    copy = reference.copy
    if not copy.is_configured:
        if copy != CandidateCopy():
            yield "[models.references.copy] needs `url` or `path`"
        return
    if model.task is not Task.GENERATION:
        yield f"[models.references.copy] belongs to task `generation`, and this model's task is `{model.task}`"
    if copy.url and copy.path:
        yield "[models.references.copy]: give only one of `url` and `path`"
    if copy.path and any(getattr(copy, name) != getattr(CandidateCopy(), name) for name in _OF_SERVER):
        yield f"[models.references.copy]: {', '.join(f'`{name}`' for name in _OF_SERVER)} belong to `url`, not to `path`"
    if reference.media and copy.path:
        yield "a copy in a folder reads text only: give it a `url`, or remove `media`"
    if not copy.versions:
        yield (
            "[models.references.copy]: `versions` is empty: name the candidate versions that it is a copy of, "
            "because its scores are wrong for any other"
        )
    if copy.where(model.name) == reference.where(model.name):
        yield "[models.references.copy] is the reference itself: it must be a copy of the candidate"


def _torch(model: Model, reference: Reference) -> Iterator[str]:
    name = PurePath(reference.path).name
    if reference.factory:
        if not name.endswith(WEIGHTS):
            yield f"the weights of a `factory` are a file {' or '.join(f'*{end}' for end in WEIGHTS)}"
    elif name.endswith((".onnx", *WEIGHTS)):
        yield (
            "runtime `torch` takes an exported program (*.pt2), safetensors weights with a `factory`, or TorchScript"
        )
        return
    if list(reference.buckets) != sorted(set(reference.buckets)):
        yield "`buckets` must rise"
    if reference.buckets and not model.batched:
        yield "`buckets` are numbers of items in a batch, but with `models.batched = false` there are no batches"
    if reference.cuda_graphs and not reference.buckets:
        yield "`cuda_graphs` needs `buckets`: one graph is captured for each"
    if reference.is_torchscript and reference.compile:
        yield "TorchScript cannot be compiled with torch.compile: remove `compile`, or export the model"
    if reference.factory or reference.is_torchscript:
        yield from _missing_inputs(model)


def _missing_inputs(model: Model) -> Iterator[str]:
    """Return what is missing in the model's configuration for a module without a description of its tensors."""
    if not model.inputs:
        yield "a PyTorch module has no description of its inputs: give name, datatype and shape in [[models.inputs]]"
    for tensor in model.inputs:
        if tensor.datatype in _NO_ARRAY:
            yield f"models.inputs `{tensor.name}`: a PyTorch module cannot take {tensor.datatype}"
        if not tensor.shape:
            yield f"models.inputs `{tensor.name}`: a PyTorch module has no description of its shape: give `shape`"

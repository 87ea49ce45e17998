"""The open references, and the reference of each candidate version."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

import msgspec

from quantdrift.core.config.schema import Model, Reference, Runtime
from quantdrift.models.comparators.protocol import Comparator
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.registry import check_mapping

_REMEMBERED: Final = 1024  # versions, which clients may choose
Load = Callable[[Model, Reference], ReferenceRuntime]


class VersionReference(msgspec.Struct, frozen=True, kw_only=True):
    """The reference and the comparator of a candidate version.

    Parameters
    ----------
    runtime
        The loaded reference.
    comparator
        For the model's task.
    reference
        The configuration of the reference: the names of its tensors, and how captured tensors map to them.
    """

    model: Model
    runtime: ReferenceRuntime
    comparator: Comparator
    reference: Reference = Reference()

    def has_replica(self, version: str) -> bool:
        """Return whether a replica of candidate `version` is configured."""
        return any(fnmatchcase(version, pattern) for pattern in self.reference.copy.versions)


class References:
    """All open references.

    Parameters
    ----------
    models
        Their references are opened at once; `add` opens those of further models.
    load
        Loads a reference; called once for all versions of a model, and for all models with the same ONNX file and embedding.

    Raises
    ------
    OperatorError, RetryError
        As of `add`.
    """

    def __init__(self, models: Iterable[Model], load: Load) -> None:
        self._load = load
        self._loaded: dict[tuple[bytes, str, str], ReferenceRuntime] = {}
        self._by_model: dict[str, list[tuple[tuple[str, ...], VersionReference]]] = {}
        self._remembered = lru_cache(maxsize=_REMEMBERED)(self._find)
        for model in models:
            self.add(model)

    def add(self, model: Model) -> None:
        """Open the references of a model, or none of them.

        Raises
        ------
        OperatorError
            A reference cannot be loaded, is not full precision, or lacks tensors that its configuration names.
        RetryError
            The server of a reference is unreachable; references that were opened stay open for the next try.
        """
        references = []
        for reference in model.references:
            key = _key(model, reference)
            if key not in self._loaded:
                self._loaded[key] = self._load(model, reference)
            runtime = self._loaded[key]
            # One for each reference: it may keep statistics of the reference's outputs.
            comparator = comparator_of(model)
            check_mapping(model, reference, runtime, comparator.outputs)
            version_reference = VersionReference(
                model=model, runtime=runtime, comparator=comparator, reference=reference
            )
            references.append((reference.versions, version_reference))
        self._by_model[model.name] = references
        self._remembered.cache_clear()

    def __contains__(self, model: str) -> bool:
        """Return whether the references of `model` are open."""
        return model in self._by_model

    def find(self, model: str, version: str) -> VersionReference | None:
        """Return the first reference whose patterns match `version`, or None."""
        return self._remembered(model, version)

    def _find(self, model: str, version: str) -> VersionReference | None:
        for patterns, version_reference in self._by_model.get(model, ()):
            if any(fnmatchcase(version, pattern) for pattern in patterns):
                return version_reference
        return None

    def of(self, model: str) -> list[VersionReference]:
        """Return all open references of `model`, in the order of the configuration."""
        return [version_reference for _, version_reference in self._by_model.get(model, ())]

    def close(self) -> None:
        """Close all references."""
        for runtime in self._loaded.values():
            runtime.close()


def is_remote(model: Model) -> bool:
    """Return whether a reference of `model`, or a replica, is at a server: the model then has its own replay thread."""
    return any(reference.url or reference.copy.url for reference in model.references)


def _key(model: Model, reference: Reference) -> tuple[bytes, str, str]:
    """Return the key under which models share a loaded reference. Only ONNX files, which declare their tensors, are shared."""
    model_name = "" if reference.runtime is Runtime.ONNX and not is_remote(model) else model.name
    loaded = msgspec.structs.replace(
        reference, versions=(), inputs=(), output="", output_scale=0.0, output_zero_point=0
    )
    return (msgspec.json.encode(loaded), model.embedding, model_name)

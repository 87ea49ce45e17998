"""Which reference answers for a candidate version."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import msgspec

from quantdrift.core.config.schema import Model, Reference, Runtime
from quantdrift.shadow.comparators.protocol import Comparator
from quantdrift.shadow.comparators.registry import comparator_of
from quantdrift.shadow.runtimes.protocol import ReferenceRuntime
from quantdrift.shadow.runtimes.registry import check_mapping

Load = Callable[[Model, Reference], ReferenceRuntime]


class VersionReference(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate version is measured with.

    Parameters
    ----------
    model
        Its configuration.
    runtime
        The loaded reference.
    comparator
        For the model's kind of output.
    reference
        Its configuration: what its tensors are called, and how they are made of those that are captured.
    """

    model: Model
    runtime: ReferenceRuntime
    comparator: Comparator
    reference: Reference = Reference()

    def is_copied(self, version: str) -> bool:
        """Return whether a copy of candidate `version` is there."""
        return any(fnmatchcase(version, pattern) for pattern in self.reference.copy.versions)


class References:
    """Every reference that is open.

    Parameters
    ----------
    models
        Models with their references and the versions these answer for; `add` takes further ones.
    load
        Loads one; called once for all versions, and all models of one ONNX file and embedding.

    Raises
    ------
    OperatorError, RetryError
        As of `add`.
    """

    def __init__(self, models: Iterable[Model], load: Load) -> None:
        self._load = load
        self._loaded: dict[tuple[Reference, str, str], ReferenceRuntime] = {}
        self._judges: dict[str, list[tuple[tuple[str, ...], VersionReference]]] = {}
        for model in models:
            self.add(model)

    def add(self, model: Model) -> None:
        """Open the references of a model, or none of them.

        Raises
        ------
        OperatorError
            A reference cannot be loaded or is none, or has not the tensors that its configuration names.
        RetryError
            The server that holds one is away; what was opened for the model stays open for the next try.
        """
        judges = []
        for reference in model.references:
            key = _key(model, reference)
            if key not in self._loaded:
                self._loaded[key] = self._load(model, reference)
            runtime = self._loaded[key]
            # One each: it may remember what its reference gave.
            comparator = comparator_of(model)
            check_mapping(model, reference, runtime, comparator.outputs)
            judge = VersionReference(model=model, runtime=runtime, comparator=comparator, reference=reference)
            judges.append((reference.versions, judge))
        self._judges[model.name] = judges

    def __contains__(self, model: str) -> bool:
        """Return whether the references of `model` are open."""
        return model in self._judges

    def find(self, model: str, version: str) -> VersionReference | None:
        """Return what `version` is measured with: the first reference with a pattern that matches, or None."""
        for patterns, judge in self._judges.get(model, ()):
            if any(fnmatchcase(version, pattern) for pattern in patterns):
                return judge
        return None

    def close(self) -> None:
        """Let go of all of them."""
        for runtime in self._loaded.values():
            runtime.close()


def is_remote(model: Model) -> bool:
    """Return whether a reference of `model`, or a copy, is at a server: all are replayed in a thread of their own then."""
    return any(reference.url or reference.copy.url for reference in model.references)


def _key(model: Model, reference: Reference) -> tuple[Reference, str, str]:
    """Return what must be equal for one loaded reference to do for both; an ONNX file alone tells its tensors."""
    whose = "" if reference.runtime is Runtime.ONNX and not is_remote(model) else model.name
    loaded = msgspec.structs.replace(
        reference, versions=(), inputs=(), output="", output_scale=0.0, output_zero_point=0
    )
    return (loaded, model.embedding, whose)

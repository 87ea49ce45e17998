"""Which reference answers for a candidate version."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import msgspec

from quantdrift.core.config.schema import Model, Reference
from shadow.classification import ClassificationComparator
from shadow.comparator import Comparator
from shadow.runtime import ReferenceRuntime

Load = Callable[[Model, Reference], ReferenceRuntime]


class Judge(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate version is measured with.

    Parameters
    ----------
    model
        Its configuration.
    runtime
        The loaded reference.
    comparator
        For the model's kind of output.
    """

    model: Model
    runtime: ReferenceRuntime
    comparator: Comparator


class References:
    """Every configured reference, loaded once.

    Parameters
    ----------
    models
        Models with their references and the versions these answer for.
    load
        Loads one; called once per file, set of allowed types and embedding.

    Raises
    ------
    OperatorError
        A reference cannot be loaded or is none.
    """

    def __init__(self, models: Iterable[Model], load: Load) -> None:
        loaded: dict[tuple[str, tuple[str, ...], str], ReferenceRuntime] = {}
        self._judges: dict[str, list[tuple[tuple[str, ...], Judge]]] = {}
        for model in models:
            comparator = ClassificationComparator(model.output_kind, model.top_k)
            judges = self._judges.setdefault(model.name, [])
            for reference in model.references:
                key = (reference.path, reference.allow_reduced_precision, model.embedding)
                if key not in loaded:
                    loaded[key] = load(model, reference)
                judge = Judge(model=model, runtime=loaded[key], comparator=comparator)
                judges.append((reference.versions, judge))

    def find(self, model: str, version: str) -> Judge | None:
        """Return what `version` is measured with: the first reference with a pattern that matches, or None."""
        for patterns, judge in self._judges.get(model, ()):
            if any(fnmatchcase(version, pattern) for pattern in patterns):
                return judge
        return None

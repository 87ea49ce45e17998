"""The cache of open references, bounded by memory: the least recently used one is closed, and reopened when needed.

Only the replay thread uses it, with one reference at a time, so that no reference is closed while in use.
"""

import logging
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Final

from quantdrift.core.errors import OperatorError
from quantdrift.models.runtimes import malloc
from quantdrift.models.runtimes.protocol import Artefact, BrokenRuntimeError, Provenance, ReferenceRuntime
from quantdrift.models.tensors.arrays import Array, TensorSpec

_LOG = logging.getLogger(__name__)
_MEASURED: Final = 3  # runs of a new largest input: a library may allocate again for the second one
_STATM = Path("/proc/self/statm")


class RuntimeCache:
    """The open references.

    Parameters
    ----------
    memory_bytes
        Most memory of all of them (`shadow.reference_memory_bytes`). The one in use stays open regardless. 0: no limit.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._open: dict[CachedRuntime, ReferenceRuntime] = {}  # longest unused first

    @property
    def n_bytes(self) -> int:
        """Memory of the open references."""
        return sum(cached.n_bytes for cached in self._open)

    @property
    def n_open(self) -> int:
        """Number of open references."""
        return len(self._open)

    def use(self, wanted: "CachedRuntime") -> ReferenceRuntime:
        """Return the reference, opened if necessary; others are closed if the memory does not suffice.

        Raises
        ------
        BrokenRuntimeError
            It can no longer be opened, or its artefact has changed.
        """
        runtime = self._open.pop(wanted, None)
        if runtime is None:
            self._make_room(wanted.n_bytes)
            runtime = wanted.reopen()
        self._open[wanted] = runtime
        return runtime

    def put(self, owner: "CachedRuntime", runtime: ReferenceRuntime) -> None:
        """Add a reference that was opened for the first time, or update one that takes more memory than known."""
        self._open.pop(owner, None)
        self._make_room(owner.n_bytes)
        self._open[owner] = runtime

    def close(self) -> None:
        """Close all of them."""
        while self._open:
            self._open.popitem()[1].close()

    def _make_room(self, n_bytes: int) -> None:
        while self._memory_bytes and self.n_bytes + n_bytes > self._memory_bytes:
            oldest = next((cached for cached in self._open if cached.n_bytes), None)
            if oldest is None:
                return
            self._open.pop(oldest).close()
            malloc.trim()
            _LOG.info(
                "closed reference %s until its next use: all references together would exceed"
                " shadow.reference_memory_bytes",
                oldest.artefact.path,
            )


class CachedRuntime:
    """A reference that may be closed while it is not in use. Its metadata stays available.

    Parameters
    ----------
    load
        Opens the reference. Called at once, so that errors show at the start, and after each time that it was closed.
    least_bytes
        Lower bound of its memory: the size of its files. If opening it added more to this process, that counts, and what its
        largest inputs added, because a library keeps its work memory for the next ones. 0: it is at a server, takes no memory
        here and stays open.
    """

    def __init__(self, cache: RuntimeCache, load: Callable[[], ReferenceRuntime], least_bytes: int) -> None:
        self._cache = cache
        self._load = load
        before = _resident_bytes()
        runtime = load()
        self.n_bytes = max(_resident_bytes() - before, least_bytes) if least_bytes else 0
        self._opened_bytes = self.n_bytes
        self._largest = 0
        self._to_measure = 0
        self.artefact: Artefact = runtime.artefact
        self.provenance: Provenance = runtime.provenance
        self.inputs: tuple[TensorSpec, ...] = runtime.inputs
        self.outputs: tuple[TensorSpec, ...] = runtime.outputs
        self.embedding: str = runtime.embedding
        cache.put(self, runtime)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return every output by name; opens the reference again if it was closed.

        Raises
        ------
        QuarantineError, RetryError
            As of the reference.
        BrokenRuntimeError
            As of the reference, or it can no longer be opened.
        """
        runtime = self._cache.use(self)
        if not self._is_measured(sum(array.nbytes for array in inputs.values())):
            return runtime.run(inputs)
        before = _resident_bytes()
        try:
            return runtime.run(inputs)
        finally:
            self.n_bytes += max(_resident_bytes() - before, 0)
            self._cache.put(self, runtime)

    def close(self) -> None:
        """Close all references of the cache."""
        self._cache.close()

    def reopen(self) -> ReferenceRuntime:
        """Open it again.

        Raises
        ------
        BrokenRuntimeError
            It can no longer be opened, or its artefact has changed.
        """
        self.n_bytes, self._largest = self._opened_bytes, 0
        try:
            runtime = self._load()
        except OperatorError as error:
            raise BrokenRuntimeError(
                f"the reference {self.artefact.path} could be opened at the start, but not again: {error}"
            ) from error
        copy, first_copy = runtime.provenance.copy, self.provenance.copy
        if (runtime.artefact.digest, copy) != (self.artefact.digest, first_copy):
            runtime.close()
            raise BrokenRuntimeError(
                f"the reference {self.artefact.path} has changed since the start (it is {runtime.artefact.digest} {copy}, was "
                f"{self.artefact.digest} {first_copy}): the worker must restart to use it"
            )
        return runtime

    def _is_measured(self, n_bytes: int) -> bool:
        """Return whether to measure the memory of this run: inputs of this size may take more than all before.

        Not every run is measured, because other threads allocate memory too.
        """
        if n_bytes > self._largest:
            self._largest, self._to_measure = n_bytes, _MEASURED
        if not self.n_bytes or not self._to_measure or 2 * n_bytes < self._largest:
            return False
        self._to_measure -= 1
        return True


def files_bytes(path: str) -> int:
    """Return the size of a reference's file, with files next to it whose names begin with its name (external data).

    For a folder, the size of the files in it; 0 if there is no such file.
    """
    file = Path(path)
    if path and file.is_dir():
        return sum(path.stat().st_size for path in file.rglob("*") if path.is_file())
    if not path or not file.is_file():
        return 0
    return sum(path.stat().st_size for path in file.parent.glob(f"{file.name}*") if path.is_file())


def _resident_bytes() -> int:
    """Return the memory of this process; its peak if the system does not report the current value."""
    try:
        return int(_STATM.read_text("ascii").split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

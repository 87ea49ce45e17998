"""References that share a bound on memory: the one that was used longest ago is closed, and opened again when needed.

Everything happens in the thread that replays, which computes with one reference at a time: none is ever closed in use.
"""

import logging
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Final

from quantdrift.core.errors import OperatorError
from quantdrift.shadow.runtimes import malloc
from quantdrift.shadow.runtimes.protocol import Artefact, BrokenRuntimeError, Provenance, ReferenceRuntime
from quantdrift.shadow.tensors.arrays import Array, TensorSpec

_LOG = logging.getLogger(__name__)
_MEASURED: Final = 3  # runs of a new largest input: a library may plan its memory anew for the second one
_STATM = Path("/proc/self/statm")


class RuntimeCache:
    """Holds references that are open.

    Parameters
    ----------
    memory_bytes
        Most that all of them may take. The one in use stays whatever it takes. 0: all stay open.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._open: dict[CachedRuntime, ReferenceRuntime] = {}  # longest unused first

    @property
    def n_bytes(self) -> int:
        """What those that are open take."""
        return sum(one.n_bytes for one in self._open)

    @property
    def n_open(self) -> int:
        """How many are open."""
        return len(self._open)

    def use(self, wanted: "CachedRuntime") -> ReferenceRuntime:
        """Return a reference, open; others are closed where there would be no room.

        Raises
        ------
        BrokenRuntimeError
            It could be opened before, and cannot any more, or is another one by now.
        """
        runtime = self._open.pop(wanted, None)
        if runtime is None:
            self._make_room(wanted.n_bytes)
            runtime = wanted.reopen()
        self._open[wanted] = runtime
        return runtime

    def put(self, one: "CachedRuntime", runtime: ReferenceRuntime) -> None:
        """Take a reference that was opened for the first time, or one that takes more than was known."""
        self._open.pop(one, None)
        self._make_room(one.n_bytes)
        self._open[one] = runtime

    def close(self) -> None:
        """Close all of them."""
        while self._open:
            self._open.popitem()[1].close()

    def _make_room(self, n_bytes: int) -> None:
        while self._memory_bytes and self.n_bytes + n_bytes > self._memory_bytes:
            oldest = next((one for one in self._open if one.n_bytes), None)
            if oldest is None:
                return
            self._open.pop(oldest).close()
            malloc.trim()
            _LOG.info("reference %s is closed for now: shadow.reference_memory_bytes", oldest.artefact.path)


class CachedRuntime:
    """A reference that may be closed while it is not used. What it says of itself stays known.

    Parameters
    ----------
    shelf
        Where it is kept.
    load
        Opens it; called at once, so that what is wrong with it is known at the start, and after each time that it was
        closed.
    least_bytes
        What it takes at least: the size of its files. Counted is what opening it added to this process, where that is
        more, and what its largest inputs added to that: a library keeps what it computed in for the next ones. 0: it is at a
        server, takes nothing here and stays open.
    """

    def __init__(self, shelf: RuntimeCache, load: Callable[[], ReferenceRuntime], least_bytes: int) -> None:
        self._shelf = shelf
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
        shelf.put(self, runtime)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return every output by name, having opened the reference again where it was closed.

        Raises
        ------
        QuarantineError, RetryError
            As of the reference.
        BrokenRuntimeError
            As of the reference, or it cannot be opened any more.
        """
        runtime = self._shelf.use(self)
        if not self._is_measured(sum(array.nbytes for array in inputs.values())):
            return runtime.run(inputs)
        before = _resident_bytes()
        try:
            return runtime.run(inputs)
        finally:
            self.n_bytes += max(_resident_bytes() - before, 0)
            self._shelf.put(self, runtime)

    def close(self) -> None:
        """Close all references of the shelf."""
        self._shelf.close()

    def reopen(self) -> ReferenceRuntime:
        """Open it again.

        Raises
        ------
        BrokenRuntimeError
            It cannot be opened any more, or is another one by now.
        """
        self.n_bytes, self._largest = self._opened_bytes, 0
        try:
            runtime = self._load()
        except OperatorError as error:
            raise BrokenRuntimeError(
                f"the reference {self.artefact.path} could be opened before: {error}"
            ) from error
        copy, first_copy = runtime.provenance.copy, self.provenance.copy
        if (runtime.artefact.digest, copy) != (self.artefact.digest, first_copy):
            runtime.close()
            raise BrokenRuntimeError(
                f"the reference {self.artefact.path} is another one than at the start ({runtime.artefact.digest} {copy}, not "
                f"{self.artefact.digest} {first_copy}): the worker must start anew with it"
            )
        return runtime

    def _is_measured(self, n_bytes: int) -> bool:
        """Return whether inputs of this size may take more than all before. Other threads take memory too: not each is measured."""
        if n_bytes > self._largest:
            self._largest, self._to_measure = n_bytes, _MEASURED
        if not self.n_bytes or not self._to_measure or 2 * n_bytes < self._largest:
            return False
        self._to_measure -= 1
        return True


def files_bytes(path: str) -> int:
    """Return the size of a reference's file with what begins with its name beside it (external data); 0 where none is.

    Of a folder that of the files in it.
    """
    file = Path(path)
    if path and file.is_dir():
        return sum(one.stat().st_size for one in file.rglob("*") if one.is_file())
    if not path or not file.is_file():
        return 0
    return sum(one.stat().st_size for one in file.parent.glob(f"{file.name}*") if one.is_file())


def _resident_bytes() -> int:
    """Return the memory of this process; where the system does not tell, the most that it ever was."""
    try:
        return int(_STATM.read_text("ascii").split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

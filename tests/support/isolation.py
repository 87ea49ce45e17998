"""What a test marked `unit` must not do: open a socket, start a process, or import torch.

An event loop is allowed, and so is the pair of connected sockets with which it wakes itself up: they have no address.
What C code opens by itself (gRPC, uvloop) is not seen. `lscpu` is allowed: scikit-learn asks it once for the cores.
"""

import ast
import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final
from unittest import mock

ROOT: Final = Path(__file__).resolve().parents[2]
OURS: Final = ("benchmarks", "examples", "quantdrift", "tests")
RUNTIME: Final = "torch"
_EVENTS: Final = frozenset({
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "socket.bind",
    "socket.connect",
    "socket.getaddrinfo",
    "socket.sendmsg",
    "socket.sendto",
    "subprocess.Popen",
})  # fmt: skip

_watching: list[list[str]] = []  # an audit hook cannot be removed: it looks here


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _watching and event in _EVENTS:
        program = f" {arguments[0]}" if event == "subprocess.Popen" else ""
        if program != " lscpu":
            _watching[-1].append(f"{event}{program}")


sys.addaudithook(_audit)


class _Refusal(importlib.abc.MetaPathFinder):
    """Refuses to find torch, and notes that somebody looked for it."""

    def __init__(self, found: list[str]) -> None:
        self._found = found

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname == RUNTIME:
            self._found.append(f"import {fullname}")
            raise ImportError(f"a unit test must not import {fullname}", name=fullname)


@contextlib.contextmanager
def isolated() -> Iterator[list[str]]:
    """Note inside the block what a unit test must not do; torch cannot be imported there at all.

    Whether another test imported torch before makes no difference.

    Yields
    ------
    list of str
        What was done, in order, e.g. `socket.connect`.
    """
    found: list[str] = []
    start = BaseProcess.start

    def noted(process: BaseProcess) -> None:  # multiprocessing has no audit event of its own
        found.append("multiprocessing")
        start(process)

    kept = sys.modules.pop(RUNTIME, None)
    refusal = _Refusal(found)
    sys.meta_path.insert(0, refusal)
    _watching.append(found)
    try:
        with mock.patch.object(BaseProcess, "start", noted):
            yield found
    finally:
        _watching.remove(found)
        sys.meta_path.remove(refusal)
        if kept is not None:
            sys.modules[RUNTIME] = kept


def reaches(module: Path, name: str = RUNTIME) -> tuple[str, ...]:
    """Return by which modules importing this one imports `name`, from the first to the last, or nothing.

    Sources are read, nothing is imported: what is inside a function or under TYPE_CHECKING does not count.
    """
    came: dict[Path, Path | None] = {module: None}
    waiting = [module]
    while waiting:
        at = waiting.pop()
        for imported in _imported(at):
            if imported.partition(".")[0] == name:
                way = [imported]
                step: Path | None = at
                while step is not None:
                    way.append(step.relative_to(ROOT).as_posix() if step.is_relative_to(ROOT) else step.name)
                    step = came[step]
                return tuple(reversed(way))
            for source in _sources(imported):
                if source not in came:
                    came[source] = at
                    waiting.append(source)
    return ()


@cache
def _imported(source: Path) -> tuple[str, ...]:
    """Return the dotted names that a source imports when it is itself imported; `from a import b` gives a and a.b."""
    found: list[str] = []
    waiting: list[ast.AST] = list(ast.parse(source.read_bytes()).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)
    return tuple(found)


@cache
def _sources(name: str) -> tuple[Path, ...]:
    """Return the sources of this project that importing a dotted name runs: its packages' and its own."""
    parts = name.split(".")
    if parts[0] not in OURS:
        return ()
    places = [ROOT.joinpath(*parts[:n]) for n in range(1, len(parts) + 1)]
    named = [file for place in places for file in (place / "__init__.py", place.with_suffix(".py"))]
    return tuple(file for file in named if file.is_file())

"""The cases of a benchmark, each one computed from its number, in several processes or in this one."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

import click

_Number = TypeVar("_Number")
_Result = TypeVar("_Result")
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_own = Path()


class Cases:
    """Computes cases in processes, each with a folder of its own for the files that a case overwrites.

    Parameters
    ----------
    folder
        Files are written there, and in folders inside it.
    jobs
        Processes; with 1 the cases run in this process.
    """

    def __init__(self, folder: Path, jobs: int = 1) -> None:
        self.folder, self._jobs = folder, jobs
        self._pool: ProcessPoolExecutor | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        if self._jobs > 1:
            before = {name: os.environ.get(name) for name in _ONE_THREAD}
            os.environ |= dict.fromkeys(_ONE_THREAD, "1")  # for libraries that the processes load
            self._open.callback(_restore, before)
            self._pool = self._open.enter_context(
                ProcessPoolExecutor(
                    self._jobs,
                    mp_context=multiprocessing.get_context("spawn"),
                    initializer=_begin,
                    initargs=(self.folder,),
                )
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def each(
        self, label: str, run: Callable[[Path, _Number], _Result], numbers: Sequence[_Number]
    ) -> list[_Result]:
        """Return the result of each case, in their order, with a bar on standard error.

        Parameters
        ----------
        label
            What the bar says.
        run
            A function of a module, called with a folder that no other case uses at that time and the case.
        numbers
            The cases, as `run` takes them.
        """
        with click.progressbar(
            self._results(run, numbers), label=label, file=sys.stderr, length=len(numbers)
        ) as bar:
            return list(bar)

    def _results(
        self, run: Callable[[Path, _Number], _Result], numbers: Sequence[_Number]
    ) -> Iterator[_Result]:
        if self._pool is None:
            for number in numbers:
                yield run(self.folder, number)
        else:
            yield from self._pool.map(_run, [run] * len(numbers), numbers)


def _begin(folder: Path) -> None:
    global _own  # noqa: PLW0603 - one process, one folder
    _own = folder / f"process-{os.getpid()}"
    _own.mkdir()


def _run(run: Callable[[Path, _Number], _Result], number: _Number) -> _Result:
    return run(_own, number)


def _restore(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value

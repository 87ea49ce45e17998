"""Moves the times that NATS says by the shift of this process: NATS asks the kernel itself, so that `clock.c` does not reach it.

Python imports this module at its start where its folder is on PYTHONPATH. The client library of NATS is changed when it is imported.
"""

import dataclasses
import importlib.abc
import importlib.machinery
import mmap
import os
import re
import struct
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any, Final

_TIME: Final = re.compile(rb'"(20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?Z"')
_API: Final = "$JS.API."


class _Loader(importlib.abc.Loader):
    """Loads a module as always, and changes it."""

    def __init__(self, loader: Any, shift: "mmap.mmap") -> None:
        self._loader = loader
        self._shift = shift

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _CHANGES[module.__name__](module, self._shift)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, shift: "mmap.mmap") -> None:
        self._shift = shift

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del target
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in _CHANGES else None
        if spec is not None:
            spec.loader = _Loader(spec.loader, self._shift)
        return spec


def _by(shift: "mmap.mmap") -> timedelta:
    return timedelta(microseconds=struct.unpack("=q", shift[:8])[0] // 1000)


def _messages(module: Any, shift: "mmap.mmap") -> None:
    """Move the time at which a message was stored."""
    read = module.Msg.Metadata._from_reply.__func__  # noqa: SLF001 - a shim of the library

    def shifted(kind: Any, reply: str) -> Any:
        metadata = read(kind, reply)
        return dataclasses.replace(metadata, timestamp=metadata.timestamp + _by(shift))

    module.Msg.Metadata._from_reply = classmethod(shifted)  # noqa: SLF001


def _answers(module: Any, shift: "mmap.mmap") -> None:
    """Move all times in what the API of JetStream answers."""
    ask = module.Client.request

    async def shifted(self: Any, subject: str, *arguments: Any, **options: Any) -> Any:
        answer = await ask(self, subject, *arguments, **options)
        if subject.startswith(_API):
            by = _by(shift)
            answer.data = _TIME.sub(lambda found: _moved(found, by), answer.data)
        return answer

    module.Client.request = shifted


def _moved(found: "re.Match[bytes]", by: timedelta) -> bytes:
    at = datetime.fromisoformat(found[1].decode()).replace(tzinfo=UTC) + by
    micros = int(((found[2] or b".0")[1:7]).ljust(6, b"0"))
    return f'"{at + timedelta(microseconds=micros):%Y-%m-%dT%H:%M:%S.%fZ}"'.encode()


_CHANGES: Final = {"nats.aio.msg": _messages, "nats.aio.client": _answers}

if _path := os.environ.get("SHIFTED_CLOCK", ""):
    with open(_path, "rb") as _file:  # noqa: PTH123 - pathlib would cost every process its import
        sys.meta_path.insert(0, _Finder(mmap.mmap(_file.fileno(), 8, prot=mmap.PROT_READ)))

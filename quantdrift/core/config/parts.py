"""The files of a configuration: the main file, and one part per model in the directory `models.d/` next to it.

A part contains only `[[models]]` and `[[slices]]`, so that teams can mount, add and remove theirs separately. Options of
the whole installation are in the main file.
"""

import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from quantdrift.core.errors import OperatorError
from quantdrift.core.text import plain

DIRECTORY = "models.d"
_MOST_SHOWN = 200  # characters of a line with a mistake
_LISTS = ("models", "slices")
_FILES = ("path", "token_file", "canaries")

Signature = tuple[tuple[str, int, int, int], ...]


class Parts(NamedTuple):
    """The merged document of all files.

    Parameters
    ----------
    document
        The main file's document with the lists of the parts appended.
    origins
        The part that an entry of a list comes from, by the list's name and the entry's number.
    """

    document: dict[str, Any]
    origins: dict[tuple[str | int, ...], Path]


def read_parts(path: Path) -> Parts:
    """Return the document of the main file with the lists of the parts appended, in the order of their names.

    Files of references and rechecks in a part are relative to that part's directory.

    Raises
    ------
    OperatorError
        A file cannot be read, or a part contains anything else.
    """
    document = _read(path)
    origins: dict[tuple[str | int, ...], Path] = {}
    for part in _parts(path):
        part_document = _read(part)
        if other := sorted(set(part_document) - set(_LISTS)):
            raise OperatorError(
                f"{part}: a file in {DIRECTORY} may contain only [[models]] and [[slices]], not `{other[0]}`"
            )
        for name in _LISTS:
            more = part_document.get(name, [])
            _extend(document, name, more, part)
            whole = len(document.get(name, ()))
            origins |= {(name, index): part for index in range(whole - len(more), whole)}
    return Parts(document, origins)


def signature(path: Path) -> Signature:
    """Return names, times, inodes and sizes of all files; it changes when any of them changes."""
    entries = []
    for file in (path, *_parts(path)):
        try:
            status = file.stat()  # through the links of a mounted ConfigMap
        except OSError:
            continue
        entries.append((file.name, status.st_mtime_ns, status.st_ino, status.st_size))
    return tuple(entries)


def _parts(path: Path) -> list[Path]:
    """Return the parts, without hidden files, in which a mounted ConfigMap keeps its versions."""
    try:
        return sorted(
            file
            for file in (path.parent / DIRECTORY).iterdir()
            if file.suffix == ".toml" and not file.name.startswith(".") and file.is_file()
        )
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise OperatorError(f"{path.parent / DIRECTORY} cannot be read: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise OperatorError(f"no configuration file at {path}: give one with --config") from error
    except tomllib.TOMLDecodeError as error:
        raise OperatorError(f"{path} cannot be read: {error}{_line(path, str(error))}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"{path} cannot be read: {error}") from error


def _line(path: Path, error: str) -> str:
    """Return the line that the parser names, below its message, with a mark under the column; empty: it names none."""
    position = re.search(r"line (\d+), column (\d+)", error)
    lines = path.read_text(encoding="utf-8").splitlines()
    if position is None or int(position[1]) > len(lines):
        return ""
    line = plain(lines[int(position[1]) - 1].replace("\t", " "))
    return f"\n    {line}\n    {'^':>{int(position[2])}}" if len(line) <= _MOST_SHOWN else ""


def _extend(document: dict[str, Any], name: str, more: Any, part: Path) -> None:
    if not isinstance(more, list) or not all(isinstance(entry, dict) for entry in more):
        raise OperatorError(f"{part}: write [[{name}]], a list")
    for entry in more:
        references = entry.get("references")
        reference_list = references if isinstance(references, list) else []
        copies = [reference.get("copy") for reference in reference_list if isinstance(reference, dict)]
        for reference in (*reference_list, *copies, entry.get("recheck")):
            for file in _FILES if isinstance(reference, dict) else ():
                if isinstance(reference.get(file), str) and reference[file]:
                    reference[file] = str(part.resolve().parent / reference[file])
    if more:
        whole = document.setdefault(name, [])
        if not isinstance(whole, list):
            raise OperatorError(f"{part}: `{name}` in the main file is not a list")
        whole.extend(more)

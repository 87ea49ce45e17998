"""Recorded inputs: files with arrays of items, and the attributes by which slices tell the items apart.

A file is `.npz` or `.safetensors`. It has an array with the name of each input, with one row for each item. Further arrays with
one text or whole number for each item are attributes. Names of folders such as `scanner=archive` give an attribute to all files below.
An attribute is called like the rule of its slices (`scanner`), like the header, parameter or JSON path, or by its key
(`header.x-scanner`).
"""

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from quantdrift.core.config.schema import Config, Slice
from quantdrift.core.errors import OperatorError
from quantdrift.core.slices import CAPTURED, attribute_key
from quantdrift.core.text import visible
from quantdrift.models.runtimes.canaries.canaries import read_inputs
from quantdrift.models.tensors.arrays import Array

GROUP: Final = "group"
"""Name of the array by which items are one observation, such as a session."""
SUFFIXES: Final = (".npz", ".safetensors")
_ATTRIBUTES: Final = frozenset("USiub")  # kinds of arrays: texts and whole numbers


class RecordedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of recorded inputs.

    Parameters
    ----------
    path
        The file.
    folders
        Attributes from the names of the folders above it, by their names there.
    n_bytes
        Its length.
    """

    path: Path
    folders: dict[str, str]
    n_bytes: int


class RecordedItems(msgspec.Struct, frozen=True, kw_only=True):
    """The items of one file.

    Parameters
    ----------
    path
        The file.
    inputs
        By name : (items, ...).
    attributes
        Values of each item, by the key of the attribute.
    labels
        The true class of each item, as it is in the file; None: not asked for.
    groups
        Name of the observation that each item belongs to; None: each is its own.
    """

    path: Path
    inputs: dict[str, Array]
    attributes: dict[str, list[str]]
    labels: Array | None
    groups: list[str] | None

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))


class RecordingLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What the arrays of the files are.

    Parameters
    ----------
    inputs
        Names of the inputs; each file must have all of them.
    keys
        The key of an attribute, by each name that it may have.
    labels
        Name of the array with the true classes; empty: none.
    session
        Key of the attribute by which items are one observation, unless there is an array `group`; empty: none.
    takers
        The model that takes an input which the reference does not take, by the name of the input.
    """

    inputs: tuple[str, ...]
    keys: dict[str, str]
    labels: str = ""
    session: str = ""
    takers: Mapping[str, str] = {}


def layout_of(
    config: Config,
    rules: Sequence[Slice],
    inputs: Iterable[str],
    labels: str = "",
    attributes: Iterable[str] = (),
) -> RecordingLayout:
    """Return the layout for these slice rules of a model, and for the keys of further attributes."""
    keys = {name: key for key in attributes for name in (key.partition(".")[2], key)}
    for rule in rules:
        if rule.feature or rule.cross:
            continue
        key = attribute_key(rule)
        for name in (key.partition(".")[2], key, rule.name):
            keys[name] = key
    session = config.sampling.sticky_header
    if session:
        keys |= {session: f"header.{session}", f"header.{session}": f"header.{session}"}
    names = tuple(dict.fromkeys(inputs))
    if labels in names:
        raise OperatorError(
            f"--labels {labels}: the model has an input of that name; name the array otherwise"
        )
    return RecordingLayout(
        inputs=names, keys=keys, labels=labels, session=f"header.{session}" if session else ""
    )


def parts_of(path: Path, option: str = "--inputs", suffixes: Sequence[str] = SUFFIXES) -> list[RecordedFile]:
    """Return the files of a recording, a file or a folder, in the order of their names.

    Parameters
    ----------
    option
        What names it.
    suffixes
        Endings of the names of its files.

    Raises
    ------
    OperatorError
        There is none, one is damaged, or a folder between has no attribute in its name.
    """
    if path.is_file():
        if path.suffix not in suffixes:
            raise OperatorError(f"{option} {path}: recorded inputs are {' or '.join(suffixes)} files")
        return [_part(path, {})]
    if not path.is_dir():
        raise OperatorError(f"{option} {path}: there is no such file or folder")
    parts = []
    for file in sorted(entry for entry in path.rglob("*") if entry.suffix in suffixes and entry.is_file()):
        folders = {}
        for folder in file.relative_to(path).parent.parts:
            name, equals, value = folder.partition("=")
            if not (name and equals and value):
                raise OperatorError(
                    f"{option} {path}: the folder `{folder}` gives no attribute; name it NAME=VALUE, such as scanner=archive"
                )
            folders[name] = value
        parts.append(_part(file, folders))
    if not parts:
        raise OperatorError(f"{option} {path}: the folder has no {' or '.join(suffixes)} file")
    return parts


def _part(file: Path, folders: dict[str, str]) -> RecordedFile:
    """Return a file of a recording; one that is cut off is an error at once, and not after all files before it."""
    if file.suffix == ".npz" and not zipfile.is_zipfile(file):
        raise OperatorError(
            f"{file} is no .npz file, or only the beginning of one: record it again, or remove it"
        )
    return RecordedFile(path=file, folders=folders, n_bytes=file.stat().st_size)


def read(part: RecordedFile, layout: RecordingLayout) -> RecordedItems:
    """Return the items of a file.

    Raises
    ------
    OperatorError
        The file cannot be read, lacks an input, has arrays of different lengths, or another array that is no attribute.
    """
    arrays = read_inputs(part.path)
    if missing := [name for name in layout.inputs if name not in arrays]:
        taker = layout.takers.get(missing[0])
        if taker is not None:
            raise OperatorError(
                f"{taker} takes `{missing[0]}`, which the reference does not take: export it with the names of the reference's inputs,"
                f" or give {part.path} an array of that name, if requests have it"
            )
        raise OperatorError(
            f"{part.path} has no array {_listed(missing)}: it has {_listed(arrays) or 'none'}, and the inputs are"
            f" {_listed(layout.inputs)}"
        )
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    n_items = lengths[layout.inputs[0]]
    if others := [name for name, length in lengths.items() if length != n_items]:
        raise OperatorError(
            f"{part.path}: `{layout.inputs[0]}` has {n_items} rows, but `{others[0]}` has {lengths[others[0]]}: each"
            " array has one row for each item"
        )
    if not n_items:
        raise OperatorError(f"{part.path} has no items")
    if layout.labels and layout.labels not in arrays:
        raise OperatorError(
            f"{part.path} has no array `{layout.labels}`, which --labels names: it has {_listed(arrays)}"
        )
    texts = {
        name: _texts(part.path, name, array)
        for name, array in arrays.items()
        if name not in {*layout.inputs, layout.labels}
    }
    texts |= {name: [value] * n_items for name, value in part.folders.items()}
    attributes = {attribute_key_of(layout.keys, name): values for name, values in texts.items()}
    return RecordedItems(
        path=part.path,
        inputs={name: arrays[name] for name in layout.inputs},
        attributes=attributes,
        labels=arrays[layout.labels] if layout.labels else None,
        groups=texts.get(GROUP) or attributes.get(layout.session),
    )


def attribute_key_of(keys: Mapping[str, str], name: str) -> str:
    """Return the key of the attribute that is called `name`; the name itself where no slice uses it."""
    return name if name.startswith(CAPTURED) else keys.get(name, name)


def _texts(path: Path, name: str, array: Array) -> list[str]:
    if array.ndim != 1 or array.dtype.kind not in _ATTRIBUTES:
        raise OperatorError(
            f"{path}: the array `{name}`, {array.dtype}{list(array.shape)}, is neither an input of the model nor an attribute"
            " (one text or whole number for each item): rename or remove it"
        )
    values = np.char.decode(array) if array.dtype.kind == "S" else array
    return [visible(str(value)) for value in values.tolist()]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)

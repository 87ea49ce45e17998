"""The notebook of one slice: what the slice page shows, as calls of `quantdrift.frames` with their values filled in.

Names come from the wire. They stand in code alone, as literals of Python that `ascii` writes: in a Markdown cell they could be HTML.
"""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

_FORMAT: Final = (4, 5)
_INTRODUCTION: Final = """# One slice of a quantised model

The live page of quantdrift wrote this notebook. It reads the database and changes nothing. Install `quantdrift[frames]` and `pandas`, and set
the variable `QUANTDRIFT_DSN` to the address of a user with the role `quantdrift_reader`.

Figures describe the traffic, not the sample, if you use the column `weight`."""


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """What the page showed: a slice of a version, and a time.

    Parameters
    ----------
    step
        `hour` or `day`.
    margins
        The query of the margins.
    """

    model: str
    version: str
    slice: str
    begin: datetime
    end: datetime
    step: str
    margins: str


def notebook(chosen: Chosen) -> bytes:
    """Return the notebook as a file."""
    cells = [_cell(kind, number, source) for number, (kind, source) in enumerate(_cells(chosen))]
    document = {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": _FORMAT[0],
        "nbformat_minor": _FORMAT[1],
    }
    return json.dumps(document, indent=1).encode()


def _cells(chosen: Chosen) -> Iterable[tuple[str, str]]:
    yield "markdown", _INTRODUCTION
    yield (
        "code",
        f"""import os
from datetime import datetime

from quantdrift import frames

model = {chosen.model!a}
version = {chosen.version!a}
slice_name = {chosen.slice!a}
start = datetime.fromisoformat({chosen.begin.astimezone(UTC).isoformat()!a})
end = datetime.fromisoformat({chosen.end.astimezone(UTC).isoformat()!a})
drift = frames.pandas(os.environ["QUANTDRIFT_DSN"])""",
    )
    yield "markdown", "## How is the slice now?"
    yield (
        "code",
        'now = drift.slices(model=model, version=version)\nnow[now["slice"] == slice_name].T',
    )
    yield "markdown", "## How did it develop?"
    yield (
        "code",
        f"history = drift.history(model, slice=slice_name, version=version, step={chosen.step!a}, start=start, end=end)\nhistory",
    )
    yield "markdown", "## Which answer became which?"
    yield (
        "code",
        "drift.direction(model, slice=slice_name, version=version, start=start, end=end)",
    )
    yield "markdown", "## The worst items"
    yield (
        "code",
        "drift.worst(model, slice=slice_name, version=version, start=start, end=end, n=20)",
    )
    yield "markdown", "## Margins of the unquantised model, changed and unchanged answers apart"
    yield "code", f"drift.sql({chosen.margins.rstrip(';')!a})"
    yield "markdown", "## A mean and a quantile of your own"
    yield (
        "code",
        """columns = ["flip", "divergence", "weight"]
items = drift.items(model, slice=slice_name, version=version, start=start, end=end, columns=columns)
if len(items):
    print(frames.weighted_mean(items["flip"], items["weight"]))
    print(frames.weighted_quantile(items["divergence"], items["weight"], 0.99))""",
    )
    yield "code", "drift.close()"


def _cell(kind: str, number: int, source: str) -> dict[str, Any]:
    cell = {
        "cell_type": kind,
        "id": f"cell-{number}",
        "metadata": {},
        "source": source.splitlines(keepends=True),
    }
    return cell | {"execution_count": None, "outputs": []} if kind == "code" else cell

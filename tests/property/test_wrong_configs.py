"""Configurations with mistakes anywhere."""

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.core.config.load import load
from quantdrift.core.config.schema import Config, Model, ModelTensor, Reference, Slice
from quantdrift.core.errors import OperatorError

pytestmark = pytest.mark.property

VALUES = st.one_of(
    st.booleans(),
    st.integers(-3, 3),
    st.floats(),
    st.sampled_from(["", "x", "m", "8000", "127.0.0.1:1", "generation", "features"]),
    st.lists(st.sampled_from([1, "x", {}, {"name": "x"}]), max_size=2),
    st.dictionaries(st.sampled_from(["name", "versions", "rate", "qqq"]), st.integers(0, 2), max_size=2),
)


def _base() -> dict[str, Any]:
    reference = Reference(path="m.onnx", versions=("1",))
    model = Model(
        name="m", references=(reference,), inputs=(ModelTensor(name="x", datatype="FP32", shape=(-1, 2)),)
    )
    sliced = Slice(name="a", header="x-request-id")
    document: dict[str, Any] = msgspec.to_builtins(Config(models=(model,), slices=(sliced,)))
    for table in _tables(document):
        for key in [key for key, value in table.items() if value is None]:
            del table[key]  # TOML cannot state it
    return document


def _toml(value: Any) -> str:
    """Return a value in TOML, tables in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value)


def _tables(document: Any) -> list[dict[str, Any]]:
    inner = (
        document.values()
        if isinstance(document, dict)
        else document
        if isinstance(document, list | tuple)
        else ()
    )
    here = [document] if isinstance(document, dict) else []
    return here + [table for one in inner for table in _tables(one)]


@given(data=st.data())
def test_any_wrong_values_are_named_and_never_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever is written at up to three places, the configuration loads, or an error names what is wrong."""
    document = _base()
    for _ in range(data.draw(st.integers(1, 3))):
        tables = _tables(document)
        table = tables[data.draw(st.integers(0, len(tables) - 1))]
        key = data.draw(st.sampled_from([*sorted(table), "qqq"]))
        if data.draw(st.booleans()):
            table[key] = data.draw(VALUES)
        else:
            table.pop(key, None)
    path = tmp_path_factory.getbasetemp() / "wrong.toml"
    path.write_text("".join(f"{json.dumps(key)} = {_toml(one)}\n" for key, one in document.items()))
    try:
        config = load(path, {})
    except OperatorError as error:
        head, *lines = str(error).splitlines()
        assert head == "the configuration is wrong:"
        assert lines
        assert all(line.startswith(f"  - {path}: ") for line in lines)
    else:
        assert isinstance(config, Config)

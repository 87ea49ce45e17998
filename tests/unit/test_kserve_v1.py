"""KServe v1, by rows and by columns."""

from typing import Any

import pytest

from quantdrift.core.config.schema import Model, ModelTensor
from quantdrift.core.records import Loss
from quantdrift.sidecar.protocols.kserve_v1 import KserveV1
from tests.support.sidecar.decode import answer, ask, datatypes, lost, values

pytestmark = pytest.mark.unit

V1 = KserveV1()
CONFIGURED = Model(
    name="m",
    inputs=(ModelTensor(name="x", datatype="FP32"),),
    outputs=(ModelTensor(name="logits", datatype="FP32"),),
)
ROWS = [[0.5, 1, None], [2, 3, 4]]


def test_what_a_server_of_kserve_answers_is_read() -> None:
    """Numbers without a fraction beside others are one tensor; the body is one that KServe's SDK has sent."""
    query = ask(V1, {"instances": [[1, 2, 3, 4]]})
    assert (values(query.inputs), datatypes(query.inputs)) == (
        {"instances": [[1, 2, 3, 4]]},
        {"instances": "INT64"},
    )
    reply = answer(V1, b'{"predictions":[[7.5,8.75,10.0]]}', query)
    assert (values(reply.outputs), datatypes(reply.outputs)) == (
        {"predictions": [[7.5, 8.75, 10.0]]},
        {"predictions": "FP64"},
    )
    assert reply.version == ""


@pytest.mark.parametrize(
    ("rows", "datatype", "expected"),
    [
        ([1, 2], "INT64", [1, 2]),
        ([1, 2.5], "FP64", [1.0, 2.5]),
        ([[True], [False]], "BOOL", [[True], [False]]),
        (["a", "größe"], "BYTES", [b"a", "größe".encode()]),
        ([{"b64": "AP8="}, "a"], "BYTES", [b"\x00\xff", b"a"]),
        ([[[{"b64": ""}]]], "BYTES", [[[b""]]]),
    ],
)
def test_type_and_shape_follow_from_the_rows(rows: list[Any], datatype: str, expected: list[Any]) -> None:
    """As far as JSON has types; `{"b64": ...}` is the bytes that it stands for."""
    found = ask(V1, {"instances": rows}).inputs
    assert (values(found), datatypes(found)) == ({"instances": expected}, {"instances": datatype})


def test_the_configuration_names_and_types_what_the_wire_does_not() -> None:
    """The only configured tensor gives its name and type to an unnamed one, in both directions."""
    query = ask(V1, {"instances": [[1, 2]]}, model=CONFIGURED)
    assert (values(query.inputs), datatypes(query.inputs)) == ({"x": [[1.0, 2.0]]}, {"x": "FP32"})
    reply = answer(V1, {"predictions": [[1, 2]]}, query, model=CONFIGURED)
    assert datatypes(reply.outputs) == {"logits": "FP32"}
    compared = Model(name="m", output="scores")
    assert datatypes(answer(V1, {"predictions": [1.5]}, model=compared).outputs) == {"scores": "FP64"}


def test_rows_may_be_objects_of_named_values() -> None:
    """Each name is a tensor, over all rows."""
    rows = [{"x": [1, 2], "name": "a", "image": {"b64": "AA=="}}, {"name": "b", "x": [3, 4], "image": "c"}]
    found = ask(V1, {"instances": rows}, model=CONFIGURED).inputs
    assert values(found) == {"x": [[1, 2], [3, 4]], "name": [b"a", b"b"], "image": [b"\0", b"c"]}
    assert datatypes(found)["x"] == "FP32"
    answered = answer(V1, {"predictions": [{"scores": [0.5, 0.5], "top": 0}]}).outputs
    assert values(answered) == {"scores": [[0.5, 0.5]], "top": [0]}


def test_columns_are_one_tensor_or_several() -> None:
    """A tensor by itself, or an object of them; a signature is a parameter."""
    query = ask(V1, {"inputs": {"a": [1], "b": ["x"]}, "signature_name": "serve"})
    assert values(query.inputs) == {"a": [1], "b": [b"x"]}
    assert query.parameters == {"signature_name": "serve"}
    assert query.document["signature_name"] == "serve"
    assert values(answer(V1, {"outputs": [[0.5]]}).outputs) == {"predictions": [[0.5]]}
    assert values(answer(V1, {"outputs": {"y": 3}}).outputs) == {"y": 3}


@pytest.mark.parametrize(
    ("body", "loss"),
    [
        (b"[]", Loss.DECODE),
        ({}, Loss.DECODE),
        ({"instances": [1], "inputs": [1]}, Loss.DECODE),
        ({"instances": [[1, 2], [3]]}, Loss.DECODE),
        ({"instances": [[1, 2], 3]}, Loss.DECODE),
        ({"instances": [1, [2]]}, Loss.DECODE),
        ({"instances": [1, "a"]}, Loss.DECODE),
        ({"instances": [True, 1]}, Loss.DECODE),
        ({"instances": [None]}, Loss.DECODE),
        ({"instances": [2**63]}, Loss.DECODE),
        ({"instances": ["\ud800"]}, Loss.DECODE),
        ({"instances": [{"b64": "A"}]}, Loss.DECODE),
        ({"instances": [{"a": 1}, {"b": 1}]}, Loss.DECODE),
        ({"instances": [{"a": 1}, 1]}, Loss.DECODE),
        ({"instances": [1, {"a": 1}]}, Loss.DECODE),
        ({"instances": [[{"a": 1}]]}, Loss.DECODE),
        ({"inputs": [{"a": 1}]}, Loss.DECODE),
        ({"inputs": {}}, Loss.DECODE),
        ({"instances": []}, Loss.METADATA),
        ({"inputs": {"a": [[], []]}}, Loss.METADATA),
        (b'{"instances": ' + b"[" * 40 + b"1" + b"]" * 40 + b"}", Loss.DECODE),
        (b'{"instances": [' + b"1," * 200 + b"1]}", Loss.TOO_LARGE),
    ],
    ids=lambda _: "case",
)
def test_what_cannot_be_a_tensor_is_lost_by_its_reason(body: Any, loss: Loss) -> None:
    """Ragged, mixed, unnamed or untold: never guessed."""
    assert lost(ask, V1, body, max_values=100) is loss


def test_a_configured_type_must_fit() -> None:
    """A fraction is no integer, and an empty list has a type as soon as it is told."""
    whole = Model(name="m", inputs=(ModelTensor(name="x", datatype="INT32"),))
    assert lost(ask, V1, {"instances": [1.5]}, model=whole) is Loss.DECODE
    assert lost(ask, V1, {"instances": [2**31]}, model=whole) is Loss.DECODE
    assert ask(V1, {"instances": []}, model=whole).inputs[0].shape == (0,)
    half = Model(name="m", inputs=(ModelTensor(name="x", datatype="BF16"),))
    assert lost(ask, V1, {"instances": [1.5]}, model=half) is Loss.DECODE

"""TorchServe: bodies and forms, read by the adapter that is named for the model."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quantdrift.core.config.schema import Model, ModelTensor
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Loss
from quantdrift.sidecar.protocols.adapters import load_adapter
from quantdrift.sidecar.protocols.torchserve import TorchServe
from tests.support.sidecar.decode import answer, ask, datatypes, lost, values

pytestmark = pytest.mark.unit

SERVE = TorchServe()
BYTES, JSON, SCORES = (load_adapter(name) for name in ("bytes", "json", "scores"))
# What the image classifier that comes with TorchServe answers.
TOP = b'{"tabby": 0.27221813797950745, "tiger_cat": 0.26754093170166016, "Egyptian_cat": 0.2014847993850708}'


async def form(*fields: tuple[str, bytes, str]) -> tuple[dict[str, str], bytes]:
    """Return the head's fields and the body that a client sends for a form."""
    writer = aiohttp.MultipartWriter("form-data")
    for name, data, content_type in fields:
        part = writer.append(data, {"Content-Type": content_type})
        part.set_content_disposition("form-data", name=name, filename=f"{name}.bin")
    return {"content-type": writer.headers["Content-Type"]}, await writer.as_bytes()


def test_a_body_is_kept_as_it_is() -> None:
    """`bytes`: whatever it holds, under the name that handlers know it by."""
    picture = b"\xff\xd8\xff\xe0" + bytes(range(256))
    query = ask(SERVE, picture, headers={"content-type": "image/jpeg"}, adapter=BYTES)
    assert values(query.inputs) == {"body": [picture]}
    assert values(answer(SERVE, TOP, query, adapter=BYTES).outputs) == {"body": [TOP]}


async def test_the_fields_of_a_form_are_tensors() -> None:
    """As a client writes it; of several fields of one name each is an element."""
    headers, body = await form(
        ("data", b"\r\n--\0\xff", "image/png"), ("size", b"3", "text/plain"), ("data", b"", "image/png")
    )
    query = ask(SERVE, body, headers=headers, adapter=BYTES)
    assert values(query.inputs) == {"data": [b"\r\n--\0\xff", b""], "size": [b"3"]}


async def test_json_is_read_in_every_dress() -> None:
    """A document of KServe v1, named tensors, a bare list, and fields that hold JSON."""
    model = Model(
        name="m",
        inputs=(ModelTensor(name="x", datatype="FP32"),),
        outputs=(ModelTensor(name="y", datatype="FP32"),),
    )
    body: Any
    for body in ({"instances": [[1, 2]]}, {"inputs": {"x": [[1, 2]]}}, {"x": [[1, 2]]}, [[1, 2]]):
        found = ask(SERVE, body, model=model, adapter=JSON).inputs
        assert (values(found), datatypes(found)) == ({"x": [[1.0, 2.0]]}, {"x": "FP32"})
    for answered in ({"predictions": [[1, 2]]}, {"y": [[1, 2]]}, [[1, 2]]):
        reply = answer(SERVE, answered, model=model, adapter=JSON)
        assert (values(reply.outputs), datatypes(reply.outputs)) == ({"y": [[1.0, 2.0]]}, {"y": "FP32"})
    assert values(answer(SERVE, b"3", adapter=JSON).outputs) == {"predictions": 3}
    headers, body = await form(("data", b"[[1, 2]]", "application/json"))
    assert values(ask(SERVE, body, headers=headers, model=model, adapter=JSON).inputs) == {"x": [[1, 2]]}
    headers, body = await form(("x", b"[1]", "text/plain"), ("name", b'["a"]', "text/plain"))
    found = ask(SERVE, body, headers=headers, model=model, adapter=JSON).inputs
    assert (values(found), datatypes(found)["x"]) == ({"x": [1.0], "name": [b"a"]}, "FP32")


def test_scores_become_a_list_of_top_classes() -> None:
    """What a classifier answers, with each label's place among the configured ones, the largest first."""
    model = Model(name="m", labels=("tiger_cat", "tabby", "dog", "Egyptian_cat"))
    reply = answer(SERVE, TOP, model=model, adapter=SCORES)
    assert values(reply.outputs) == {
        "scores": [
            [
                b"0.27221813797950745:1:tabby",
                b"0.26754093170166016:0:tiger_cat",
                b"0.2014847993850708:3:Egyptian_cat",
            ]
        ]
    }
    rows = answer(SERVE, [{"0": 0.25, "1": 0.75}, {"1": 0.125, "0": 0.875}], adapter=SCORES).outputs
    assert values(rows) == {"scores": [[b"0.75:1:1", b"0.25:0:0"], [b"0.875:0:0", b"0.125:1:1"]]}
    named = Model(name="m", output="probabilities")
    assert answer(SERVE, {"7": 1}, model=named, adapter=SCORES).outputs[0].name == "probabilities"


@pytest.mark.parametrize(
    ("body", "loss"),
    [
        (b"{", Loss.DECODE),
        (b"[]", Loss.DECODE),
        (b"{}", Loss.DECODE),
        (b"3", Loss.DECODE),
        ({"a": 1, "b": "2"}, Loss.DECODE),
        ({"0": True}, Loss.DECODE),
        ({"0": 10**400}, Loss.DECODE),
        ([{"0": 1}, {"0": 1, "1": 0}], Loss.DECODE),
        ([{"0": 1}, 2], Loss.DECODE),
        ({"cat": 0.5}, Loss.METADATA),
        ({str(label): 0 for label in range(100_001)}, Loss.TOO_LARGE),
    ],
    ids=lambda _: "case",
)
def test_what_are_no_scores_is_lost_by_its_reason(body: Any, loss: Loss) -> None:
    """A label that nobody has given a place is not guessed."""
    assert lost(answer, SERVE, body, adapter=SCORES, max_values=200_000) is loss


async def test_a_broken_form_is_lost() -> None:
    """Cut short, without a boundary, without fields, or with too many of them."""
    headers, body = await form(("data", b"a", "text/plain"))
    assert lost(ask, SERVE, body[:-6], headers=headers, adapter=BYTES) is Loss.DECODE
    assert (
        lost(ask, SERVE, body, headers={"content-type": "multipart/form-data"}, adapter=BYTES) is Loss.DECODE
    )
    boundary = headers["content-type"].partition("boundary=")[2].encode()
    assert lost(ask, SERVE, b"--" + boundary + b"--\r\n", headers=headers, adapter=BYTES) is Loss.DECODE
    headers, body = await form(*[("data", b"", "text/plain")] * 1001)
    assert lost(ask, SERVE, body, headers=headers, adapter=BYTES) is Loss.TOO_LARGE
    headers, body = await form(("a", b"1", "text/plain"), ("a", b"2", "text/plain"))
    assert lost(ask, SERVE, body, headers=headers, adapter=JSON) is Loss.DECODE


def test_without_an_adapter_nothing_is_guessed() -> None:
    """The loss says what to configure."""
    assert lost(ask, SERVE, b"x") is Loss.METADATA


OWN = """
import numpy as np
from quantdrift.core.records import Tensor

class Halves:
    def inputs(self, parts, wire):
        data = (np.frombuffer(parts[0].data, "u1") / 2).astype("<f4")
        return [Tensor(name="x", datatype="FP32", shape=(1, len(data)), data=data.tobytes())]

    def outputs(self, part, wire):
        return (Tensor(name="y", datatype="FP32", shape=(1,), data=part.data),)
"""


def test_an_adapter_of_ones_own_is_imported_and_its_work_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By module and name; what it returns need not be sound."""
    (tmp_path / "own_adapter.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    adapter = load_adapter("own_adapter:Halves")
    assert values(ask(SERVE, b"\x02\x03", adapter=adapter).inputs) == {"x": [[1.0, 1.5]]}
    assert values(answer(SERVE, b"\0\0\x80\x3f", adapter=adapter).outputs) == {"y": [1.0]}
    assert lost(answer, SERVE, b"", adapter=adapter) is Loss.DECODE


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("no.such.module:A", "No module"),
        ("json:nothing", "nothing"),
        ("json:JSONDecoder", "it needs the methods"),
    ],
)
def test_an_adapter_that_cannot_be_had_is_an_error_of_the_operator(name: str, hint: str) -> None:
    """It says which one, and why."""
    with pytest.raises(OperatorError, match=hint):
        load_adapter(name)

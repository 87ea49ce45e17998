"""The Open Inference decoder against bodies that a client nobody here wrote has made."""

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from quantdrift.core.config.schema import Model, ModelTensor
from quantdrift.core.records import Loss, Tensor
from quantdrift.sidecar.protocols.errors import LostError
from tests.support.sidecar.oip_messages import decode_request, decode_response

pytestmark = pytest.mark.unit

VALUES: dict[str, npt.NDArray[Any]] = {
    "BOOL": np.array([[True, False, True]]),
    "UINT8": np.array([[0, 1, 255]], "u1"),
    "UINT16": np.array([[0, 1, 65535]], "<u2"),
    "UINT32": np.array([[0, 1, 2**32 - 1]], "<u4"),
    "UINT64": np.array([[0, 1, 2**64 - 1]], "<u8"),
    "INT8": np.array([[-128, 0, 127]], "i1"),
    "INT16": np.array([[-(2**15), 0, 2**15 - 1]], "<i2"),
    "INT32": np.array([[-(2**31), 0, 2**31 - 1]], "<i4"),
    "INT64": np.array([[-(2**63), 0, 2**63 - 1]], "<i8"),
    "FP16": np.array([[-1.5, 0.0, 65504.0]], "<f2"),
    "FP32": np.array([[-1.5, 0.1, 3e38]], "<f4"),
    "FP64": np.array([[-1.5, 0.1, 1e300]], "<f8"),
}


def body_of(*inputs: InferInput, **more: Any) -> tuple[str | None, bytes]:
    """Return the JSON length and the body that the client sends."""
    body, length = InferenceServerClient.generate_request_body(list(inputs), **more)
    return None if length is None else str(length), body


def tensor_input(name: str, datatype: str, values: npt.NDArray[Any], *, binary: bool) -> InferInput:
    """Return a client's input."""
    made = InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


def one_input(**tensor: Any) -> bytes:
    """Return a JSON request with one tensor."""
    return json.dumps({"inputs": [{"name": "x", "shape": [2], "datatype": "FP32", **tensor}]}).encode()


@pytest.mark.parametrize("datatype", [name for name in VALUES if name != "FP16"])
def test_a_clients_json_tensor_is_decoded(datatype: str) -> None:
    """Each datatype that JSON may carry comes out as little-endian bytes."""
    values = VALUES[datatype]
    request = decode_request(*body_of(tensor_input("x", datatype, values, binary=False)))
    assert request.inputs == (Tensor(name="x", datatype=datatype, shape=(1, 3), data=values.tobytes()),)


@pytest.mark.parametrize("datatype", VALUES)
def test_a_clients_binary_tensor_is_decoded(datatype: str) -> None:
    """Each datatype, FP16 included, comes out of the binary extension unchanged."""
    values = VALUES[datatype]
    request = decode_request(*body_of(tensor_input("x", datatype, values, binary=True)))
    assert request.inputs == (Tensor(name="x", datatype=datatype, shape=(1, 3), data=values.tobytes()),)


def test_a_request_may_mix_json_binary_and_strings() -> None:
    """Binary parts are assigned in JSON order, past the tensors that travel as JSON."""
    text = np.array([[b"a", "é".encode()], [b"", b"\xff\x00"]], dtype=np.object_)
    floats = np.array([1.5, -2.0], "<f4")
    length, body = body_of(
        tensor_input("text", "BYTES", text, binary=True),
        tensor_input("json", "FP32", floats, binary=False),
        tensor_input("half", "FP16", floats.astype("<f2"), binary=True),
        outputs=[InferRequestedOutput("y", binary_data=True)],
        request_id="7",
        parameters={"tenant": "a"},
    )
    request = decode_request(length, body)
    strings, plain, half = request.inputs
    assert strings.data == b"\x01\0\0\0a\x02\0\0\0\xc3\xa9\0\0\0\0\x02\0\0\0\xff\0"
    assert (plain.data, half.data) == (floats.tobytes(), floats.astype("<f2").tobytes())
    assert request.parameters == {"tenant": "a"}
    assert request.document["id"] == "7"


def test_json_strings_become_length_prefixed_bytes() -> None:
    """BYTES as JSON are strings; their UTF-8 stands behind its length."""
    request = decode_request(None, one_input(datatype="BYTES", data=["é", ""]))
    assert request.inputs[0].data == b"\x02\0\0\0\xc3\xa9\0\0\0\0"


@pytest.mark.parametrize("data", [[1, 2, 3, 4, 5, 6], [[1, 2, 3], [4, 5, 6]]])
def test_data_may_be_flat_or_nested(data: list[Any]) -> None:
    """Both forms are the same row-major tensor."""
    request = decode_request(None, one_input(shape=[2, 3], datatype="INT16", data=data))
    assert request.inputs[0].data == np.arange(1, 7, dtype="<i2").tobytes()


@pytest.mark.parametrize(
    ("shape", "data"), [([0], []), ([0, 3], []), ([2, 0], [[], []]), ([2, 0], []), ([], [7])]
)
def test_empty_tensors_and_scalars_have_data_that_fits(shape: list[int], data: list[Any]) -> None:
    """A dimension of zero has no elements; no dimension has one."""
    request = decode_request(None, one_input(shape=shape, data=data))
    assert len(request.inputs[0].data) == 4 * len(np.ravel(data))


def test_a_response_is_decoded_with_its_version() -> None:
    """JSON and binary outputs; a version may be a number; without one it is empty."""
    values = np.array([0.25, 0.75], "<f4")
    part = json.dumps(
        {
            "model_name": "m",
            "model_version": 3,
            "outputs": [
                {"name": "a", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}},
                {"name": "b", "shape": [1], "datatype": "BF16", "parameters": {"binary_data_size": 2}},
                {"name": "c", "shape": [1], "datatype": "BYTES", "data": ["0.75:1"]},
            ],
        }
    ).encode()
    response = decode_response(str(len(part)), part + values.tobytes() + b"\x80\x3f")
    assert response.version == "3"
    assert [output.data for output in response.outputs] == [
        values.tobytes(),
        b"\x80\x3f",
        b"\x06\0\0\x000.75:1",
    ]
    assert decode_response(None, b'{"outputs":[],"model_version":null}').version == ""


@pytest.mark.parametrize("text", [b"[NaN, -Infinity]", b"[null, -1e999]"])
def test_a_broken_models_answer_is_still_read(text: bytes) -> None:
    """NaN and infinities, however a server writes them, are the finding and must not be lost."""
    body = b'{"outputs":[{"name":"y","shape":[2],"datatype":"FP32","data":' + text + b"}]}"
    values = np.frombuffer(decode_response(None, body).outputs[0].data, "<f4")
    assert np.isnan(values[0])
    assert values[1] == -np.inf


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{}",
        b'{"inputs": 1}',
        b'{"inputs": [{"name": "x"}]}',
        one_input(),
        one_input(data=[1]),
        one_input(data=[1, 2, 3]),
        one_input(data=[[1, 2]]),
        one_input(data=[1, "2"]),
        one_input(data=[True, False]),
        one_input(data=[1, 10**400]),
        one_input(data={"0": 1}),
        one_input(shape=[], data=[[1]]),
        one_input(shape=[2, 2], data=[[1, 2], [3]]),
        one_input(shape=[2, 2], data=[[1, 2], 3, 4]),
        one_input(shape=[-2], data=[1, 2]),
        one_input(shape=[1] * 33, data=[1]),
        one_input(shape=[10**30], data=[1, 2]),
        one_input(datatype="INT8", data=[1, 128]),
        one_input(datatype="INT8", data=[1, 1.0]),
        one_input(datatype="UINT8", data=[1, -1]),
        one_input(datatype="BOOL", data=[1, 0]),
        one_input(datatype="BYTES", data=["a", 1]),
        one_input(datatype="BYTES", data=["a", "\ud800"]),
        one_input(datatype="BF16", data=[1, 2]),
        one_input(datatype="FP8", data=[1, 2]),
        one_input(parameters={"binary_data_size": 8}),
        one_input(parameters={"binary_data_size": -1}),
        one_input(parameters={"binary_data_size": True}),
        one_input(parameters={"binary_data_size": 8}, data=[1, 2]),
    ],
    ids=lambda _: "case",
)
def test_what_the_protocol_does_not_allow_is_lost_as_decode(body: bytes) -> None:
    """Broken JSON, data of the wrong type or count, impossible shapes and unknown types are refused."""
    with pytest.raises(LostError) as caught:
        decode_request(None, body)
    assert caught.value.loss is Loss.DECODE


@pytest.mark.parametrize(
    ("tensor", "tail"),
    [
        ({"parameters": {"binary_data_size": 8}}, b"\0" * 7),
        ({"parameters": {"binary_data_size": 8}}, b"\0" * 9),
        ({"parameters": {"binary_data_size": 7}}, b"\0" * 7),
        ({"datatype": "BYTES", "parameters": {"binary_data_size": 8}}, b"\x01\0\0\0\0\0\0\0"),
        ({"datatype": "BYTES", "parameters": {"binary_data_size": 4}}, b"\0" * 4),
        ({"datatype": "BYTES", "parameters": {"binary_data_size": 9}}, b"\0" * 9),
    ],
    ids=lambda _: "case",
)
def test_binary_data_must_fill_its_tensors_exactly(tensor: dict[str, Any], tail: bytes) -> None:
    """Too few, too many and misaligned bytes are refused."""
    part = one_input(**tensor)
    with pytest.raises(LostError) as caught:
        decode_request(str(len(part)), part + tail)
    assert caught.value.loss is Loss.DECODE


@pytest.mark.parametrize("length", ["00", "-1", "x", "", "9" * 5000, "1000"], ids=lambda _: "case")
def test_a_json_length_that_does_not_fit_is_lost_as_decode(length: str) -> None:
    """Whatever is no length of the JSON part."""
    with pytest.raises(LostError) as caught:
        decode_request(length, one_input(data=[1, 2]))
    assert caught.value.loss is Loss.DECODE


def test_shared_memory_is_lost_by_its_name() -> None:
    """Tensors that did not travel, in either direction, are counted apart."""
    shared = InferInput("x", [2], "FP32")
    shared.set_shared_memory("region", 8)
    asked = InferRequestedOutput("y")
    asked.set_shared_memory("region", 8)
    plain = tensor_input("x", "FP32", np.zeros(2, "<f4"), binary=True)
    for length, body in (body_of(shared), body_of(plain, outputs=[asked])):
        with pytest.raises(LostError) as caught:
            decode_request(length, body)
        assert caught.value.loss is Loss.SHARED_MEMORY
    answered = one_input(parameters={"shared_memory_region": "r"}).replace(b"inputs", b"outputs")
    with pytest.raises(LostError) as caught:
        decode_response(None, answered)
    assert caught.value.loss is Loss.SHARED_MEMORY


def test_a_step_of_a_sequence_is_lost_by_its_name() -> None:
    """A stateful model cannot be replayed from one request; sequence 0 is no sequence."""
    plain = tensor_input("x", "FP32", np.zeros(2, "<f4"), binary=True)
    for sequence_id in (5, "five"):
        with pytest.raises(LostError) as caught:
            decode_request(*body_of(plain, sequence_id=sequence_id, sequence_start=True))
        assert caught.value.loss is Loss.SEQUENCE
    assert decode_request(*body_of(plain, sequence_id=0)).inputs


def test_a_shape_that_no_record_can_hold_is_lost() -> None:
    """It is the client's: no error of our own."""
    with pytest.raises(LostError) as caught:
        decode_request(None, one_input(shape=[0, 2**63], data=[]))
    assert caught.value.loss is Loss.DECODE


def raw_model(datatype: str, *shape: int, batched: bool = True) -> Model:
    """Return a model whose input is configured."""
    return Model(name="m", batched=batched, inputs=(ModelTensor(name="x", datatype=datatype, shape=shape),))


@pytest.mark.parametrize(
    ("model", "body", "shape"),
    [
        (raw_model("FP32", -1, 4), bytes(16), (1, 4)),
        (raw_model("FP32", 1, 4), bytes(16), (1, 4)),
        (raw_model("FP32", -1, -1), bytes(16), (1, 4)),
        (raw_model("FP32", 2, -1, 2), bytes(48), (2, 3, 2)),
        (raw_model("BF16", -1), bytes(6), (3,)),
        (raw_model("UINT8", -1, batched=False), b"", (0,)),
    ],
    ids=lambda _: "case",
)
def test_a_raw_request_is_what_the_configuration_says(
    model: Model, body: bytes, shape: tuple[int, ...]
) -> None:
    """All of the body is the only input; its length tells what varies, as Triton takes it."""
    request = decode_request("0", body, model=model)
    told = model.inputs[0].datatype
    assert request.inputs == (Tensor(name="x", datatype=told, shape=shape, data=body),)


def test_a_raw_string_is_the_whole_body() -> None:
    """It has no length before it on the wire."""
    for shape in ((1,), (-1, 1), (-1, -1)):
        (text,) = decode_request("0", "größe".encode(), model=raw_model("BYTES", *shape)).inputs
        assert (text.shape, text.data) == ((1,) * len(shape), b"\x07\0\0\0" + "größe".encode())


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (None, Loss.METADATA),
        (Model(name="m"), Loss.METADATA),
        (raw_model("FP32"), Loss.METADATA),
        (Model(name="m", inputs=raw_model("FP32", 4).inputs * 2), Loss.METADATA),
        (raw_model("FP32", 4, -1, -1), Loss.METADATA),
        (raw_model("FP32", -1, -1, batched=False), Loss.METADATA),
        (raw_model("BYTES", 2), Loss.METADATA),
        (raw_model("FP32", -1, 3), Loss.DECODE),
        (raw_model("FP32", 3), Loss.DECODE),
        (raw_model("FP32", -1, 0), Loss.DECODE),
    ],
    ids=lambda _: "case",
)
def test_a_raw_request_without_type_and_shape_is_lost_with_its_reason(
    model: Model | None, loss: Loss
) -> None:
    """What must be configured is told apart from a body that does not fit it."""
    with pytest.raises(LostError) as caught:
        decode_request("0", bytes(16), model=model)
    assert caught.value.loss is loss


def test_an_answer_is_never_raw() -> None:
    """A response says what its tensors are."""
    with pytest.raises(LostError) as caught:
        decode_response("0", bytes(16))
    assert caught.value.loss is Loss.DECODE

"""Decoder of the generate endpoints of Triton and KServe, `POST /v2/models/NAME/generate` and `.../generate_stream`.

Models of text have the same members as tensors over gRPC, where a decoupled one answers with a response for each piece.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from quantdrift.core.records import Loss, Tensor
from quantdrift.core.tensors import DTYPES
from quantdrift.sidecar.protocols.chats.form import (
    Generated,
    PieceReader,
    entries,
    object_in,
    request_of,
    response_of,
    word,
)
from quantdrift.sidecar.protocols.content import unpack_strings
from quantdrift.sidecar.protocols.decoder import DecodedRequest, DecodedResponse, WireContext
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head
from quantdrift.sidecar.protocols.json_tensors import read_document
from quantdrift.sidecar.protocols.openai import read_events

_DONE: Final = b"[DONE]"
_ENDS: Final[Mapping[str, str]] = {
    "eos_token": "stop",
    "stop_sequence": "stop",
    "stop": "stop",
    "length": "length",
}


class TextRequest(DecodedRequest, frozen=True, kw_only=True):
    """A request to complete a text.

    Parameters
    ----------
    echoed
        The text that a server may repeat before its answer, as Triton's vLLM backend does; empty: the client asked for the answer alone.
    """

    echoed: str = ""


class Generate:
    """Decoder of a request with `text_input` and of its answer with `text_output`."""

    def request(self, head: Head, body: bytes, wire: WireContext) -> TextRequest:
        """Return the request.

        Raises
        ------
        LostError
            `decode`: it does not follow the protocol. `too_large`: too many values.
        """
        document = read_document(body, wire.max_values)
        # The options of TensorRT-LLM are inputs of its model, beside the text.
        asked = _request({**document, **object_in(document.get("parameters"))})
        return msgspec.structs.replace(asked, document=document)

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the response.

        Raises
        ------
        LostError
            As for a request; `error_status`: it reports an error.
        """
        is_stream = body.lstrip()[:1] != b"{"
        generated = Generated()
        version, reader = "", PieceReader(wire)
        for piece in _stream(body) if is_stream else (body,):
            document = reader.read(piece)
            if document.get("error"):
                raise LostError(Loss.ERROR_STATUS, "the server reports an error")
            if not isinstance(document.get("text_output"), str):
                raise LostError(Loss.DECODE, "there is no text_output")
            generated.texts.append(document["text_output"])
            generated.response_id = word(document.get("id"))
            version = word(document.get("model_version")) or version
            _add_details(generated, object_in(document.get("details")))
        if not generated.texts:
            raise LostError(Loss.DECODE, "there is no text_output")
        if not is_stream and isinstance(query, TextRequest):
            generated.texts[0] = generated.texts[0].removeprefix(query.echoed)
        return response_of(generated, wire, is_stream=is_stream, version=version)


def request_of_tensors(inputs: Iterable[Tensor], parameters: Mapping[str, Any]) -> TextRequest:
    """Return the request for a text that is sent as tensors, `text_input` and options beside it.

    Raises
    ------
    LostError
        `decode`: there is no text, or more than one.
    """
    sent = {**{tensor.name: _value(tensor) for tensor in inputs}, **parameters}
    return _request({**sent, **_sampling(sent.get("sampling_parameters"))})


def response_of_tensors(
    pieces: Sequence[Sequence[Tensor]], asked: TextRequest, wire: WireContext, version: str
) -> DecodedResponse:
    """Return the answer that came in the outputs of one response or of several, whose texts are joined.

    Raises
    ------
    LostError
        `decode`: a response without `text_output`, or of more than one text.
    """
    generated = Generated()
    texts = list[bytes]()
    for outputs in pieces:
        named = {tensor.name: tensor for tensor in outputs}
        if "text_output" not in named:
            raise LostError(Loss.DECODE, "there is no text_output")
        texts += _one_text(named["text_output"])
        if "finish_reason" in named:
            (reason,) = _one_text(named["finish_reason"])
            generated.finish_reason = _ENDS.get(reason.decode(errors="replace"), generated.finish_reason)
    # A character may be cut by the end of a piece.
    text = b"".join(texts).decode(errors="replace")
    generated.texts.append(text.removeprefix(asked.echoed) if len(pieces) == 1 else text)
    return response_of(generated, wire, is_stream=False, version=version)


def _request(sent: Mapping[str, Any]) -> TextRequest:
    """Return a request with the members of a generate endpoint."""
    prompt = sent.get("text_input")
    if not isinstance(prompt, str):
        raise LostError(Loss.DECODE, "there is no text_input")
    if sent.get("image"):
        raise LostError(Loss.DECODE, "an image beside text_input, which cannot be replayed")
    options = {
        **sent,
        "stop": sent.get("stop") or sent.get("stop_words") or None,
        "bad_words": sent.get("bad_words") or None,
    }
    decoded = request_of({}, options, prompt=prompt)
    return TextRequest(
        inputs=decoded.inputs,
        parameters=decoded.parameters,
        text=decoded.text,
        echoed="" if sent.get("exclude_input_in_output") is True else prompt,
    )


def _value(tensor: Tensor) -> Any:
    """Return the only element of a tensor, or all of them."""
    values: list[Any]
    if tensor.datatype == "BYTES":
        values = [text.decode(errors="replace") for text in unpack_strings(tensor.data)]
    elif tensor.datatype in DTYPES:
        values = np.frombuffer(tensor.data, DTYPES[tensor.datatype]).tolist()
    else:
        return None
    return values[0] if len(values) == 1 else values


def _one_text(tensor: Tensor) -> list[bytes]:
    texts = unpack_strings(tensor.data) if tensor.datatype == "BYTES" else []
    if len(texts) != 1:
        raise LostError(Loss.DECODE, f"{tensor.name} is not one text")
    return texts


def _sampling(sent: Any) -> dict[str, Any]:
    """Return the options in the JSON of `sampling_parameters`; Triton's vLLM backend takes numbers as text, too."""
    if not isinstance(sent, str):
        return {}
    try:
        options = msgspec.json.decode(sent, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise LostError(Loss.DECODE, "sampling_parameters are not a JSON object") from error
    return {name: _number(value) for name, value in options.items()}


def _number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value, type=float)
    except msgspec.DecodeError:
        return value


def _stream(body: bytes) -> Iterable[bytes]:
    return (event.data for event in read_events(body, _DONE) if event.data != _DONE)


def _add_details(generated: Generated, details: Mapping[str, Any]) -> None:
    """Add what KServe's servers say of tokens: a list for an answer in one piece, one token for a piece of a stream."""
    token = details.get("token")
    tokens = [token] if isinstance(token, dict) else list(entries(details.get("logprobs"), "logprobs"))
    generated.add_logprobs(
        [{"token": word(token.get("text")), "logprob": token.get("logprob")} for token in tokens]
    )
    if ids := [token["id"] for token in tokens if type(token.get("id")) is int]:
        generated.token_ids = generated.token_ids or []
        generated.token_ids += ids
    generated.finish_reason = _ENDS.get(word(details.get("finish_reason")), generated.finish_reason)

"""Decoder of the generate endpoints of Triton and KServe: `POST /v2/models/NAME/generate` and `.../generate_stream`."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from quantdrift.core.records import Loss
from quantdrift.sidecar.protocols.chats.form import (
    Generated,
    PieceReader,
    entries,
    object_in,
    request_of,
    response_of,
    word,
)
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
        prompt = document.get("text_input")
        if not isinstance(prompt, str):
            raise LostError(Loss.DECODE, "there is no text_input")
        # The options of TensorRT-LLM are inputs of its model, beside the text.
        sent = {**document, **object_in(document.get("parameters"))}
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
            document=document,
            echoed="" if sent.get("exclude_input_in_output") is True else prompt,
        )

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

"""Decoders of OpenAI-compatible servers: chat, completions and embeddings, whole and streamed.

The body names the model. Text is BYTES; structured values are kept as JSON. Of the other members of a request
only those that affect the generated output are kept.
"""

import base64
import binascii
import io
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from quantdrift.core.records import Loss, Tensor
from quantdrift.sidecar.protocols.cost import check
from quantdrift.sidecar.protocols.decoder import DecodedRequest, DecodedResponse, WireContext
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head
from quantdrift.sidecar.protocols.json_tensors import (
    convert,
    pack_values,
    read_document,
    text_tensor,
    write_json,
)
from quantdrift.sidecar.protocols.openai_choices import JoinedPieces, numbers

_DONE = b"[DONE]"
_BY_ID = "return_tokens_as_token_ids"

# No member that identifies the caller: user, metadata, safety_identifier, prompt_cache_key and the like.
OPTIONS = frozenset(
    """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of chat_template
    chat_template_kwargs continue_final_message dimensions documents dry_multiplier ebnf echo encoding_format
    frequency_penalty function_call functions grammar guided_choice guided_decoding_backend guided_grammar
    guided_json guided_regex ignore_eos include_stop_str_in_output json_schema length_penalty logit_bias
    logits_processors logprob_token_ids logprobs max_completion_tokens max_tokens min_p min_tokens mirostat
    modalities n no_repeat_ngram_size parallel_tool_calls prediction presence_penalty prompt_logprobs
    reasoning_effort regex repeat_penalty repetition_penalty response_format return_token_ids
    return_tokens_as_token_ids seed server_tools skip_special_tokens spaces_between_special_tokens stop
    stop_token_ids stored_prompt stream stream_options structured_outputs suffix temperature thinking
    thinking_token_budget tool_choice top_k top_logprobs top_p truncate_prompt_tokens typical_p
    use_beam_search verbosity xtc_probability
    """.split()  # noqa: SIM905 - a list of so many words would fill a page
)
_MAX_EVENTS = 200_000
_MAX_LINES = 4 * _MAX_EVENTS
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class _Embedding(msgspec.Struct):
    index: Annotated[int, Meta(ge=0)]
    embedding: list[float] | str


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]


class OpenAIChat:
    """Decoder of `POST /v1/chat/completions`."""

    def request(self, head: Head, body: bytes, wire: WireContext) -> DecodedRequest:
        """Return the request.

        Raises
        ------
        LostError
            `decode`: it does not follow the protocol. `too_large`: too many values.
        """
        document = read_document(body, wire.max_values)
        messages, tools = document.get("messages"), document.get("tools")
        if not isinstance(messages, list) or not messages:
            raise LostError(Loss.DECODE, "there are no messages")
        inputs = [text_tensor("messages", [write_json(messages)])]
        if tools:
            inputs.append(text_tensor("tools", [write_json(tools)]))
        return _query(document, inputs)

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the response.

        Raises
        ------
        LostError
            As for a request; for a stream also `truncated` if its end is missing (`[DONE]`, or a finish
            reason for each choice), and `error_status` if it reports an error.
        """
        return _generated(body, query, wire)


class OpenAICompletions:
    """Decoder of `POST /v1/completions`."""

    def request(self, head: Head, body: bytes, wire: WireContext) -> DecodedRequest:
        """Return the request; errors as for a chat."""
        document = read_document(body, wire.max_values)
        return _query(document, _texts_or_ids(document.get("prompt"), "prompt", "prompt_ids"))

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the response; errors as for a chat."""
        return _generated(body, query, wire)


class OpenAIEmbeddings:
    """Decoder of `POST /v1/embeddings`."""

    def request(self, head: Head, body: bytes, wire: WireContext) -> DecodedRequest:
        """Return the request; errors as for a chat."""
        document = read_document(body, wire.max_values)
        return _query(document, _texts_or_ids(document.get("input"), "input", "input_ids"))

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the response: one vector for each input.

        Raises
        ------
        LostError
            `decode`: it does not follow the protocol, or vectors differ in length. `too_large`: as for a
            request.
        """
        entries = convert(read_document(body, wire.max_values), _Embeddings).data
        entries.sort(key=lambda entry: entry.index)
        if [entry.index for entry in entries] != list(range(_n_texts(query.inputs))):
            raise LostError(Loss.DECODE, "the number of vectors differs from that of inputs")
        vectors = [_vector(entry.embedding) for entry in entries]
        if len({len(vector) for vector in vectors}) != 1:
            raise LostError(Loss.DECODE, "vectors of different lengths")
        shape = (len(vectors), len(vectors[0]) // 4)
        data = b"".join(vectors)
        return DecodedResponse(
            version="", outputs=(Tensor(name="embedding", datatype="FP32", shape=shape, data=data),)
        )


def _query(document: dict[str, Any], inputs: Sequence[Tensor]) -> DecodedRequest:
    options = {
        name: document[name] for name in sorted(OPTIONS & document.keys()) if document[name] is not None
    }
    model = document.get("model")
    return DecodedRequest(
        inputs=(*inputs, text_tensor("options", [write_json(options)])),
        parameters=options,
        document=document,
        model=model if isinstance(model, str) else "",
    )


def _texts_or_ids(value: Any, text: str, ids: str) -> list[Tensor]:
    """Return one or several texts as one tensor, or the tokens of each text as a separate tensor."""
    several = value if isinstance(value, list) else [value]
    if several and all(isinstance(item, str) for item in several):
        return [text_tensor(text, several)]
    if several and all(type(item) is int for item in several):
        several = [several]
    if not several or not all(isinstance(item, list) for item in several):
        raise LostError(Loss.DECODE, f"{text} is neither text nor tokens")
    return [numbers(f"{ids}.{index}", "INT64", item) for index, item in enumerate(several)]


def _n_texts(inputs: Sequence[Tensor]) -> int:
    """Return the number of input texts; the last input has the options."""
    return inputs[0].shape[0] if inputs[0].datatype == "BYTES" else len(inputs) - 1


def _generated(body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
    """Return what was generated.

    The body shows whether it is streamed, because the head may be missing: a JSON object begins with a brace,
    and no line of a stream does.
    """
    generation = JoinedPieces(wire.max_values)
    is_stream = body.lstrip()[:1] != b"{"
    if not is_stream:
        generation.add(read_document(body, wire.max_values))
    else:
        _join(body, generation, query, wire)
    tokens_are_ids = query.parameters.get(_BY_ID) is True
    by_fingerprint = wire.model is not None and wire.model.version_from == "system_fingerprint"
    return DecodedResponse(
        version=generation.fingerprint if by_fingerprint else "",
        outputs=generation.tensors(tokens_are_ids=tokens_are_ids),
        is_stream=is_stream,
        n_tokens=generation.n_tokens,
        response_id=generation.response_id,
    )


def _n_choices(query: DecodedRequest) -> int:
    """Return the number of requested choices."""
    n = query.parameters.get("n")
    return _n_texts(query.inputs) * (n if type(n) is int else 1)


def _join(body: bytes, generation: JoinedPieces, query: DecodedRequest, wire: WireContext) -> None:
    n_values = 0
    for event in read_events(body, _DONE):
        if event.data == _DONE:
            return
        if event.kind == b"error":
            raise LostError(Loss.ERROR_STATUS, "the stream reports an error")
        if event.kind not in (b"", b"message"):
            raise LostError(Loss.DECODE, "an unknown kind of event")
        n_values += event.data.count(b",") + event.data.count(b"[") + event.data.count(b"{")
        if n_values > wire.max_values:
            raise LostError(Loss.TOO_LARGE, f"a stream of more than {wire.max_values} values")
        generation.add(read_document(event.data, wire.max_values))
    # `transformers serve` never sends [DONE]: there each requested choice must have a finish reason.
    if generation.n_ended == 0 or generation.n_ended < _n_choices(query):
        raise LostError(Loss.TRUNCATED, "the end of the stream is missing")


def _vector(embedding: Sequence[float] | str) -> bytes:
    """Return a vector as FP32 bytes; as text it is the base64 of these."""
    if not isinstance(embedding, str):
        return pack_values(embedding, "FP32")
    try:
        data = base64.b64decode(embedding, validate=True)
    except (binascii.Error, ValueError) as error:
        raise LostError(Loss.DECODE, "a vector is not base64") from error
    if len(data) % np.dtype(np.float32).itemsize:
        raise LostError(Loss.DECODE, "a vector is cut short")
    return data


class ServerSentEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event.

    Parameters
    ----------
    kind
        The value of `event:`, or empty.
    data
        The `data:` lines, joined with line feeds.
    """

    kind: bytes
    data: bytes


def read_events(body: bytes, last: bytes) -> Iterator[ServerSentEvent]:
    """Yield the events in `body`.

    Lines end with CRLF, LF or CR. Comments, ids and unknown fields are ignored.

    Parameters
    ----------
    body
        The whole stream.
    last
        Data of the event that ends a stream; some servers leave out the empty line after it.

    Raises
    ------
    LostError
        `too_large`: too many events or lines. `truncated`: the stream ends within an event.
    """
    unified = body.removeprefix(_BYTE_ORDER_MARK).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if unified.count(b"\n") > _MAX_LINES:
        raise LostError(Loss.TOO_LARGE, f"a stream of more than {_MAX_LINES} lines")
    kind, data, n_events, ended = b"", [], 0, b""
    for ended in io.BytesIO(unified):  # a list of all lines could be many times as large
        line = ended.removesuffix(b"\n")
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                data.append(value.removeprefix(b" "))
            elif name == b"event":
                kind = value.removeprefix(b" ")
            continue
        if data:
            n_events += 1
            if n_events > _MAX_EVENTS:
                raise LostError(Loss.TOO_LARGE, f"a stream of more than {_MAX_EVENTS} events")
            check()
            yield ServerSentEvent(kind=kind, data=b"\n".join(data))
        kind, data = b"", []
    if data == [last]:
        yield ServerSentEvent(kind=kind, data=last)
    elif data or (ended and not ended.endswith(b"\n") and not ended.startswith(b":")):
        raise LostError(Loss.TRUNCATED, "a stream ends within an event")

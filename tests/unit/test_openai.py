"""OpenAI-compatible servers: what they are asked and answer, whole and streamed."""

import base64
import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from quantdrift.core.records import Loss
from quantdrift.sidecar.protocols.openai import OpenAIChat, OpenAICompletions, OpenAIEmbeddings
from tests.support.sidecar.decode import answer, ask, datatypes, lost, values

pytestmark = pytest.mark.unit

CHAT, COMPLETIONS, EMBEDDINGS = OpenAIChat(), OpenAICompletions(), OpenAIEmbeddings()
SAID = [{"role": "user", "content": "größe?"}]

# As LitServe answered, whole and streamed with two choices and a call of a tool.
WHOLE = (
    '{"id":"chatcmpl-120df0","object":"chat.completion","created":1795277902,"model":"loud","choices":[{"index":0,'
    '"message":{"role":"assistant","content":"GRÖSSE MATTERS","name":null,"tool_calls":[{"index":0,"id":"call_1",'
    '"type":"function","function":{"name":"measure","arguments":"{\\"text\\": \\"größe\\"}"}}],"tool_call_id":null},'
    '"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}'
).encode()
STREAMED = (
    'data: {"id":"chatcmpl-51e4db","object":"chat.completion.chunk","created":1795277902,"model":"loud",'
    '"system_fingerprint":null,"choices":[{"delta":{"role":"assistant","content":"GRÖSSE","name":null,"tool_calls":null,'
    '"tool_call_id":null},"finish_reason":null,"index":0,"logprobs":null},{"delta":{"role":"assistant","content":"GRÖSSE",'
    '"name":null,"tool_calls":null,"tool_call_id":null},"finish_reason":null,"index":1,"logprobs":null}],"usage":null}\n\n'
    'data: {"id":"chatcmpl-f1574d","object":"chat.completion.chunk","created":1795277902,"model":"loud",'
    '"system_fingerprint":null,"choices":[{"delta":{"role":"assistant","content":" MATTERS","name":null,"tool_calls":null,'
    '"tool_call_id":null},"finish_reason":null,"index":0,"logprobs":null},{"delta":{"role":"assistant","content":"",'
    '"name":null,"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":"measure","arguments":'
    '"{}"}}],"tool_call_id":null},"finish_reason":null,"index":1,"logprobs":null}],"usage":null}\n\n'
    'data: {"id":"chatcmpl-8d3dca","object":"chat.completion.chunk","created":1795277902,"model":"loud",'
    '"system_fingerprint":null,"choices":[{"delta":{"role":null,"content":null,"name":null,"tool_calls":null,'
    '"tool_call_id":null},"finish_reason":"stop","index":0,"logprobs":null},{"delta":{"role":null,"content":null,'
    '"name":null,"tool_calls":null,"tool_call_id":null},"finish_reason":"stop","index":1,"logprobs":null}],'
    '"usage":{"prompt_tokens":0,"total_tokens":0,"completion_tokens":0}}\n\n'
    "data: [DONE]\n\n"
).encode()
VECTORS = (
    b'{"data":[{"index":0,"embedding":"AACAPgAAAD8AAAAAAAAAAAAAAAA=","object":"embedding"},{"index":1,"embedding":'
    b'"AAAAAAAAAAAAAAAAAAAAPwAAAAA=","object":"embedding"}],"model":"letters","object":"list","usage":'
    b'{"prompt_tokens":0,"total_tokens":0}}'
)


def stream(*chunks: dict[str, Any], end: bytes = b"data: [DONE]\n\n") -> bytes:
    """Return a stream of these chunks."""
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + end


def delta(index: int = 0, finish_reason: str | None = None, **said: Any) -> dict[str, Any]:
    """Return a chunk with a piece of one choice."""
    return {"choices": [{"index": index, "delta": said, "finish_reason": finish_reason}]}


def test_a_chat_is_recorded_without_who_asked() -> None:
    """Messages and tools as JSON; of the rest only what decides about the answer."""
    tool = {"type": "function", "function": {"name": "f"}}
    query = ask(
        CHAT,
        {
            "model": "loud",
            "messages": SAID,
            "tools": [tool],
            "temperature": 0.5,
            "stream": True,
            "seed": None,
            "user": "alice",
            "metadata": {"tenant": "t"},
            "safety_identifier": "s",
            "prompt_cache_key": "k",
        },
    )
    assert query.model == "loud"
    assert values(query.inputs) == {
        "messages": ['[{"role":"user","content":"größe?"}]'.encode()],
        "tools": [b'[{"type":"function","function":{"name":"f"}}]'],
        "options": [b'{"stream":true,"temperature":0.5}'],
    }
    assert query.parameters == {"stream": True, "temperature": 0.5}
    assert query.document["user"] == "alice"  # for allow-listed paths


def test_a_servers_whole_answer_is_read() -> None:
    """Text, call of a tool, why it ended, and the count of tokens."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "measure", "arguments": '{"text": "größe"}'},
    }
    found = values(answer(CHAT, WHOLE).outputs)
    assert json.loads(found.pop("tool_calls")[0]) == [call]
    assert found == {"text": ["GRÖSSE MATTERS".encode()], "finish_reason": [b"stop"], "usage": [3, 2]}


def test_a_servers_stream_is_joined_per_choice() -> None:
    """As if it had come whole."""
    found = values(answer(CHAT, STREAMED).outputs)
    calls = [json.loads(called) for called in found.pop("tool_calls")]
    assert [[call["function"]["name"] for call in called] for called in calls] == [[], ["measure"]]
    assert found == {
        "text": ["GRÖSSE MATTERS".encode(), "GRÖSSE".encode()],
        "finish_reason": [b"stop", b"stop"],
        "usage": [0, 0],
    }


def test_a_stream_and_its_tokens_are_recognised() -> None:
    """Counted from the tokens of the longest choice, else from the usage of a single one; never guessed from pieces."""
    two_ids = stream(
        {"choices": [{"index": 0, "delta": {"content": "ab"}, "token_ids": [7, 8]}]},
        {"choices": [{"index": 0, "delta": {"content": "c"}, "token_ids": [9], "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}},
    )
    only_usage = stream(
        delta(content="abc", finish_reason="stop"),
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}},
    )
    replies = [answer(CHAT, body) for body in (WHOLE, STREAMED, two_ids, only_usage)]
    assert [(reply.is_stream, reply.n_tokens) for reply in replies] == [
        (False, 2),
        (True, 0),
        (True, 3),
        (True, 9),
    ]


def test_a_stream_may_end_with_a_reason_for_each_choice() -> None:
    """As `transformers serve` ends it, without `[DONE]`; what it sent was recorded here."""
    pieces = ('{"delta":{"role":"assistant"},"index":0}', '{"delta":{"content":"H"},"index":0}')
    body = "".join(f'data: {{"id":"8","choices":[{piece}],"model":"small@main"}}\n\n' for piece in pieces)
    body += 'data: {"id":"8","choices":[{"delta":{},"index":0,"finish_reason":"length"}],"usage":{"completion_tokens":4}}\n\n'
    asked = {"model": "small", "messages": SAID}
    found = values(answer(CHAT, body.encode(), ask(CHAT, asked)).outputs)
    assert found == {"text": [b"H"], "finish_reason": [b"length"], "usage": [0, 4]}
    assert lost(answer, CHAT, body.encode(), ask(CHAT, {**asked, "n": 2})) is Loss.TRUNCATED
    two = ask(COMPLETIONS, {"model": "small", "prompt": ["a", "b"]})
    assert lost(answer, COMPLETIONS, body.encode(), two) is Loss.TRUNCATED


def test_pieces_of_a_call_of_a_tool_are_merged_by_their_place() -> None:
    """Names once, arguments bit by bit, two calls mixed; the choices in any order."""
    first = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}
    second = {"index": 1, "id": "b", "function": {"name": "g", "arguments": '{"x'}}
    body = stream(
        delta(1, content="later"),
        delta(tool_calls=[first]),
        delta(tool_calls=[second]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}]),
        delta(tool_calls=[{"index": 1, "function": {"arguments": '":1}'}}]),
        delta(finish_reason="tool_calls"),
        delta(1, "stop"),
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}},
    )
    found = values(answer(CHAT, body).outputs)
    assert json.loads(found["tool_calls"][0]) == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": '{"x":1}'}},
    ]
    assert found["text"] == [b"", b"later"]
    assert found["finish_reason"] == [b"tool_calls", b"stop"]
    assert found["usage"] == [7, 9]


def test_what_a_model_thinks_and_refuses_is_kept_apart() -> None:
    """Under either name that servers give to reasoning; the function call of old is a call of a tool."""
    body = stream(
        delta(reasoning_content="hm, "),
        delta(reasoning="so"),
        delta(content="Yes."),
        delta(1, refusal="No."),
        delta(2, function_call={"name": "f"}),
        delta(2, function_call={"arguments": "{}"}),
    )
    found = values(answer(CHAT, body).outputs)
    assert found["reasoning"] == [b"hm, so", b"", b""]
    assert found["refusal"] == [b"", b"No.", b""]
    assert json.loads(found["tool_calls"][2])[0]["function"] == {"name": "f", "arguments": "{}"}


def logprobs(*entries: tuple[str, float, Sequence[tuple[str, float]]]) -> dict[str, Any]:
    """Return log-probabilities as a chat has them."""

    def one(token: str, value: float) -> dict[str, Any]:
        return {"token": token, "logprob": value, "bytes": list(token.encode())}

    return {
        "content": [
            {**one(token, value), "top_logprobs": [one(*top) for top in tops]}
            for token, value, tops in entries
        ],
        "refusal": None,
    }


def test_the_tokens_of_a_chat_are_ragged_tensors_per_choice() -> None:
    """Ids, spelling, log-probabilities and the likeliest, as far as the client asked for them; a stream's joined."""
    whole = logprobs(("Hi", -0.5, [("Hi", -0.5), ("Ho", -1.5)]), ("!", -2.0, [("!", -2.0)]))
    choice = {"finish_reason": "stop", "index": 0, "message": {"content": "Hi!"}}
    expected = {
        "tokens.0": [b"Hi", b"!"],
        "logprobs.0": [-0.5, -2.0],
        "top_tokens.0": [[b"Hi", b"Ho"], [b"!", b""]],
        "token_ids.0": [5, 6],
        "prompt_token_ids": [1, 2],
    }
    plain = answer(
        CHAT,
        {"choices": [{**choice, "logprobs": whole, "token_ids": [5, 6]}], "prompt_token_ids": [1, 2]},
    ).outputs
    first, second = ({**whole, "content": [token]} for token in whole["content"])
    pieces = [
        {"choices": [{**delta(content="Hi")["choices"][0], "logprobs": first, "token_ids": [5]}]},
        {"choices": [{**delta(content="!")["choices"][0], "logprobs": second, "token_ids": [6]}]},
        delta(finish_reason="stop"),
    ]
    streamed = answer(CHAT, stream({**delta(content=""), "prompt_token_ids": [1, 2]}, *pieces)).outputs
    assert plain == streamed
    found = values(plain)
    assert {name: found[name] for name in expected} == expected
    np.testing.assert_array_equal(found["top_logprobs.0"], [[-0.5, -1.5], [-2.0, np.nan]])
    assert datatypes(plain)["token_ids.0"] == "INT64"


def test_the_tokens_of_a_completion_come_as_lists() -> None:
    """The first of an echoed prompt has no probability; ids per choice, prompts included."""
    told = {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -0.25],
        "top_logprobs": [None, {"b": -0.25, "c": -3}],
        "text_offset": [0, 1],
    }
    choices = [
        {"index": 1, "text": "x", "finish_reason": "length", "logprobs": None},
        {"index": 0, "text": "ab", "logprobs": told, "token_ids": [8], "prompt_token_ids": [7]},
    ]
    found = values(answer(COMPLETIONS, {"choices": choices}).outputs)
    assert found["text"] == [b"ab", b"x"]
    assert found["finish_reason"] == [b"", b"length"]
    assert found["tokens.0"] == [b"a", b"b"]
    np.testing.assert_array_equal(found["logprobs.0"], [np.nan, -0.25])
    assert found["top_tokens.0"] == [[b"", b""], [b"b", b"c"]]
    assert (found["token_ids.0"], found["prompt_token_ids.0"]) == ([8], [7])
    assert "tokens.1" not in found


def test_tokens_named_by_their_ids_are_ids_where_that_was_asked_for() -> None:
    """`return_tokens_as_token_ids` of vLLM; a text that looks like one is otherwise left alone."""
    told = {"tokens": ["token_id:12", "token_id:0"], "token_logprobs": [-1, -2], "top_logprobs": None}
    body = {"choices": [{"index": 0, "text": "ab", "logprobs": told}]}
    asked = {"model": "m", "prompt": "p"}
    query = ask(COMPLETIONS, {**asked, "return_tokens_as_token_ids": True})
    assert values(answer(COMPLETIONS, body, query).outputs)["token_ids.0"] == [12, 0]
    assert "token_ids.0" not in values(answer(COMPLETIONS, body, ask(COMPLETIONS, asked)).outputs)
    told["tokens"] = ["token_id:12", "b"]
    assert lost(answer, COMPLETIONS, body, query) is Loss.DECODE


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("p", {"prompt": [b"p"]}),
        (["p", "größe"], {"prompt": [b"p", "größe".encode()]}),
        ([1, 2], {"prompt_ids.0": [1, 2]}),
        ([[1], [2, 3]], {"prompt_ids.0": [1], "prompt_ids.1": [2, 3]}),
    ],
)
def test_a_prompt_is_text_or_tokens(prompt: Any, expected: dict[str, Any]) -> None:
    """One or several of either."""
    found = values(ask(COMPLETIONS, {"model": "m", "prompt": prompt, "max_tokens": 5}).inputs)
    assert found == {**expected, "options": [b'{"max_tokens":5}']}


def test_embeddings_are_one_tensor_however_they_travel() -> None:
    """Base64 is what a server has sent; floats are the same; the order is that of the index."""
    query = ask(EMBEDDINGS, {"model": "letters", "input": ["a bee", "moo"], "encoding_format": "base64"})
    assert values(query.inputs)["input"] == [b"a bee", b"moo"]
    vectors = [[0.25, 0.5, 0, 0, 0], [0, 0, 0, 0.5, 0]]
    (found,) = answer(EMBEDDINGS, VECTORS, query).outputs
    assert (found.name, found.datatype, values((found,))["embedding"]) == ("embedding", "FP32", vectors)
    told = {"data": [{"index": 1, "embedding": vectors[1]}, {"index": 0, "embedding": vectors[0]}]}
    assert answer(EMBEDDINGS, told, query).outputs == (found,)
    tokens = ask(EMBEDDINGS, {"model": "letters", "input": [[1], [2, 3]]})
    assert answer(EMBEDDINGS, told, tokens).outputs == (found,)


@pytest.mark.parametrize(
    ("decoder", "body", "loss"),
    [
        (CHAT, b"[]", Loss.DECODE),
        (CHAT, {"model": "m"}, Loss.DECODE),
        (CHAT, {"messages": []}, Loss.DECODE),
        (CHAT, {"messages": "hi"}, Loss.DECODE),
        (CHAT, b'{"messages": [{"content": "\\ud800"}]}', Loss.DECODE),
        (CHAT, b'{"messages": [' + b"[" * 3000 + b"]" * 3000 + b"]}", Loss.DECODE),
        (CHAT, b'{"messages": [' + b"1," * 100_000 + b"1]}", Loss.TOO_LARGE),
        (COMPLETIONS, {"model": "m"}, Loss.DECODE),
        (COMPLETIONS, {"prompt": []}, Loss.DECODE),
        (COMPLETIONS, {"prompt": ["a", 1]}, Loss.DECODE),
        (COMPLETIONS, {"prompt": [True]}, Loss.DECODE),
        (COMPLETIONS, {"prompt": [[1], [2.5]]}, Loss.DECODE),
        (COMPLETIONS, {"prompt": [2**64]}, Loss.DECODE),
        (EMBEDDINGS, {"input": {"text": "a"}}, Loss.DECODE),
    ],
    ids=lambda _: "case",
)
def test_what_was_not_asked_in_the_protocol_is_lost(decoder: Any, body: Any, loss: Loss) -> None:
    """By its reason, and by nothing else."""
    assert lost(ask, decoder, body) is loss


HUGE = {"token": "a", "logprob": 0, "top_logprobs": [{"token": "", "logprob": 0}] * 400}
SMALL = {"token": "a", "logprob": 0}


@pytest.mark.parametrize(
    ("body", "loss"),
    [
        (b"", Loss.TRUNCATED),
        (b"oops", Loss.TRUNCATED),
        (b"[]", Loss.TRUNCATED),
        (b"{", Loss.DECODE),
        (b"{}", Loss.DECODE),
        (stream(), Loss.DECODE),
        (stream(delta(content="a"), end=b""), Loss.TRUNCATED),
        (stream(delta(content="a"), end=b"data: [DO"), Loss.TRUNCATED),
        (stream(delta(content="a"), delta(finish_reason="stop"), end=b"data: [DO"), Loss.TRUNCATED),
        (stream(delta(0, "stop"), delta(1, content="a"), end=b""), Loss.TRUNCATED),
        (stream(delta(content="a"), end=b'data: {"choices'), Loss.TRUNCATED),
        (stream(delta(content="a"), {"error": {"message": "no memory"}}), Loss.ERROR_STATUS),
        (stream(delta(content="a"), end=b"event: error\ndata: {}\n\n"), Loss.ERROR_STATUS),
        (stream(delta(content="a"), end=b"event: other\ndata: {}\n\n"), Loss.DECODE),
        (stream(delta(content="a"), end=b"data: [1]\n\ndata: [DONE]\n\n"), Loss.DECODE),
        (stream(delta(1, content="a")), Loss.DECODE),
        (stream({"choices": [{"delta": {"content": "a"}}]}), Loss.DECODE),
        (stream(delta(-1, content="a")), Loss.DECODE),
        (stream(delta(10**6, content="a")), Loss.DECODE),
        (stream(delta(content=1)), Loss.DECODE),
        (stream(delta(tool_calls=[{"id": "a", "function": {"arguments": "{}"}}])), Loss.DECODE),
        (stream(*[delta(content="a,,,,,,,,,,")] * 2000), Loss.TOO_LARGE),
        ({"choices": [{"index": 0, "message": {"content": "a"}, "token_ids": [-1]}]}, Loss.DECODE),
        ({"choices": [{"index": 0, "logprobs": {"tokens": ["a"], "token_logprobs": [1, 2]}}]}, Loss.DECODE),
        ({"choices": [{"index": 0, "logprobs": {"content": [HUGE, *[SMALL] * 400]}}]}, Loss.TOO_LARGE),
        (b'{"choices": [{"index": 0, "text": "\\ud800"}]}', Loss.DECODE),
        ({"choices": [{"index": 0, "text": "a"}, {"index": 0, "text": "b"}]}, Loss.DECODE),
    ],
    ids=lambda _: "case",
)
def test_what_was_not_answered_in_the_protocol_is_lost_by_its_reason(body: Any, loss: Loss) -> None:
    """A stream without its end, or with an error in it, is never taken for an answer."""
    assert lost(answer, CHAT, body, max_values=20_000) is loss


@pytest.mark.parametrize(
    "data",
    [
        [],
        [{"index": 1, "embedding": [1.0]}],
        [{"index": 0, "embedding": [1.0]}, {"index": 0, "embedding": [1.0]}],
        [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0, 2.0]}],
        [{"index": 0, "embedding": "AAA"}, {"index": 1, "embedding": "AAAA"}],
        [{"index": 0, "embedding": "ä"}, {"index": 1, "embedding": "AAAA"}],
        [{"index": 0, "embedding": ["a"]}, {"index": 1, "embedding": ["b"]}],
        [{"index": 0, "embedding": None}, {"index": 1, "embedding": None}],
    ],
    ids=lambda _: "case",
)
def test_vectors_that_are_not_those_of_the_inputs_are_lost(data: Any) -> None:
    """One for each, all of one length."""
    query = ask(EMBEDDINGS, {"model": "m", "input": ["a", "b"]})
    assert lost(answer, EMBEDDINGS, {"data": data}, query) is Loss.DECODE


def test_a_vector_of_one_number_is_one() -> None:
    """As base64 it is four bytes."""
    query = ask(EMBEDDINGS, {"model": "m", "input": "a"})
    text = base64.b64encode(struct.pack("<f", 0.5)).decode()
    (found,) = answer(EMBEDDINGS, {"data": [{"index": 0, "embedding": text}]}, query).outputs
    assert (found.shape, found.data) == ((1, 1), struct.pack("<f", 0.5))

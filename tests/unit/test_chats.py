"""Other interfaces of language models in the form of OpenAI's: what is special about each, and what is lost.

`tests/servers/test_chats.py` has the ordinary exchanges, by real clients.
"""

import json
from typing import Any

import pytest

from quantdrift.core.records import Loss
from quantdrift.sidecar.protocols.chats.generate import Generate
from quantdrift.sidecar.protocols.chats.messages import AnthropicMessages
from quantdrift.sidecar.protocols.chats.ollama import OllamaChat, OllamaGenerate
from quantdrift.sidecar.protocols.chats.responses import OpenAIResponses
from quantdrift.sidecar.protocols.decoder import DecodedRequest
from tests.support.sidecar.decode import answer, ask, lost, values

pytestmark = pytest.mark.unit

RESPONSES, MESSAGES, CHAT, ONE, GENERATE = (
    OpenAIResponses(),
    AnthropicMessages(),
    OllamaChat(),
    OllamaGenerate(),
    Generate(),
)
USER = {"role": "user", "content": "why?"}


def messages_of(query: DecodedRequest) -> list[dict[str, Any]]:
    """Return the messages as the shadow reads them."""
    assert query.inputs[0].name == "messages"
    found: list[dict[str, Any]] = json.loads(values(query.inputs)["messages"][0])
    return found


def events(*told: dict[str, Any]) -> bytes:
    """Return a stream of events, each with its type as name."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (one["type"].encode(), json.dumps(one).encode()) for one in told
    )


def lines(*told: dict[str, Any]) -> bytes:
    """Return a stream of lines."""
    return b"".join(json.dumps(one).encode() + b"\n" for one in told)


def response(*items: dict[str, Any], status: str = "completed", **more: Any) -> dict[str, Any]:
    """Return a response with these items."""
    return {"object": "response", "status": status, "output": list(items), **more}


def said(text: str, **more: Any) -> dict[str, Any]:
    """Return an item with a text."""
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text, **more}],
    }


def message(*blocks: dict[str, Any], reason: str = "end_turn") -> dict[str, Any]:
    """Return a message with these blocks."""
    return {"type": "message", "role": "assistant", "content": list(blocks), "stop_reason": reason}


def test_a_conversation_of_responses_is_a_conversation_of_a_chat() -> None:
    """Reasoning, text and calls of one answer are one message, and results of tools are messages of a tool."""
    query = ask(
        RESPONSES,
        {
            "model": "m",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a tool"}]},
                said("I ask."),
                {"type": "function_call", "call_id": "c", "name": "w", "arguments": '{"at": 1}'},
                {"type": "function_call_output", "call_id": "c", "output": "rain"},
                {"type": "message", "role": "user", "content": "and?"},
            ],
        },
    )
    call = {"id": "c", "type": "function", "function": {"name": "w", "arguments": '{"at": 1}'}}
    assert messages_of(query) == [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "I ask.", "reasoning_content": "a tool", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
        {"role": "user", "content": "and?"},
    ]


def test_a_conversation_of_messages_is_a_conversation_of_a_chat() -> None:
    """Blocks of tools become calls and messages of a tool; what is no image with content stays as it is."""
    query = ask(
        MESSAGES,
        {
            "model": "m",
            "system": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "a tool"},
                        {"type": "tool_use", "id": "c", "name": "w", "input": {"at": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [{"type": "text", "text": "rain"}],
                        },
                        {"type": "image", "source": {}},
                        {"type": "text", "text": "and?"},
                    ],
                },
            ],
        },
    )
    call = {"id": "c", "type": "function", "function": {"name": "w", "arguments": '{"at":1}'}}
    assert messages_of(query) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "reasoning_content": "a tool", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
        {"role": "user", "content": [{"type": "image", "source": {}}, {"type": "text", "text": "and?"}]},
    ]


@pytest.mark.parametrize(
    ("decoder", "asked"),
    [
        (
            MESSAGES,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "which?"},
                            {
                                "type": "image",
                                "source": {"type": "base64", "media_type": "image/jpeg", "data": "/9j/AA=="},
                            },
                        ],
                    }
                ]
            },
        ),
        (CHAT, {"messages": [{"role": "user", "content": "which?", "images": ["/9j/AA=="]}]}),
        (
            RESPONSES,
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "which?"},
                            {"type": "input_image", "image_url": "data:image/jpeg;base64,/9j/AA=="},
                        ],
                    }
                ]
            },
        ),
    ],
)
def test_an_image_has_one_form(decoder: Any, asked: dict[str, Any]) -> None:
    """That of a chat, with its content: so a reference at a server can be sent it."""
    image = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9j/AA=="}}
    assert messages_of(ask(decoder, {"model": "m", **asked})) == [
        {"role": "user", "content": [{"type": "text", "text": "which?"}, image]}
    ]


@pytest.mark.parametrize(
    ("decoder", "asked", "options"),
    [
        (
            RESPONSES,
            {
                "input": "a",
                "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
                "reasoning": {"effort": "low"},
                "tool_choice": {"type": "function", "name": "w"},
                "user": "u",
            },
            {
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
                "reasoning_effort": "low",
                "tool_choice": {"type": "function", "function": {"name": "w"}},
            },
        ),
        (RESPONSES, {"input": "a", "previous_response_id": "r"}, {"stored_prompt": True}),
        (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, {"server_tools": True}),
        (
            MESSAGES,
            {
                "messages": [USER],
                "stop_sequences": ["x"],
                "tool_choice": {"type": "any"},
                "thinking": {"type": "enabled", "budget_tokens": 9},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
                "metadata": {"user_id": "u"},
            },
            {
                "stop": ["x"],
                "tool_choice": "required",
                "thinking": True,
                "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
            },
        ),
        (
            CHAT,
            {"messages": [USER], "format": "json", "think": False, "options": {"num_predict": -1, "seed": 1}},
            {"response_format": {"type": "json_object"}, "thinking": False, "seed": 1},
        ),
        (ONE, {"prompt": "a", "context": [1]}, {"stored_prompt": True}),
        (ONE, {"prompt": "a", "raw": True, "think": "high"}, {"reasoning_effort": "high"}),
        (
            GENERATE,
            {"text_input": "a", "stop_words": ["x"], "temperature": 0},
            {"stop": ["x"], "temperature": 0},
        ),
        (GENERATE, {"text_input": "a", "parameters": {"max_tokens": 3}}, {"max_tokens": 3}),
    ],
)
def test_options_have_the_names_of_openai(
    decoder: Any, asked: dict[str, Any], options: dict[str, Any]
) -> None:
    """What affects no answer, or names a user, is left out."""
    assert ask(decoder, asked).parameters == options


def test_a_prompt_without_a_template_is_a_completion() -> None:
    """Ollama's `raw`, and a generate endpoint."""
    for decoder, asked in ((ONE, {"prompt": "a", "raw": True}), (GENERATE, {"text_input": "a"})):
        query = ask(decoder, asked)
        assert [tensor.name for tensor in query.inputs] == ["prompt", "options"]
        assert values(query.inputs)["prompt"] == [b"a"]


@pytest.mark.parametrize(
    ("decoder", "answered", "reason"),
    [
        (RESPONSES, response(said("a")), b"stop"),
        (
            RESPONSES,
            response(said("a"), status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
            b"length",
        ),
        (MESSAGES, message({"type": "text", "text": "a"}, reason="max_tokens"), b"length"),
        (MESSAGES, message({"type": "text", "text": "a"}, reason="pause_turn"), b""),
        (CHAT, {"message": {"content": "a"}, "done": True, "done_reason": "length"}, b"length"),
        (ONE, {"response": "a", "done": True, "done_reason": "stop"}, b"stop"),
        (GENERATE, {"text_output": "a", "details": {"finish_reason": "eos_token", "logprobs": []}}, b"stop"),
        (GENERATE, {"text_output": "a"}, b""),
    ],
)
def test_the_end_has_the_words_of_openai(decoder: Any, answered: dict[str, Any], reason: bytes) -> None:
    """A limit, the model's own end, or unknown."""
    outputs = values(answer(decoder, answered).outputs)
    assert (outputs["text"], outputs["finish_reason"]) == ([b"a"], [reason])


@pytest.mark.parametrize(
    ("decoder", "answered"),
    [
        (RESPONSES, response({"type": "reasoning", "summary": []}, said("a"))),
        (RESPONSES, response({"type": "web_search_call"}, said("a"))),
        (MESSAGES, message({"type": "thinking", "thinking": ""}, {"type": "text", "text": "a"})),
        (MESSAGES, message({"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"})),
        (CHAT, {"message": {"content": "a", "thinking": "b"}, "done": True}),
    ],
)
def test_what_was_generated_besides_the_text_is_known_of(decoder: Any, answered: dict[str, Any]) -> None:
    """Also if the server hides it: the text alone is not what the model generated, and must not be scored as if it were."""
    (reasoning,) = values(answer(decoder, answered).outputs)["reasoning"]
    assert reasoning


def test_log_probabilities_are_those_of_a_chat() -> None:
    """Of responses and of Ollama they have OpenAI's form; of a generate endpoint tokens have ids."""
    token = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -1.0}]}
    for decoder, answered in (
        (RESPONSES, response(said("a", logprobs=[token]))),
        (CHAT, {"message": {"content": "a"}, "logprobs": [token], "done": True}),
    ):
        outputs = values(answer(decoder, answered).outputs)
        assert (outputs["tokens.0"], outputs["logprobs.0"]) == ([b"a"], [-0.5])
        assert (outputs["top_tokens.0"], outputs["top_logprobs.0"]) == ([[b"b"]], [[-1.0]])
    pieces = [
        {
            "text_output": text,
            "details": {"token": {"id": number, "text": text, "logprob": -0.5, "special": False}},
        }
        for number, text in enumerate("ab")
    ]
    streamed = b"".join(b"data: " + json.dumps(piece).encode() + b"\n\n" for piece in pieces)
    outputs = values(answer(GENERATE, streamed).outputs)
    assert (outputs["text"], outputs["token_ids.0"]) == ([b"ab"], [0, 1])


def test_an_answer_of_a_generate_endpoint_may_repeat_its_prompt() -> None:
    """Triton's vLLM backend does, if the client does not forbid it."""
    query = ask(GENERATE, {"text_input": "the fox"})
    assert values(answer(GENERATE, {"text_output": "the fox jumps"}, query).outputs)["text"] == [b" jumps"]
    alone = ask(GENERATE, {"text_input": "the fox", "parameters": {"exclude_input_in_output": True}})
    kept = answer(GENERATE, {"text_output": "the fox jumps", "model_version": "2"}, alone)
    assert (values(kept.outputs)["text"], kept.version) == ([b"the fox jumps"], "2")


def test_a_stream_of_responses_needs_only_its_finished_items() -> None:
    """A server that leaves the items out of its last event."""
    streamed = events(
        {"type": "response.output_item.done", "item": said("a")},
        {"type": "response.completed", "response": response()},
    )
    answered = answer(RESPONSES, streamed)
    assert values(answered.outputs)["text"] == [b"a"]
    assert answered.is_stream


@pytest.mark.parametrize(
    ("decoder", "body", "loss"),
    [
        (RESPONSES, events({"type": "response.output_text.delta", "delta": "a"}), Loss.TRUNCATED),
        (RESPONSES, events({"type": "response.failed", "response": {}}), Loss.ERROR_STATUS),
        (RESPONSES, response(status="queued"), Loss.ERROR_STATUS),
        (RESPONSES, {"object": "response"}, Loss.DECODE),
        (RESPONSES, response(said("a") | {"content": "a"}), Loss.DECODE),
        (MESSAGES, events({"type": "message_start", "message": {}}), Loss.TRUNCATED),
        (MESSAGES, events({"type": "error", "error": {"type": "overloaded_error"}}), Loss.ERROR_STATUS),
        (MESSAGES, {"type": "error"}, Loss.ERROR_STATUS),
        (MESSAGES, {"type": "message"}, Loss.DECODE),
        (MESSAGES, message({"type": "text", "text": "a"}) | {"content": [1]}, Loss.DECODE),
        (CHAT, lines({"message": {"content": "a"}, "done": False}), Loss.TRUNCATED),
        (CHAT, lines({"error": "out of memory"}), Loss.ERROR_STATUS),
        (CHAT, b'{"message": {"content": "a"}, "do', Loss.TRUNCATED),
        (ONE, b"", Loss.TRUNCATED),
        (GENERATE, {"error": "no"}, Loss.ERROR_STATUS),
        (GENERATE, {"outputs": []}, Loss.DECODE),
        (GENERATE, b"", Loss.DECODE),
    ],
)
def test_what_is_no_whole_answer_is_lost(decoder: Any, body: Any, loss: Loss) -> None:
    """With its reason."""
    assert lost(answer, decoder, body) is loss


@pytest.mark.parametrize(
    ("decoder", "body"),
    [
        (RESPONSES, {}),
        (RESPONSES, {"input": [1]}),
        (MESSAGES, {"messages": "a"}),
        (MESSAGES, {"messages": []}),
        (CHAT, {}),
        (GENERATE, {"inputs": []}),
    ],
)
def test_what_is_no_request_is_lost(decoder: Any, body: Any) -> None:
    """It does not follow the protocol."""
    assert lost(ask, decoder, body) is Loss.DECODE


@pytest.mark.parametrize("decoder", [RESPONSES, MESSAGES, CHAT, GENERATE])
def test_the_values_of_a_stream_are_bounded(decoder: Any) -> None:
    """A body of few bytes may have many values."""
    piece = b'data: {"type":"a","text_output":"","x":[' + b"1," * 40 + b"1]}\n\n"
    body = piece * 40 if decoder is not CHAT else piece.removeprefix(b"data: ") * 40
    assert lost(answer, decoder, body, max_values=200) is Loss.TOO_LARGE

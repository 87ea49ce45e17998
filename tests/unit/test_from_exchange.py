"""Scoring requests, built from exchanges with an OpenAI-compatible server."""

import json
from typing import Any

import numpy as np
import pytest

from quantdrift.core.config.schema import Generation
from quantdrift.core.errors import QuarantineError
from quantdrift.models.language.answer import Answer, ToolCall
from quantdrift.models.language.from_exchange import scoring_inputs
from quantdrift.models.language.scoring import Scores, ScoringRequest
from tests.support.shadow.onnx_models import exchange_of, inputs_of
from tests.support.shadow.openai_exchanges import chat, exchange

pytestmark = pytest.mark.unit

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = [{"role": "user", "content": "größe?"}]


def read(
    path: str, asked: dict[str, Any], answered: Any
) -> tuple[list[ScoringRequest], list[Answer], list[Scores | None]]:
    """Return what is asked of the reference, the answers, and the candidate's own scores."""
    inputs, candidate = scoring_inputs(exchange(path, {"model": "m", **asked}, answered))
    return inputs["request"].tolist(), candidate["answer"].tolist(), candidate["scores"].tolist()


def of_chat(answered: Any, **asked: Any) -> tuple[ScoringRequest, Answer, Scores | None]:
    """Return the same of the only choice of a chat."""
    (one,), (answer,), (scores,) = read(CHAT, {"messages": SAID, **asked}, answered)
    return one, answer, scores


def test_a_chat_is_an_item_with_its_messages_and_template() -> None:
    """The prompt's text is there for slices."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"required": ["a"]}}}
    more = {"chat_template_kwargs": {"enable_thinking": False}, "tools": [tool]}
    asked, answer, scores = of_chat(chat("yes"), **more)
    assert asked == ScoringRequest(
        messages=tuple(SAID),
        tools=(tool,),
        template={"chat_template_kwargs": {"enable_thinking": False}},
        served="yes",
        is_ended=True,
        temperature=1.0,
    )
    assert (answer.text, answer.finish_reason, answer.tools) == ("yes", "stop", {"f": {"required": ["a"]}})
    assert scores is None
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    inputs, _ = scoring_inputs(exchange(CHAT, {"model": "m", "messages": [*SAID, *parts]}, chat()))
    assert inputs["prompt"].tolist() == ["größe?\na\nb"]
    assert inputs["answer"].tolist() == ["yes"]


def test_every_choice_of_every_prompt_is_an_item() -> None:
    """Choices come prompt by prompt."""
    choices = [{"index": i, "text": str(i), "finish_reason": "stop"} for i in range(4)]
    asked, _, _ = read(COMPLETIONS, {"prompt": ["a", "b"], "n": 2}, {"choices": choices})
    assert [(one.prompt, one.served) for one in asked] == [("a", "0"), ("a", "1"), ("b", "2"), ("b", "3")]
    ids, _, _ = read(
        COMPLETIONS, {"prompt": [[5, 6], [7]], "add_special_tokens": False}, {"choices": choices[:2]}
    )
    assert [one.prompt_ids for one in ids] == [(5, 6), (7,)]
    assert not ids[0].add_special_tokens
    with pytest.raises(QuarantineError, match="choice 2 does not belong to one of the 2 prompts"):
        read(COMPLETIONS, {"prompt": ["a", "b"]}, {"choices": choices})


def test_ids_from_the_wire_go_before_texts() -> None:
    """They are what the candidate really read and said."""
    answered = {**chat("yes", token_ids=[8, 9]), "prompt_token_ids": [1, 2, 3]}
    asked, answer, _ = of_chat(answered)
    assert (asked.prompt_ids, asked.served_ids, answer.n_tokens) == ((1, 2, 3), (8, 9), 2)


def test_the_number_of_tokens_is_read_from_the_usage() -> None:
    """Of one prompt and one answer; of zeros nothing is known."""
    usage = {"usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    asked, answer, _ = of_chat({**chat(), **usage})
    assert (asked.n_prompt_tokens, answer.n_tokens) == (5, 2)
    choices = [{"index": i, "text": str(i), "finish_reason": "stop"} for i in range(2)]
    several, answers, _ = read(COMPLETIONS, {"prompt": ["a", "b"]}, {"choices": choices, **usage})
    assert [one.n_prompt_tokens for one in several] == [None, None]
    assert [one.n_tokens for one in answers] == [None, None]
    asked, answer, _ = of_chat({**chat(), "usage": {"prompt_tokens": 0, "completion_tokens": 0}})
    assert (asked.n_prompt_tokens, answer.n_tokens) == (None, None)


def _logprobs(*tokens: str, top: int = 0) -> dict[str, Any]:
    one = {"logprob": -0.5, "top_logprobs": [{"token": f"token_id:{n}", "logprob": -1.0} for n in range(top)]}
    return {"logprobs": {"content": [{"token": token, **one} for token in tokens]}}


def test_log_probabilities_come_with_their_tokens() -> None:
    """Named by ids or by their spelling."""
    named = of_chat(
        chat("ab", **_logprobs("token_id:4", "token_id:5", top=2)), return_tokens_as_token_ids=True
    )
    assert named[0].served_ids == (4, 5)
    assert named[2] is not None
    assert (named[2].ids, named[2].tokens) == ((4, 5), ())
    np.testing.assert_array_equal(named[2].top_ids, [[0, 1], [0, 1]])
    spelt_too = _logprobs("token_id:4", "token_id:5", top=2)
    for one, text in zip(spelt_too["logprobs"]["content"], "ab", strict=True):
        one["bytes"] = list(text.encode())  # vLLM: only of what is listed they are the name's
    (scores,) = of_chat(chat("ab", **spelt_too), return_tokens_as_token_ids=True)[2:]
    assert scores is not None
    assert (scores.ids, scores.tokens) == ((4, 5), ())
    np.testing.assert_array_equal(scores.top_ids, [[0, 1], [0, 1]])
    spelt = of_chat(chat("ab", **_logprobs("a", "b", "</s>")))
    assert spelt[2] is not None
    assert (spelt[2].ids, spelt[2].tokens) == ((), (b"a", b"b", b"</s>"))
    assert spelt[0].served == "ab</s>"
    assert of_chat(chat("ü", **_logprobs("\ufffd", "\ufffd")))[0].served == "ü"


def test_logprobs_after_a_sampling_filter_are_left_out() -> None:
    """Minus infinity is written as -9999: the other values there are of the tokens that were left."""
    logprobs = _logprobs("a", "b", top=2)
    first = logprobs["logprobs"]["content"][0]
    first["top_logprobs"] = [first["top_logprobs"][0], {"token": "c", "logprob": -9999.0}]
    scores = of_chat(chat("ab", **logprobs))[2]
    assert scores is not None
    np.testing.assert_array_equal(scores.logprobs, [np.nan, -0.5])
    np.testing.assert_array_equal(scores.top_logprobs, [[np.nan, np.nan], [-1.0, -1.0]])


@pytest.mark.parametrize(
    "options",
    [
        {"structured_outputs": {"regex": "[ab]+"}},
        {"response_format": {"type": "json_object"}},
        {"guided_choice": ["ab"]},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    ],
)
def test_what_a_grammar_left_is_not_what_the_model_said(options: dict[str, Any]) -> None:
    """What is forbidden was taken out before log-probabilities were told. The tokens are those that were served."""
    asked, _, scores = of_chat(chat("ab", **_logprobs("a", "b", top=2)), **options)
    assert scores is None
    assert asked.served == "ab"
    wire = exchange(
        CHAT, {"model": "m", "messages": SAID, **options}, chat("ab", **_logprobs("a", "b"), token_ids=[4, 5])
    )
    (one,) = scoring_inputs(wire, has_replica=True)[0]["request"]
    assert (one.served_ids, one.ask_replica) == ((4, 5), True)


def test_a_list_of_what_the_client_named_is_not_that_of_the_likeliest() -> None:
    """With vLLM's `logprob_token_ids`; the served token's log-probability is the model's."""
    scores = of_chat(chat("ab", **_logprobs("a", "b", top=2)), logprob_token_ids=[0, 1])[2]
    assert scores is not None
    assert scores.logprobs.tolist() == [-0.5, -0.5]
    assert scores.top_logprobs.shape == (2, 0)


def test_a_stop_sequence_may_end_a_text_within_a_token_or_before_any() -> None:
    """An answer of nothing is then no failure; where tokens are told, nothing is cut."""
    asked, answer, _ = of_chat(chat(""), stop=["\n"])
    assert (asked.is_cut, answer.is_cut, answer.is_empty) == (True, True, False)
    assert not of_chat(chat("a", finish_reason="length"), stop="\n")[1].is_cut
    assert of_chat(chat(""))[1].is_empty
    assert of_chat(chat("", finish_reason="length"), stop="\n")[1].is_empty
    assert not of_chat(chat("a", **_logprobs("a", ".\n")), stop="\n")[0].is_cut


def test_functions_are_offered_as_tools_are() -> None:
    """The way before there were tools."""
    called = {"function_call": {"name": "f", "arguments": "{}"}}
    answer = of_chat(chat(None, message=called), functions=[{"name": "f", "parameters": {}}])[1]
    assert (answer.calls, answer.tools) == ((ToolCall(name="f", arguments="{}"),), {"f": {}})


def test_the_effort_is_given_to_the_template() -> None:
    """Each has one token: their number would not tell."""
    asked, _, _ = of_chat(chat(), reasoning_effort="low", chat_template_kwargs={"x": 1})
    assert asked.template == {"chat_template_kwargs": {"reasoning_effort": "low", "x": 1}}


def test_what_a_server_made_of_the_tokens_is_no_text_to_score() -> None:
    """Reasoning and calls of tools are cut out of what was generated: only tokens bring them back."""
    called = {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
    asked, answer, _ = of_chat(chat(None, message=called))
    assert asked.served is None
    assert answer.calls == (ToolCall(name="f", arguments="{}"),)
    assert not answer.is_empty
    assert of_chat(chat("so", message={"reasoning": "hm"}))[0].served is None
    whole = of_chat(chat("so", message={"reasoning": "hm"}, **_logprobs("<think>", "hm", "</think>", "so")))
    assert whole[0].served == "<think>hm</think>so"


def test_an_answer_that_was_taken_apart_is_a_message_where_its_tokens_are_counted() -> None:
    """The template puts it together; without a count nothing would show that it writes it otherwise."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    answered = chat(None, message={"reasoning_content": "hm", "tool_calls": [call]})
    assert of_chat(answered)[0].served_message == {}
    counted = of_chat({**answered, "usage": {"prompt_tokens": 3, "completion_tokens": 9}})[0]
    assert counted.served_message == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [call],
    }
    assert (
        of_chat({**chat("so"), "usage": {"prompt_tokens": 3, "completion_tokens": 1}})[0].served_message == {}
    )


@pytest.mark.parametrize(
    ("content", "options", "problem"),
    [
        (
            [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "input_audio"}],
            {},
            "image_url, input_audio",
        ),
        ("a", {"stored_prompt": True}, "kept at the server"),
        ("a", {"server_tools": True}, "tools of its own"),
    ],
)
def test_a_prompt_that_is_not_all_text_or_not_all_there_is_set_aside(
    content: Any, options: dict[str, Any], problem: str
) -> None:
    """With what is missing: a reference that read the rest alone would be compared with an answer to something else."""
    messages = [{"role": "user", "content": content}]
    with pytest.raises(QuarantineError, match=problem):
        read(CHAT, {"messages": messages, **options}, chat())


def test_an_empty_answer_is_reported() -> None:
    """A refusal is something."""
    assert of_chat(chat("", finish_reason="length"))[1].is_empty
    assert not of_chat(chat(None, message={"refusal": "no"}))[1].is_empty


@pytest.mark.parametrize(
    ("options", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "top_p": 0.9, "frequency_penalty": 0, "logit_bias": {}}, True),
        ({"top_k": 1}, True),
        ({}, False),
        ({"temperature": 0.7}, False),
        ({"temperature": 0, "repetition_penalty": 1.1}, False),
        ({"temperature": 0, "response_format": {"type": "json_object"}}, False),
        ({"temperature": 0, "response_format": {"type": "text"}, "tool_choice": "auto"}, True),
        ({"temperature": 0, "tool_choice": "required"}, False),
        ({"temperature": 0, "structured_outputs": {"regex": "a"}}, False),
        ({"temperature": 0, "repeat_penalty": 1.1}, False),
        ({"temperature": 0, "grammar": "root ::= x"}, False),
        ({"temperature": 0, "regex": "a"}, False),
    ],
)
def test_greedy_is_what_had_no_choice(options: dict[str, Any], *, greedy: bool) -> None:
    """A temperature that is not told is the server's; what forbids tokens hides the likeliest."""
    assert of_chat(chat(), **options)[1].is_greedy is greedy


@pytest.mark.parametrize(("options", "greedy"), [({}, False), ({"repetition_penalty": 1}, True)])
def test_a_penalty_of_the_server_leaves_no_greedy_choice(options: dict[str, Any], *, greedy: bool) -> None:
    """It holds where the request names none; vLLM takes it from the model's folder."""
    asked = {"model": "m", "messages": SAID, "temperature": 0, **options}
    _, candidate = scoring_inputs(exchange(CHAT, asked, chat()), Generation(repetition_penalty=1.05))
    assert candidate["answer"].tolist()[0].is_greedy is greedy


@pytest.mark.parametrize(
    ("options", "schema"),
    [
        ({"response_format": {"type": "json_object"}}, {}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"required": ["a"]}},
                }
            },
            {"required": ["a"]},
        ),
        ({"guided_json": {"required": ["b"]}}, {"required": ["b"]}),
        ({"structured_outputs": {"json": {"required": ["c"]}}}, {"required": ["c"]}),
    ],
)
def test_json_is_wanted(options: dict[str, Any], schema: dict[str, Any]) -> None:
    """In each of the ways to ask for it."""
    answer = of_chat(chat("{}"), **options)[1]
    assert (answer.wants_json, answer.schema) == (True, schema)
    assert not of_chat(chat("{}"))[1].wants_json


@pytest.mark.parametrize("option", ["chat_template", "truncate_prompt_tokens"])
def test_a_prompt_that_would_be_another_is_set_aside(option: str) -> None:
    """Unless its tokens are told."""
    with pytest.raises(QuarantineError, match=option):
        of_chat(chat(), **{option: "5"})
    assert of_chat({**chat(), "prompt_token_ids": [1]}, **{option: "5"})[0].prompt_ids == (1,)
    choices = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}
    with pytest.raises(
        QuarantineError, match="truncate"
    ):  # tokens as they were sent are not those that were read
        read(COMPLETIONS, {"prompt": [5, 6, 7], "truncate_prompt_tokens": 2}, choices)
    with pytest.raises(QuarantineError, match="suffix"):
        read(COMPLETIONS, {"prompt": "a", "suffix": "b"}, choices)


def test_what_is_no_text_is_set_aside() -> None:
    """With what it has instead."""
    with pytest.raises(QuarantineError, match="it is not a text exchange"):
        scoring_inputs(exchange_of(inputs_of(2)))
    choices = {"choices": [{"index": 0, "text": "ab", "finish_reason": "stop"}]}
    with pytest.raises(QuarantineError, match="`echo`"):
        read(COMPLETIONS, {"prompt": "a", "echo": True}, choices)


def test_messages_of_a_tool_are_kept_as_they_are() -> None:
    """The template wants them."""
    said = [*SAID, {"role": "tool", "tool_call_id": "1", "content": json.dumps({"x": 1})}]
    assert of_chat(chat(), messages=said)[0].messages == tuple(said)


def listed(*positions: list[float]) -> dict[str, Any]:
    """Return the log-probabilities of a chat, the served token's first, as vLLM lists them."""
    content = [
        {
            "token": f"t{n}",
            "logprob": values[0],
            "top_logprobs": [{"token": f"t{n}{k or ''}", "logprob": value} for k, value in enumerate(values)],
        }
        for n, values in enumerate(positions)
    ]
    return chat("t0t1t2"[: 2 * len(positions)], logprobs={"content": content})


JSON = {"response_format": {"type": "json_object"}, "logprobs": True}


@pytest.mark.parametrize(
    ("answered", "forced"),
    [
        (listed([0.0, -9999.0], [-0.5, -1.0], [-0.1, -9999.0]), (True, False, True)),
        (listed([-0.5, -1.0], [-0.7, -0.9]), None),  # it may list what the grammar removed
        (listed([0.0], [-0.5]), None),  # a certain model looks like this, too
        (listed([-0.2], [-0.5]), (False, False)),
        (chat("yes"), None),
    ],
)
def test_lists_show_where_a_grammar_left_no_choice(
    answered: dict[str, Any], forced: tuple[bool, ...] | None
) -> None:
    """Only where they show removed tokens. They are no scores of the model, so they are used for nothing else."""
    _, answer, scores = of_chat(answered, **JSON)
    assert (answer.has_grammar, answer.forced, scores) == (True, forced, None)
    _, free, served = of_chat(answered)
    assert (free.has_grammar, free.forced, free.forced_tokens) == (False, None, ())
    assert (served is None) == ("logprobs" not in answered["choices"][0])

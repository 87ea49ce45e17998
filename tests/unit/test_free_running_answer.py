"""Free-running answers of the reference: which exchanges get one, and what is computed from it."""

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from quantdrift.core.clock import ManualClock, SystemClock
from quantdrift.core.config.schema import Generation, Model, Reference
from quantdrift.core.tasks import Task
from quantdrift.core.telemetry import OWN_ANSWERS, Telemetry
from quantdrift.models.comparators.text.generation import GenerationComparator
from quantdrift.models.language.answer import Answer, ToolCall
from quantdrift.models.language.free_running_answer import (
    FreeAnswer,
    FreeAnswerOutcome,
    FreeAnswerRequest,
    free_answer_request,
)
from quantdrift.models.language.scoring import SCORES, Scores, ScoringRequest, TokenRow, objects
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.models.runtimes.registry import RuntimeRequest
from quantdrift.models.runtimes.text.scoring_runtime import Question, ScoringRuntime
from quantdrift.shadow.pipeline.metrics import ShadowMetrics
from quantdrift.shadow.replay.replay import ReplayResult
from tests.support.shadow.onnx_models import BIAS, WEIGHT
from tests.support.shadow.openai_exchanges import chat, exchange, prepared
from tests.support.shadow.score_streams import compared, scored, scores_of, told
from tests.unit.test_from_exchange import SAID, of_chat
from tests.unit.test_generation import SERVED, P

pytestmark = pytest.mark.unit

ALL = Generation(own_share=1.0, own_tokens=20)


def _beside(own: FreeAnswer, **answer: Any) -> dict[str, Any]:
    scores = msgspec.structs.replace(scores_of(P, SERVED), free_answer=own)
    return told(compared(None, scores, Answer(**{"text": "said", "finish_reason": "stop", **answer})))


def _own(**members: Any) -> FreeAnswer:
    return FreeAnswer(
        **{
            "outcome": FreeAnswerOutcome.DONE,
            "finish_reason": "stop",
            "max_tokens": 20,
            "calls": (),
            **members,
        }
    )


def test_the_share_is_drawn_by_the_id() -> None:
    """The same on every worker; 5 % of 20,000 within five standard errors, and nothing by default."""
    few = Generation(own_share=0.05)
    chosen = [free_answer_request(f"{n:032x}", few, {}, Answer(text="")) for n in range(20_000)]
    n_chosen = sum(one is not None for one in chosen)
    assert abs(n_chosen - 1000) < 5 * (20_000 * 0.05 * 0.95) ** 0.5
    assert chosen[:500] == [free_answer_request(f"{n:032x}", few, {}, Answer(text="")) for n in range(500)]
    assert free_answer_request("0" * 32, Generation(), {}, Answer(text="")) is None
    assert len({one.seed for one in chosen if one}) == n_chosen


@pytest.mark.parametrize(
    ("options", "answer", "limit", "capped"),
    [
        ({}, {}, 20, True),
        ({"max_tokens": 20}, {}, 20, False),
        ({"max_tokens": 8}, {}, 8, False),
        ({"max_tokens": 50, "max_completion_tokens": 8}, {}, 8, False),
        ({"max_tokens": 21}, {}, 20, True),
        ({}, {"finish_reason": "length", "n_tokens": 16}, 16, False),
        ({"max_tokens": "x"}, {}, 20, True),
    ],
)
def test_it_may_have_as_many_tokens_as_the_candidate(
    options: dict[str, Any], answer: dict[str, Any], limit: int, *, capped: bool
) -> None:
    """A limit of the candidate's server shows where it cut; `own_tokens` comes on top."""
    found = free_answer_request("x", ALL, options, Answer(text="", **answer))
    assert found is not None
    assert (found.max_tokens, found.is_capped) == (limit, capped)


def test_a_penalty_that_nobody_has_is_not_asked_for() -> None:
    """Not every server knows it; one that the candidate's has by default, or the client names, is passed on."""
    of_server = msgspec.structs.replace(ALL, repetition_penalty=1.05)
    for generation, options, told_ in (
        (ALL, {"repetition_penalty": 1.0}, {}),
        (ALL, {"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        (of_server, {"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        (of_server, {"repetition_penalty": 1.0}, {"repetition_penalty": 1.0}),
    ):
        found = free_answer_request("x", generation, options, Answer(text=""))
        assert found is not None
        assert found.options == told_


def test_one_answer_of_an_exchange_is_asked_for() -> None:
    """And of none, unless it is allowed."""
    assert of_chat(chat("yes"))[0].free_answer is None


def test_lengths_are_compared_up_to_the_cap() -> None:
    """Both sides are cut there."""
    for n, n_own, ratio in ((10, 5, 2.0), (5, 10, 0.5), (100, 20, 1.0), (100, 5, 4.0)):
        reason = "length" if n_own == 20 else "stop"
        own = _own(n_tokens=n_own, finish_reason=reason, is_capped=True)
        found = _beside(own, n_tokens=n)
        assert found["length_ratio"] == ratio
        assert found["finish_changed"] is ((n > 20) != (n_own == 20))
        assert (found["own"], found["own_n_tokens"], found["own_finish_reason"]) == ("done", n_own, reason)


def test_tokens_that_nobody_counted_are_those_that_were_scored() -> None:
    """Of a stream without usage; of an own answer without it nothing is said."""
    assert _beside(_own(n_tokens=6))["length_ratio"] == 0.5
    assert _beside(_own())["length_ratio"] is None


WEATHER = '{"city": "Köln", "days": 3}'
REORDERED = '{"days":3.0,\n "city":"K\\u00f6ln"}'


def _calls(*pairs: tuple[str, str]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(name=name, arguments=arguments) for name, arguments in pairs)


@pytest.mark.parametrize(
    ("served", "own", "same"),
    [
        ((("weather", WEATHER),), (("weather", REORDERED),), True),
        ((("weather", WEATHER),), (("weather", '{"city": "Bonn", "days": 3}'),), False),
        ((("weather", WEATHER),), (("weather", '{"city": "Köln", "days": "3"}'),), False),
        ((("weather", WEATHER),), (("forecast", WEATHER),), False),
        ((("weather", WEATHER),), (("weather", WEATHER), ("weather", WEATHER)), False),
        ((("a", "{}"), ("b", "{}")), (("b", ""), ("a", "{ }")), True),
        ((("a", '{"x": true}'),), (("a", '{"x": 1}'),), False),
        ((("a", '{"x": [1, 2]}'),), (("a", '{"x": [2, 1]}'),), False),
        ((("a", "{}"),), (), False),
        ((), (("a", "{}"),), False),
        ((("a", "{}"),), (("a", "{"),), None),
        ((), (), None),
    ],
)
def test_tool_calls_are_compared_by_name_and_by_the_value_of_their_arguments(
    served: Sequence[tuple[str, str]], own: Sequence[tuple[str, str]], *, same: bool | None
) -> None:
    """Not by their spelling: two calls at once have no order, lists have one. What cannot be read is not compared."""
    tools: dict[str, Any] = {"weather": {}, "forecast": {}, "a": {}, "b": {}}
    options = {"calls": _calls(*served), "tools": tools, "is_repeatable": True}
    found = _beside(_own(calls=_calls(*own)), **options)
    assert found["own_same"] is same
    unchanged = 0.0 if served else math.nan  # by the check of what was called
    assert found["flip"] == pytest.approx(unchanged if same is None else float(not same), nan_ok=True)


@pytest.mark.parametrize(
    ("served", "own", "same"),
    [
        (WEATHER, REORDERED, True),
        (WEATHER, '{"city": "Köln"}', False),
        ("[1, 2]", "[1.0, 2e0]", True),
        ('{"x": null}', "{}", False),
        (WEATHER, "not JSON", None),
        ("[" * 5000 + "]" * 5000, WEATHER, None),
    ],
)
def test_json_is_compared_by_its_value(served: str, own: str, *, same: bool | None) -> None:
    """Where JSON was asked for; text in free form is not."""
    assert _beside(_own(text=own), text=served, wants_json=True)["own_same"] is same
    assert _beside(_own(text=own), text=served)["own_same"] is None


def test_a_value_decides_only_where_equal_models_must_agree() -> None:
    """Without chance, with the same grammar, with both answers whole, and where the runtime tells calls from text."""
    served: dict[str, Any] = {"text": WEATHER, "wants_json": True, "is_repeatable": True}
    other = {"text": '{"city": "Bonn", "days": 3}'}
    assert _beside(_own(**other), **served)["flip"] == 1.0
    assert _beside(_own(**other), **{**served, "is_repeatable": False})["flip"] == 0.0
    assert _beside(_own(**other, outcome=FreeAnswerOutcome.UNFORCED), **served)["flip"] == 0.0
    cut = _beside(_own(**other, is_capped=True, finish_reason="length"), **served)
    assert (cut["own_same"], cut["flip"]) == (None, 0.0)
    calls = {"calls": _calls(("a", "{}")), "tools": {"a": {}}, "is_repeatable": True}
    assert _beside(_own(calls=None), **calls)["own_same"] is None
    assert _beside(_own(), **calls)["flip"] == 1.0  # the reference says something, and calls nothing
    left = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    own = _own(calls=calls["calls"])
    assert _beside(own, **{**calls, "calls": (), "text": "no"})["own_same"] is False
    assert (
        _beside(own, **{**calls, "calls": (), "text": left})["own_same"] is None
    )  # as its server has no parser
    tokens = _beside(_own(text=REORDERED), is_greedy=True, **served)
    assert (tokens["own_same"], tokens["flip"]) == (True, 0.0)


@pytest.mark.parametrize(
    ("options", "is_repeatable"),
    [
        ({"temperature": 0, "response_format": {"type": "json_object"}}, True),
        ({"temperature": 0, "tool_choice": "required"}, True),
        ({"top_k": 1}, True),
        ({"temperature": 0.7}, False),
        ({}, False),
    ],
)
def test_a_grammar_leaves_an_answer_repeatable(options: dict[str, Any], *, is_repeatable: bool) -> None:
    """It need not be made of the likeliest tokens, but of the same ones each time."""
    _, answer, _ = of_chat(chat("yes"), **options)
    assert answer.is_repeatable is is_repeatable
    assert not answer.is_greedy or options == {"top_k": 1}


@pytest.mark.parametrize(
    ("reason", "own", "changed"),
    [
        ("stop", {}, False),
        ("length", {}, True),
        ("tool_calls", {}, True),
        ("tool_calls", {"calls": None}, False),
        ("", {}, None),
        ("stop", {"finish_reason": ""}, None),
    ],
)
def test_a_changed_finish(reason: str, own: dict[str, Any], *, changed: bool | None) -> None:
    """Where calls cannot be told from text, a call ends as text does."""
    assert _beside(_own(n_tokens=3, **own), finish_reason=reason)["finish_changed"] is changed


def test_what_the_reference_says_is_judged_as_the_candidates() -> None:
    """Its JSON and its calls; what `own_tokens` cut is not held against it."""
    asked: dict[str, Any] = {"wants_json": True, "text": "no JSON", "tools": {"f": {}}}
    found = _beside(_own(text='{"a": 1}', n_tokens=3), **asked)
    assert (found["json_valid"], found["own_json_valid"]) == (False, True)
    cut = _own(text='{"a": ', n_tokens=20, finish_reason="length", is_capped=True)
    assert _beside(cut, **asked)["own_json_valid"] is None
    assert _beside(msgspec.structs.replace(cut, is_capped=False), **asked)["own_json_valid"] is False
    for name, valid in (("f", True), ("g", False)):
        calls = (ToolCall(name=name, arguments="{}"),)
        assert _beside(_own(calls=calls, n_tokens=3), **asked)["own_tool_calls_valid"] is valid


@pytest.mark.parametrize(
    "outcome", [FreeAnswerOutcome.UNABLE, FreeAnswerOutcome.LATE, FreeAnswerOutcome.FAILED]
)
def test_an_answer_that_is_not_there_is_counted_and_says_nothing(outcome: FreeAnswerOutcome) -> None:
    """What teacher forcing tells of the exchange stays."""
    found = _beside(FreeAnswer(outcome=outcome), n_tokens=3)
    assert found["own"] == outcome.value
    assert [found[name] for name in ("length_ratio", "finish_changed", "own_finish_reason")] == [None] * 3
    assert found["nll"] > 0


def test_own_answers_are_counted_by_what_became_of_them() -> None:
    """Each item once, of each model; what was not asked for is not counted."""
    reader = InMemoryMetricReader()
    telemetry = Telemetry("test", [reader])
    meters = ShadowMetrics(telemetry, SystemClock())
    owns = [
        FreeAnswer(outcome=FreeAnswerOutcome.LATE),
        None,
        _own(n_tokens=3),
        FreeAnswer(outcome=FreeAnswerOutcome.LATE),
    ]
    reference = objects([msgspec.structs.replace(scores_of(P, SERVED), free_answer=own) for own in owns])
    batch_divergences = GenerationComparator(ALL).compare({SCORES: objects([None] * 4)}, {SCORES: reference})
    outcomes = [
        ReplayResult(batch_divergences=batch_divergences, rows=range(3), embedding=None),
        ReplayResult(batch_divergences=batch_divergences, rows=range(3, 4), embedding=None),
    ]
    model = Model(name="m", task=Task.GENERATION, references=(Reference(path="folder"),))
    asked = exchange("/v1/chat/completions", {"model": "m", "messages": SAID}, chat())
    entry = prepared(asked, model, LinearRuntime(WEIGHT, BIAS))
    meters.compared([entry, entry], outcomes)
    metrics: Any = reader.get_metrics_data()
    (of_resource,) = metrics.resource_metrics
    counted = {
        point.attributes["outcome"]: point.value
        for metric in of_resource.scope_metrics[0].metrics
        if metric.name == OWN_ANSWERS.name
        for point in metric.data.data_points
    }
    telemetry.close()
    assert counted == {"late": 2, "done": 1}


class _Slow:
    """A language model that takes four seconds of the clock for an answer."""

    longest = None
    width = 0
    media = ()
    end_ids = ()
    artefact = LinearRuntime(WEIGHT, BIAS).artefact
    provenance = LinearRuntime(WEIGHT, BIAS).provenance

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.within: list[float] = []

    def chat_ids(self, asked: ScoringRequest) -> tuple[int, ...]:
        return (1,)

    def text_ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        return (1,)

    def spelling(self, ids: Sequence[int]) -> str | None:
        return None

    def score(self, rows: Sequence[TokenRow]) -> list[Scores]:
        return [scores_of(P[:1], row.served) for row in rows]

    def answer(
        self,
        asked: ScoringRequest,
        answer_request: FreeAnswerRequest,
        prompt: Callable[[], tuple[int, ...]],
        within_s: float,
    ) -> FreeAnswer:
        self.within.append(within_s)
        self.clock.advance(4.0)
        return _own()

    def answers(self, questions: Sequence[Question], within_s: float) -> None:
        """Answer one at a time."""

    def close(self) -> None:
        """Hold nothing."""


def test_own_answers_take_no_longer_than_they_may() -> None:
    """In one batch: what does not fit into it is late, and the next batch has as long again."""
    clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
    language = _Slow(clock)
    model = Model(name="m", task=Task.GENERATION, generation=Generation(own_share=1.0, own_s=10.0))
    runtime = ScoringRuntime(RuntimeRequest(model=model, reference=Reference()), language, clock)
    own = free_answer_request("x", model.generation, {}, Answer(text=""))
    asked = [ScoringRequest(prompt_ids=(1,), served_ids=(0,), free_answer=own)] * 5
    for _ in range(2):
        found = scored(runtime, *asked)
        outcomes = [one.free_answer.outcome.value for one in found if one.free_answer]
        assert outcomes == ["done"] * 3 + ["late"] * 2
    assert language.within == [10.0, 6.0, 2.0] * 2

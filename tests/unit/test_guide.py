"""The steps to a first verdict, as `quantdrift status` shows them."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from quantdrift.cli.look.blockers import Port, StatusFacts
from quantdrift.cli.look.guide import expected, expected_lines, guide, steps
from quantdrift.core.config.schema import Config, Model, Monitor, Notify, Reference, SamplingOptions
from quantdrift.core.stream.backlog import Waiting
from quantdrift.storage.account.flow import AwaitedSlice, Flow, FlowRates, FlowStep, ModelFlow, OpenSessions

pytestmark = pytest.mark.unit

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
CONFIG = Config(
    models=(Model(name="wines", references=(Reference(path="/models/wines.onnx", versions=("*",)),)),),
    monitor=Monitor(min_groups=300),
)
PORTS = {
    role: Port(address="127.0.0.1:1", answers=True, ready=True) for role in ("sidecar", "shadow", "monitor")
}
ARCHIVE = AwaitedSlice(version="7", slice="scanner=archive", n_groups=120, n_of_all=240)
_HARDLY_ANY = AwaitedSlice(version="7", slice="all", n_groups=1, n_of_all=1)


def _step(n: int) -> FlowStep:
    return FlowStep(recent=n, total=n, last=NOW)


def _facts(model: ModelFlow | None) -> StatusFacts:
    n = 0 if model is None else model.offered.total
    flow = Flow(
        models={} if model is None else {"wines": model},
        offered=_step(n),
        captured=_step(n),
        tallied_at=NOW,
        is_led=True,
    )
    return StatusFacts(
        now=NOW,
        begin=NOW - timedelta(hours=1),
        span="1h",
        flow=flow,
        waiting={"wines": Waiting(is_read=True)},
        ports=PORTS,
    )


def _wines(n: int, **changes: Any) -> ModelFlow:
    counts: dict[str, Any] = {name: _step(n) for name in ("offered", "captured", "compared", "folded")}
    return ModelFlow(model="wines", **counts, **changes)


def _rows(config: Config, facts: StatusFacts) -> list[tuple[str, str]]:
    return list(guide(steps(config, facts), facts))


def test_what_is_done_what_is_next_and_what_comes_then() -> None:
    """Before the first request: everything runs, and the next step says where to send requests."""
    states = [state for state, _ in _rows(CONFIG, _facts(None))]
    assert states == ["done", "done", "next", "then", "then", "then", "then"]
    config = msgspec.structs.replace(
        CONFIG, sidecar=msgspec.structs.replace(CONFIG.sidecar, listen="0.0.0.0:8000")
    )
    assert ("next", "send requests to 0.0.0.0:8000 (sidecar.listen)") in _rows(config, _facts(None))


def test_nothing_configured_and_nothing_running_begins_with_init() -> None:
    """The step after it names the parts that are away."""
    rows = _rows(Config(), StatusFacts(now=NOW, begin=NOW, span="1h"))
    assert rows[0] == (
        "next",
        "describe a model and its reference: `quantdrift init MODEL.onnx` writes the configuration",
    )
    assert rows[1][1] == (
        "start `quantdrift up`: Postgres, NATS, sidecar, shadow and monitor cannot be seen to run"
    )


def test_a_verdict_is_expected_at_the_share_of_the_slice_in_the_present_rate() -> None:
    """180 exchanges are missing; of two that are compared a second one is of the slice, so that it takes three minutes."""
    model = _wines(240, verdicts={"unknown": 1}, awaited=(ARCHIVE,), rates=FlowRates(leaving=2.0))
    (of_archive,) = expected(CONFIG, model)
    assert of_archive.expected_s == pytest.approx(180.0)
    text = (
        "300 exchanges are needed for scanner=archive, 120 were compared: some 3 minutes at the present rate"
    )
    assert ("next", f"first verdict: {text}") in _rows(CONFIG, _facts(model))
    assert list(expected_lines(CONFIG, model)) == [f"next verdict: {text}"]


def test_without_a_rate_no_time_is_promised() -> None:
    """Nothing was compared in the last two minutes; and before the first fold a slice of all traffic is the first."""
    model = _wines(240, verdicts={"unknown": 1}, awaited=(ARCHIVE,))
    assert expected(CONFIG, model)[0].words.endswith("120 were compared: nothing is compared at present")
    begun = _wines(40, rates=FlowRates(leaving=5.0))
    assert (
        "next",
        "first verdict: 300 exchanges are needed for all traffic: a minute at the present rate",
    ) in _rows(CONFIG, _facts(begun))


def _of_people(n_open: int, oldest_s: float, newest_s: float, **changes: Any) -> ModelFlow:
    sessions = OpenSessions(n=n_open, oldest_s=oldest_s, newest_s=newest_s)
    return _wines(960, rates=FlowRates(leaving=2.0), sessions=sessions, **changes)


def test_a_first_verdict_on_people_waits_until_their_sessions_are_over() -> None:
    """Five minutes after the first request 320 people are there, which would be enough exchanges; none of their sessions is over before 25 minutes are."""
    config = msgspec.structs.replace(CONFIG, sampling=SamplingOptions(sticky_header="x-user"))
    text = (
        "first verdict: 300 sessions are needed for all traffic, and one counts 30 minutes after its first request"
        " (monitor.session_s): some 30 minutes at the present rate"
    )
    assert ("next", text) in _rows(config, _facts(_of_people(320, 300.0, 0.0)))
    few = _of_people(40, 300.0, 0.0)  # 260 more begin within 1,950 s, at 40 in 300 s
    assert ("next", text.replace("some 30 minutes", "some 1 hour")) in _rows(config, _facts(few))
    nothing = [text for _, text in _rows(config, _facts(_wines(40)))]
    assert (
        f"{text[: text.index(': some')]}. In a new version every second one counts sooner, from a minute on: nothing is"
        " compared at present"
    ) in nothing


def test_in_a_new_version_half_of_the_sessions_count_by_their_begin() -> None:
    """At 10 people a second 600 have come after a minute; 300 of them count by a begin of a minute, the last of them after two."""
    config = msgspec.structs.replace(CONFIG, sampling=SamplingOptions(sticky_header="x-user"))
    begun = OpenSessions(n=600, oldest_s=60.0, newest_s=0.0, version_s=60.0)
    seconds = _seconds(config, begun)
    assert seconds == pytest.approx(60.0, abs=3.0)
    old = msgspec.structs.replace(begun, version_s=5_000.0)
    assert _seconds(config, old) == pytest.approx(1_770.0, abs=10.0)
    # Those that begin when the version is ten minutes old count ten minutes later: a session a second, 300 lacking.
    slow = OpenSessions(n=600, oldest_s=600.0, newest_s=0.0, version_s=600.0)
    counted = sum(1 for k in range(600) if k % 2 == 0 and k + max(k, 60.0) <= 600)  # until now
    later = _seconds(config, slow)
    shown = sum(1 for k in range(2_000) if k % 2 == 0 and k + max(k, 60.0) <= 600 + later)
    whole = sum(1 for k in range(2_000) if k % 2 == 1 and k + 1_800.0 <= 600 + later)
    assert shown - counted + whole == pytest.approx(300, abs=8)


def _seconds(config: Config, begun: OpenSessions) -> float:
    model = _wines(
        960, rates=FlowRates(leaving=2.0), sessions=begun, awaited=(_HARDLY_ANY,), verdicts={"unknown": 1}
    )
    (awaited,) = expected(config, model)
    assert awaited.expected_s is not None
    return awaited.expected_s


def test_the_sessions_of_a_slice_are_its_share_of_those_that_are_open() -> None:
    """180 are missing, half of 400 open ones are of the slice: the 180th of 200 began 13 minutes ago."""
    config = msgspec.structs.replace(CONFIG, sampling=SamplingOptions(sticky_header="x-user"))
    model = _of_people(400, 1680.0, 680.0, verdicts={"unknown": 1}, awaited=(ARCHIVE,))
    (of_archive,) = expected(config, model)
    assert of_archive.expected_s == pytest.approx(1800.0 - 780.0)
    assert of_archive.words.endswith("(monitor.session_s); 120 count: some 17 minutes at the present rate")


def test_the_steps_are_over_with_the_first_verdict_of_each_model() -> None:
    """Slices with less traffic stay as lines of their model, three at most."""
    awaited = tuple(
        msgspec.structs.replace(ARCHIVE, slice=f"scanner={k}", n_groups=100 - k) for k in range(5)
    )
    model = _wines(900, verdicts={"ok": 1, "unknown": 5}, awaited=awaited, rates=FlowRates(leaving=2.0))
    assert _rows(CONFIG, _facts(model)) == []
    lines = list(expected_lines(CONFIG, model))
    assert len(lines) == 4
    assert lines[-1] == "and 2 slices with less traffic"
    second = msgspec.structs.replace(CONFIG.models[0], name="grapes")
    both = msgspec.structs.replace(CONFIG, models=(*CONFIG.models, second))
    (verdict,) = [text for _, text in _rows(both, _facts(model)) if text.startswith("first verdict")]
    assert verdict == (
        "first verdict: `grapes`: 300 exchanges are needed for all traffic: nothing is compared at present"
    )


def test_where_alerts_go_is_the_last_step() -> None:
    """It is done once there is any way for them, and holds up nothing."""
    assert steps(CONFIG, _facts(None))[-1].is_done is False
    config = msgspec.structs.replace(CONFIG, notify=Notify(webhook_url="https://chat.example/hook"))
    assert steps(config, _facts(None))[-1].text == "alerts go to the webhook"


def test_where_the_database_is_away_from_parts_that_have_worked_nothing_begins() -> None:
    """Whoever is woken by that needs no steps to a first verdict."""
    facts = msgspec.structs.replace(_facts(None), flow=None, database_problem="Postgres does not answer")
    assert _rows(CONFIG, facts)
    worked = {**PORTS, "sidecar": msgspec.structs.replace(PORTS["sidecar"], counts={"offered": 12.0})}
    assert _rows(CONFIG, msgspec.structs.replace(facts, ports=worked)) == []

"""What `quantdrift status` says blocks the way of the exchanges."""

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from quantdrift.cli.look.blockers import Port, StatusFacts, ago, blockers, notes
from quantdrift.core.config.schema import Config, Intake, Model, Reference, Sidecar, TelemetryOptions
from quantdrift.core.process.states import PartState
from quantdrift.core.sampling.pause import Order, Pause
from quantdrift.core.stream.backlog import Waiting
from quantdrift.storage.account.flow import Flow, FlowRates, FlowStep, ModelFlow
from quantdrift.storage.fold_rows import ShardState

pytestmark = pytest.mark.unit

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
CONFIG = Config(
    models=(Model(name="wines", references=(Reference(path="/models/wines.onnx", versions=("*",)),)),),
    telemetry=TelemetryOptions(otlp_endpoint="http://collector:4317"),
)
UP = {"sidecar": Port(address="127.0.0.1:9464", answers=True, ready=True)}


def _ago(minutes: float) -> datetime:
    return NOW - timedelta(minutes=minutes)


def _step(n: int, *, minutes: float = 0.0) -> FlowStep:
    return FlowStep(recent=n, total=n, last=_ago(minutes))


def _wines(**changes: Any) -> ModelFlow:
    steps: dict[str, Any] = {name: _step(100) for name in ("offered", "captured", "compared", "folded")}
    return ModelFlow(model="wines", **(steps | changes))


def _flow(*models: ModelFlow, **changes: Any) -> Flow:
    counts: dict[str, Any] = {
        "offered": _step(100),
        "captured": _step(100),
        "tallied_at": NOW,
        "folded_at": NOW,
    }
    return Flow(models={model.model: model for model in models}, **(counts | changes))


def _facts(**changes: Any) -> StatusFacts:
    known: dict[str, Any] = {
        "flow": _flow(_wines()),
        "waiting": {"wines": Waiting(is_read=True)},
        "ports": UP,
    }
    return StatusFacts(now=NOW, begin=_ago(60), span="1h", **(known | changes))


def _late(*, coming: float, leaving: float) -> dict[str, Any]:
    """Return the facts of a stream that is read, and whose oldest exchange has waited for four minutes."""
    rates = FlowRates(coming=coming, leaving=leaving)
    return {
        "flow": _flow(_wines(rates=rates)),
        "waiting": {"wines": Waiting(n_messages=6322, n_delivered=64, is_read=True)},
        "oldest_s": 245.0,
    }


def test_nothing_blocks_where_everything_flows() -> None:
    """Recent counts, a reader, and a monitor that has just folded."""
    assert blockers(CONFIG, _facts()) == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"flow": _flow(ModelFlow(model="wine", unknown=_step(801)))},
            (
                "saw model `wine` 801 times in the last 1h, which is not configured (did you mean `wines`?); configured:"
                " `wines`. Correct models.name, or add a [[models]]"
            ),
        ),
        (
            {"waiting": {"wines": Waiting(n_messages=40, read_at=_ago(12))}},
            (
                "no shadow worker has read model `wines` from the stream for 12 min: 40 exchanges wait. Start `quantdrift"
                " shadow`, or see its log"
            ),
        ),
        (
            {"waiting": {"wines": Waiting(n_messages=1)}},
            (
                "no shadow worker reads model `wines` from the stream: 1 exchange waits. Start `quantdrift shadow`"
            ),
        ),
        (
            {"flow": _flow(_wines(unfolded=_step(9, minutes=14)), folded_at=_ago(14))},
            (
                "the monitor last folded 14 min ago; 9 comparisons of model `wines` wait: start `quantdrift monitor`"
            ),
        ),
        (
            {"flow": _flow(_wines(unfolded=_step(1, minutes=2)), folded_at=None)},
            (
                "no monitor has folded anything yet; 1 comparison of model `wines` waits: start `quantdrift monitor`"
            ),
        ),
        (
            {
                "flow": _flow(
                    _wines(),
                    shards=(
                        ShardState(number=0, holder="one", n_unfolded=3, oldest=_ago(9)),
                        ShardState(number=1, n_unfolded=1, oldest=_ago(4)),
                    ),
                )
            },
            (
                "no monitor folds shard 1 of the models: 1 batch waits, the oldest for 4 min. Start a `quantdrift monitor`, or see"
                " the logs of those that run"
            ),
        ),
        (
            {
                "flow": _flow(
                    _wines(
                        compared=FlowStep(), quarantined={"schema": _step(7)}, details={"schema": "no `x`"}
                    )
                )
            },
            "7 of 7 exchanges of model `wines` could not be compared, most of them because of `schema`: no `x`",
        ),
        (
            {"flow": _flow(_wines(lost={"stream_full": _step(90)}))},
            (
                "90 % of the sampled exchanges of model `wines` were lost before the stream, most of them as `stream_full`:"
                " the stream is full: start more shadow workers, sample less, or raise stream.max_bytes"
            ),
        ),
        (
            {"flow": _flow(_wines(unreferenced=("int8-4",)))},
            "version int8-4 of model `wines` has no reference: add it to models.references.versions",
        ),
        (
            {"flow": _flow(_wines(), n_unsent=2, unsent_since=_ago(5), unsent_error="refused")},
            "2 alert events waited 5 min for the collector at http://collector:4317 (telemetry.otlp_endpoint): refused",
        ),
        (
            {
                "flow": _flow(
                    _wines(captured=FlowStep(total=50)),
                    offered=FlowStep(total=500),
                    captured=FlowStep(total=50),
                )
            },
            (
                "no sidecar has seen an inference request in the last 1h (500 before): send the traffic to 0.0.0.0:8000"
                " (sidecar.listen), not to the server's own address 127.0.0.1:8001: no client has connected to the sidecar since"
                " its start"
            ),
        ),
        (
            {"flow": _flow(_wines(), tallied_at=_ago(19))},
            "no sidecar has sent counts for 19 min: none runs, or no shadow worker does, which stores them",
        ),
        (
            {"pause": Pause(everything=Order(by="ann", at=_ago(30), reason="load test"))},
            (
                "sampling is paused for all models by ann since 2026-11-22 11:30 UTC (load test): `quantdrift resume` ends"
                " it"
            ),
        ),
        (
            {"full_disk": "/var/lib/quantdrift"},
            "the disk of /var/lib/quantdrift is full, so that NATS and Postgres store nothing: free some of it",
        ),
        (
            {"processes": {"shadow": PartState(works=False, since=_ago(3), why="no reference")}},
            "shadow is down since 11:57:00 UTC: no reference",
        ),
        (
            {
                "ports": {
                    "sidecar": Port(
                        address="127.0.0.1:9464",
                        answers=True,
                        ready=True,
                        counts={"stream_unstored_seconds": 300},
                    )
                }
            },
            (
                "NATS at nats://127.0.0.1:4222 has stored no exchange for 5 min, though it is connected: its disk is full,"
                " or was. Free some, and restart it: until then it stores nothing (its log and /healthz say so)"
            ),
        ),
        (
            {
                "waiting": {"wines": Waiting(n_messages=3)},
                "missing": {"wines": ("/models/wines.onnx",)},
            },
            (
                "the reference of model `wines` cannot be loaded: /models/wines.onnx does not exist on this machine"
                " (models.references.path)"
            ),
        ),
        (
            _late(coming=24.0, leaving=7.0),
            (
                "6,322 exchanges of `wines` wait in the stream, the oldest for 4 min: 7 a second are compared, 24 a second"
                " come. They become more, and expire after stream.max_age_s: start more shadow workers, or lower"
                " sampling.rate. The monitor lowers all rates itself before they expire. `quantdrift stream drop` drops what waits"
            ),
        ),
        (
            _late(coming=2.0, leaving=7.0),
            (
                "6,322 exchanges of `wines` wait in the stream, the oldest for 4 min: 7 a second are compared, 2 a second"
                " come. None is left in some 21 min; until then verdicts are late"
            ),
        ),
        (
            _late(coming=2.0, leaving=0.0),
            (
                "6,322 exchanges of `wines` wait in the stream, the oldest for 4 min, and none was compared in the last 2"
                " min: see the log of the shadow"
            ),
        ),
        (
            {
                "flow": _flow(
                    _wines(
                        lost={"truncated": _step(30), "client_abort": _step(9), "decode": FlowStep(total=3)},
                        nameless={"held_bytes": _step(4)},
                        verdicts={"ok": 2, "unknown": 3},
                        n_lossy=2,
                        loss="loss: too many of its samples were lost: see `quantdrift status`",
                    ),
                    ModelFlow(model="", nameless={"held_bytes": _step(40), "error_status": _step(99)}),
                )
            },
            (
                "2 of 5 slices of model `wines` are `unknown`: loss: too many of its samples were lost. Of the last 1h: 44"
                " held_bytes (model not known), 30 truncated; raise sidecar.max_held_bytes, or sample less"
            ),
        ),
        (
            {"flow": _flow(_wines(unknown=_step(20, minutes=0.1)))},
            (
                "a sidecar saw model `wines` 20 times in the last 1h, the last time 6 s ago, while its own configuration did"
                " not have it: if this goes on, give all sidecars the same [[models]]"
            ),
        ),
        (
            {"ports": UP | {"shadow": Port(address="127.0.0.1:9465")}, "waiting": {"wines": Waiting()}},
            (
                "no shadow answers at 127.0.0.1:9465 (shadow.admin), and none reads from NATS: start `quantdrift shadow`"
            ),
        ),
        (
            {"ports": UP | {"monitor": Port(address="127.0.0.1:9466")}},
            "no monitor answers at 127.0.0.1:9466 (monitor.admin), and none leads: start `quantdrift monitor`",
        ),
    ],
)
def test_each_block_is_said_in_words(changes: dict[str, Any], said: str) -> None:
    """With the name of the model or the option, and what to do."""
    assert blockers(CONFIG, _facts(**changes))[0] == said


def test_with_nothing_running_each_part_has_one_line() -> None:
    """Postgres, NATS and the sidecar are away: none of them is said twice."""
    facts = _facts(
        flow=None,
        database_problem="Postgres at h:5432 does not answer",
        waiting=None,
        nats_problem="NATS at h:4222 is not reachable",
        ports={"sidecar": Port(address="127.0.0.1:9464")},
    )
    assert blockers(CONFIG, facts) == (
        "Postgres at h:5432 does not answer",
        "NATS at h:4222 is not reachable",
        (
            "no sidecar answers at 127.0.0.1:9464 (sidecar.admin): start `quantdrift sidecar`, or call this command where it"
            " runs"
        ),
    )


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"backend_failures": 3.0}, "did not accept 3 connections: start the server there"),
        ({"ignored": 12.0}, "12 other requests passed, which no protocol of capture.protocols takes for a"),
        ({"blind_connections": 1.0}, "it cannot read 1 connection, which use TLS or are not HTTP"),
    ],
)
def test_a_sidecar_without_predictions_says_what_it_saw_instead(counts: dict[str, float], said: str) -> None:
    """From its own metrics: nothing of it has reached the database."""
    ports = {"sidecar": Port(address="a", answers=True, ready=True, counts=counts)}
    flow = _flow(_wines(captured=FlowStep()), offered=FlowStep(), captured=FlowStep(), tallied_at=None)
    assert said in blockers(CONFIG, _facts(flow=flow, ports=ports))[0]


def test_what_quantdrift_up_has_not_come_to_yet_is_not_missed() -> None:
    """It starts shadow and monitor once the database is ready: nobody needs to start them, and they run nowhere else."""
    silent = UP | {role: Port(address=f"127.0.0.1:{role}") for role in ("shadow", "monitor")}
    starting = {"sidecar": PartState(works=True), "db upgrade": PartState(works=False)}
    facts = _facts(ports=silent, processes=starting)
    assert blockers(CONFIG, facts) == ("db upgrade is still starting: see the log",)
    assert notes(CONFIG, facts) == ()
    all_started = {name: PartState(works=True) for name in ("sidecar", "postgres")}
    (missed,) = blockers(CONFIG, _facts(ports=silent, processes=all_started))
    assert missed.startswith("no monitor answers at 127.0.0.1:monitor")


def test_posts_that_nothing_decodes_are_noted_beside_those_that_are() -> None:
    """A client that asks another path than all others is else not seen to be unwatched."""
    counts = {"unknown_posts": 12.0, "offered": 388.0}
    ports = {"sidecar": Port(address="a", answers=True, ready=True, counts=counts)}
    (noted,) = notes(CONFIG, _facts(ports=ports))
    assert noted.startswith(
        "12 POST requests (3 %) since the start of the sidecar at a had paths that no protocol"
    )
    few = {"sidecar": Port(address="a", answers=True, ready=True, counts=counts | {"unknown_posts": 9.0})}
    assert notes(CONFIG, _facts(ports=few)) == ()


def test_what_blocks_nothing_is_noted() -> None:
    """Parts that work and do not answer here, parts that are not ready, and what the shadow found to contradict."""
    silent = {role: Port(address=f"127.0.0.1:{role}") for role in ("sidecar", "shadow", "monitor")}
    flow = _flow(_wines(contradictions=("models.output_kind: set it to `probabilities`",)), is_led=True)
    facts = _facts(flow=flow, ports=silent)
    assert blockers(CONFIG, facts) == ()
    elsewhere = "it runs elsewhere, or has another address"
    assert notes(CONFIG, facts) == (
        (
            "the sidecar does not answer at 127.0.0.1:sidecar (sidecar.admin), and counts of a sidecar come:"
            f" {elsewhere}"
        ),
        (
            "the shadow does not answer at 127.0.0.1:shadow (shadow.admin), and a shadow worker reads from NATS:"
            f" {elsewhere}"
        ),
        f"the monitor does not answer at 127.0.0.1:monitor (monitor.admin), and a monitor leads: {elsewhere}",
        "figures of model `wines` may mislead: models.output_kind: set it to `probabilities`",
    )
    ports = UP | {"monitor": Port(address="127.0.0.1:9466", answers=True)}
    assert notes(CONFIG, _facts(ports=ports)) == (
        "the monitor at 127.0.0.1:9466 answers, but is not ready: see its log",
    )
    assert notes(CONFIG, _facts()) == ()


def test_images_that_no_reference_reads_are_said() -> None:
    """Also where most of a model's exchanges are texts; where they are images it is what blocks the model, and said once."""
    media = {"quarantined": {"media": _step(3)}, "details": {"media": "parts that are not text (image_url)"}}
    (noted,) = notes(CONFIG, _facts(flow=_flow(_wines(**media))))
    assert noted == (
        "3 exchanges of model `wines` in the last 1h had more than text in their messages, and were not compared: parts that are not"
        " text (image_url)"
    )
    assert blockers(CONFIG, _facts(flow=_flow(_wines(**media)))) == ()
    facts = _facts(flow=_flow(_wines(compared=FlowStep(), **media)))
    assert notes(CONFIG, facts) == ()
    assert "3 of 3 exchanges of model `wines` could not be compared" in blockers(CONFIG, facts)[0]


@pytest.mark.parametrize(
    ("digests", "changes", "said"),
    [
        ("aaa", {}, ()),
        ("bbb", {}, ()),  # this command has another file, or other variables, than all parts
        (
            "aba",
            {},
            (
                (
                    "shadow runs with another configuration than the file ([sampling], [capture], [[models]] or [[slices]] differ):"
                    " restart shadow"
                ),
            ),
        ),
        (
            "abb",
            {"processes": {"shadow": PartState(works=True)}},
            (
                (
                    "shadow and monitor run with another configuration than the file ([sampling], [capture], [[models]] or [[slices]]"
                    " differ): `quantdrift up --restart shadow --restart monitor`"
                ),
            ),
        ),
        (
            "bcc",
            {},
            (
                (
                    "sidecar, shadow and monitor run with different configurations ([sampling], [capture], [[models]] or"
                    " [[slices]] differ), and none with that of this command: give them one file"
                ),
            ),
        ),
        (
            "baa",
            {"refused": 1.0},
            (
                (
                    "the sidecar refuses the changed configuration and goes on with the one before, unlike shadow and monitor:"
                    " its log says why"
                ),
            ),
        ),
        (
            "aaa",
            {"refused": 1.0, "config_problem": "config.toml cannot be read"},
            ("config.toml cannot be read",),
        ),
    ],
)
def test_refused_and_different_configurations_are_noted(
    digests: str, changes: dict[str, Any], said: tuple[str, ...]
) -> None:
    """With the parts that do not have what the file has, and what to do."""
    given = dict(changes)
    counts = {"config_refused": given.pop("refused", 0.0)}
    ports = {
        role: Port(address=role, answers=True, ready=True, digest=digest, counts=counts)
        for role, digest in zip(("sidecar", "shadow", "monitor"), digests, strict=True)
    }
    assert notes(CONFIG, _facts(ports=ports, digest="a", **given)) == said


def test_a_part_that_does_not_answer_is_never_beside_everything_flows() -> None:
    """Whatever else is known: it is a line of what blocks, or a note."""
    config = msgspec.structs.replace(CONFIG, sidecar=Sidecar(tally_interval_s=60.0))
    ports = {role: Port(address=role, answers=True, ready=True) for role in ("sidecar", "shadow", "monitor")}
    for role, tallied, read, led, waits in itertools.product(
        ports, (0, 3, 7), (None, 1, 9), (True, False), (0, 5)
    ):
        flow = _flow(
            _wines(unfolded=_step(waits, minutes=9)), tallied_at=_ago(tallied), is_led=led, folded_at=_ago(9)
        )
        facts = _facts(
            flow=flow,
            ports=ports | {role: Port(address=role)},
            waiting={"wines": Waiting(n_messages=waits, read_at=None if read is None else _ago(read))},
        )
        assert blockers(config, facts) or notes(config, facts), (role, tallied, read, led, waits)


@pytest.mark.parametrize(
    "changes", [{"oldest_s": 119.0}, {"waiting": {"wines": Waiting(is_read=True)}, "oldest_s": 500.0}]
)
def test_what_waits_for_seconds_or_not_at_all_blocks_nothing(changes: dict[str, Any]) -> None:
    """A shadow worker that keeps up takes seconds."""
    assert blockers(CONFIG, _facts(**(_late(coming=1.0, leaving=9.0) | changes))) == ()


def test_what_a_reader_has_in_hand_does_not_wait() -> None:
    """Exchanges that were delivered and are being replayed block nothing."""
    waiting = {"wines": Waiting(n_messages=4, n_delivered=4, read_at=_ago(5))}
    assert blockers(CONFIG, _facts(waiting=waiting)) == ()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7_199, "119 min"), (172_800, "2 d")]
)
def test_an_age_has_one_unit(seconds: float, text: str) -> None:
    """Two of a unit at least, so that it is never coarser than half."""
    assert ago(timedelta(seconds=seconds)) == text


def test_lowered_rates_are_noted_and_told_where_exchanges_wait() -> None:
    """They block nothing: what is sampled less is no loss."""
    late = _late(coming=24.0, leaving=7.0)
    flow = msgspec.structs.replace(late["flow"], lag_factor=0.25)
    (noted,) = notes(CONFIG, _facts(flow=flow))
    assert noted == (
        "the shadow does not keep up, so every sampling rate is multiplied by 0.25 until it does: start more shadow workers,"
        " or lower sampling.rate"
    )
    (blocked,) = blockers(CONFIG, _facts(**late | {"flow": flow}))
    assert "lowers all rates itself before they expire (now to 0.25 of what is configured)." in blocked


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (
            {},
            (
                "send the traffic to 0.0.0.0:8000 (sidecar.listen), not to the server's own address 127.0.0.1:9000: no client has"
                " connected to the sidecar since its start; or record calls with the tap at /run/tap (intake.tap): none has connected since"
                " the sidecar's start. Set QUANTDRIFT_TAP to this path where the server runs, and look for lines of `quantdrift` in its log"
            ),
        ),
        (
            {"connections": 3.0, "tap_connections": 2.0},
            (
                "send the traffic to 0.0.0.0:8000 (sidecar.listen): 3 connections came, without a request that was read to its end; or"
                " record calls with the tap at /run/tap (intake.tap): 2 connections of taps came, and no recorded call: the server must"
                " call `record` for each answer"
            ),
        ),
        (
            {"connections": 1.0, "tap_connections": 1.0, "observer_errors": 5.0, "intake_refused": 2.0},
            (
                "send the traffic to 0.0.0.0:8000 (sidecar.listen): 1 connection came, without a request that was read to its end; or"
                " record calls with the tap at /run/tap (intake.tap): 1 connection of taps came, and no recorded call; 5 calls failed: the"
                " server's log says why; or correct the callers: 2 calls had no valid token, no certificate of a caller, or a model that"
                " theirs may not report on"
            ),
        ),
    ],
)
def test_where_nothing_came_in_each_way_in_is_named_with_its_counters(
    counts: dict[str, float], said: str
) -> None:
    """Addresses, the tap's socket, and what the sidecar has counted on each: a person can see which one is wrong."""
    config = msgspec.structs.replace(
        CONFIG,
        sidecar=Sidecar(listen="0.0.0.0:8000", backend="127.0.0.1:9000"),
        intake=Intake(tap="/run/tap"),
    )
    ports = {"sidecar": Port(address="a", answers=True, ready=True, counts=counts)}
    flow = _flow(offered=FlowStep(), captured=FlowStep(), tallied_at=None)
    (line,) = (
        line
        for line in blockers(config, _facts(flow=flow, ports=ports))
        if line.startswith("no sidecar has seen")
    )
    assert line == f"no sidecar has seen an inference request: {said}"

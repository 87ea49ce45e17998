"""`quantdrift gate --live`, as typed, with a real stream and a real database."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import numpy as np
import onnx
import pytest

from quantdrift.core.clusters import Anchors, Clustering, cluster_slice, novel_input
from quantdrift.core.codec import encode
from quantdrift.core.config.load import load
from quantdrift.core.config.schema import Budget, Config, Model, Reference, Stream
from quantdrift.core.config.state import judged_by
from quantdrift.core.errors import RetryError
from quantdrift.core.keys import Key, KeyRing, write_keys
from quantdrift.core.records import Exchange, HeaderStratum, Policy, Predicate
from quantdrift.core.sealing import seal
from quantdrift.core.slices import SliceKey, everything, slice_of
from quantdrift.core.stream.connection import Queue
from quantdrift.drift.gate import Question
from quantdrift.facts.gate import Outcome
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
from quantdrift.models.runtimes.protocol import digest_of
from quantdrift.models.tensors.codec import decode
from quantdrift.monitor.gate import body_of
from quantdrift.release.gate.judge import Asked
from quantdrift.release.gate.live import LiveGate
from quantdrift.release.gate.offline import SliceRoute
from quantdrift.shadow.pipeline.classify import classify
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import References
from quantdrift.storage.database import Database
from quantdrift.storage.gate import GateRun
from quantdrift.storage.labels import LabelRow
from quantdrift.storage.labels import load as load_labels
from quantdrift.storage.schema.slice_tables import DiscoveryStatus
from quantdrift.storage.slices.clusters import Vectors, store_clustering
from quantdrift.storage.slices.discovery import StoredRow, load_state, store_round
from tests.support.commands import invoked
from tests.support.shadow.onnx_models import WEIGHT, exchange_of, inputs_of, linear_model, logits_of, saved
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons
from tests.support.storage.discovered_traffic import discovery

pytestmark = pytest.mark.integration

CONFIG = """
[shadow]
provider = "cpu"
threads = 1
[capture]
headers = ["x-scanner"]
[stream]
url = "{url}"
name = "{name}"
{keys}
[[models]]
name = "digits"
[[models.references]]
path = "fp32.onnx"
[[slices]]
name = "scanner"
header = "x-scanner"
"""
SLICE = "insert into slice (model, name, predicate, definition) values ('digits', $1, $2, $3) returning id"
GATES = (
    "select r.id, r.model, r.candidate, r.made_by, r.begun_at, r.checked_at, r.ended_at, r.more, r.answers,"
    " coalesce(v.verdict, 'insufficient') as verdict, coalesce(v.slice, '') as slice, v.configuration, 0.0 as age_s"
    " from gate_run r left join gate_verdict v on v.gate_id = r.id order by r.id"
)
SUMS = (
    "insert into rollup_hour (model_version_id, slice_id, hour, n_items, n_groups, weight, weight_sq, flip, topk, js,"
    " divergence, margin, flip_weight, topk_weight, js_weight, divergence_weight, margin_weight, n_infinite, divergence_bins)"
    " values ($1, $2, date_trunc('hour', now()), 1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, '{}')"
)


class Site:
    """A configuration with models, a stream, and a database in which two scanners were compared today."""

    def __init__(self, directory: Path, dsn: str, stream: Stream) -> None:
        self.directory, self.dsn, self.stream = directory, dsn, stream

    def gate(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command, with --live and without a wait for the other hours of the day."""
        return invoked(
            "gate", *arguments, "--live", "--any-hour", directory=self.directory, QUANTDRIFT_DSN=self.dsn
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return the gates in the database."""

        async def read() -> list[dict[str, Any]]:
            connection = await asyncpg.connect(self.dsn)
            try:
                return [dict(row) for row in await connection.fetch(GATES)]
            finally:
                await connection.close()

        return asyncio.run(read())

    def notes(self) -> int:
        """Return the number of notes of alerts."""

        async def read() -> int:
            connection = await asyncpg.connect(self.dsn)
            try:
                return int(await connection.fetchval("select count(*) from alert_action"))
            finally:
                await connection.close()

        return asyncio.run(read())

    def alert(self, name: str) -> None:
        """Let a slice alert."""

        async def fire() -> None:
            connection = await asyncpg.connect(self.dsn)
            try:
                await connection.execute(
                    "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)"
                    " select v.id, s.id, 'firing', 'flip', now(), now(), '{}' from model_version v, slice s where s.name = $1",
                    name,
                )
            finally:
                await connection.close()

        asyncio.run(fire())

    @contextlib.contextmanager
    def traffic(self, make: Callable[[int], Exchange], sealed: Key | None = None) -> Iterator[None]:
        """Publish exchanges inside the block, one after the other, from before the gate begins until it has ended."""
        over = threading.Event()

        async def publish() -> None:
            queue = await Queue.connect(self.stream, client_name="test")
            await queue.ensure()
            for number in range(100_000):
                if over.is_set():
                    break
                exchange = make(number)
                wire = encode(exchange)
                if sealed is not None:
                    wire = seal(wire, sealed, model=exchange.model, exchange_id=exchange.id)
                await queue.publish_exchange(exchange.model, exchange.id, wire)
            await queue.close()

        thread = threading.Thread(target=lambda: asyncio.run(publish()))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(60)


@pytest.fixture
def site(tmp_path: Path, nats_url: str, postgres_dsn: str) -> Site:
    """Return a site."""
    stream = Stream(url=nats_url, name=f"t{uuid.uuid4().hex[:8]}")
    configure(tmp_path, stream)
    saved(linear_model(), tmp_path / "fp32.onnx")
    saved(linear_model(weight=WEIGHT + np.float32(1e-4)), tmp_path / "good.onnx")
    saved(linear_model(weight=-WEIGHT), tmp_path / "broken.onnx")

    async def prepare() -> None:
        connection = await asyncpg.connect(postgres_dsn)
        version = await connection.fetchval(
            "insert into model_version (model, candidate_version, reference_digest) values ('digits', 'int8', 'r') returning id"
        )
        named = {
            "all": ("true", []),
            "scanner=office": (
                'header.x-scanner = "office"',
                [{"key": "header.x-scanner", "equals": "office"}],
            ),
            "scanner=archive": (
                'header.x-scanner = "archive"',
                [{"key": "header.x-scanner", "equals": "archive"}],
            ),
        }
        for name, (predicate, where) in named.items():
            number = await connection.fetchval(SLICE, name, predicate, json.dumps({"where": where}))
            await connection.execute(SUMS, version, number)
        await connection.fetchval(SLICE, "scanner=old", 'header.x-scanner = "old"', json.dumps({"where": []}))
        await connection.close()

    asyncio.run(prepare())
    return Site(tmp_path, postgres_dsn, stream)


def configure(directory: Path, stream: Stream, keys: str = "") -> None:
    """Write the configuration."""
    (directory / "config.toml").write_text(
        CONFIG.format(url=stream.url, name=stream.name, keys=keys), encoding="utf-8"
    )


def served(number: int, **changes: Any) -> Exchange:
    """Return an exchange of either scanner, served by a model that decides like the reference."""
    scanner = "archive" if number % 2 else "office"
    exchange = exchange_of(inputs_of(2, seed=number), attributes={"header.x-scanner": scanner})
    return msgspec.structs.replace(exchange, **changes)


def run_of(row: dict[str, Any]) -> GateRun:
    """Return a gate as the monitor reads it."""
    return GateRun(
        **{**row, "answers": json.loads(row["answers"]), "configuration": json.loads(row["configuration"])}
    )


def answers_of(row: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the answers of a stored gate, by slice and question."""
    return {(one["slice"], one["question"]): one for one in json.loads(row["answers"])}


def test_a_candidate_that_decides_like_its_reference_passes_on_live_traffic(site: Site) -> None:
    """Every slice with traffic today passes both questions; the row has the verdict that is printed; the stream keeps its exchanges."""
    with site.traffic(served):
        done = site.gate("good.onnx", "--margin", "0.02", "--wait", "2m", "--json")
    assert done.returncode == 0, done.stderr
    printed, (row,) = json.loads(done.stdout), site.rows()
    assert (printed["verdict"], row["verdict"], printed["id"]) == ("pass", "pass", row["id"])
    config = load(site.directory / "config.toml")
    assert (row["slice"], json.loads(row["configuration"])) == ("", judged_by(config, config.models[0]))
    assert row["candidate"].startswith("sha256:")
    assert row["begun_at"] < row["checked_at"] == row["ended_at"]
    answers = answers_of(row)
    assert {name for name, _ in answers} == {"all", "scanner=office", "scanner=archive"}
    assert {question for _, question in answers} == {"flips", "harm"}
    assert all(one["n"] >= 370 for (_, question), one in answers.items() if question == "flips")
    assert printed["unusable"] == 0


def test_a_broken_candidate_fails_at_once_and_the_table_says_where(site: Site) -> None:
    """After a dozen exchanges; people get the number of the gate, the exchanges and the time."""
    with site.traffic(served):
        done = site.gate("broken.onnx", "--wait", "2m")
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("gate 1: ")
    assert "fail: above the limit in" in done.stdout
    assert site.rows()[0]["verdict"] == "fail"


@pytest.mark.release
def test_the_accuracy_is_asked_of_all_traffic_by_bounding_flips(site: Site) -> None:
    """With the reference's accuracy a good candidate passes at 99 %; live traffic has no true classes yet, so --labels is an error."""
    asked = ("good.onnx", "--mlperf", "99")
    done = site.gate(*asked, "--labels", "truth")
    assert (done.returncode, "true classes come later than the traffic" in done.stderr) == (2, True)
    with site.traffic(served):
        done = site.gate(*asked, "--reference-accuracy", "0.97", "--margin", "0.02", "--wait", "2m")
    assert done.returncode == 0, done.stderr
    answers = answers_of(site.rows()[0])
    assert {name for name, question in answers if question == "accuracy"} == {"all"}
    accuracy = answers["all", "accuracy"]
    assert (accuracy["verdict"], accuracy["limit"]) == ("pass", pytest.approx(0.0097))
    assert accuracy["n"] > 370


@pytest.mark.release
def test_labels_that_are_loaded_while_the_gate_runs_count(site: Site) -> None:
    """With --mlperf 99 and no accuracy given, the true classes of some hundred exchanges let a good candidate pass."""
    seen: list[Exchange] = []

    def make(number: int) -> Exchange:
        seen.append(served(number))
        return seen[-1]

    async def label() -> None:
        """Compare the exchanges as a shadow does, and load the true classes, until the gate has ended."""
        connection = await asyncpg.connect(site.dsn)
        try:
            await make_partitions(connection, [datetime.now(UTC).date() + timedelta(days=n) for n in (0, 1)])
            done = 0
            async with Database(site.dsn) as database:
                while not over.is_set():
                    some, done = seen[done : done + 4000], min(len(seen), done + 4000)
                    tops = {one.id: logits_of(decode(one.inputs[0])).argmax(axis=1).tolist() for one in some}
                    await store_comparisons(
                        connection,
                        [
                            Comparison(
                                captured_at=one.captured_at,
                                exchange_id=uuid.UUID(one.id),
                                item=item,
                                batch_id=1,
                                model_version_id=1,
                                detail=json.dumps({"candidate_top": top, "reference_top": top}),
                            )
                            for one in some
                            for item, top in enumerate(tops[one.id])
                        ],
                    )
                    rows = [
                        LabelRow(n=0, key=str(uuid.UUID(name)), item=item, number=top, label=str(top))
                        for name, classes in tops.items()
                        for item, top in enumerate(classes)
                    ]
                    async with database.begin() as begun:
                        await load_labels(
                            begun, rows, model="digits", by="exchange", since=since, source="truth.csv"
                        )
                    await asyncio.to_thread(over.wait, 0.5)
        finally:
            await connection.close()

    over, since = threading.Event(), datetime.now(UTC) - timedelta(hours=1)
    thread = threading.Thread(target=lambda: asyncio.run(label()))
    thread.start()
    try:
        with site.traffic(make):
            done = site.gate("good.onnx", "--mlperf", "99", "--margin", "0.02", "--wait", "2m", "--json")
    finally:
        over.set()
        thread.join(60)
    assert done.returncode == 0, done.stderr
    accuracy = answers_of(site.rows()[0])["all", "accuracy"]
    assert (accuracy["verdict"], accuracy["limit"]) == ("pass", 0.0)
    assert accuracy["n"] >= 366
    assert accuracy["mean"] == pytest.approx(-0.01)


def test_without_labels_the_accuracy_is_insufficient_and_the_command_says_why(site: Site) -> None:
    """All exchanges wait for a label; what to do is said."""
    with site.traffic(served):
        done = site.gate("good.onnx", "--mlperf", "99", "--wait", "2s")
    assert done.returncode == 4, done.stderr
    assert re.search(
        r"[\d,]+ have no label: `quantdrift labels load` gives them one while the gate runs", done.stdout
    )
    assert re.search(r"all +accuracy lost +insufficient +0 ", done.stdout)


def test_a_load_run_above_its_budget_fails_the_gate_on_live_traffic(site: Site) -> None:
    """The row, which HTTP shows, has its answer and the reason; budgets without a file are an error, because nothing is measured."""
    (site.directory / "load.json").write_text('{"latency_p99_s": 0.02}', encoding="utf-8")
    done = site.gate("good.onnx", "--latency-p99", "0.01")
    assert (done.returncode, "need --load with --live" in done.stderr) == (2, True)
    with site.traffic(served):
        done = site.gate("good.onnx", "--latency-p99", "0.01", "--load", "load.json", "--wait", "2m")
    assert done.returncode == 3, done.stderr
    (row,) = site.rows()
    latency = answers_of(row)["all", "latency"]
    assert (row["verdict"], latency["verdict"], latency["mean"], latency["limit"]) == (
        "fail",
        "fail",
        0.02,
        0.01,
    )
    assert body_of(run_of(row)).reason == "the load run does not keep its budget: latency"


def test_an_alert_gives_the_gate_its_model_and_its_slice(site: Site) -> None:
    """Recorded or live: its slice and all inputs are judged, and no other; with --model, or for an unknown alert, it is an error."""
    site.alert("scanner=archive")
    x = inputs_of(800)
    np.savez(site.directory / "rec.npz", x=x, scanner=np.where(np.arange(800) % 2, "archive", "office"))
    recorded = ("gate", "good.onnx", "--inputs", "rec.npz", "--alert")

    def offline(*arguments: str) -> subprocess.CompletedProcess[str]:
        return invoked(*recorded, *arguments, directory=site.directory, QUANTDRIFT_DSN=site.dsn)

    done = offline("1", "--json")
    assert done.returncode in {0, 4}, done.stderr
    made = json.loads(done.stdout)
    assert made["model"] == "digits"
    assert [one["slice"] for one in made["slices"]] == ["all", "scanner=archive"]
    done = offline("1", "--model", "digits")
    assert (done.returncode, "leave out --model and --slice" in done.stderr) == (2, True)
    done = offline("2")
    assert (done.returncode, "there is no alert 2" in done.stderr) == (2, True)
    np.savez(site.directory / "rec.npz", x=x, scanner=np.full(800, "office"))
    done = offline("1")
    assert (done.returncode, "no item is in the slice `scanner=archive` of alert 1" in done.stderr) == (
        2,
        True,
    )
    site.alert("scanner=old")
    with site.traffic(served):
        done = site.gate("broken.onnx", "--alert", "1", "--wait", "2m")
        old = site.gate("broken.onnx", "--alert", "2", "--wait", "2m")
    assert done.returncode == 3, done.stderr
    (row,) = site.rows()
    assert ({name for name, _ in answers_of(row)}, row["slice"]) == (
        {"all", "scanner=archive"},
        "scanner=archive",
    )
    assert (old.returncode, "`scanner=old` cannot be judged on live traffic" in old.stderr) == (2, True)


def test_the_verdict_on_every_slice_becomes_a_note_of_an_alert(site: Site) -> None:
    """With --note nothing is narrowed; an alert that is not there, of another model, or named twice is an error at once."""
    site.alert("scanner=archive")
    with site.traffic(served):
        done = site.gate("broken.onnx", "--note", "1", "--wait", "2m")
    assert done.returncode == 3, done.stderr
    assert {name for name, _ in answers_of(site.rows()[0])} == {"all", "scanner=office", "scanner=archive"}
    assert site.notes() == 1
    for asked, words in {
        ("--note", "2"): "there is no alert 2",
        ("--note", "1", "--model", "letters"): "alert 1 is about model `digits`, and not about `letters`",
        ("--note", "1", "--alert", "1"): "--note is in place of --alert",
    }.items():
        done = site.gate("broken.onnx", *asked)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def test_a_route_serves_its_slice_with_a_model_of_its_own(site: Site) -> None:
    """The archive is served by a broken model: it fails, the office does not; both digests are recorded."""
    with site.traffic(served):
        done = site.gate("good.onnx", "--wait", "2m", "--route", "scanner=archive=broken.onnx")
    assert done.returncode == 3, done.stderr
    (row,) = site.rows()
    verdicts = {
        name: one["verdict"] for (name, question), one in answers_of(row).items() if question == "flips"
    }
    assert verdicts["scanner=archive"] == "fail"
    assert verdicts["scanner=office"] != "fail"
    assert " scanner=archive=sha256:" in row["candidate"]


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.release), (signal.SIGTERM, 143)]
)
def test_a_signal_ends_the_gate_without_a_verdict_and_its_row_says_so(
    site: Site, number: signal.Signals, code: int
) -> None:
    """Whoever asks for the verdict learns that it has ended; the alert gets no note, and CI no file."""
    site.alert("scanner=archive")
    # A test run in the background may have SIGINT ignored, and children inherit that.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    run = "import runpy; runpy.run_module('quantdrift', run_name='__main__', alter_sys=True)"
    asked = ("gate", "good.onnx", "--live", "--alert", "1", "--wait", "10m", "--junit", "gate.xml")
    with subprocess.Popen(
        [sys.executable, "-c", heed + run, *asked],
        cwd=site.directory,
        env={**os.environ, "QUANTDRIFT_DSN": site.dsn, "PYTHONPATH": str(Path.cwd())},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline_s = time.monotonic() + 120
        while not site.rows() and process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        process.send_signal(number)
        printed, problems = process.communicate(timeout=60)
    assert process.returncode == code, problems
    assert "Interrupted: gate 1 has ended without a verdict." in printed
    (row,) = site.rows()
    assert (row["verdict"], row["ended_at"] is not None) == ("insufficient", True)
    body = body_of(run_of(row))
    assert body.reason.endswith("; the gate has ended: start another one")
    assert body.ended_at == row["ended_at"]
    assert not (site.directory / "gate.xml").exists()
    assert site.notes() == 0


def test_an_error_while_the_gate_runs_ends_its_row_too(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 as of any error that may pass; nobody waits for a verdict that will not come."""

    def fail(_: object) -> str:
        raise RetryError("the terminal is gone")

    monkeypatch.setattr("quantdrift.release.gate.gate.so_far", fail)
    monkeypatch.setattr("quantdrift.release.gate.follow._LOOK_S", 0.1)
    done = site.gate("good.onnx", "--wait", "1m")
    assert (done.returncode, "the terminal is gone (try again)" in done.stderr) == (1, True)
    (row,) = site.rows()
    assert (row["verdict"], row["ended_at"] is not None) == ("insufficient", True)


@pytest.mark.release
def test_exchanges_from_before_the_candidate_was_recorded_do_not_count(site: Site) -> None:
    """All of them are old: after the wait it is insufficient, and nothing was seen."""
    before = datetime.now(UTC) - timedelta(minutes=10)
    with site.traffic(lambda number: served(number, captured_at=before)):
        done = site.gate("broken.onnx", "--wait", "2s", "--json")
    assert done.returncode == 4, done.stderr
    assert json.loads(done.stdout)["exchanges"] == 0
    (row,) = site.rows()
    assert (row["verdict"], row["ended_at"] is not None) == ("insufficient", True)
    done = site.gate("broken.onnx", "--wait", "1s")
    assert "about 370 more, and none came" in done.stdout


def test_rare_samples_weigh_more_so_the_mean_is_that_of_the_traffic(tmp_path: Path) -> None:
    """The candidate is wrong on one half of the traffic, which is sampled ten times as rarely as the other."""
    model = Model(
        name="digits", references=(Reference(path=str(saved(linear_model(), tmp_path / "fp32.onnx"))),)
    )
    references = References([model], lambda _, reference: OnnxRuntime(Path(reference.path), threads=1))
    often = HeaderStratum(name="often", rate=1.0, headers={"x-scanner": "office"})
    policy = Policy(epoch="e", header_strata=(often, HeaderStratum(name="default", rate=0.1)), body_strata=())
    scanner = Predicate(key="header.x-scanner", equals="archive")
    archive = SliceKey(model="digits", name="scanner=archive", predicate="archive", where=(scanner,))
    broken = OnnxRuntime(saved(linear_model(weight=-WEIGHT), tmp_path / "broken.onnx"), threads=1)
    gate = LiveGate(
        Config(models=(model,)),
        model,
        slices=[everything("digits"), archive],
        asked=Asked(slices=(Question.flips(0.01),)),
        candidate=OnnxRuntime(tmp_path / "fp32.onnx", threads=1),
        routes=[SliceRoute(slice=archive, runtime=broken)],
        begun_at=datetime.now(UTC) - timedelta(minutes=1),
        alpha=0.05,
    )
    for number in range(440):
        is_office = number % 11 != 10
        name, rate = ("office", 1.0) if is_office else ("archive", 0.1)
        exchange = exchange_of(inputs_of(1, seed=number), attributes={"header.x-scanner": name})
        sampling = msgspec.structs.replace(
            exchange.sampling, policy=policy, pi1=rate, pi2=1.0, u1=0.05, u2=0.0
        )
        wire = encode(msgspec.structs.replace(exchange, sampling=sampling))
        case = classify(wire, sequence=0, n_delivered=1, max_deliveries=1, references=references)
        assert isinstance(case, PreparedExchange)
        gate.see([case])
    references.close()
    mean = {name: trial.sums[1] / sum(trial.sums) for name, trial in gate.trials}
    assert mean["scanner=archive"] > 0.5
    assert mean["all"] == pytest.approx(mean["scanner=archive"] / 2)
    assert gate.outcome is Outcome.FAIL


def test_frames_of_one_camera_count_once(tmp_path: Path) -> None:
    """Twenty alike frames in a row, none of which flips: 400 exchanges would pass one by one, and are a dozen bursts."""
    model = Model(
        name="digits", references=(Reference(path=str(saved(linear_model(), tmp_path / "fp32.onnx"))),)
    )
    references = References([model], lambda _, reference: OnnxRuntime(Path(reference.path), threads=1))
    gate = LiveGate(
        Config(models=(model,)),
        model,
        slices=[everything("digits")],
        asked=Asked(slices=(Question.flips(0.01),)),
        candidate=OnnxRuntime(tmp_path / "fp32.onnx", threads=1),
        routes=(),
        begun_at=datetime.now(UTC) - timedelta(minutes=1),
        alpha=0.05,
    )
    rng = np.random.default_rng(1)
    outcomes = set()
    for number in range(400):
        scene = inputs_of(1, seed=number // 20)
        frame = (scene + 0.3 * rng.normal(size=scene.shape)).astype(np.float32)
        wire = encode(exchange_of(frame))
        case = classify(wire, sequence=0, n_delivered=1, max_deliveries=1, references=references)
        assert isinstance(case, PreparedExchange)
        gate.see([case])
        outcomes.add(gate.outcome)
    references.close()
    assert outcomes == {Outcome.INSUFFICIENT}
    assert gate.bursts is not None
    assert (gate.bursts.n_exchanges >= 370, gate.bursts.n_observations <= 100) == (True, True)


@pytest.mark.release
def test_the_mean_divergence_is_asked_of_live_traffic_too(site: Site) -> None:
    """A candidate that decides alike and whose scores differ fails by it alone; one that computes the same passes in every slice."""
    budget = "[models.budget]\nflip = 0.5\ndivergence = 0.02\ncap = 1.0\n"
    text = (site.directory / "config.toml").read_text(encoding="utf-8")
    (site.directory / "config.toml").write_text(
        text.replace("[[slices]]", f"{budget}[[slices]]"), encoding="utf-8"
    )
    saved(
        linear_model(weight=WEIGHT * np.float32(0.2)), site.directory / "flat.onnx"
    )  # less sure, of the same class
    with site.traffic(served):
        good = site.gate("good.onnx", "--divergence", "--wait", "2m", "--json")
        flat = site.gate("flat.onnx", "--divergence", "--wait", "2m", "--json")
    assert good.returncode == 0, good.stderr
    answers = answers_of(site.rows()[0])
    assert {name for name, question in answers if question == "divergence"} == {name for name, _ in answers}
    assert 0 <= answers["all", "divergence"]["mean"] < 1e-4
    assert flat.returncode == 3, flat.stderr
    found = answers_of(site.rows()[1])
    failed = {question for (_, question), one in found.items() if one["verdict"] == "fail"}
    assert failed == {"divergence"}
    assert max(one["low"] for (_, question), one in found.items() if question == "divergence") > 0.02


@pytest.mark.release
def test_a_session_is_one_observation(site: Site) -> None:
    """Ten exchanges each: as many observations as sessions, counted when the wait is over."""
    with site.traffic(lambda number: served(number, group=f"g{number // 10 % 4}")):
        done = site.gate("good.onnx", "--wait", "3s", "--json")
    assert done.returncode == 4, done.stderr
    printed = json.loads(done.stdout)
    answers = {(one["slice"], one["question"]): one for one in printed["slices"]}
    assert printed["exchanges"] > 40
    assert answers["all", "flips"]["n"] == 4


def clustering_of(digest: str) -> Clustering:
    """Return a clustering of the logits: cluster 1, 2 or 3 is the class 0, 1 or 2, and nothing is novel."""
    return Clustering(
        model="digits",
        reference_digest=digest,
        version=1,
        space="logits",
        columns=(),
        ids=(1, 2, 3),
        centroids=1e3 * np.eye(3, dtype=np.float32),
        radii=np.full(3, np.inf, np.float32),
        centre=np.zeros(3, np.float32),
        scale=np.ones(3, np.float32),
        spreads=np.ones(3, np.float32),
        gaps=False,
        vocabulary={},
        former=Anchors(ids=(), centres=np.zeros((0, 3), np.float32), spreads=np.zeros(0, np.float32)),
        next_id=4,
        expected_novel=0.005,
    )


@pytest.fixture
def learned(site: Site) -> Site:
    """Return a site with clusters 1 to 3, a fourth one that the fit no longer has, and a candidate that never says class 2."""
    text = (site.directory / "config.toml").read_text(encoding="utf-8")
    (site.directory / "config.toml").write_text(
        text.replace('name = "digits"', 'name = "digits"\nembedding = "logits"', 1), encoding="utf-8"
    )
    digest = digest_of(site.directory / "fp32.onnx", ())

    async def fit() -> None:
        async with Database(site.dsn) as database, database.begin() as connection:
            at = datetime.now(UTC)
            vectors = Vectors(
                vectors=np.zeros((1, 3), np.float32),
                pi=np.ones(1),
                exchanges=[""],
                slices=[()],
                attributes=[{}],
                from_at=at,
                to_at=at,
            )
            await store_clustering(
                connection, clustering_of(digest), "[]", vectors=vectors, made_by="monitor"
            )
        for number in (1, 2, 3, 9):
            await compared_today(site, cluster_slice("digits", number))
        await compared_today(site, novel_input("digits"))

    asyncio.run(fit())
    blind = linear_model()
    bias = onnx.helper.make_tensor("never", onnx.TensorProto.FLOAT, [3], [0.0, 0.0, -1e3])
    blind.graph.initializer.append(bias)
    last = blind.graph.node[-1]
    name, last.output[0] = last.output[0], "before"
    blind.graph.node.append(onnx.helper.make_node("Add", ["before", "never"], [name]))
    saved(blind, site.directory / "blind.onnx")
    return site


async def compared_today(site: Site, key: SliceKey) -> None:
    """Make a slice, unless it is there, and let something of it be compared within the last hour."""
    connection = await asyncpg.connect(site.dsn)
    try:
        where = msgspec.json.encode({"where": key.where}).decode()
        found = await connection.fetchval("select id from slice where predicate = $1", key.predicate)
        number = found or await connection.fetchval(SLICE, key.name, key.predicate, where)
        await connection.execute(SUMS, 1, number)
    finally:
        await connection.close()


@pytest.mark.release
def test_learned_slices_are_judged_by_the_clustering_of_the_beginning(learned: Site) -> None:
    """A candidate that never says class 2 breaks the cluster of these inputs alone; a cluster that the fit no longer has is left out."""
    with learned.traffic(served):
        done = learned.gate("blind.onnx", "--wait", "2m", "--alpha", "1e-9", "--json")
        good = learned.gate("good.onnx", "--wait", "2m", "--margin", "0.02", "--json")
    assert done.returncode == 3, done.stderr
    flips = {
        name: one for (name, question), one in answers_of(learned.rows()[0]).items() if question == "flips"
    }
    assert {name for name in flips if name.startswith("cluster")} == {"cluster=1", "cluster=2", "cluster=3"}
    assert [flips[f"cluster={number}"]["mean"] for number in (1, 2, 3)] == [0.0, 0.0, 1.0]
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["not_judged"] == [
        "novel=input: it has little ordinary traffic by design; --alert on an alert of it judges it",
        "cluster=9: neither the configuration nor the newest clustering tells who is in it",
    ]
    assert answers_of(learned.rows()[1])["cluster=3", "flips"]["verdict"] == "pass"


def discover(site: Site, key: SliceKey) -> None:
    """Let a discovered slice be confirmed, with traffic today."""

    async def confirm() -> None:
        async with Database(site.dsn) as database, database.begin() as connection:
            before = await load_state(connection, datetime.now(UTC))
            row = discovery(
                id=0,
                predicate=key.predicate,
                name=key.name,
                where=key.where,
                status=DiscoveryStatus.CONFIRMED,
                confirmed_at=datetime.now(UTC),
            )
            confirmed = StoredRow(row=row, reason="confirmed")
            await store_round(connection, after=before.mark, discoveries=[confirmed], searches=[])
        await compared_today(site, key)

    asyncio.run(confirm())


def test_recorded_inputs_are_judged_on_learned_and_discovered_slices_where_the_database_is(
    learned: Site,
) -> None:
    """The broken cluster fails; a discovered slice counts if the recording tells who is in it, else it is said that it does not."""
    discover(learned, slice_of("digits", [Predicate(key="header.x-site", equals="s3")]))
    discover(learned, slice_of("digits", [Predicate(key="header.x-user", equals="u1")]))
    x = inputs_of(3000)
    arrays: dict[str, Any] = {
        "x": x,
        "scanner": np.where(np.arange(3000) % 3, "archive", "office"),
        "x-site": np.where(np.arange(3000) % 2, "s3", "s4"),
    }
    np.savez(learned.directory / "rec.npz", **arrays)

    def offline(*arguments: str, dsn: str = learned.dsn) -> subprocess.CompletedProcess[str]:
        asked = ("gate", *arguments, "--inputs", "rec.npz")
        return invoked(*asked, directory=learned.directory, QUANTDRIFT_DSN=dsn)

    done = offline("blind.onnx", "--json", "--alpha", "1e-9")
    assert done.returncode == 3, done.stderr
    made = json.loads(done.stdout)
    flips = {one["slice"]: one for one in made["slices"]}
    names = {"all", "scanner=office", "scanner=archive", "cluster=1", "cluster=2", "cluster=3", "x-site=s3"}
    assert {*flips} == names
    assert [flips[f"cluster={number}"]["mean"] for number in (1, 2, 3)] == [0.0, 0.0, 1.0]
    classes = logits_of(x).argmax(axis=1)
    assert flips["cluster=3"]["n"] == (classes == 2).sum()
    assert flips["x-site=s3"]["n"] == 1500
    assert made["not_judged"] == [
        "novel=input: it has little ordinary traffic by design; --slice novel judges it",
        "x-user=u1: the recording has no `header.x-user`",
    ]
    novel = offline("good.onnx", "--slice", "novel", "--json")
    assert novel.returncode == 4, novel.stderr  # nothing is novel here
    assert {one["slice"] for one in json.loads(novel.stdout)["slices"]} == {"all", "novel=input"}
    good = offline("good.onnx", "--slice", "cluster", "--junit", "gate.xml")
    assert good.returncode == 0, good.stderr
    assert re.findall(r"^(\S+) +changed answers +pass", good.stdout, re.MULTILINE) == [
        "all",
        "cluster=1",
        "cluster=2",
        "cluster=3",
    ]
    learned.alert("cluster=3")
    done = offline("blind.onnx", "--alert", "1", "--json", "--no-note")
    assert {one["slice"] for one in json.loads(done.stdout)["slices"]} == {"all", "cluster=3"}


def test_without_the_database_the_gate_says_what_it_does_not_judge(learned: Site) -> None:
    """It judges the rules, and says why no more, on the terminal and in CI; who has asked for clusters by name gets an error."""
    np.savez(learned.directory / "rec.npz", x=inputs_of(800), scanner=np.full(800, "office"))
    asked = ("gate", "good.onnx", "--inputs", "rec.npz")
    done = invoked(*asked, "--junit", "gate.xml", directory=learned.directory)
    assert done.returncode == 0, done.stderr
    words = (
        "learned and discovered slices: the database, which knows them, cannot be read: no Postgres address"
    )
    assert f"Not judged: {words}" in done.stdout
    assert words in (learned.directory / "gate.xml").read_text(encoding="utf-8")
    done = invoked(*asked, "--slice", "scanner", directory=learned.directory)
    assert (done.returncode, "Not judged" in done.stdout) == (0, False)
    done = invoked(*asked, "--slice", "cluster", directory=learned.directory)
    assert (done.returncode, "no Postgres address" in done.stderr) == (2, True)
    away = {"QUANTDRIFT_DSN": "postgresql://nobody@127.0.0.1:1/nothing?sslmode=disable"}
    done = invoked(*asked, directory=learned.directory, **away)
    assert (done.returncode, "which knows them, cannot be read: " in done.stdout) == (0, True), done.stderr


def test_what_the_candidate_cannot_answer_counts_as_flips(site: Site) -> None:
    """It takes five features, and requests have four: it fails, because failing on what is hard must not pass; its divergence is the cap."""
    saved(other_model(5, "x"), site.directory / "wide.onnx")
    with site.traffic(served):
        done = site.gate("wide.onnx", "--divergence", "--wait", "2m")
    assert done.returncode == 3, done.stderr
    assert answers_of(site.rows()[0])["all", "divergence"]["mean"] == Budget().cap
    assert "of them the candidate could not answer; they count as changed answers (" in done.stdout
    assert "takes x: float32[?, 5]" in done.stdout


def test_what_the_reference_cannot_answer_does_not_count(site: Site) -> None:
    """A request with five features: it is skipped with the reason, and nothing is seen."""
    wide = np.zeros((1, 5), np.float32)
    logits = np.zeros((1, 3), np.float32)
    with site.traffic(lambda _: exchange_of(wide, logits, attributes={"header.x-scanner": "office"})):
        done = site.gate("good.onnx", "--wait", "1s", "--json")
    assert done.returncode == 4, done.stderr
    printed = json.loads(done.stdout)
    assert (printed["exchanges"], printed["unusable"] > 0) == (0, True)
    assert "FP32[1, 5]" in printed["problem"]


def test_encrypted_exchanges_need_the_key_and_say_so(site: Site) -> None:
    """Without a key none counts, with it they do."""
    path, key = site.directory / "payload.keys", Key.create(datetime.now(UTC))
    write_keys(path, KeyRing(keys=(key,)), is_new=True)
    with site.traffic(served, sealed=key):
        done = site.gate("good.onnx", "--wait", "1s", "--json")
        assert "it is encrypted: set stream.payload_key_file" in json.loads(done.stdout)["problem"]
        configure(site.directory, site.stream, keys=f'payload_key_file = "{path}"')
        done = site.gate("good.onnx", "--wait", "1s", "--json")
    assert json.loads(done.stdout)["exchanges"] > 0, done.stdout


def other_model(n_features: int, name: str) -> onnx.ModelProto:
    """Return a linear model of so many features, whose input has this name."""
    model = linear_model(weight=np.zeros((n_features, 3), np.float32))
    model.graph.input[0].name = name
    model.graph.node[0].input[0] = name
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = n_features
    return model


def test_a_candidate_whose_inputs_have_other_names_is_an_error(site: Site) -> None:
    """At once, and not a failure of each exchange."""
    saved(other_model(4, "pixels"), site.directory / "named.onnx")
    done = site.gate("named.onnx", "--wait", "1m")
    assert done.returncode == 2
    assert "takes `pixels`, but requests have ['x'], as the reference takes them" in done.stderr
    assert site.rows() == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--inputs", "config.toml"), "give either --inputs, recorded inputs, or --live"),
        (("--against", "good.onnx"), "--against is for --inputs"),
        (("--route", "scanner=archive=absent.onnx"), "write SLICE=FILE"),
        (
            ("--route", "scanner=new=good.onnx"),
            "--route scanner=new: there is no such slice; known are `scanner=office`",
        ),
        (("--wait", "soon"), "--wait soon is not a duration"),
    ],
)
def test_what_cannot_be_done_is_said(site: Site, arguments: Sequence[str], words: str) -> None:
    """Exit code 2, and nothing is recorded."""
    done = site.gate("good.onnx", *arguments)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert site.rows() == []


def test_a_model_without_traffic_is_an_error(site: Site) -> None:
    """There is no slice to judge; it says so at once, and does not wait."""

    async def forget() -> None:
        connection = await asyncpg.connect(site.dsn)
        await connection.execute("delete from rollup_hour")
        await connection.close()

    asyncio.run(forget())
    began_s = time.monotonic()
    done = site.gate("good.onnx", "--wait", "1h")
    assert (done.returncode, "no slice of model `digits` had traffic" in done.stderr) == (2, True), (
        done.stderr
    )
    assert time.monotonic() - began_s < 60


@pytest.mark.release
def test_the_hours_that_were_seen_are_said_and_a_pass_waits_for_the_others(site: Site) -> None:
    """However many questions pass within seconds, the verdict is insufficient; the hours that were seen are one or two."""
    with site.traffic(served):
        done = invoked(
            "gate",
            *("good.onnx", "--live", "--margin", "0.02", "--wait", "20s", "--json"),
            directory=site.directory,
            QUANTDRIFT_DSN=site.dsn,
        )
    assert done.returncode == 4, done.stderr
    printed, (row,) = json.loads(done.stdout), site.rows()
    assert (printed["verdict"], row["verdict"]) == ("insufficient", "insufficient")
    assert 1 <= len(printed["hours"]) <= 2
    if {answer["verdict"] for answer in printed["slices"]} == {"pass"}:
        assert sorted([*printed["hours"], *printed["missing_hours"]]) == list(range(24))

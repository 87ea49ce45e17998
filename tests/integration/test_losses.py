"""Losses from the client's socket to the verdict: each counts for its model, and `quantdrift status` shows it."""

import asyncio
import json
import re
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest

from quantdrift.core.clock import SystemClock
from quantdrift.core.codec import decode_tally
from quantdrift.core.config.schema import Config, Model, Monitor, Stream
from quantdrift.core.records import (
    BodyStratum,
    HeaderStratum,
    Loss,
    ModelCount,
    Policy,
    StratumCount,
    Tally,
    Verdict,
)
from quantdrift.core.stream.connection import Queue
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import claim, load_catalog, resume
from quantdrift.storage.fold.write import write
from tests.support.commands import invoked
from tests.support.sidecar.raw_exchanges import REQUEST, RESPONSE
from tests.support.sidecar.relay_process import SidecarProcess, free_port, running_backend, sidecar, wait
from tests.support.sidecar.relay_rig import answer, post
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons

pytestmark = pytest.mark.integration

CHAT, DIGITS = "chat", "digits"
N_COMPARED = 60
WATCH = Config(models=(Model(name=CHAT), Model(name=DIGITS)), monitor=Monitor(min_groups=50))
POLICY = Policy(
    epoch="e1",
    header_strata=(HeaderStratum(name="default", rate=1.0),),
    body_strata=(BodyStratum(name="default", rate=1.0),),
)
EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "word "}}]}\n\n'
LAST = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


class _Chats(socketserver.ThreadingTCPServer):
    """Streams answers: whole ones, ones without an end, ones that it cuts itself, and refusals."""

    allow_reuse_address = True
    daemon_threads = True


class _Chat(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        """Answer one request as its only message asks."""
        length = 0
        while (line := self.rfile.readline()).strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        asked = json.loads(self.rfile.read(length) or b"{}")
        wanted = asked["messages"][0]["content"]
        if wanted == "refuse":
            self.wfile.write(answer(b"slow down", b"429 Too Many Requests"))
            return
        self.wfile.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        self._send(EVENT)
        if wanted == "cut":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        if wanted == "endless":
            self.rfile.read()  # until the client leaves
            return
        self._send(LAST)
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, event: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))


@contextmanager
def _chats() -> Iterator[int]:
    """Run the chat server; yield its port."""
    with _Chats(("127.0.0.1", 0), _Chat) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


def _chat(running: SidecarProcess, wanted: str) -> None:
    """Have a chat through the relay; an endless one is closed after its first words."""
    body = json.dumps({"model": CHAT, "stream": True, "messages": [{"role": "user", "content": wanted}]})
    with running.connect() as client:
        client.sendall(post(body.encode(), b"/v1/chat/completions"))
        got = b""
        while not (b"[DONE]" in got or b"slow down" in got or (wanted == "endless" and b"word" in got)):
            try:
                data = client.recv(65_536)
            except ConnectionResetError:
                break
            if not data:
                break
            got += data


def _options(stream: Stream, *models: str) -> dict[str, object]:
    return {
        "STREAM__URL": stream.url,
        "STREAM__NAME": stream.name,
        "SAMPLING__RATE": 1,
        "SAMPLING__MAX_EXCHANGES_PER_S": 1e6,
        "SIDECAR__TALLY_INTERVAL_S": 0.2,
        **({"MODELS": json.dumps([{"name": name} for name in models])} if models else {}),
    }


async def _tallies(stream: Stream) -> list[Tally]:
    """Return the newest tally of each start."""
    queue = await Queue.connect(stream, client_name="test")
    try:
        consumer = await queue.consumer("tally", ack_wait_s=60)
        found: dict[str, Tally] = {}
        for delivery in await consumer.fetch(64, max_bytes=10**7, timeout_s=0.5):
            tally = decode_tally(delivery.data)
            found[tally.boot] = tally
            await delivery.nak(0)
        return list(found.values())
    finally:
        await queue.close()


async def _store_tallies(dsn: str, *tallies: Tally) -> None:
    async with Database(dsn) as database:
        await Writer(database, SystemClock()).store_tallies("w", list(tallies))


async def _compare(dsn: str, *models: str, known_for: timedelta = timedelta(0)) -> None:
    """Store comparisons of all traffic of these models, that never differ, of the last minutes; and since when they are known.

    Each model has a minute of its own: what is folded after later exchanges of other models is no evidence.
    """
    db = await asyncpg.connect(dsn)
    try:
        now = datetime.now(UTC)
        await make_partitions(db, [(now - timedelta(days=1)).date(), now.date()])
        begins = [now - timedelta(minutes=number) for number in reversed(range(len(models)))]
        await db.execute(
            "insert into policy (id, epoch, definition) overriding system value values (1, 'e1', $1)",
            msgspec.json.encode(POLICY).decode(),
        )
        for number, model in enumerate(models, start=1):
            version = await db.fetchval(
                "insert into model_version (model, candidate_version, reference_digest, first_seen_at)"
                " values ($1, '1', $2, $3) returning id",
                model,
                "d" * 64,
                now - known_for,
            )
            slice_id = await db.fetchval(
                "insert into slice (model, predicate, name, definition) values ($1, 'true', 'all', $2) returning id",
                model,
                '{"where": []}',
            )
            batch = await db.fetchval(
                "insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows)"
                " values ('comparison', 'w', $1, $2, $1, $3) returning id",
                now,
                begins[0] - timedelta(seconds=N_COMPARED),
                N_COMPARED,
            )
            rows = [
                Comparison(
                    captured_at=begins[number - 1] - timedelta(seconds=k),
                    exchange_id=f"{number:08d}-0000-0000-0000-{k:012d}",
                    batch_id=batch,
                    model_version_id=version,
                    slice_ids=(slice_id,),
                    flip=False,
                    divergence=0.0,
                )
                for k in range(N_COMPARED)
            ]
            await store_comparisons(db, rows)
    finally:
        await db.close()


async def _fold(dsn: str, config: Config = WATCH) -> dict[str, tuple[Verdict, str]]:
    """Fold as a monitor does; return the verdict on all traffic of each model, and why."""
    async with Database(dsn) as database, database.begin() as connection:
        fold = Fold(config, await resume(connection))
        found = await claim(connection, fold.position.fold_seq, 1000)
        fold.learn(await load_catalog(connection))
        for rows in found:
            fold.batch(rows)
        await write(connection, fold.take(), "")
        versions = fold.catalog.versions
        return {versions[row.model_version_id].model: (row.verdict, row.reason) for row in fold.verdicts()}


class _Status:
    """`quantdrift status` on a database and a stream, with these models configured."""

    def __init__(self, directory: Path, dsn: str, stream: Stream, *models: str) -> None:
        self._directory = directory
        ports = [free_port() for _ in range(3)]
        text = f'[sidecar]\nadmin = "127.0.0.1:{ports[0]}"\n[shadow]\nadmin = "127.0.0.1:{ports[1]}"\n'
        text += f'[monitor]\nadmin = "127.0.0.1:{ports[2]}"\n[stream]\nname = "{stream.name}"\n'
        for model in models:
            text += (
                f'[[models]]\nname = "{model}"\n[[models.references]]\npath = "x.onnx"\nversions = ["*"]\n'
            )
        (directory / "x.onnx").touch()
        (directory / "status.toml").write_text(text)
        self._variables = {"QUANTDRIFT_DSN": dsn, "QUANTDRIFT__STREAM__URL": stream.url}

    def json(self) -> dict[str, Any]:
        """Return the output of `--json`."""
        found: dict[str, Any] = json.loads(self._called("--json"))
        return found

    def rows(self, model: str) -> dict[str, int]:
        """Return the rows of a model with their count of the last hour, else in all."""
        text = self._called().partition(f"\nmodel {model}")[2].partition("\n\n")[0]
        found = re.findall(r"^  (\S.*?) {2,}([\d,]+)\b", text, re.MULTILINE)
        return {name: int(n.replace(",", "")) for name, n in found}

    def _called(self, *arguments: str) -> str:
        command = ("status", "--config", "status.toml", *arguments)
        done = invoked(*command, directory=self._directory, **self._variables)
        assert done.returncode in (0, 1)
        return done.stdout


@pytest.mark.parametrize(
    ("wanted", "n"),
    [
        pytest.param("endless", 30, marks=pytest.mark.release),
        pytest.param("refuse", 30, marks=pytest.mark.release),
        ("cut", 30),
    ],
)
def test_losses_at_one_sidecar_leave_the_model_of_another_alone(
    tmp_path: Path, nats_url: str, postgres_dsn: str, wanted: str, n: int
) -> None:
    """Chats that clients stop, and refusals, are no loss of answers; what the server cuts is, of its own model alone."""
    stream = Stream(url=nats_url, name=f"t-{secrets.token_hex(6)}")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        _chats() as port,
        running_backend() as backend,
        sidecar(tmp_path / "a", port, **_options(stream, CHAT)) as a,
        sidecar(tmp_path / "b", backend.port, **_options(stream, DIGITS)) as b,
    ):
        backend.reply = lambda _: json.dumps(RESPONSE).encode()
        for _ in range(n):
            _chat(a, wanted)
            _chat(a, "whole")
            b.talk(post(json.dumps(REQUEST).encode()))
        wait(lambda: b.count("quantdrift_sidecar_published_total") == n, "all of the digits are published")
        wait(lambda: a.count("quantdrift_sidecar_published_total") == n, "the whole chats are published")
        wait(lambda: a.count("quantdrift_sidecar_lost_total", model=CHAT) == n, "the other chats are counted")
    tallies = asyncio.run(_tallies(stream))
    assert len(tallies) == 2
    reason = {"endless": Loss.CLIENT_ABORT, "refuse": Loss.ERROR_STATUS, "cut": Loss.TRUNCATED}[wanted]
    ((of_chats,),) = (one.strata for one in tallies if CHAT in one.strata[0].models)
    assert of_chats.lost == of_chats.models[CHAT].lost == {reason: n}
    asyncio.run(_store_tallies(postgres_dsn, *tallies))
    asyncio.run(_compare(postgres_dsn, CHAT, DIGITS))
    verdicts = asyncio.run(_fold(postgres_dsn))
    assert verdicts[DIGITS][0] is Verdict.OK, verdicts
    status = _Status(tmp_path, postgres_dsn, stream, CHAT, DIGITS)
    rows = status.rows(CHAT)
    lossy = [line for line in status.json()["blockers"] if line.startswith("1 of 1 slice of model `chat` is")]
    if wanted == "cut":
        assert verdicts[CHAT][0] is Verdict.UNKNOWN
        assert verdicts[CHAT][1].startswith("loss: ")
        assert (rows["lost: truncated"], rows["captured"]) == (n, 2 * n)
        assert len(lossy) == 1
        assert f"Of the last 1h: {n} truncated" in lossy[0]
    else:
        assert verdicts[CHAT][0] is Verdict.OK, verdicts
        assert (rows[f"no answer: {reason}"], rows["captured"]) == (n, 2 * n)
        assert lossy == []
    assert not any(name.startswith(("lost", "no answer")) for name in status.rows(DIGITS))


@pytest.mark.release
def test_what_was_lost_under_a_wrong_name_does_not_count_once_it_is_corrected(
    tmp_path: Path, nats_url: str, postgres_dsn: str
) -> None:
    """The sidecar takes the corrected name over while it runs; the verdict is `ok`, and status says what was not compared."""
    stream = Stream(url=nats_url, name=f"t-{secrets.token_hex(6)}")
    asked = post(json.dumps(REQUEST).encode())
    (tmp_path / "a").mkdir()
    with running_backend() as backend, sidecar(tmp_path / "a", backend.port, **_options(stream)) as running:
        backend.reply = lambda _: json.dumps(RESPONSE).encode()
        for _ in range(50):
            running.talk(asked)
        wait(
            lambda: running.count("quantdrift_sidecar_lost_total", reason="unknown_model") == 50,
            "nothing of a name that is not configured is captured",
        )
        (tmp_path / "a" / "config.toml").write_text(f'[[models]]\nname = "{DIGITS}"\n')

        def is_captured() -> bool:
            running.talk(asked)
            return running.count("quantdrift_sidecar_published_total", model=DIGITS) >= 20

        wait(is_captured, "the corrected name is captured")
    tallies = asyncio.run(_tallies(stream))
    n_unknown = sum(one.models[DIGITS].unknown for tally in tallies for one in tally.strata)
    assert n_unknown >= 50
    asyncio.run(_store_tallies(postgres_dsn, *tallies))
    asyncio.run(_compare(postgres_dsn, DIGITS))
    verdicts = asyncio.run(_fold(postgres_dsn))
    assert verdicts[DIGITS][0] is Verdict.OK, verdicts
    rows = _Status(tmp_path, postgres_dsn, stream, DIGITS).rows(DIGITS)
    assert rows["named where it was not configured"] == n_unknown
    assert rows["captured"] + n_unknown == rows["offered"]


def _tally(
    before: timedelta, lost: dict[Loss, int] | None = None, *, sequence: int = 1, **models: ModelCount
) -> Tally:
    """Return a tally of 200 sampled requests of one sidecar, so long ago."""
    lost = lost or {}
    n_open = sum(one.taken - one.published - sum(one.lost.values()) for one in models.values())
    stratum = StratumCount(
        stratum="default",
        offered=200,
        taken=200,
        thinned=0,
        published=200 - sum(lost.values()) - n_open,
        lost=lost,
        models=models,
    )
    return Tally(
        source="pod",
        boot="f" * 32,
        sequence=sequence,
        at=datetime.now(UTC) - before,
        strata=(stratum,),
        blind_connections=0,
    )


_RECENTLY = timedelta(seconds=20)
_CASES = {
    "its own": (
        lambda: [
            _tally(
                _RECENTLY,
                {Loss.PUBLISH: 30},
                digits=ModelCount(taken=50, published=20, lost={Loss.PUBLISH: 30}),
                chat=ModelCount(taken=150, published=150),
            )
        ],
        ("lost: publish", 30),
        "loss: too many of its samples were lost or not observed in the last hour. Of the last 1h: 30 publish; NATS did not",
    ),
    "without a model": (
        lambda: [
            _tally(
                _RECENTLY,
                {Loss.HELD_BYTES: 30},
                digits=ModelCount(taken=20, published=20, configured=True),
            )
        ],
        ("lost, model not known: held_bytes", 30),
        ". Of the last 1h: 30 held_bytes (model not known); raise sidecar.max_held_bytes",
    ),
    "of a sidecar that names no model": (
        lambda: [_tally(_RECENTLY, {Loss.UNOBSERVED: 30})],
        ("lost, model not known: unobserved", 30),
        ". Of the last 1h: 30 unobserved (model not known); the relay cannot read",
    ),
    "of a sidecar that does not have the model": (
        lambda: [
            _tally(2 * _RECENTLY, {Loss.UNKNOWN_MODEL: 10}, digits=ModelCount(taken=0, unknown=10)),
            _tally(
                _RECENTLY,
                {Loss.UNKNOWN_MODEL: 40},
                sequence=2,
                digits=ModelCount(taken=0, unknown=40),
            ),
        ],
        ("named where it was not configured", 40),
        ". Of the last 1h: 40 named where it is not configured",
    ),
    "of a sidecar that is gone": (
        lambda: [_tally(timedelta(minutes=10), digits=ModelCount(taken=200))],
        ("not accounted for", 200),
        "loss: 200 of this model's samples of the last hour are not accounted for: a sidecar ended without sending its",
    ),
}


@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_a_verdict_that_names_status_is_answered_there(
    tmp_path: Path,
    nats_url: str,
    postgres_dsn: str,
    case: tuple[Callable[[], list[Tally]], tuple[str, int], str],
) -> None:
    """With a row and its count, and with a line of what blocks."""
    counts, row, said = case
    stream = Stream(url=nats_url, name=f"t-{secrets.token_hex(6)}")
    asyncio.run(_store_tallies(postgres_dsn, *counts()))
    asyncio.run(_compare(postgres_dsn, DIGITS, known_for=timedelta(hours=5)))
    verdict, reason = asyncio.run(_fold(postgres_dsn))[DIGITS]
    assert verdict is Verdict.UNKNOWN
    assert reason.startswith("loss: ")
    assert reason.endswith("see `quantdrift status`")
    status = _Status(tmp_path, postgres_dsn, stream, DIGITS)
    assert row in status.rows(DIGITS).items()
    (line,) = [
        one for one in status.json()["blockers"] if one.startswith("1 of 1 slice of model `digits` is")
    ]
    assert said in line
    assert not status.json()["flows"]


def test_a_sidecar_of_the_release_before_loses_for_the_models_that_its_counts_name(postgres_dsn: str) -> None:
    """During a roll-out its losses still come without a model: those of the chats are no losses of the digits."""
    old = ModelCount(taken=100, published=100)
    tally = _tally(_RECENTLY, {Loss.TRUNCATED: 80, Loss.ERROR_STATUS: 20}, chat=old)
    asyncio.run(_store_tallies(postgres_dsn, tally))
    asyncio.run(_compare(postgres_dsn, CHAT, DIGITS))
    verdicts = asyncio.run(_fold(postgres_dsn))
    assert [verdicts[model][0] for model in (CHAT, DIGITS)] == [Verdict.UNKNOWN, Verdict.OK]

"""`/gate/ID` at the monitor's admin port, from a real database, and the examples for Argo Rollouts and Flagger that ask it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import asyncpg
import msgspec
import pytest
import yaml

import quantdrift.monitor.gate
from quantdrift.core.process.admin import Admin
from quantdrift.monitor.gate import gate_routes
from quantdrift.storage.database import Database

pytestmark = pytest.mark.integration

ROOT: Final = Path(__file__).resolve().parents[2]
GOLDEN: Final = ROOT / "tests/contract/gate_bodies.json"
DIGEST: Final = f"sha256:{'ab' * 32}"


def answer(name: str, verdict: str, **more: Any) -> dict[str, Any]:
    """Return the answer about one slice."""
    known = {"n": 370, "mean": 0.0, "low": 0.0, "high": 0.0099, "limit": 0.01, "more": 0}
    return {"slice": name, "question": "flips", "verdict": verdict, **known, **more}


ENOUGH: Final = answer("all", "pass")
BAD: Final = answer("scanner=archive", "fail", n=73, mean=0.0548, low=0.0107, high=0.1232)
FEW: Final = answer("scanner=mobile", "insufficient", n=50, high=0.0713, more=320)
RUNS: Final = {
    "pass": ("pass", 0, [ENOUGH], True),
    "fail": ("fail", 0, [ENOUGH, BAD], True),
    "silent": ("insufficient", 320, [ENOUGH, FEW], False),
    "ended without enough": ("insufficient", 320, [ENOUGH, FEW], True),
    "just begun": ("insufficient", None, [], False),
}


@pytest.fixture
async def address(postgres_dsn: str, record: asyncpg.Connection) -> AsyncIterator[str]:
    """Serve five gates, 1 to 5."""
    for verdict, more, answers, ended in RUNS.values():
        await record.execute(
            "insert into gate_run (model, candidate, alpha, verdict, more, answers, checked_at, ended_at) values ('digits', $1,"
            " 0.05, $2, $3, $4, case when $5 then timestamptz '2026-11-23 08:00:00Z' end,"
            " case when $6 then timestamptz '2026-11-23 08:00:00Z' end)",
            DIGEST,
            verdict,
            more,
            msgspec.json.encode(answers).decode(),
            bool(answers),
            ended,
        )
    async with Database(postgres_dsn) as database:
        admin = Admin("monitor.admin", "127.0.0.1:0", lambda: True, gate_routes(database))
        await admin.start()
        try:
            yield f"http://127.0.0.1:{admin.port}"
        finally:
            await admin.stop()


async def test_bodies_and_status_are_those_that_rollouts_rely_on(address: str) -> None:
    """GET is always 200; promote is 200 on a pass only, and rollback on a failure only; the bodies are the golden file."""
    bodies = {}
    async with aiohttp.ClientSession() as session:
        for number, (name, run) in enumerate(RUNS.items(), start=1):
            async with session.get(f"{address}/gate/{number}") as got:
                assert (got.status, got.content_type) == (200, "application/json")
                bodies[name] = await got.json()
            for hook, wanted in (("promote", "pass"), ("rollback", "fail")):
                flagger = {"name": "digits", "namespace": "ml", "phase": "Progressing", "metadata": {}}
                async with session.post(f"{address}/gate/{number}/{hook}", json=flagger) as posted:
                    assert posted.status == (200 if run[0] == wanted else 403)
                    assert await posted.json() == bodies[name]
    assert bodies == msgspec.json.decode(GOLDEN.read_bytes())


async def test_a_gate_that_records_is_not_called_silent(address: str, record: asyncpg.Connection) -> None:
    """The third one was checked hours ago; once it is checked now, nothing is said of its end."""
    await record.execute("update gate_run set checked_at = now() where id = 3")
    async with aiohttp.ClientSession() as session, session.get(f"{address}/gate/3") as got:
        body = await got.json()
    assert body["reason"].endswith("the slice that lacks most needs about 320 more exchanges")
    assert body["ended_at"] is None


async def test_what_is_not_known_is_insufficient_and_never_a_verdict(
    address: str, record: asyncpg.Connection
) -> None:
    """An unknown number, one that no number can be, and a database without the table: 200, and 403 for both hooks."""
    async with aiohttp.ClientSession() as session:
        for number in ("99", "9" * 19):
            async with session.get(f"{address}/gate/{number}") as got:
                body = await got.json()
                assert (got.status, body["verdict"], body["slices"]) == (200, "insufficient", [])
                assert body["reason"].startswith(f"there is no gate {number}")
        await record.execute("alter table gate_run rename to gone")
        async with session.get(f"{address}/gate/1") as got:
            body = await got.json()
            assert (got.status, body["verdict"]) == (200, "insufficient")
        for hook in ("promote", "rollback"):
            async with session.post(f"{address}/gate/1/{hook}") as posted:
                assert posted.status == 403
        async with session.get(f"{address}/gate/one") as got:
            assert got.status == 404


async def test_a_database_that_hangs_does_not_hang_a_rollout(
    address: str, record: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody holds a lock on the table: the answer comes all the same, and is insufficient."""
    monkeypatch.setattr(quantdrift.monitor.gate, "_ANSWER_S", 0.2)
    async with aiohttp.ClientSession() as session, record.transaction():
        await record.execute("lock table gate_run in access exclusive mode")
        async with session.get(f"{address}/gate/1") as got:
            body = await got.json()
            assert (got.status, body["verdict"]) == (200, "insufficient")
            assert body["reason"] == "the database does not answer: ask again"
    async with aiohttp.ClientSession() as session, session.get(f"{address}/gate/1") as got:
        assert (await got.json())["verdict"] == "pass"


def test_the_examples_ask_what_is_served() -> None:
    """Argo Rollouts reads the verdict, pauses where it is neither; Flagger calls the two hooks. Only routes that exist."""
    (argo,) = yaml.safe_load_all((ROOT / "deploy/argo-rollouts/gate.yaml").read_text(encoding="utf-8"))
    (metric,) = argo["spec"]["metrics"]
    assert argo["kind"] == "AnalysisTemplate"
    assert metric["provider"]["web"]["url"].endswith("/gate/{{args.gate}}")
    assert metric["provider"]["web"]["jsonPath"] == "{$.verdict}"
    assert (metric["successCondition"], metric["failureCondition"]) == (
        'result == "pass"',
        'result == "fail"',
    )
    assert metric["inconclusiveLimit"] == metric["count"] - 1
    (flagger,) = yaml.safe_load_all((ROOT / "deploy/flagger/gate.yaml").read_text(encoding="utf-8"))
    hooks = {hook["type"]: hook["url"] for hook in flagger["spec"]["analysis"]["webhooks"]}
    assert {kind: url.rpartition("/")[2] for kind, url in hooks.items()} == {
        "confirm-promotion": "promote",
        "rollback": "rollback",
    }

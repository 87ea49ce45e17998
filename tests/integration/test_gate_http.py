"""`/gate/ID` at the monitor's admin port, from a real database, and the examples for Argo Rollouts and Flagger that ask it."""

import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import asyncpg
import msgspec
import pytest
import yaml

import quantdrift.monitor.gate
from quantdrift.core.config.schema import Budget, Config, Model, Monitor
from quantdrift.core.config.state import judged_by
from quantdrift.core.errors import OperatorError
from quantdrift.core.process.admin import Admin
from quantdrift.monitor.gate import gate_routes
from quantdrift.storage.database import Database
from quantdrift.storage.gate import begin, end, progress
from quantdrift.storage.schema.roles import OPERATOR
from tests.support.storage.logins import login_in

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


DIGITS: Final = Model(name="digits")
CONFIG: Final = Config(models=(DIGITS,))


async def judge(
    database: Database,
    verdict: str,
    more: int | None = 0,
    answers: list[dict[str, Any]] | None = None,
    *,
    ended: bool = True,
    only: str = "",
    config: Config = CONFIG,
) -> int:
    """Let a gate run as `quantdrift gate --live` does, and return its number."""
    begun = await begin(database, model="digits", candidate=DIGEST, alpha=0.05)
    written = msgspec.json.encode(answers or [])
    if answers:
        await progress(database, begun.id, more=more, answers=written)
    if ended:
        await end(
            database,
            begun.id,
            verdict=verdict,
            more=more,
            answers=written,
            configuration=judged_by(config, DIGITS),
            only=only,
        )
    return begun.id


@asynccontextmanager
async def served(dsn: str, config: Config = CONFIG, token: str = "") -> AsyncIterator[str]:
    """Serve the gates of a database as the monitor does, and return the address."""
    async with Database(dsn) as database:
        admin = Admin("monitor.admin", "127.0.0.1:0", lambda: True, gate_routes(database, config, token))
        await admin.start()
        try:
            yield f"http://127.0.0.1:{admin.port}"
        finally:
            await admin.stop()


@pytest.fixture
async def address(postgres_dsn: str, record: asyncpg.Connection, database: Database) -> AsyncIterator[str]:
    """Serve five gates, 1 to 5."""
    for verdict, more, answers, ended in RUNS.values():
        await judge(database, verdict, more, answers, ended=ended)
    for column in ("checked_at", "ended_at"):
        await record.execute(f"update gate_run set {column} = '2026-11-23 08:00Z' where {column} is not null")
    async with served(postgres_dsn) as place:
        yield place


async def asked(
    address: str, number: int, hook: str = "", *, candidate: str = DIGEST, token: str = "", **body: Any
) -> tuple[int, dict[str, Any]]:
    """Ask for a gate, and return status and body; a hook is asked by POST."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"{address}/gate/{number}{hook and '/' + hook}"
    parameters = {"candidate": candidate} if candidate else {}
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            "POST" if hook else "GET", url, params=parameters, headers=headers, json=body or None
        ) as got,
    ):
        return got.status, await got.json()


FLAGGER: Final = {"name": "digits", "namespace": "ml", "phase": "Progressing", "checksum": "85d557f47b"}


async def test_bodies_and_status_are_those_that_rollouts_rely_on(address: str) -> None:
    """GET is always 200; promote is 200 on a pass only, and rollback on a failure only; the bodies are the golden file."""
    bodies = {}
    for number, (name, run) in enumerate(RUNS.items(), start=1):
        status, bodies[name] = await asked(address, number)
        assert status == 200
        for hook, wanted in (("promote", "pass"), ("rollback", "fail")):
            metadata = {"candidate": DIGEST}
            status, body = await asked(address, number, hook, candidate="", metadata=metadata, **FLAGGER)
            assert status == (200 if run[0] == wanted else 403)
            assert body == bodies[name]
    assert bodies == msgspec.json.decode(GOLDEN.read_bytes())


FORGERIES: Final = (
    "update gate_run set verdict = 'pass', answers = '[]' where id = {gate}",
    "update gate_run set candidate = 'sha256:0' where id = {gate}",
    "update gate_verdict set verdict = 'pass' where gate_id = {gate}",
    (
        "insert into gate_verdict (gate_id, verdict, slice, configuration, made_by, made_at)"
        " values ({gate}, 'pass', '', '{{}}', 'quantdrift_operator_user', now())"
    ),
    "delete from gate_verdict where gate_id = {gate}",
    "delete from gate_run where id = {gate}",
    "insert into gate_run (id, model, candidate, alpha) overriding system value values ({gate}, 'digits', 'x', 0.05)",
    "insert into gate_run (model, candidate, alpha, made_by) values ('digits', 'x', 0.05, 'somebody')",
    "select gate_end({gate}, 'pass', 0, '[]', '{{}}', '')",
    "select gate_progress({gate}, 0, '[]')",
)


async def test_nobody_turns_the_verdict_on_a_gate(postgres_dsn: str, record: asyncpg.Connection) -> None:
    """Neither another operator nor who ran it makes a pass of a fail; what is recorded is in the audit, with who it was."""
    honest = await login_in(postgres_dsn, OPERATOR)
    name = f"mallory_{postgres_dsn.rpartition('/')[2]}"
    await record.execute(f"create user {name} password 'm' in role {OPERATOR}")
    other = re.sub(r"//[^@]+@", f"//{name}:m@", honest)
    async with Database(honest) as database:
        failed = await judge(database, "fail", 0, [ENOUGH, BAD])
        running = await judge(database, "insufficient", 320, [ENOUGH, FEW], ended=False)
        with pytest.raises(OperatorError, match="has ended, or another user began it"):
            await progress(database, failed, more=0, answers=b"[]")
    entries = "select actor, action, model, subject, after from audit where action like '%gate%' order by seq"
    before = await record.fetch(entries)
    assert [(row["model"], row["subject"]) for row in before] == [("digits", f"gate {failed}")]
    assert before[0]["actor"] == honest.partition("//")[2].partition(":")[0]
    state = msgspec.json.decode(before[0]["after"])
    assert (state["verdict"], state["candidate"]) == ("fail", DIGEST)
    for user, gates in ((other, (failed, running)), (honest, (failed,))):
        connection = await asyncpg.connect(user)
        for gate in gates:
            for statement in FORGERIES:
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(statement.format(gate=gate))
        await connection.close()
    async with served(postgres_dsn) as address:
        for gate in (failed, running):
            assert (await asked(address, gate, "promote"))[0] == 403
        assert (await asked(address, failed, "rollback"))[0] == 200
    assert await record.fetch(entries) == before


async def test_a_pass_promotes_what_was_judged_and_nothing_else(
    postgres_dsn: str, record: asyncpg.Connection, database: Database
) -> None:
    """Not another candidate, not by other options, not a slice alone, not after a day; each time with what to do."""
    gate = await judge(database, "pass", 0, [ENOUGH])
    narrow = await judge(database, "pass", 0, [ENOUGH], only="scanner=archive")
    lax = Config(models=(Model(name="digits", budget=Budget(flip=0.5)),))
    async with served(postgres_dsn) as address, served(postgres_dsn, lax) as changed:
        assert (await asked(address, gate, "promote"))[0] == 200
        other = f"sha256:{'cd' * 32}"
        for place, number, candidate, body, reason in (
            (address, gate, other, {}, f"gate {gate} judges another candidate: {DIGEST}"),
            (address, gate, "", {}, "the candidate is missing"),
            (
                address,
                gate,
                "",
                {**FLAGGER, "metadata": {"candidate": other}},
                "judges another candidate",
            ),
            (address, gate, "", FLAGGER, "the candidate is missing"),
            (changed, gate, DIGEST, {}, "other options than the monitor's (models.digits.budget.flip)"),
            (address, narrow, DIGEST, {}, "judged scanner=archive alone: run it without --alert"),
        ):
            status, answer = await asked(place, number, "promote", candidate=candidate, **body)
            assert (status, answer["verdict"]) == (403, "insufficient")
            assert reason in answer["reason"]
            status, answer = await asked(place, number, candidate=candidate)
            assert (status, answer["verdict"]) == (200, "insufficient")
        await record.execute("update gate_verdict set made_at = now() - interval '25 hours'")
        status, answer = await asked(address, gate, "promote")
        assert (status, answer["verdict"]) == (403, "insufficient")
        assert answer["reason"] == (
            "the verdict is 1.04 d old, and monitor.gate_max_age_s allows 1 d: run the gate again"
        )
    longer = msgspec.structs.replace(CONFIG, monitor=Monitor(gate_max_age_s=180_000))
    async with served(postgres_dsn, longer) as address:
        assert (await asked(address, gate, "promote"))[0] == 200


async def test_only_a_program_with_a_token_learns_a_verdict(
    postgres_dsn: str, database: Database, tmp_path: Path
) -> None:
    """As a bearer or, as Flagger can, in the body; of its own models; a replaced token counts at once."""
    gate = await judge(database, "pass", 0, [ENOUGH])
    file = tmp_path / "tokens"

    def write(**tokens: str) -> str:
        lines = [
            f"{name} sha256:{hashlib.sha256(token.encode()).hexdigest()} {'faces' if name == 'faces' else 'digi*'}"
            for name, token in tokens.items()
        ]
        file.write_text("\n".join(lines))
        return file.read_text()

    token = write(rollouts="right", faces="other")
    config = msgspec.structs.replace(CONFIG, monitor=Monitor(gate_token_file=str(file)))
    async with served(postgres_dsn, config, token) as address:
        assert (await asked(address, gate, "promote", token="right"))[0] == 200
        assert (await asked(address, gate, token="right"))[1]["verdict"] == "pass"
        metadata = {"candidate": DIGEST, "token": "right"}
        assert (await asked(address, gate, "promote", candidate="", metadata=metadata))[0] == 200
        for wrong in ("", "wrong", "other"):
            status, answer = await asked(address, gate, "promote", token=wrong)
            assert (status, answer["verdict"]) == (403, "insufficient")
            assert (answer["candidate"], answer["slices"]) == ("", [])
            assert (await asked(address, gate, token=wrong))[1] == answer
        write(rollouts="new")
        assert (await asked(address, gate, "promote", token="right"))[0] == 403
        assert (await asked(address, gate, "promote", token="new"))[0] == 200
    open_port = msgspec.structs.replace(CONFIG, monitor=Monitor(admin="0.0.0.0:9466"))
    async with served(postgres_dsn, open_port) as address:
        status, answer = await asked(address, gate, "promote")
        assert (status, "set monitor.gate_token_file" in answer["reason"]) == (403, True)


async def test_a_gate_that_records_is_not_called_silent(address: str, record: asyncpg.Connection) -> None:
    """The third one was checked hours ago; once it is checked now, nothing is said of its end."""
    await record.execute("update gate_run set checked_at = now() where id = 3")
    _, body = await asked(address, 3)
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
    assert (await asked(address, 1))[1]["verdict"] == "pass"


def test_the_examples_ask_what_is_served() -> None:
    """Argo Rollouts reads the verdict, pauses where it is neither; Flagger calls the two hooks. Only routes that exist."""
    (argo,) = yaml.safe_load_all((ROOT / "deploy/argo-rollouts/gate.yaml").read_text(encoding="utf-8"))
    (metric,) = argo["spec"]["metrics"]
    assert argo["kind"] == "AnalysisTemplate"
    assert metric["provider"]["web"]["url"].endswith("/gate/{{args.gate}}?candidate={{args.candidate}}")
    assert metric["provider"]["web"]["headers"] == [
        {"key": "Authorization", "value": "Bearer {{args.token}}"}
    ]
    assert {one["name"] for one in argo["spec"]["args"]} == {"gate", "candidate", "token"}
    assert metric["provider"]["web"]["jsonPath"] == "{$.verdict}"
    assert (metric["successCondition"], metric["failureCondition"]) == (
        'result == "pass"',
        'result == "fail"',
    )
    assert metric["inconclusiveLimit"] == metric["count"] - 1
    (flagger,) = yaml.safe_load_all((ROOT / "deploy/flagger/gate.yaml").read_text(encoding="utf-8"))
    hooks = {hook["type"]: hook["url"] for hook in flagger["spec"]["analysis"]["webhooks"]}
    for hook in flagger["spec"]["analysis"]["webhooks"]:
        assert hook["metadata"].keys() == {"candidate", "token"}
    assert {kind: url.rpartition("/")[2] for kind, url in hooks.items()} == {
        "confirm-promotion": "promote",
        "rollback": "rollback",
    }

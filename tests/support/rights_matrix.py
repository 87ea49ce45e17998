"""Who may do what: every credential of an installation tried against every action, for the page `docs/reference/rights.md`.

`python -m tests.support.rights_matrix` runs `quantdrift up`, tries, and writes that page again. Every trial is a real one at the real
server: Postgres rolls it back, NATS gets a message that its stream refuses to store, and HTTP asks for what does not exist.
"""

import asyncio
import contextlib
import hashlib
import os
import re
import ssl
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import aiohttp
import asyncpg
import msgspec
import nats
import nats.errors
from nats.aio.client import Client

from quantdrift.core.config.callers import TokenScope
from quantdrift.core.process.states import STATES, read_states
from quantdrift.core.stream.rights import NatsRole, inbox
from quantdrift.storage.audit import Action
from quantdrift.storage.schema.roles import (
    HOLDERS,
    MONITOR,
    OPERATOR,
    PAGE,
    READER,
    REPORT,
    SHADOW,
    login_of,
)
from tests.support.sidecar.relay_process import free_port

PAGE_FILE: Final = Path(__file__).resolve().parents[2] / "docs/reference/rights.md"
NOBODY: Final = "nobody"
"""A user of Postgres without a role, a client of NATS without a key, a request without a token."""
WRONG: Final = "wrong token"
EVERYTHING: Final = "all of them"
SQL_ROLES: Final = (SHADOW, MONITOR, OPERATOR, PAGE, REPORT, READER)
TOKENS: Final[Mapping[str, str]] = {
    WRONG: "",
    **{scope: f"may={scope}" for scope in TokenScope},
    EVERYTHING: "",
}
"""What follows the hash in the line of a token, by what the token may do; the wrong one has no line."""
_READY_S: Final = 240.0

Matrix = dict[str, dict[str, str]]
"""By action and by who: empty where it is refused, else `yes` or what is allowed of it."""


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """A running `quantdrift up` with logins.

    Parameters
    ----------
    dsns
        Address of a user in each SQL role, and of one without a role.
    keys
        Files of the keys at NATS.
    tls
        With which NATS is reached.
    ports
        Of each role's HTTP.
    data
        The data directory.
    pid
        Of `up`.
    """

    data: Path
    pid: int
    owner: str
    dsns: Mapping[str, str]
    nats: str
    keys: Mapping[NatsRole, Path]
    tls: ssl.SSLContext
    ports: Mapping[str, int]


@contextmanager
def installed(directory: Path) -> Iterator[Installation]:
    """Run `quantdrift up` with tokens for page, gate and intake, and users in the SQL roles that people have."""
    ports = {name: free_port() for name in ("relay", "sidecar", "shadow", "monitor", "page", "intake")}
    lines = [
        f"{name.replace(' ', '-')} sha256:{hashlib.sha256(token_of(name).encode()).hexdigest()} {may}".strip()
        for name, may in TOKENS.items()
        if name != WRONG
    ]
    (directory / "tokens").write_text("\n".join(lines))
    reporters = [
        f"{model} sha256:{hashlib.sha256(token_of(model).encode()).hexdigest()} {model}"
        for model in ("digits", "faces")
    ]
    (directory / "reporters").write_text("\n".join(reporters))
    config = directory / "config.toml"
    address = {name: f'"127.0.0.1:{port}"' for name, port in ports.items()}
    config.write_text(
        f'[sidecar]\nlisten = {address["relay"]}\nbackend = "127.0.0.1:{free_port()}"\nadmin = {address["sidecar"]}\n'
        f"drain_delay_s = 0\n[shadow]\nadmin = {address['shadow']}\n"
        f'[monitor]\nadmin = {address["monitor"]}\ngate_token_file = "tokens"\n'
        f'[web]\nlisten = {address["page"]}\ntoken_file = "tokens"\n'
        f'[intake]\nlisten = {address["intake"]}\ntoken_file = "reporters"\n'
        '[[models]]\nname = "digits"\n[[models]]\nname = "faces"\n'
    )
    data = directory / "data"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUANTDRIFT")}
    command = [sys.executable, "-m", "quantdrift", "up", "-c", str(config), "--data", str(data)]
    with ExitStack() as stack:
        log = stack.enter_context((directory / "up.log").open("w"))
        process = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        try:
            _wait_ready(process, data / STATES, directory / "up.log")
            yield asyncio.run(_opened(data, ports, process.pid))
        finally:
            process.terminate()
            process.wait()


def token_of(name: str) -> str:
    """Return the token of a caller."""
    return f"the token of whoever may {name}"


def _wait_ready(process: subprocess.Popen[bytes], states: Path, log: Path) -> None:
    names = {"sidecar", "shadow", "monitor", "web"}
    until_s = time.monotonic() + _READY_S
    while not states.exists() or any(
        name not in (read := read_states(states)) or not read[name].works for name in names
    ):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until_s, f"`up` is not ready within {_READY_S:g} s:\n{log.read_text()}"
        time.sleep(0.1)


async def _opened(data: Path, ports: Mapping[str, int], pid: int) -> Installation:
    owner = (data / "dsn").read_text().strip()
    dsns = {
        role: (data / f"{role.removeprefix('quantdrift_')}.dsn").read_text().strip()
        for role in (SHADOW, MONITOR, PAGE, READER)
    }
    place = owner.rpartition("@")[2]
    connection = await asyncpg.connect(owner)
    try:
        await connection.execute("create user nobody password 'p'")
        for role in (OPERATOR, REPORT):
            await connection.execute(f"create user {login_of(role)} password 'p' in role {role}")
    finally:
        await connection.close()
    people = {role: f"postgresql://{login_of(role)}:p@{place}" for role in (OPERATOR, REPORT)}
    return Installation(
        data=data,
        pid=pid,
        owner=owner,
        dsns={NOBODY: f"postgresql://nobody:p@{place}", **dsns, **people},
        nats=(data / "nats.url").read_text().strip(),
        keys={role: data / "nats/keys" / f"{role}.nk" for role in NatsRole},
        tls=ssl.create_default_context(cafile=str(data / "nats/tls/ca.pem")),
        ports=ports,
    )


async def tried(installation: Installation) -> dict[str, Matrix]:
    """Try everything, and return what was allowed, by section of the page."""
    tables, actions = await _sql(installation)
    return {
        "Tables": tables,
        "SQL": actions,
        "NATS": await _nats(installation),
        "Page": await _page(installation),
        "Ports": await _ports(installation),
        "Intake": await _intake(installation),
    }


# Postgres

_TABLES: Final = """
    select c.relname as name, c.relkind::text as kind, array_agg(a.attname order by a.attnum)::text[] as columns,
        array_agg(a.attname order by a.attnum) filter (where a.attidentity <> 'a' and a.attgenerated = '')::text[] as writable
    from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
    where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'f')
        and (not c.relispartition or c.oid = (select min(inhrelid) from pg_inherits where inhparent = 'comparison'::regclass))
    group by c.relname, c.relkind order by c.relname
"""
_FUNCTIONS: Final = """
    select p.proname || '(' || pg_get_function_identity_arguments(p.oid) || ')' as signature, p.proname as name,
        array(select format_type(t, null) from unnest(p.proargtypes) t) as arguments
    from pg_proc p where p.pronamespace = 'public'::regnamespace and p.prorettype <> 'trigger'::regtype
    order by p.proname
"""
_PARTITION: Final = re.compile(r"comparison_\d{8}")
# What only writes to the database as a whole, or to the server: by the words of the page.
SQL_ACTIONS: Final[Mapping[str, str]] = {
    "create a table": "create table public.mine (n int)",
    "create a function": "create function public.mine() returns int language sql as 'select 1'",
    "create an operator": "create operator public.=== (leftarg = text, rightarg = text, function = texteq)",
    "create a schema": "create schema mine",
    "create a role": "create role mine",
    "drop an extension": "drop extension plpgsql",
    "give itself a right": "do $$ begin grant delete on comparison to current_user;"
    " if not has_table_privilege('comparison', 'delete') then raise insufficient_privilege; end if; end $$",
    "become superuser": "alter role current_user superuser",
    "become the owner": "set session authorization quantdrift",
    **{f"become `{role}`": f"set role {role}" for role in (*SQL_ROLES, *HOLDERS)},
    "own `comparison`": "alter table comparison owner to current_user",
    "plant a trigger": "create trigger mine before insert on comparison execute function audit_refuse()",
    "plant a rule": "create rule mine as on insert to comparison do also notify mine",
    "plant a default": "alter table comparison alter flip set default true",
    "drop a table": "drop table alert",
    "drop a partition by hand": "do $$ begin execute (select 'drop table ' || min(inhrelid)::regclass from pg_inherits"
    " where inhparent = 'comparison'::regclass); end $$",
    "empty a table": "truncate tally",
    "lead: hold the lock of the monitor": "lock table leader_lock in share update exclusive mode nowait",
    "hold the lock of the search": "lock table discovery_lock in share update exclusive mode nowait",
    "hold the lock of maintenance": "lock table partition_lock in share update exclusive mode nowait",
    "keep the audit from its writers": "lock table audit in exclusive mode",
    "remove the audit's trigger": "alter table audit disable trigger all",
    "read a file of the server": "select pg_read_file('/etc/passwd')",
    "write a file of the server": "copy (select 1) to '/tmp/quantdrift-mine'",
    "run a program at the server": "copy (select 1) to program 'true'",
    "import a file of the server": "select lo_import('/etc/passwd')",
    "read password hashes": "select rolpassword from pg_authid",
    "end another user's session": "select pg_terminate_backend(pid) from pg_stat_activity"
    " where usename in ('quantdrift_monitor_user', 'quantdrift_shadow_user') and usename <> session_user limit 1",
    "change the server's settings": "set log_statement = 'none'",
    "acknowledge in its own name": "insert into alert_action (alert_id, action, identity, reason, severity, level, finding)"
    " values (0, 'ack', '', 'x', 'firing', 0, null)",
    "acknowledge in somebody else's name": "insert into alert_action (alert_id, action, identity, reason, severity, level, finding)"
    " values (0, 'ack', 'alice', 'x', 'firing', 0, null)",
    "close an incident in somebody else's name": "insert into incident_change (incident_id, state, mitigation, at, identity, reason)"
    " values (0, 'closed', null, now(), 'alice', 'x')",
    "record the verdict of its own gate": "do $$ declare g bigint; begin insert into gate_run (model, candidate, alpha)"
    " values ('digits', 'sha256:0', 0.05) returning id into g; perform gate_end(g, 'pass', 0, '[]', '{}', ''); end $$",
    "turn the verdict of somebody else's gate": "select gate_end(1, 'pass', 0, '[]', '{}', '')",
}
_GATE: Final = """do $$ declare g bigint; begin
    insert into gate_run (model, candidate, alpha) values ('digits', 'sha256:0', 0.05) returning id into g;
    perform gate_end(g, 'fail', 0, '[]', '{}', '');
end $$"""
_REFUSED: Final = (
    asyncpg.InsufficientPrivilegeError,
    asyncpg.CheckViolationError,  # of the name for whom somebody acts
)


async def _sql(installation: Installation) -> tuple[Matrix, Matrix]:
    """Try each column of each table, each function, each action and each entry of the audit as each role."""
    owner = await asyncpg.connect(installation.owner)
    try:
        await owner.execute(_GATE)
        tables, functions = await owner.fetch(_TABLES), await owner.fetch(_FUNCTIONS)
    finally:
        await owner.close()
    rights: Matrix = {}
    actions: Matrix = {}
    for role in (NOBODY, *SQL_ROLES):
        # What has a right may wait for a lock of those who work meanwhile.
        connection = await asyncpg.connect(installation.dsns[role], server_settings={"lock_timeout": "1s"})
        try:
            for table in tables:
                name = _PARTITION.sub("a partition of comparison", table["name"])
                rights.setdefault(f"`{name}`", {})[role] = await _of_table(connection, table)
            for function in functions:
                nulls = ", ".join(f"null::{kind}" for kind in function["arguments"])
                call = f"select {function['name']}({nulls})"
                is_refused = await _is_refused(connection, call, "permission denied for function")
                signature = re.sub(r" ORDER BY .*", "", function["signature"])
                actions.setdefault(f"call `{signature}`", {})[role] = "" if is_refused else "yes"
            for action, statement in SQL_ACTIONS.items():
                actions.setdefault(action, {})[role] = _yes(not await _is_refused(connection, statement))
            for entry in Action:
                statement = f"select audit_add('{entry}', '', '', null, null, '')"
                actions.setdefault(f"add to the audit: `{entry}`", {})[role] = _yes(
                    not await _is_refused(connection, statement)
                )
        finally:
            await connection.close()
    return rights, actions


async def _of_table(connection: asyncpg.Connection, table: asyncpg.Record) -> str:
    """Return what a role may do with a table, with the columns where they are not all."""
    name = table["name"]
    parts = []
    for verb, columns in (
        ("select", table["columns"]),
        ("insert", table["writable"]),
        ("update", table["writable"]),
        ("delete", None),
    ):
        if table["kind"] == "v" and verb != "select":
            continue
        if columns is None:
            if not await _is_refused(connection, f"delete from {name} where false"):
                parts.append(verb)
            continue
        if not await _is_refused(connection, _touching(verb, name, columns)):
            parts.append(verb)
            continue
        allowed = [
            column for column in columns if not await _is_refused(connection, _touching(verb, name, [column]))
        ]
        if allowed:
            missing = [column for column in columns if column not in allowed]
            some = f"not {', '.join(missing)}" if len(missing) < len(allowed) else ", ".join(allowed)
            parts.append(f"{verb} ({some})")
    return ", ".join(parts)


def _touching(verb: str, table: str, columns: Sequence[str]) -> str:
    """Return a statement that needs the right to columns, and touches no row."""
    quoted = [f'"{column}"' for column in columns]
    match verb:
        case "select":
            return f"select {', '.join(quoted)} from {table} where false"
        case "insert":
            nulls = ", ".join("null" for _ in quoted)
            return f"insert into {table} ({', '.join(quoted)}) select {nulls} where false"
        case _:
            return f"update {table} set {', '.join(f'{column} = null' for column in quoted)} where false"


async def _is_refused(connection: asyncpg.Connection, statement: str, why: str = "") -> bool:
    """Return whether the server refuses a statement for want of a right; other errors mean that it would have done it.

    Parameters
    ----------
    why
        What the refusal begins with; empty: anything.
    """
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute(statement)
    except _REFUSED as error:
        return str(error).startswith(why)
    except (asyncpg.PostgresSyntaxError, asyncpg.UndefinedObjectError, asyncpg.UndefinedColumnError):
        raise
    except asyncpg.PostgresError:
        return False
    finally:
        await transaction.rollback()
    return False


def _yes(allowed: bool) -> str:  # noqa: FBT001 - reads well
    return "yes" if allowed else ""


# NATS

_NAME: Final = "quantdrift"
_API: Final = "$JS.API"
_FORBIDDEN: Final = "nobody.may.publish.this"
PUBLISHED: Final[Mapping[str, tuple[str, ...]]] = {
    "publish an exchange": (f"{_NAME}.exchange.digits",),
    "publish a tally": (f"{_NAME}.tally.digits.pod.boot",),
    "publish the policy": (f"$KV.{_NAME}-policy.directive",),
    "pause and resume": (f"$KV.{_NAME}-pause.pause",),
    "store an exemplar": (f"{_NAME}.exemplar.digits.all.random.1",),
    "ask for a copy of exchanges": (f"{_NAME}.copy.digits",),
    "read its own rights": ("$SYS.REQ.USER.INFO",),
    "read the policy": (f"{_API}.DIRECT.GET.KV_{_NAME}-policy.$KV.{_NAME}-policy.directive",),
    "read the pause": (f"{_API}.DIRECT.GET.KV_{_NAME}-pause.$KV.{_NAME}-pause.pause",),
    "see how much waits": (
        f"{_API}.STREAM.INFO.{_NAME}",
        f"{_API}.CONSUMER.INFO.{_NAME}.shadow-digits",
    ),
    "read exchanges": (
        f"{_API}.CONSUMER.CREATE.{_NAME}.shadow-digits",
        f"{_API}.CONSUMER.MSG.NEXT.{_NAME}.shadow-digits",
    ),
    "acknowledge exchanges": (f"$JS.ACK.{_NAME}.shadow-digits.1.1.1.1.1",),
    "read tallies": (
        f"{_API}.CONSUMER.CREATE.{_NAME}-tally.tallies",
        f"{_API}.CONSUMER.MSG.NEXT.{_NAME}-tally.tallies",
    ),
    "read exemplars": (
        f"{_API}.CONSUMER.CREATE.{_NAME}-exemplar.reader",
        f"{_API}.CONSUMER.MSG.NEXT.{_NAME}-exemplar.reader",
    ),
    "fetch one message of the stream": (f"{_API}.STREAM.MSG.GET.{_NAME}",),
    "fetch one message of the stream directly": (f"{_API}.DIRECT.GET.{_NAME}",),
    "create and update the stream of exchanges": (
        f"{_API}.STREAM.CREATE.{_NAME}",
        f"{_API}.STREAM.UPDATE.{_NAME}",
    ),
    "create a stream of its own": (f"{_API}.STREAM.CREATE.mine",),
    "update the bucket of the policy": (f"{_API}.STREAM.UPDATE.KV_{_NAME}-policy",),
    "update the bucket of the pause": (f"{_API}.STREAM.UPDATE.KV_{_NAME}-pause",),
    "delete a message": (f"{_API}.STREAM.MSG.DELETE.{_NAME}",),
    "empty a stream": (f"{_API}.STREAM.PURGE.{_NAME}",),
    "delete a stream": (f"{_API}.STREAM.DELETE.{_NAME}",),
    "delete a consumer of exchanges": (f"{_API}.CONSUMER.DELETE.{_NAME}.shadow-digits",),
    "list the streams": (f"{_API}.STREAM.NAMES",),
    "ask the server about others": ("$SYS.REQ.SERVER.PING",),
    "answer in place of the server": (f"_INBOX.{_NAME}.shadow.x",),
}
SUBSCRIBED: Final[Mapping[str, str]] = {
    "hear everything": ">",
    "hear exchanges as they are published": f"{_NAME}.exchange.>",
    "hear tallies as they are published": f"{_NAME}.tally.>",
    "hear copies of exchanges": f"{_NAME}.copy.>",
    "hear the policy": f"$KV.{_NAME}-policy.>",
    "hear the pause": f"$KV.{_NAME}-pause.>",
    **{f"hear the answers to the {role}": f"{inbox(_NAME, role)}.>" for role in NatsRole},
}


async def _nats(installation: Installation) -> Matrix:
    """Publish and subscribe with each key, and without one."""
    matrix: Matrix = {action: {NOBODY: ""} for action in ("connect", *PUBLISHED, *SUBSCRIBED)}
    with contextlib.suppress(nats.errors.Error):
        client = await nats.connect(
            installation.nats, tls=installation.tls, allow_reconnect=False, error_cb=_ignore
        )
        await client.close()
        matrix["connect"][NOBODY] = "yes"
    for role in NatsRole:
        refusals: asyncio.Queue[str] = asyncio.Queue()

        async def note(problem: Exception, refusals: asyncio.Queue[str] = refusals) -> None:
            refusals.put_nowait(str(problem))

        client = await nats.connect(
            installation.nats,
            tls=installation.tls,
            nkeys_seed=str(installation.keys[role]),
            inbox_prefix=inbox(_NAME, role),
            error_cb=note,
        )
        try:
            matrix["connect"][role] = "yes"
            for action, subjects in PUBLISHED.items():
                answers = set()
                for subject in subjects:
                    # A stream refuses to store what another one should, and the API answers to no JSON with an error.
                    await client.publish(subject, b"{", headers={"Nats-Expected-Stream": "nobody"})
                    answers.add(not await _refusals(client, refusals))
                assert len(answers) == 1, (role, action)
                matrix[action][role] = _yes(answers.pop())
            for action, subject in SUBSCRIBED.items():
                subscription = await client.subscribe(subject)
                is_refused = await _refusals(client, refusals)
                matrix[action][role] = _yes(not is_refused)
                if not is_refused:
                    await subscription.unsubscribe()
        finally:
            await client.close()
    return matrix


async def _refusals(client: Client, refusals: asyncio.Queue[str]) -> int:
    """Return how often the server has refused something since the last call: it answers in order, and refuses the last one always."""
    await client.publish(_FORBIDDEN)
    n = 0
    async with asyncio.timeout(30):
        while _FORBIDDEN not in await refusals.get():
            n += 1
    return n


async def _ignore(_: Exception) -> None:
    """Say nothing of a connection that is refused."""


# HTTP

_LABELS: Final = b"key,candidate_right,reference_right\nr1,false,true\n"
_MARK: Final = re.compile(r'name="form_mark" value="([^"]+)"')


async def _page(installation: Installation) -> Matrix:
    """Ask the page with each token, and without one."""
    url = f"http://127.0.0.1:{installation.ports['page']}"
    matrix: Matrix = defaultdict(dict)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        for who in (NOBODY, *TOKENS):
            headers = {} if who == NOBODY else {"Authorization": f"Bearer {token_of(who)}"}

            async def ask(
                method: str,
                path: str,
                *,
                data: bytes | Mapping[str, str] | None = None,
                headers: Mapping[str, str] = headers,
                **more: str,
            ) -> int:
                async with session.request(
                    method, url + path, data=data, headers={**headers, **more}, allow_redirects=False
                ) as answer:
                    return answer.status

            for action, path in (
                ("read a page", "/"),
                ("read an alert", "/alert/1"),
                ("read the API", "/api/v1/slices"),
            ):
                matrix[action][who] = _yes(await ask("GET", path) in {200, 404})
            async with session.get(f"{url}/events", headers=headers, allow_redirects=False) as answer:
                matrix["follow the events"][who] = _yes(answer.status == 200)
            async with session.get(f"{url}/login", headers=headers) as answer:
                mark = _MARK.search(await answer.text())
            assert mark is not None
            form = {"form_mark": mark[1], "action": "ack", "reason": "x"}
            for action, path, done in (
                ("acknowledge an alert", "/alert/1", "ack"),
                ("say what became of an incident", "/incident/1", "close"),
            ):
                status = await ask("POST", path, data={**form, "action": done}, Origin=url)
                matrix[action][who] = _yes(status not in {303, 401, 403})
            status = await ask(
                "POST",
                "/api/v1/labels?by=trace",
                data=_LABELS,
                headers={**headers, "Content-Type": "text/csv", "Origin": url},
            )
            matrix["send labels"][who] = _yes(status not in {401, 403})
            matrix["ask under a name that somebody pointed here"][who] = _yes(
                await ask("GET", "/", Host="evil.example") in {200, 303}
            )
            matrix["send a form from another site"][who] = _yes(
                await ask("POST", "/alert/1", data=form, Origin="https://evil.example") == 404
            )
            matrix["ask whether it lives"][who] = _yes(await ask("GET", "/livez") == 200)
    return dict(matrix)


async def _ports(installation: Installation) -> Matrix:
    """Ask the admin ports of sidecar, shadow and monitor with each token, and without one."""
    matrix: Matrix = defaultdict(dict)
    async with aiohttp.ClientSession() as session:
        for who in (NOBODY, *TOKENS):
            headers = {} if who == NOBODY else {"Authorization": f"Bearer {token_of(who)}"}
            for role in ("sidecar", "shadow", "monitor"):
                url = f"http://127.0.0.1:{installation.ports[role]}"
                for action, method, path, host in (
                    (f"read metrics of the {role}", "GET", "/metrics", ""),
                    (f"ask whether the {role} is ready", "GET", "/readyz", ""),
                    (f"read metrics of the {role} under another name", "GET", "/metrics", "evil.example"),
                    (f"pause sampling at the {role}", "POST", "/pause", ""),
                    (f"resume sampling at the {role}", "POST", "/resume", ""),
                ):
                    more = {"Host": host} if host else {}
                    async with session.request(method, url + path, headers={**headers, **more}) as answer:
                        matrix[action][who] = _yes(answer.status not in {403, 404, 405, 421})
            url = f"http://127.0.0.1:{installation.ports['monitor']}/gate/99?candidate=sha256:0"
            async with session.get(url, headers=headers) as answer:
                reason = (await answer.json())["reason"]
            matrix["learn the verdict of a gate"][who] = _yes(reason.startswith("there is no gate 99"))
    return dict(matrix)


async def _intake(installation: Installation) -> Matrix:
    """Report an exchange of each model with each token, and without one."""
    tensors = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}
    answers = {"outputs": [{"name": "y", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}
    url = f"http://127.0.0.1:{installation.ports['intake']}/v1/exchanges"
    matrix: Matrix = {}
    async with aiohttp.ClientSession() as session:
        for who in (NOBODY, WRONG, "digits", "faces"):
            headers = {} if who == NOBODY else {"Authorization": f"Bearer {token_of(who)}"}
            for model in ("digits", "faces"):
                body = {
                    "exchanges": [
                        {"target": f"/v2/models/{model}/infer", "request": tensors, "response": answers}
                    ]
                }
                async with session.post(url, json=body, headers=headers) as answer:
                    told = await answer.json() if answer.status == 200 else {"accepted": 0}
                matrix.setdefault(f"report on `{model}`", {})[who] = _yes(told["accepted"] == 1)
    return matrix


# The page

_HEAD: Final = """# Who may do what

Generated by `python -m tests.support.rights_matrix`: it runs `quantdrift up`, and tries every action with every credential. A test
tries them again, and compares what it finds with this page and with what [rights](../how-to/rights.md) promises. An empty cell is a refusal.
The owner of the database and the administrator of Postgres may do everything there and are left out.
"""
_SECTIONS: Final[Mapping[str, tuple[str, str]]] = {
    "Tables": (
        "Postgres: tables and views",
        "A role may use the columns in brackets, where not all. `nobody` is a user without a role.",
    ),
    "SQL": (
        "Postgres: what else",
        (
            "Functions were called with nulls, so `yes` says that the role may call it. What a role adds to the audit has the name of its user,\n"
            "whatever it says."
        ),
    ),
    "NATS": (
        "NATS",
        (
            "The key of each role, and a client without a key. Keys of sidecars that are bound to models publish less:\n"
            "[rights](../how-to/rights.md#nats)."
        ),
    ),
    "Page": (
        "The live page and its API",
        "With a token of `web.token_file` that has `may=` and one word, or none: then it may do all of them.",
    ),
    "Ports": (
        "Ports for metrics, probes and gates",
        "With the same tokens, in `monitor.gate_token_file`. They are on loopback unless you change it.",
    ),
    "Intake": ("Intake", "With tokens that are bound to one model each."),
}


def page(results: Mapping[str, Matrix]) -> str:
    """Return the text of the page."""
    lines = [_HEAD]
    for section, (title, text) in _SECTIONS.items():
        matrix = results[section]
        who = list(dict.fromkeys(name for row in matrix.values() for name in row))
        shown = [name.removeprefix("quantdrift_") for name in who]
        lines += [f"## {title}", "", text, "", _row(["", *shown]), _row(["---"] * (len(who) + 1))]
        lines += [_row([action, *(row.get(name, "") for name in who)]) for action, row in matrix.items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="qd-rights-") as directory,
        installed(Path(directory)) as installation,
    ):
        PAGE_FILE.write_text(page(asyncio.run(tried(installation))), encoding="utf-8")


if __name__ == "__main__":
    _main()

"""SQL roles with the least rights that each process needs, so that a compromised process can do little else."""

import base64
import hashlib
import hmac
import os
from collections.abc import Mapping
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.pool import NullPool

from quantdrift.core.errors import OperatorError
from quantdrift.storage.address import Dsn
from quantdrift.storage.audit import Action, add
from quantdrift.storage.database import make_engine, translated
from quantdrift.storage.schema.tables import Base, QuarantineTable
from quantdrift.storage.schema.unknown import ERASURE, PARTITIONS, refuse_unknown

SHADOW: Final = "quantdrift_shadow"
MONITOR: Final = "quantdrift_monitor"
READER: Final = "quantdrift_reader"
REPORT: Final = "quantdrift_report"
AUDIT_ADD: Final = "audit_add(text, text, text, jsonb, jsonb, text)"
"""Adds an entry to the audit. Nobody may write its table: who and when come from the server, not from the caller."""
GATE_FUNCTIONS: Final = (
    "gate_progress(bigint, bigint, jsonb)",
    "gate_end(bigint, text, bigint, jsonb, jsonb, text)",
)
"""Record what a gate finds while it runs, and its verdict: once, for the user who began it, with an entry in the audit."""
OPERATOR: Final = "quantdrift_operator"
PAGE: Final = "quantdrift_page"
"""An operator that writes for the people who have logged in at the page: no other user says for whom it acts."""
ROLES: Final = (SHADOW, MONITOR, READER, REPORT, OPERATOR, PAGE)
HOLDERS: Final = (PARTITIONS, ERASURE)
"""Roles that nobody logs in as: their rights are used through functions."""
INTERVAL_FUNCTIONS: Final = ("array_added", "array_sum(double precision[])", "mean_interval")
PARTITION_FUNCTIONS: Final = (
    *("partition_make(date)", "partition_drop(date)", "partition_empty(date)"),
    *("comparison_condense(date, timestamptz, integer)", "blocks_drop(timestamptz, bigint)"),
    "blocks_merge(timestamptz, bigint)",
)
PAYLOADS_FUNCTION: Final = "payloads_drop(timestamptz, bigint)"
ERASE_FUNCTION: Final = "comparison_erase(timestamptz[], uuid[])"
# Of the users that people log in as: they cannot change the first one, and must not use up the server's connections. The
# others are against mistakes, such as a transaction that somebody forgets and that holds back vacuum.
_OF_PEOPLE: Final = "connection limit 10"
_LIMITS: Final = {"statement_timeout": "10min", "idle_in_transaction_session_timeout": "1min"}
_ITERATIONS: Final = 4096  # of SCRAM, as Postgres does

# Tables that the shadow inserts into. It updates or deletes only a `batch` row of its own transaction, and updates `doubt`
# and `arrival`.
_WRITTEN: Final = (
    "model_version",
    "slice",
    "policy",
    "batch",
    "comparison",
    "tally",
    "quarantine",
    "noise",
    "expiry",
)
# Tables that only the monitor writes.
_DERIVED: Final = (
    "detector",
    "alert",
    "incident",
    "verdict",
    "transition",
    "outbox",
    "rollup_hour",
    "rollup_day",
    "fold",
    "model_fold",
    "model_span",
    "shard",
    "monitor_process",
    "leader",
    "baseline",
    "noise_floor",
    "noise_slice",
    "noise_test",
    "noise_change",
    "session",
    "undeclared_session",
    "discovery",
    "discovery_change",
    "discovery_search",
    "slice_change",
    "value_share",
    "serving",
)
_VIEWS: Final = (
    "version_now",
    "slice_now",
    "signal_now",
    "slice_history",
    "slice_day",
    "item",
    "slice_item",
    "coverage_hour",
    "release_compare",
    "not_observed",
    "change_log",
    "account",
    "incidents",
    "incident_now",
)
# Columns that readers cannot see; the monitor sees the vectors alone, from which it learns slices.
_HIDDEN: Final = {"quarantine": "payload", "embedding": "vector"}
_PARTITIONS_TO_HOLDER: Final = f"""do $$ declare part regclass; begin
    for part in select inhrelid::regclass from pg_inherits where inhparent = 'comparison'::regclass
    loop execute format('alter table %s owner to {PARTITIONS}', part); end loop;
end $$"""  # noqa: S608 - a constant
# The monitor owned `comparison` in releases before, and could give rights to it to anybody. To read it stays what it was.
_ONLY_READING: Final = f"""do $$ declare held record; begin
    for held in
        select part, grantee, bool_or(privilege_type = 'SELECT') as reads
        from (
            select c.oid::regclass as part, acl.grantee, acl.privilege_type, c.relowner
            from pg_class c, aclexplode(c.relacl) acl
            union all
            select c.oid::regclass, acl.grantee, acl.privilege_type, c.relowner
            from pg_attribute a join pg_class c on c.oid = a.attrelid, aclexplode(a.attacl) acl
        ) rights
        where grantee <> relowner and pg_get_userbyid(grantee) <> all ('{{{", ".join((*ROLES, *HOLDERS))}}}') and (part = 'comparison'::regclass or exists (
            select from pg_inherits where inhparent = 'comparison'::regclass and inhrelid = part
        ))
        group by part, grantee having bool_or(privilege_type <> 'SELECT')
    loop
        execute format('revoke all on %s from %s cascade', held.part,
            case held.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(held.grantee)) end);
        if held.reads then
            execute format('grant select on %s to %s', held.part,
                case held.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(held.grantee)) end);
        end if;
    end loop;
end $$"""  # noqa: S608 - a constant
_OPEN_SCHEMA: Final = text(f"""
    select not has_schema_privilege('{PARTITIONS}', 'public', 'create')
        or exists (select from pg_namespace, aclexplode(nspacl) acl
            where nspname = 'public' and acl.grantee = 0 and acl.privilege_type = 'CREATE')
""")  # noqa: S608 - a constant
# A text that changes with every right, owner, role and membership, whatever the order in which they were granted. Each day
# has another partition, whose rights count for nothing: those of `comparison` apply.
_RIGHTS: Final = text("""
    select md5(string_agg(part, E'\\n' order by part)) from (
        select concat_ws(' ', 'table', c.oid, c.relowner, acl) as part
        from pg_class c left join lateral aclexplode(c.relacl) acl on true
        where c.relnamespace = 'public'\\:\\:regnamespace and c.relkind in ('r', 'p', 'v') and not c.relispartition
        union all
        select concat_ws(' ', 'column', a.attrelid, a.attnum, acl)
        from pg_attribute a join pg_class c on c.oid = a.attrelid, aclexplode(a.attacl) acl
        where c.relnamespace = 'public'\\:\\:regnamespace and not c.relispartition
        union all
        select concat_ws(' ', 'function', p.oid, acl) from pg_proc p, aclexplode(p.proacl) acl
        where p.pronamespace = 'public'\\:\\:regnamespace
        union all
        select concat_ws(' ', 'schema', acl) from pg_namespace n, aclexplode(n.nspacl) acl where n.nspname = 'public'
        union all
        select concat_ws(' ', 'role', rolname, rolcanlogin, rolconnlimit, rolconfig) from pg_roles
        where rolname = any(:roles)
        union all
        select concat_ws(' ', 'member', m.roleid, m.member)
        from pg_auth_members m join pg_roles r on r.oid = m.roleid join pg_roles one on one.oid = m.member
        where r.rolname = any(:roles) and (one.rolname = any(:roles) or one.rolname = current_user)
    ) parts
""")


def statements() -> list[str]:
    """Return the SQL that creates the roles and gives them exactly their rights, without closing semicolons.

    Idempotent; run it again after every `db upgrade`. The roles cannot log in: create users `in role` one of them.
    Needs an up-to-date schema, and a user that owns it and may create roles. `comparison` belongs to a role of its own, because only an
    owner may create and drop its daily partitions, and whoever owns a table can make others run code when they write to it.
    """
    return [
        *(_create(role) for role in (*ROLES, *HOLDERS)),
        f"grant {', '.join((*ROLES, *HOLDERS))} to current_user",
        *_holders(),
        f"revoke all on all tables in schema public from {', '.join(ROLES)}",
        f"grant usage on schema public to {', '.join(ROLES)}",
        *_shadow(),
        *_monitor(),
        *_reader(),
        f"grant select on alembic_version, compatibility to {SHADOW}, {MONITOR}, {READER}",
        f"grant {READER} to {REPORT}",
        f"grant insert on report_run to {REPORT}",
        f"grant {REPORT} to {OPERATOR}",
        f"grant {OPERATOR} to {PAGE}",
        *_operator(),
    ]


async def apply(dsn: Dsn, passwords: Mapping[str, str] | None = None, *, is_start: bool = False) -> None:
    """Execute the statements, create or change one user for some roles, and add an entry to the audit: one transaction.

    There is no entry if rights, users and passwords were so before.

    Parameters
    ----------
    passwords
        Of the users to create or change, by role: ASCII. Empty: the user exists and keeps its password. The server gets
        only a SCRAM-SHA-256 verifier of it, so that no log can have it.
    is_start
        These passwords are new at each start of `quantdrift up`: they alone are no change.

    Raises
    ------
    OperatorError
        The schema does not exist, the user may not create roles, or a user that should keep its password does not exist.
    RetryError
        Postgres is unavailable.
    """
    engine = make_engine(dsn, settings={"application_name": "quantdrift setup"}, poolclass=NullPool)
    try:
        async with translated(), engine.begin() as connection:
            await refuse_unknown(connection)
            named = {"roles": [*ROLES, *HOLDERS, *(login_of(role) for role in passwords or {})]}
            before = await connection.scalar(_RIGHTS, named)
            for statement in statements():
                await _execute(connection, statement)
            if await connection.scalar(_OPEN_SCHEMA):
                raise OperatorError(
                    "the schema `public` belongs to another user, so that everybody may create functions in it and this one may not say who:"
                    " let a superuser run `alter schema public owner to` this user, and run this again"
                )
            roles_with_login = await _logins(connection)
            for role, password in (passwords or {}).items():
                await _login(connection, role, password, exists=role in roles_with_login)
            changed = sorted(role for role, password in (passwords or {}).items() if password)
            if (changed and not is_start) or await connection.scalar(_RIGHTS, named) != before:
                await add(
                    connection, Action.SETUP_POSTGRES, after={"roles": list(ROLES), "passwords": changed}
                )
    finally:
        await engine.dispose()


async def logins(dsn: Dsn) -> frozenset[str]:
    """Return the roles whose user exists.

    Raises
    ------
    RetryError, OperatorError
        As `apply`.
    """
    engine = make_engine(dsn, settings={"application_name": "quantdrift setup"}, poolclass=NullPool)
    try:
        async with translated(), engine.begin() as connection:
            return await _logins(connection)
    finally:
        await engine.dispose()


def login_of(role: str) -> str:
    """Return the name of the user in a role."""
    return f"{role}_user"


async def _logins(connection: AsyncConnection) -> frozenset[str]:
    users = set((await connection.scalars(text("select rolname from pg_roles"))).all())
    return frozenset(role for role in ROLES if login_of(role) in users)


async def _execute(connection: AsyncConnection, statement: str) -> None:
    await connection.execute(text(statement.replace(":", "\\:")))


async def _login(connection: AsyncConnection, role: str, password: str, *, exists: bool) -> None:
    """Create or change the user in a role."""
    user = login_of(role)
    if not exists and not password:
        raise OperatorError(f"the user {user} does not exist any more: remove its file, and run this again")
    if not exists:
        await _execute(connection, f"create role {user} login in role {role}")
    await _execute(connection, f"grant {role} to {user}")
    if password:
        await _execute(connection, f"alter role {user} login password '{scram(password, os.urandom(16))}'")
    if role not in {SHADOW, MONITOR}:
        await _execute(connection, f"alter role {user} {_OF_PEOPLE}")
        for name, value in _LIMITS.items():
            await _execute(connection, f"alter role {user} set {name} = '{value}'")


def scram(password: str, salt: bytes) -> str:
    """Return the SCRAM-SHA-256 verifier of an ASCII password, as Postgres stores it (RFC 5802, RFC 7677)."""
    salted = hashlib.pbkdf2_hmac("sha256", password.encode("ascii"), salt, _ITERATIONS)
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    stored_key = hashlib.sha256(client_key).digest()
    server_key = hmac.digest(salted, b"Server Key", "sha256")
    parts = [base64.b64encode(part).decode() for part in (salt, stored_key, server_key)]
    return f"SCRAM-SHA-256${_ITERATIONS}:{parts[0]}${parts[1]}:{parts[2]}"


def _create(role: str) -> str:
    # There is no `create role if not exists`.
    return (
        f"do $$ begin create role {role} nologin;"
        " exception when duplicate_object or unique_violation then null; end $$"
    )


_REPORTED: Final = "digest, options, pause, reported_at"
"""Of `process_report`, what whoever stores tallies writes: not who stored it, nor what the audit has."""


def _shadow() -> list[str]:
    readable = [table for table in _WRITTEN if table != QuarantineTable.__tablename__]
    return [
        f"grant select on {', '.join(readable)} to {SHADOW}",
        f"grant select, insert, update on doubt, arrival to {SHADOW}",
        f"grant insert on {', '.join(_WRITTEN)} to {SHADOW}",
        # With storage.write_blocks a worker stores blocks; always it looks whether an exchange is in one.
        f"grant select (captured_from, captured_to, exchange_id), insert on condensed_block to {SHADOW}",
        f"grant execute on function block_refused to {SHADOW}",
        f"grant select (id, stream_sequence, reason) on quarantine to {SHADOW}",
        f"grant update (n_rows, skipped), delete on batch to {SHADOW}",
        f"grant select on clustering, discovery, noise_test to {SHADOW}",
        f"grant insert on embedding to {SHADOW}",
        f"grant update (lapsed_at) on slice, model_version to {SHADOW}",
        f"grant insert on slice_change to {SHADOW}",
        f"grant select, insert, update on value_share to {SHADOW}",
        f"grant select, insert (role, source, {_REPORTED}), update (seen_at, {_REPORTED}) on process_report to {SHADOW}",
    ]


def _holders() -> list[str]:
    return [
        f"revoke create on schema public from public, {MONITOR}",
        f"grant usage, create on schema public to {PARTITIONS}",
        f"alter table comparison owner to {PARTITIONS}",
        f"grant all on comparison to {PARTITIONS}",  # its former owner had been left the right to read
        f"alter table condensed_block owner to {PARTITIONS}",
        f"grant select (id, fold_seq, stored_at) on batch to {PARTITIONS}",
        _PARTITIONS_TO_HOLDER,
        _ONLY_READING,
        *(f"alter function {function} owner to {PARTITIONS}" for function in PARTITION_FUNCTIONS),
        # Who gets a function must be allowed to create one, for a moment.
        f"grant usage, create on schema public to {ERASURE}",
        f"alter function {ERASE_FUNCTION} owner to {ERASURE}",
        f"revoke create on schema public from {ERASURE}",
        f"revoke all on comparison, condensed_block from {ERASURE}",
        # What is left of a block goes back into comparison.
        f"grant select (captured_at, exchange_id), insert, delete on comparison to {ERASURE}",
        f"grant select, delete on condensed_block to {ERASURE}",
    ]


def _monitor() -> list[str]:
    return [
        f"grant select on {', '.join((*(name for name in sorted(Base.metadata.tables) if name != 'quarantine'), *_VIEWS))} to {MONITOR}",
        f"grant select ({_without('quarantine')}) on quarantine to {MONITOR}",
        f"grant insert, update, delete on {', '.join(_DERIVED)} to {MONITOR}",
        # What people did stays as it is: the monitor adds its own, says from which fold on theirs counts, and names the person
        # who closed an alert in the change of its incident. What belongs to a deleted alert goes with it.
        f"grant insert (alert_id, action, reason, severity), update (fold_seq) on alert_action to {MONITOR}",
        f"grant insert (incident_id, state, mitigation, at, fold_seq, counts, identity, reason), update (fold_seq) on incident_change to {MONITOR}",
        f"grant update on leader_lock, discovery_lock, partition_lock to {MONITOR}",
        f"grant insert, update (lapsed_at) on model_version, slice to {MONITOR}",
        f"grant update (fold_seq, read_after, read_until, rest_until, horizon_s, read_from, n_rows, skipped), delete on batch to {MONITOR}",
        # It stores tallies, and counts what expires, while no shadow worker does.
        f"grant insert on batch, tally, expiry to {MONITOR}",
        f"grant insert (role, source, {_REPORTED}), update, delete on process_report to {MONITOR}",
        f"grant insert, update on arrival to {MONITOR}",
        f"grant delete on tally, policy, arrival to {MONITOR}",
        f"grant delete on quarantine to {MONITOR}",
        f"grant insert, delete on clustering to {MONITOR}",
        # Retention.
        f"grant delete on embedding, gate_run, label, report_run, slice, model_version, doubt to {MONITOR}",
        f"grant execute on function {', '.join((AUDIT_ADD, PAYLOADS_FUNCTION, *PARTITION_FUNCTIONS))} to {MONITOR}",
    ]


def _operator() -> list[str]:
    # Decisions are rows that the monitor takes over: it alone says from which fold on they count.
    return [
        f"grant insert ({_columns('baseline')}) on baseline to {OPERATOR}",
        f"grant update (status, held, waits_since, confirmed_at, expired_at) on discovery to {OPERATOR}",
        f"grant insert ({_columns('discovery_change')}) on discovery_change to {OPERATOR}",
        f"grant insert ({_columns('slice_change')}) on slice_change to {OPERATOR}",
        f"grant update on discovery_lock to {OPERATOR}",
        # Not `made_by`: it is always the user that Postgres authenticated.
        f"grant insert (alert_id, action, identity, reason, severity, level, finding) on alert_action to {OPERATOR}",
        f"grant insert (incident_id, state, mitigation, at, identity, reason) on incident_change to {OPERATOR}",
        f"grant update (state, mitigation, ended_at) on incident to {OPERATOR}",
        f"grant update (lapsed_at) on slice to {OPERATOR}",
        f"grant update (places, counted_at, total, error, counts, reserved) on value_share to {OPERATOR}",
        f"grant insert, update on label to {OPERATOR}",
        # What a gate finds is written by functions, for the user who began it: nobody turns another one's verdict.
        f"grant insert (model, candidate, alpha) on gate_run to {OPERATOR}",
        f"grant execute on function {', '.join(GATE_FUNCTIONS)} to {OPERATOR}",
        f"grant execute on function {AUDIT_ADD} to {OPERATOR}",
    ]


def _columns(table: str) -> str:
    """Return the columns of a decision that whoever makes it gives."""
    names = Base.metadata.tables[table].columns.keys()
    return ", ".join(name for name in names if name not in {"id", "made_at", "fold_seq"})


def _without(table: str) -> str:
    """Return the columns of a table but the one that most cannot see."""
    names = Base.metadata.tables[table].columns.keys()
    return ", ".join(name for name in names if name != _HIDDEN[table])


def _reader() -> list[str]:
    # Everything except payloads and vectors: they are production traffic, or reveal much of it.
    tables = [name for name in sorted(Base.metadata.tables) if name not in _HIDDEN]
    parts = [f"grant select ({_without(table)}) on {table} to {READER}" for table in _HIDDEN]
    return [
        f"grant select on {', '.join((*tables, *_VIEWS))} to {READER}",
        f"grant execute on function not_observed_in, comparisons, comparisons_of, newest_from, items, items_of, some_items to {READER}, {MONITOR}",
        f"grant execute on function {', '.join(INTERVAL_FUNCTIONS)} to {READER}, {MONITOR}",
        *parts,
    ]

"""SQL roles with the least rights that each process needs, so that a compromised process can do little else."""

from typing import Final

from sqlalchemy import text
from sqlalchemy.pool import NullPool

from quantdrift.storage.audit import Action, add
from quantdrift.storage.database import make_engine, translated
from quantdrift.storage.schema.tables import Base, Quarantine

SHADOW: Final = "quantdrift_shadow"
MONITOR: Final = "quantdrift_monitor"
READER: Final = "quantdrift_reader"
REPORT: Final = "quantdrift_report"
AUDIT_ADD: Final = "audit_add(text, text, text, jsonb, jsonb, text)"
"""Adds an entry to the audit. Nobody may write its table: who and when come from the server, not from the caller."""
ROLES: Final = (SHADOW, MONITOR, READER, REPORT)

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
    "verdict",
    "transition",
    "outbox",
    "rollup_hour",
    "rollup_day",
    "fold",
    "leader",
    "baseline",
    "noise_floor",
    "noise_slice",
    "noise_change",
    "session",
    "undeclared_session",
    "discovery",
    "discovery_change",
    "discovery_search",
    "slice_change",
    "value_share",
)
_VIEWS: Final = ("slice_now", "slice_history", "slice_item", "coverage_hour", "account")
# Columns that readers cannot see.
_HIDDEN: Final = {"quarantine": "payload", "embedding": "vector"}
_PARTITIONS_TO_MONITOR: Final = f"""do $$ declare part regclass; begin
    for part in select inhrelid::regclass from pg_inherits where inhparent = 'comparison'::regclass
    loop execute format('alter table %s owner to {MONITOR}', part); end loop;
end $$"""  # noqa: S608 - a constant


def statements() -> list[str]:
    """Return the SQL that creates the roles and gives them exactly their rights, without closing semicolons.

    Idempotent; run it again after every `db upgrade`. The roles cannot log in: create users `in role` one of them.
    Needs an up-to-date schema, and a user that owns it and may create roles. The monitor becomes the owner of
    `comparison`, because only an owner may create and drop its daily partitions.
    """
    return [
        *(_create(role) for role in ROLES),
        f"grant {', '.join(ROLES)} to current_user",
        f"revoke all on all tables in schema public from {', '.join(ROLES)}",
        f"grant usage on schema public to {', '.join(ROLES)}",
        *_shadow(),
        *_monitor(),
        *_reader(),
        f"grant select on alembic_version, compatibility to {SHADOW}, {MONITOR}, {READER}",
        f"grant {READER} to {REPORT}",
        f"grant insert on report_run to {REPORT}",
    ]


async def apply(dsn: str) -> None:
    """Execute the statements and add an entry to the audit, in one transaction.

    Raises
    ------
    OperatorError
        The schema does not exist, or the user may not create roles.
    RetryError
        Postgres is unavailable.
    """
    engine = make_engine(dsn, settings={"application_name": "quantdrift db"}, poolclass=NullPool)
    try:
        async with translated(), engine.begin() as connection:
            for statement in statements():
                await connection.execute(text(statement.replace(":", "\\:")))
            await add(connection, Action.DB_ROLES, after={"roles": list(ROLES)})
    finally:
        await engine.dispose()


def _create(role: str) -> str:
    # There is no `create role if not exists`.
    return (
        f"do $$ begin create role {role} nologin;"
        " exception when duplicate_object or unique_violation then null; end $$"
    )


def _shadow() -> list[str]:
    readable = [table for table in _WRITTEN if table != Quarantine.__tablename__]
    return [
        f"grant select on {', '.join(readable)} to {SHADOW}",
        f"grant select, insert, update on doubt, arrival to {SHADOW}",
        f"grant insert on {', '.join(_WRITTEN)} to {SHADOW}",
        f"grant select (id, stream_sequence, reason) on quarantine to {SHADOW}",
        f"grant update (n_rows, skipped), delete on batch to {SHADOW}",
        f"grant select on clustering, discovery to {SHADOW}",
        f"grant insert on embedding to {SHADOW}",
        f"grant update (lapsed_at) on slice, model_version to {SHADOW}",
        f"grant insert on slice_change to {SHADOW}",
        f"grant select, insert, update on value_share to {SHADOW}",
    ]


def _monitor() -> list[str]:
    return [
        f"grant create on schema public to {MONITOR}",
        f"alter table comparison owner to {MONITOR}",
        _PARTITIONS_TO_MONITOR,
        f"grant select on {', '.join((*sorted(Base.metadata.tables), *_VIEWS))} to {MONITOR}",
        f"grant insert, update, delete on {', '.join(_DERIVED)} to {MONITOR}",
        f"grant insert, update (lapsed_at) on model_version, slice to {MONITOR}",
        f"grant update (fold_seq, n_rows, skipped), delete on batch to {MONITOR}",
        # It stores tallies, and counts what expires, while no shadow worker does.
        f"grant insert on batch, tally, expiry to {MONITOR}",
        f"grant insert, update on arrival to {MONITOR}",
        f"grant delete on tally, policy, arrival to {MONITOR}",
        f"grant update (payload), delete on quarantine to {MONITOR}",
        f"grant insert, delete on clustering to {MONITOR}",
        # Retention.
        f"grant delete on embedding, report_run, slice, model_version, doubt to {MONITOR}",
        f"grant execute on function {AUDIT_ADD} to {MONITOR}",
    ]


def _reader() -> list[str]:
    # Everything except payloads and vectors: they are production traffic, or reveal much of it.
    tables = [name for name in sorted(Base.metadata.tables) if name not in _HIDDEN]
    parts = [
        f"grant select ({', '.join(columns)}) on {table} to {READER}"
        for table, hidden in _HIDDEN.items()
        if (columns := [name for name in Base.metadata.tables[table].columns.keys() if name != hidden])  # noqa: SIM118
    ]
    return [f"grant select on {', '.join((*tables, *_VIEWS))} to {READER}", *parts]

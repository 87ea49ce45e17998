"""Who may add what to the audit, who may write for a person, and payloads that the monitor deletes without reading them.

Revision ID: 0003
Revises: 0002
"""

from alembic import op

from quantdrift.migrations.initial.functions import FUNCTIONS

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# The function of the first schema writes; it is called by those that check, and by nobody else.
_AUDIT_WRITE = FUNCTIONS["audit_add"].replace("create function audit_add", "create function audit_write")
# Who owns the audit may add everything: `db upgrade`, `setup` and `privacy` do. A limit is far above what a command writes; an entry is
# kept for ever.
_AUDIT_ADD = """
    create or replace function audit_add(
        new_action text, new_model text, new_subject text, new_before jsonb, new_after jsonb, new_note text
    ) returns bigint language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $body$
    declare
        longest constant int := 262144;
        allowed text[] := array[]::text[];
    begin
        if length(coalesce(new_action, '')) > 64 or length(coalesce(new_model, '')) > 1024
            or length(coalesce(new_subject, '')) > 1024 or length(coalesce(new_note, '')) > 8192
            or octet_length(new_before::text) > longest or octet_length(new_after::text) > longest then
            raise exception 'an entry of the audit is longer than allowed: % characters of note, % and % bytes of state',
                length(coalesce(new_note, '')), coalesce(octet_length(new_before::text), 0), coalesce(octet_length(new_after::text), 0)
                using errcode = 'program_limit_exceeded';
        end if;
        if not (select pg_has_role(session_user, relowner, 'member') from pg_class where oid = 'public.audit'::regclass) then
            if exists (select from pg_roles where rolname = 'quantdrift_operator' and pg_has_role(session_user, oid, 'member')) then
                allowed := allowed || array[
                    'pause', 'resume', 'baseline accept', 'baseline freeze', 'baseline keep', 'baseline import', 'slices retire',
                    'slices restore', 'slices forget', 'setup nats', 'labels load', 'exemplars erase', 'alert ack', 'alert unack',
                    'alert note', 'alert close', 'incident mitigate', 'incident reopen', 'incident close'
                ];
            end if;
            if exists (select from pg_roles where rolname = 'quantdrift_monitor' and pg_has_role(session_user, oid, 'member')) then
                allowed := allowed || array['configuration', 'pause seen', 'pause local', 'slices fit'];
            end if;
            if not coalesce(new_action = any(allowed), false) then
                raise exception '% may not add an entry of the audit that says: %', session_user, new_action
                    using errcode = 'insufficient_privilege';
            end if;
        end if;
        return public.audit_write(new_action, new_model, new_subject, new_before, new_after, new_note);
    end $body$
"""
_GATE_END = (
    FUNCTIONS["gate_end"]
    .replace("create function gate_end", "create or replace function gate_end")
    .replace("public.audit_add(", "public.audit_write(")
)
# The page alone may write for a person; the monitor updates such rows when it takes them over. A role that does not exist refuses
# nobody: before `setup postgres` has made that of the page, its user is an operator's.
_IDENTITY = """identity = '' or pg_has_role(session_user, to_regrole('quantdrift_page'), 'member')
    or pg_has_role(session_user, to_regrole('quantdrift_monitor'), 'member')"""
_IDENTITY_TABLES = ("alert_action", "incident_change")
_PAYLOADS_DROP = """
    create function payloads_drop(before timestamptz, most bigint) returns setof bigint
    language sql volatile security definer set search_path = pg_catalog, pg_temp as $body$
        update public.quarantine set payload = null where id in (
            select id from public.quarantine where quarantined_at < before and payload is not null limit most
        ) returning id
    $body$
"""
_PRIVATE = ("audit_write", "payloads_drop")


def upgrade() -> None:
    """Go one revision forward."""
    execute = op.get_bind().exec_driver_sql
    for statement in (_AUDIT_WRITE, _AUDIT_ADD, _GATE_END, _PAYLOADS_DROP):
        execute(statement)
    for name in _PRIVATE:
        execute(f"revoke all on function {name} from public")
    for table in _IDENTITY_TABLES:
        op.create_check_constraint(op.f(f"ck_{table}_identity"), table, _IDENTITY)


def downgrade() -> None:
    """Go one revision back."""
    execute = op.get_bind().exec_driver_sql
    for table in _IDENTITY_TABLES:
        op.drop_constraint(op.f(f"ck_{table}_identity"), table)
    for name in ("audit_add", "gate_end"):
        execute(FUNCTIONS[name].replace("create function", "create or replace function"))
    for name in _PRIVATE:
        execute(f"drop function {name}")

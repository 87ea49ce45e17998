"""Functions that make and drop the partitions of `comparison`, and erase its rows, so that no user must own the table.

Three functions are added: the release before can use the schema as before. Once `setup postgres --apply` of this release has taken
`comparison` from the monitor's role, a monitor of the release before makes and drops no partitions until it is replaced; they are
made two weeks ahead.

Revision ID: 0030
Revises: 0029
"""

from typing import Final

from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    for signature, statement in _FUNCTIONS.items():
        op.execute(statement)
        op.execute(f"revoke all on function {signature} from public")


def downgrade() -> None:
    """Go one revision back."""
    for signature in _FUNCTIONS:
        op.execute(f"drop function {signature}")


# The table is created on its own and then attached, which, unlike `create table ... partition of`, does not lock `comparison` against
# readers and writers.
_MAKE: Final = """
    create function partition_make(day date) returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $body$
    declare
        name text := 'comparison_' || to_char(day, 'YYYYMMDD');
    begin
        execute format('create table public.%I (like public.comparison including all)', name);
        execute format(
            'comment on table public.%I is %L', name,
            'Comparisons captured on ' || to_char(day, 'YYYY-MM-DD') || ', UTC.'
        );
        execute format(
            'alter table public.comparison attach partition public.%I for values from (%L) to (%L)', name,
            to_char(day, 'YYYY-MM-DD') || ' 00\\:00\\:00+00', to_char(day + 1, 'YYYY-MM-DD') || ' 00\\:00\\:00+00'
        );
    end $body$
"""
_DROP: Final = """
    create function partition_drop(day date) returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $body$
    begin
        execute format('drop table if exists public.%I', 'comparison_' || to_char(day, 'YYYYMMDD'));
    end $body$
"""
_ERASE: Final = """
    create function comparison_erase(times timestamptz[], ids uuid[]) returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $body$
    begin
        delete from public.comparison where (captured_at, exchange_id) in (select * from unnest(times, ids));
    end $body$
"""
_FUNCTIONS: Final = {
    "partition_make(date)": _MAKE,
    "partition_drop(date)": _DROP,
    "comparison_erase(timestamptz[], uuid[])": _ERASE,
}

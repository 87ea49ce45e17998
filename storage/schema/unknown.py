"""Objects of the database that quantdrift did not make, and that would run with the rights of whoever writes its tables.

The owner of the schema writes in `db upgrade` and `privacy erase`. Whoever owns a table of the schema, or may create functions in it, can make
such a write run code of their own: by a trigger, a rule, a policy, a default or a check, or by a function or an operator that fits a
call better than the server's.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.errors import OperatorError
from quantdrift.core.text import plain
from quantdrift.storage.schema.tables import Base

PARTITIONS: Final = "quantdrift_partitions"
"""Role that owns `comparison` with its partitions and `condensed_block`, and the functions that make, condense and drop days."""
ERASURE: Final = "quantdrift_erasure"
"""Role that owns the function which erases comparisons, and may do nothing else."""
_TRIGGERS: Final = ("audit.audit_rows", "audit.audit_all")
_SHOWN: Final = 10
# What is searched: our tables and views, and the partitions of `comparison`. A function of a superuser or of an extension is trusted.
_UNKNOWN: Final = text(
    """
    with recursive parts (oid) as (
        select to_regclass('public.comparison')::oid union all select to_regclass('public.condensed_block')::oid
        union all
        select i.inhrelid from pg_inherits i join parts p on i.inhparent = p.oid
    ),
    ours as (
        select c.oid, n.nspname || '.' || c.relname as name, c.relname, c.relkind, c.relowner, p.oid is not null as is_part
        from pg_class c join pg_namespace n on n.oid = c.relnamespace left join parts p on p.oid = c.oid
        where p.oid is not null or (n.nspname = 'public' and c.relname::text = any(:tables))
            or (n.nspname = 'public' and c.relkind = 'v' and c.relowner = :owner)
    ),
    inside (classid, objid, kind, name) as (
        select 'pg_attrdef'::regclass, d.oid, 'default', o.name from pg_attrdef d join ours o on o.oid = d.adrelid
        union all
        select 'pg_constraint'::regclass, c.oid, 'constraint ' || quote_ident(c.conname), o.name
        from pg_constraint c join ours o on o.oid = c.conrelid
        union all
        select 'pg_class'::regclass, i.indexrelid, 'index ' || i.indexrelid::regclass::text, o.name
        from pg_index i join ours o on o.oid = i.indrelid
    ),
    trusted (oid) as (
        select :owner union select oid from pg_roles where rolsuper
        union select oid from pg_roles where rolname in (:partitions, :erasure)
    )
    select format('%s %s belongs to %s', case relkind when 'v' then 'view' else 'table' end, name, pg_get_userbyid(relowner))
    from ours where relowner <> :owner and not (is_part and pg_get_userbyid(relowner) = :partitions)
    union all
    select format('%s is a partition of another kind', name) from ours where is_part and relkind not in ('r', 'p')
    union all
    select format('trigger %I on %s, which runs %s', t.tgname, o.name, t.tgfoid::regprocedure)
    from pg_trigger t join ours o on o.oid = t.tgrelid
    where not t.tgisinternal and not (o.relname || '.' || t.tgname = any(:triggers))
    union all
    select format('rule %I on %s', r.rulename, o.name) from pg_rewrite r join ours o on o.oid = r.ev_class
    where r.rulename <> '_RETURN' or o.relkind <> 'v'
    union all
    select format('policy %I on %s', p.polname, o.name) from pg_policy p join ours o on o.oid = p.polrelid
    union all
    select format('foreign key %I of %s to %s', c.conname, c.conrelid::regclass, o.name)
    from pg_constraint c join ours o on o.oid = c.confrelid where not exists (select from ours b where b.oid = c.conrelid)
    union all
    select distinct format('%s of %s, which uses %s', i.kind, i.name, pg_describe_object(d.refclassid, d.refobjid, 0))
    from inside i join pg_depend d on d.classid = i.classid and d.objid = i.objid
    where d.refobjid >= 16384
        and d.refclassid in ('pg_proc'::regclass, 'pg_operator'::regclass, 'pg_type'::regclass, 'pg_opclass'::regclass)
    union all
    select format('%s %s, which belongs to %s', f.kind, f.name, pg_get_userbyid(f.owner))
    from (
        select 'pg_proc'::regclass as classid, oid, 'function' as kind, oid::regprocedure::text as name, proowner as owner
        from pg_proc where pronamespace = 'public'::regnamespace
        union all
        select 'pg_operator'::regclass, oid, 'operator', oid::regoperator::text, oprowner
        from pg_operator where oprnamespace = 'public'::regnamespace
    ) f
    where f.owner not in (select oid from trusted)
        and not exists (select from pg_depend d where d.classid = f.classid and d.objid = f.oid and d.deptype = 'e')
    union all
    select format('role %s, as which somebody can log in', rolname) from pg_roles
    where rolname in (:partitions, :erasure) and rolcanlogin
    union all
    select format('%s is a member of %s', pg_get_userbyid(m.member), r.rolname)
    from pg_auth_members m join pg_roles r on r.oid = m.roleid
    where r.rolname in (:partitions, :erasure) and m.member not in (select oid from trusted)
    """.replace("::", "\\:\\:")
)
_OWNER: Final = text("""
    select relowner from pg_class where oid = to_regclass('public.alembic_version')
""")


async def unknown_objects(connection: AsyncConnection) -> list[str]:
    """Return what is unknown, each as words that name it and where it is; nothing before the first upgrade."""
    async with _only_of_the_server(connection):
        owner = await connection.scalar(_OWNER)
        values = {
            "tables": [*Base.metadata.tables, "alembic_version"],
            "triggers": [*_TRIGGERS],
            "owner": owner,
            "partitions": PARTITIONS,
            "erasure": ERASURE,
        }
        objects = [] if owner is None else (await connection.scalars(_UNKNOWN, values)).all()
    return sorted(objects)


async def refuse_unknown(connection: AsyncConnection) -> None:
    """Check that nothing unknown is there, before the owner of the schema writes: first in a transaction.

    Raises
    ------
    OperatorError
        Something is; the error names it.
    RetryError, OperatorError
        As `Database.begin`.
    """
    if unknown := await unknown_objects(connection):
        named = "; ".join(plain(name) for name in unknown[:_SHOWN])
        more = f"; and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise OperatorError(
            "the database has what quantdrift did not make, and it would run with the rights of this command:"
            f" {named}{more}. Find out who made it, remove it, and give that user a new password; then run this again"
        )


@asynccontextmanager
async def _only_of_the_server(connection: AsyncConnection) -> AsyncIterator[None]:
    """Resolve every name by the server's own functions and operators, whatever others have made."""
    await connection.execute(text("set local search_path = pg_catalog"))
    yield
    await connection.execute(text("set local search_path to default"))

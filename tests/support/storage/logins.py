"""Users in the SQL roles, as an administrator makes them."""

import asyncpg

from quantdrift.storage.schema.roles import apply
from quantdrift.storage.schema.unknown import PARTITIONS


async def login_in(dsn: str, role: str) -> str:
    """Apply the roles unless they have their rights; return the address of a user in one of them, who has no other right."""
    place, _, name = dsn.rpartition("/")
    user = f"{role}_{name}"
    connection = await asyncpg.connect(dsn)
    if (
        await connection.fetchval("select tableowner from pg_tables where tablename = 'comparison'")
        != PARTITIONS
    ):
        await apply(dsn)
    await connection.execute(
        f"do $$ begin create user {user} password 'p' in role {role};"
        " exception when duplicate_object then null; end $$"
    )
    await connection.close()
    return f"postgresql://{user}:p@{place.rpartition('@')[2]}/{name}"

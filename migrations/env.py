"""What Alembic runs: `storage.migrate` and `storage.revision` hand in the connection."""

from alembic import context

from quantdrift.storage.schema.tables import Base


def _is_ours(name: str | None, kind: str, _parents: object) -> bool:
    # Daily partitions come and go; no revision speaks of them.
    return not (kind == "table" and name is not None and name.startswith("comparison_"))


context.configure(
    connection=context.config.attributes["connection"],
    on_version_apply=context.config.attributes.get("on_version_apply"),
    target_metadata=Base.metadata,
    include_name=_is_ours,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()

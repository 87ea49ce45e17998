"""Names to lock for whoever changes partitions or discovered slices, which need a right that readers do not have.

Views are added that nothing reads: the release before can use the schema as before.

Revision ID: 0014
Revises: 0013
"""

from typing import Final

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_LOCKS: Final = {
    "partition_lock": "creates or drops partitions",
    "discovery_lock": "changes discovered slices",
}


def upgrade() -> None:
    """Go one revision forward."""
    for name, purpose in _LOCKS.items():
        op.execute(f"create view {name} as select 1 as id")
        op.execute(
            f"comment on view {name} is 'A name without rows: whoever {purpose} has it locked. To lock it needs the right to"
            " update it.'"
        )
        op.execute(f"comment on column {name}.id is 'Always 1.'")


def downgrade() -> None:
    """Go one revision back."""
    for name in _LOCKS:
        op.execute(f"drop view {name}")

"""Who may drop what waits in the stream, and by how much rates are lowered because the shadow does not keep up.

The compatibility rule: it adds a column with a default, and a word that an operator may say in the audit.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_ALLOWED = "'incident close'"
_DEFINITION = "select pg_get_functiondef('audit_add(text, text, text, jsonb, jsonb, text)'::regprocedure)"


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "fold",
        sa.Column(
            "lag_factor",
            sa.Double(),
            server_default=sa.text("1"),
            nullable=False,
            comment="Factor on every sampling rate because the shadow does not keep up; 1: it does. Of the monitor that leads.",
        ),
    )
    _allow(_ALLOWED, f"{_ALLOWED}, 'stream drop'")


def downgrade() -> None:
    """Go one revision back."""
    _allow(f"{_ALLOWED}, 'stream drop'", _ALLOWED)
    op.drop_column("fold", "lag_factor")


def _allow(before: str, after: str) -> None:
    """Replace what an operator may say in the audit."""
    connection = op.get_bind()
    definition = connection.exec_driver_sql(_DEFINITION).scalar_one()
    if before not in definition:
        raise RuntimeError("the function audit_add is not that of revision 0003")
    connection.exec_driver_sql(definition.replace(before, after))

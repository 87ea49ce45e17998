"""Evidence of sessions against sources that differ, apart from the evidence of values that never come back.

A column is added: the release before can use the schema as before.

Revision ID: 0037
Revises: 0036
"""

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "undeclared_session",
        sa.Column(
            "comes_back",
            sa.Boolean(),
            nullable=False,
            server_default=sa.false(),
            comment=_COMES_BACK,
        ),
    )
    op.create_table_comment("undeclared_session", _TICKETS, existing_comment=_UNKNOWN)


def downgrade() -> None:
    """Go one revision back."""
    op.create_table_comment("undeclared_session", _UNKNOWN, existing_comment=_TICKETS)
    op.drop_column("undeclared_session", "comes_back")


_COMES_BACK = (
    "Whether values come back, as those of sources do: bursts of a value are compared with its other bursts."
)
_EVIDENCE = (
    "Evidence that requests with one value of an attribute come in bursts and have alike outcomes, although"
    " the attribute is not sampling.sticky_header."
)
_UNKNOWN = f"{_EVIDENCE} From `found_at` on the slice is unknown."
_TICKETS = f"{_EVIDENCE} From `found_at` on the slice is unknown, and its alerts are tickets."

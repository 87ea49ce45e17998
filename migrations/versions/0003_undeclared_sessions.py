"""The evidence for sessions that nobody declared.

The release before does not use the new table.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.create_table(
        "undeclared_session",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice."),
        sa.Column(
            "attribute",
            sa.Text(),
            nullable=False,
            comment="Recorded attribute, for instance header.x-user.",
        ),
        sa.Column("n_exchanges", sa.BigInteger(), nullable=False, comment="Exchanges tested so far."),
        sa.Column("log_evidence", sa.Double(), nullable=False, comment="Logarithm of the evidence so far."),
        sa.Column(
            "log_threshold",
            sa.Double(),
            nullable=False,
            comment="Evidence from which on it counts as found.",
        ),
        sa.Column(
            "tested_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Time of the newest exchange that was tested.",
        ),
        sa.Column(
            "found_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Time of the newest exchange when the evidence reached the threshold; it stays.",
        ),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_undeclared_session_model_version_id_model_version"),
        ),
        sa.ForeignKeyConstraint(
            ["slice_id"], ["slice.id"], name=op.f("fk_undeclared_session_slice_id_slice")
        ),
        sa.PrimaryKeyConstraint(
            "model_version_id", "slice_id", "attribute", name=op.f("pk_undeclared_session")
        ),
        comment="Evidence that requests with one value of an attribute come in bursts and have alike outcomes, although"
        " the attribute is not sampling.sticky_header. From `found_at` on the slice is unknown.",
    )


def downgrade() -> None:
    """Go one revision back."""
    op.drop_table("undeclared_session")

"""What sidecars and shadow workers report of themselves, for the audit.

A table is added: the release before can use the schema as before.

Revision ID: 0018
Revises: 0017
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.create_table(
        "process_report",
        sa.Column("role", sa.Text(), nullable=False, comment="sidecar or shadow."),
        sa.Column("source", sa.Text(), nullable=False, comment="Pod, or host."),
        sa.Column(
            "reported_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="When the stream took the newest report of a change.",
        ),
        sa.Column(
            "seen_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When its last report was stored, to the hour.",
        ),
        sa.Column(
            "stored_by",
            sa.Text(),
            server_default=sa.text("session_user"),
            nullable=False,
            comment="Database user who stored the first report.",
        ),
        sa.Column("digest", sa.Text(), nullable=False, comment="SHA-256 of its options."),
        sa.Column(
            "options",
            JSONB(),
            nullable=False,
            comment="Options that differ from their default, without credentials.",
        ),
        sa.Column(
            "pause",
            JSONB(none_as_null=True),
            nullable=True,
            comment="What is paused at this process alone; null: nothing.",
        ),
        sa.Column(
            "audited_digest", sa.Text(), nullable=True, comment="digest, as the audit has it; null: not yet."
        ),
        sa.Column(
            "audited_options",
            JSONB(none_as_null=True),
            nullable=True,
            comment="options, as the audit has them.",
        ),
        sa.Column(
            "audited_pause",
            JSONB(none_as_null=True),
            nullable=True,
            comment="pause, as the audit has it.",
        ),
        sa.PrimaryKeyConstraint("role", "source", name=op.f("pk_process_report")),
        comment="Configuration and local pause of each sidecar and shadow worker, as it reported them last, and as the audit has"
        " them. One row per process.",
    )


def downgrade() -> None:
    """Go one revision back."""
    op.drop_table("process_report")

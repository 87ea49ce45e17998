"""The table of gates: candidates that were judged on live traffic.

Nothing that is there changes: the release before can use the schema as before.

Revision ID: 0021
Revises: 0019
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0021"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.create_table(
        "gate_run",
        sa.Column(
            "id",
            sa.BigInteger(),
            sa.Identity(always=True),
            nullable=False,
            comment="Number of the gate, as in `GET /gate/ID`.",
        ),
        sa.Column("model", sa.Text(), nullable=False, comment="Model."),
        sa.Column(
            "candidate", sa.Text(), nullable=False, comment="Digest of the candidate's file: sha256:..."
        ),
        sa.Column(
            "made_by",
            sa.Text(),
            server_default=sa.text("session_user"),
            nullable=False,
            comment="User of the database that ran it.",
        ),
        sa.Column(
            "alpha",
            sa.Double(),
            nullable=False,
            comment="Probability of a false pass, and of a false failure, at most.",
        ),
        sa.Column(
            "begun_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the digest was recorded: only later exchanges count.",
        ),
        sa.Column(
            "checked_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="When the answers were computed; null: nothing was judged yet.",
        ),
        sa.Column(
            "ended_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="When the command ended; null: it runs, or was killed.",
        ),
        sa.Column(
            "verdict",
            sa.Text(),
            server_default=sa.text("'insufficient'"),
            nullable=False,
            comment="pass, fail or insufficient.",
        ),
        sa.Column(
            "more",
            sa.BigInteger(),
            nullable=True,
            comment="About how many exchanges are missing to the slice that lacks most; null: unknown.",
        ),
        sa.Column(
            "answers",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'[]'"),
            nullable=False,
            comment="The answer to each question about each slice: slice, question, verdict, n, mean, low, high, limit, more.",
        ),
        sa.CheckConstraint("verdict in ('pass', 'fail', 'insufficient')", name=op.f("ck_gate_run_verdict")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gate_run")),
        comment="A candidate that `quantdrift gate --live` judges, on exchanges that were captured after this row was"
        " written. One row per run.",
    )


def downgrade() -> None:
    """Go one revision back."""
    op.drop_table("gate_run")

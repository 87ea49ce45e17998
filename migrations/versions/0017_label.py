"""The table of true labels.

Nothing that is there changes: the release before can use the schema as before.

Revision ID: 0017
Revises: 0016
"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.create_table(
        "label",
        sa.Column(
            "captured_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Of the item, as in comparison.",
        ),
        sa.Column(
            "exchange_id", sa.UUID(as_uuid=False), nullable=False, comment="Of the item, as in comparison."
        ),
        sa.Column(
            "item", sa.SmallInteger(), nullable=False, comment="Index of the item in the exchange, from 0."
        ),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="model_version it belongs to."),
        sa.Column(
            "label",
            sa.Text(),
            nullable=True,
            comment="The true class, by its number or its name in models.labels, as loaded; null where the file said which side was"
            " right.",
        ),
        sa.Column(
            "candidate_right",
            sa.Boolean(),
            nullable=False,
            comment="Whether the candidate's answer was right.",
        ),
        sa.Column(
            "reference_right",
            sa.Boolean(),
            nullable=False,
            comment="Whether the reference's answer was right.",
        ),
        sa.Column(
            "loaded_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was loaded.",
        ),
        sa.ForeignKeyConstraint(
            ["model_version_id"], ["model_version.id"], name=op.f("fk_label_model_version_id_model_version")
        ),
        sa.PrimaryKeyConstraint("captured_at", "exchange_id", "item", name=op.f("pk_label")),
        comment="Which side was right about a compared item, by the true label that somebody loaded with"
        " `quantdrift labels load`. One row per labelled item.",
    )
    op.create_index("ix_label_model_version_id", "label", ["model_version_id", "captured_at"])


def downgrade() -> None:
    """Go one revision back."""
    op.drop_table("label")

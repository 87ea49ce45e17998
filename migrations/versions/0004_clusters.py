"""Learned slices: what was fitted, and the vectors it was fitted to.

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.create_table(
        "clustering",
        sa.Column("id", sa.Integer(), sa.Identity(always=True), nullable=False, comment="Order of the fits."),
        sa.Column("model", sa.Text(), nullable=False, comment="Model whose inputs it divides."),
        sa.Column(
            "version",
            sa.Integer(),
            nullable=False,
            comment="Rises by one with each fit of the model; comparison.detail names it under `clustering`.",
        ),
        sa.Column(
            "reference_digest",
            sa.Text(),
            nullable=False,
            comment="SHA-256 of the reference that embeds the inputs.",
        ),
        sa.Column(
            "space",
            sa.Text(),
            nullable=False,
            comment="The reference's output or layer, or features with their names.",
        ),
        sa.Column(
            "made_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When.",
        ),
        sa.Column("made_by", sa.Text(), nullable=False, comment="Who asked for it: a user name, or monitor."),
        sa.Column(
            "from_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Capture time of the first vector it was fitted to.",
        ),
        sa.Column("to_at", sa.DateTime(timezone=True), nullable=False, comment="Of the last."),
        sa.Column("n_vectors", sa.Integer(), nullable=False, comment="Vectors it was fitted to."),
        sa.Column(
            "next_id",
            sa.Integer(),
            nullable=False,
            comment="First cluster id that the model had not used by then.",
        ),
        sa.Column(
            "clusters",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="Per cluster: id, n, estimated share of the traffic, radius, over-represented declared slices with"
            " their lift, and the exchanges nearest to its centroid.",
        ),
        sa.Column(
            "content",
            sa.LargeBinary(),
            nullable=False,
            comment="Centroids, radii, scaling and known attribute values: versioned and checked.",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_clustering")),
        sa.UniqueConstraint("model", "version", name=op.f("uq_clustering_model_version")),
        comment="Learned slices of a model, one row per fit; the newest of a reference and space is in force.",
    )
    op.create_table(
        "embedding",
        sa.Column("captured_at", sa.DateTime(timezone=True), nullable=False, comment="As in comparison."),
        sa.Column("exchange_id", sa.UUID(as_uuid=False), nullable=False, comment="As in comparison."),
        sa.Column("item", sa.SmallInteger(), nullable=False, comment="As in comparison."),
        sa.Column("model", sa.Text(), nullable=False, comment="Model."),
        sa.Column(
            "reference_digest",
            sa.Text(),
            nullable=False,
            comment="SHA-256 of the reference that embedded it.",
        ),
        sa.Column(
            "space",
            sa.Text(),
            nullable=False,
            comment="The reference's output or layer, or features with their names.",
        ),
        sa.Column(
            "pi",
            sa.Double(),
            nullable=False,
            comment="Total inclusion probability of the item; that of this sample, equal for all, is not in it.",
        ),
        sa.Column("vector", sa.LargeBinary(), nullable=False, comment="Float32, little-endian."),
        sa.CheckConstraint("pi > 0 and pi <= 1", name=op.f("ck_embedding_inclusion_probability")),
        sa.PrimaryKeyConstraint("captured_at", "exchange_id", "item", name=op.f("pk_embedding")),
        comment="A bounded sample of vectors that learned slices are fitted to; the oldest go first."
        " Vectors may tell much of an input: readers see all but those.",
    )
    op.create_index(
        "ix_embedding_space",
        "embedding",
        ["model", "reference_digest", "space", "captured_at"],
        unique=False,
    )


def downgrade() -> None:
    """Go one revision back."""
    op.drop_table("embedding")
    op.drop_table("clustering")

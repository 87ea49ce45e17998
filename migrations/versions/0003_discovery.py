"""Discovered slices: what a search found, and how its test goes.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    time = sa.DateTime(timezone=True)
    op.create_table(
        "discovery",
        sa.Column("id", sa.Integer(), sa.Identity(always=True), nullable=False, comment="Stable id."),
        sa.Column("model", sa.Text(), nullable=False, comment="Model whose items it takes."),
        sa.Column(
            "predicate", sa.Text(), nullable=False, comment="Canonical text of its conditions; the identity."
        ),
        sa.Column("name", sa.Text(), nullable=False, comment="Short name."),
        sa.Column(
            "definition",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="The predicate for machines: list of conditions under `where`.",
        ),
        sa.Column(
            "status",
            sa.Text(),
            nullable=False,
            comment="candidate: under test. confirmed: a monitored slice. expired: not confirmed in time, or unseen.",
        ),
        sa.Column(
            "slice_id",
            sa.Integer(),
            nullable=True,
            comment="slice it became when it was first confirmed.",
        ),
        sa.Column(
            "model_version_id",
            sa.Integer(),
            nullable=False,
            comment="Version on which it was found, and is tested.",
        ),
        sa.Column("metric", sa.Text(), nullable=False, comment="Metric that concentrates in it."),
        sa.Column(
            "found_mean",
            sa.Double(),
            nullable=False,
            comment="Weighted mean there when it was found, in the metric's unit; biased upwards.",
        ),
        sa.Column("overall_mean", sa.Double(), nullable=False, comment="The same over everything."),
        sa.Column(
            "found_share", sa.Double(), nullable=False, comment="Its share of the traffic then, weighted."
        ),
        sa.Column(
            "null_mean",
            sa.Double(),
            nullable=False,
            comment="Mean that it must be shown to be above, in the metric's unit.",
        ),
        sa.Column(
            "scale",
            sa.Double(),
            nullable=False,
            comment="Cap of the metric, in its unit: the test is of values over it.",
        ),
        sa.Column(
            "log_threshold",
            sa.Double(),
            nullable=False,
            comment="Natural logarithm of the evidence that confirms it: candidates of its search over the allowance.",
        ),
        sa.Column(
            "log_evidence",
            sa.Double(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Natural logarithm of the largest evidence so far.",
        ),
        sa.Column(
            "log_wealth",
            sa.ARRAY(sa.Double()),
            nullable=False,
            comment="Natural logarithm of each bet's wealth.",
        ),
        sa.Column(
            "n_groups",
            sa.BigInteger(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Groups tested since it was frozen.",
        ),
        sa.Column(
            "n_found",
            sa.Integer(),
            server_default=sa.text("1"),
            nullable=False,
            comment="How often a search has frozen it.",
        ),
        sa.Column("first_found_at", time, nullable=False, comment="When a search first found it."),
        sa.Column(
            "frozen_at",
            time,
            nullable=False,
            comment="Only what was captured from here on is tested; later than everything that was searched.",
        ),
        sa.Column("tested_at", time, nullable=False, comment="Captures before this have been tested."),
        sa.Column("confirmed_at", time, nullable=True, comment="When it was last confirmed."),
        sa.Column("expired_at", time, nullable=True, comment="When it last expired."),
        sa.CheckConstraint(
            "status in ('candidate', 'confirmed', 'expired')", name=op.f("ck_discovery_status")
        ),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_discovery_model_version_id_model_version"),
        ),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_discovery_slice_id_slice")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_discovery")),
        sa.UniqueConstraint("model", "predicate", name=op.f("uq_discovery_model_predicate")),
        comment="A slice that a search found: tested on traffic captured after it was frozen, monitored once"
        " confirmed. Its id and its slice's stay when it expires and is found again.",
    )
    op.create_table(
        "discovery_search",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Version searched."),
        sa.Column("searched_at", time, nullable=False, comment="When."),
        sa.Column(
            "allowance",
            sa.Double(),
            nullable=False,
            comment="Expected false confirmations that this round of searches may cost, all versions together.",
        ),
        sa.Column("n_items", sa.Integer(), nullable=False, comment="Items searched."),
        sa.Column("n_scored", sa.BigInteger(), nullable=False, comment="Slices looked at."),
        sa.Column("n_found", sa.Integer(), nullable=False, comment="Slices found, known ones included."),
        sa.Column("n_frozen", sa.Integer(), nullable=False, comment="Of these, new candidates."),
        sa.Column(
            "n_left_out",
            sa.BigInteger(),
            nullable=False,
            comment="Attributes, values, conditions and slices that the limits left out.",
        ),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_discovery_search_model_version_id_model_version"),
        ),
        sa.PrimaryKeyConstraint("model_version_id", name=op.f("pk_discovery_search")),
        comment="The last search of each candidate version, and what it cost.",
    )


def downgrade() -> None:
    """Go one revision back."""
    op.drop_table("discovery_search")
    op.drop_table("discovery")

"""Discovered slices that are retired, and who changed the status of one, when and why.

A monitor of the release before cannot read a slice that is retired: its nightly search fails until it is replaced, and
all else goes on.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_COMMENT = (
    "A slice that a search found: tested on traffic captured after it was frozen, monitored once confirmed. Its id"
    " and its slice's stay when it {} found again."
)
_STATUS = "candidate: under test. confirmed: a monitored slice. expired: not confirmed in time"


def upgrade() -> None:
    """Go one revision forward."""
    time = sa.DateTime(timezone=True)
    op.add_column(
        "discovery",
        sa.Column(
            "waits_since",
            time,
            nullable=True,
            comment="Since when it is proven and waits for one of discovery.most_slices; null: it does not.",
        ),
    )
    op.add_column(
        "discovery",
        sa.Column(
            "held",
            sa.Boolean(),
            server_default=sa.text("false"),
            nullable=False,
            comment="Whether a person retired it: no search tests it again until it is restored.",
        ),
    )
    _statuses("'candidate', 'confirmed', 'expired', 'retired'")
    op.alter_column(
        "discovery",
        "status",
        comment=f"{_STATUS}. retired: monitored no more. Why stands in discovery_change.",
    )
    op.create_table_comment("discovery", _COMMENT.format("expires or is retired and is"))
    op.create_table(
        "discovery_change",
        sa.Column(
            "id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Order of changes."
        ),
        sa.Column("discovery_id", sa.Integer(), nullable=False, comment="Discovered slice."),
        sa.Column("status", sa.Text(), nullable=False, comment="What it is from here on."),
        sa.Column("made_by", sa.Text(), nullable=False, comment="Who: a user name, or monitor."),
        sa.Column("made_at", time, server_default=sa.text("now()"), nullable=False, comment="When."),
        sa.Column("reason", sa.Text(), nullable=False, comment="Why, in words."),
        sa.Column(
            "fold_seq",
            sa.BigInteger(),
            nullable=True,
            comment="The fold follows it from here on; null until the monitor took it.",
        ),
        sa.CheckConstraint(
            "status in ('candidate', 'confirmed', 'expired', 'retired')",
            name=op.f("ck_discovery_change_status"),
        ),
        sa.ForeignKeyConstraint(
            ["discovery_id"], ["discovery.id"], name=op.f("fk_discovery_change_discovery_id_discovery")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_discovery_change")),
        comment="Every change of status of a discovered slice, with who and why; rows are never changed.",
    )
    op.create_index("ix_discovery_change_discovery", "discovery_change", ["discovery_id", "id"], unique=False)
    op.create_index(
        "ix_discovery_change_unfolded",
        "discovery_change",
        ["id"],
        unique=False,
        postgresql_where=sa.text("fold_seq is null"),
    )


def downgrade() -> None:
    """Go one revision back; what is retired has expired then."""
    op.drop_table("discovery_change")
    op.execute("update discovery set status = 'expired', expired_at = now() where status = 'retired'")
    _statuses("'candidate', 'confirmed', 'expired'")
    op.alter_column("discovery", "status", comment=f"{_STATUS}, or unseen.")
    op.create_table_comment("discovery", _COMMENT.format("expires and is"))
    op.drop_column("discovery", "held")
    op.drop_column("discovery", "waits_since")


def _statuses(allowed: str) -> None:
    name = op.f("ck_discovery_status")
    op.drop_constraint(name, "discovery", type_="check")
    op.create_check_constraint(name, "discovery", f"status in ({allowed})")

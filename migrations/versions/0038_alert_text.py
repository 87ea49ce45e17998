"""The event of an alert is stored once, in `transition`, with its words; `alert.details` has how alerts are related, which changes.

A nullable column and an index are added. What `alert.details` had beside the relations is in the newest row of `transition` that
opened the alert or made it worse. Where no such row is left, it stays.

Revision ID: 0038
Revises: 0037
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None

_RELATED = "array['explained_by', 'explained_by_id', 'incident', 'explains', 'explains_ids']"
_EVENT = """
    (
        select t.details from transition t
        where t.alert_id = a.id and t.to_verdict in ('warning', 'firing') order by t.id desc limit 1
    )
"""


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "transition",
        sa.Column(
            "text",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=True,
            comment="What it says, worded when it was written: headline, lines, do_now, tomorrow, details. Null: no alert changed.",
        ),
    )
    op.create_index(
        "ix_transition_alert_id",
        "transition",
        ["alert_id", "id"],
        postgresql_where=sa.text("alert_id is not null"),
    )
    op.alter_column(
        "alert",
        "details",
        comment="How it is related to other alerts: explained_by, incident, explains. What it is about is in the newest row of"
        " transition that opened it or made it worse.",
        existing_type=postgresql.JSONB(astext_type=sa.Text()),
        existing_nullable=False,
    )
    op.execute(
        f"""
        update alert a set details = (
            select coalesce(jsonb_object_agg(key, value), '{{}}') from jsonb_each(a.details) where key = any({_RELATED})
        )
        where {_EVENT} is not null
        """  # noqa: S608 - constants
    )


def downgrade() -> None:
    """Go one revision back."""
    op.execute(f"update alert a set details = coalesce({_EVENT} - {_RELATED}, '{{}}') || a.details")  # noqa: S608 - constants
    op.alter_column(
        "alert",
        "details",
        comment="What changed, from which value to which, as the on-call engineer sees it.",
        existing_type=postgresql.JSONB(astext_type=sa.Text()),
        existing_nullable=False,
    )
    op.drop_index("ix_transition_alert_id", table_name="transition")
    op.drop_column("transition", "text")

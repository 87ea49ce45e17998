"""The audit: who changed what, as a chain of hashes to which rows can only be added.

A table and two functions are added: the release before can use the schema as before.

Revision ID: 0014
Revises: 0009
"""

from typing import Final

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0014"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.create_table(
        "audit",
        sa.Column(
            "seq", sa.BigInteger(), autoincrement=False, nullable=False, comment="1, 2, 3, ... without a gap."
        ),
        sa.Column(
            "at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="When it was written, by the database's clock.",
        ),
        sa.Column(
            "actor",
            sa.Text(),
            nullable=False,
            comment="Who: the user that Postgres authenticated (session_user).",
        ),
        sa.Column("action", sa.Text(), nullable=False, comment="What was done, as the command is called."),
        sa.Column("model", sa.Text(), nullable=False, comment="Model; empty: no single one."),
        sa.Column(
            "subject",
            sa.Text(),
            nullable=False,
            comment="What was changed: `slice 12`, `discovery 3`, `revision 7` of the bucket of pauses, or a process; may be empty.",
        ),
        sa.Column(
            "before",
            postgresql.JSONB(),
            nullable=True,
            comment="The former state; null: there was none, or it is unknown.",
        ),
        sa.Column("after", postgresql.JSONB(), nullable=True, comment="The new state; null: there is none."),
        sa.Column("note", sa.Text(), nullable=False, comment="Reason that the person gave; may be empty."),
        sa.Column(
            "hash",
            sa.LargeBinary(),
            nullable=False,
            comment="SHA-256 of the hash of the entry before and of all other columns; `quantdrift audit verify` computes it"
            " again.",
        ),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit")),
        comment="Who changed what and when, in a chain of hashes. Only the function `audit_add` writes it; rows are never changed"
        " or deleted.",
    )
    for column, comment in _MADE_BY.items():
        op.execute(f"comment on column {column} is '{comment}'")
    op.execute(_ADD)
    op.execute("revoke all on function audit_add(text, text, text, jsonb, jsonb, text) from public")
    op.execute(_REFUSE)
    for name, when in (
        ("audit_rows", "update or delete on audit for each row"),
        ("audit_all", "truncate on audit"),
    ):
        op.execute(f"create trigger {name} before {when} execute function audit_refuse()")
        op.execute(f"alter table audit enable always trigger {name}")


def downgrade() -> None:
    """Go one revision back."""
    op.drop_table("audit")
    op.execute("drop function audit_refuse()")
    op.execute("drop function audit_add(text, text, text, jsonb, jsonb, text)")
    for column, comment in _MADE_BY.items():
        op.execute(
            f"comment on column {column} is '{comment.replace('the user of the database', 'a user name')}'"
        )


_MADE_BY: Final = {
    "baseline.made_by": "Who decided: the user of the database, or monitor.",
    "discovery_change.made_by": "Who changed it: the user of the database, or monitor.",
    "slice_change.made_by": "Who changed it: the user of the database, monitor or shadow.",
    "clustering.made_by": "Who asked for it: the user of the database, or monitor.",
}
# Each field is its length in bytes, a colon and its bytes, or `-` for null: no two entries have the same bytes.
# `quantdrift.storage.audit.canonical` computes the same. The lock is released with the transaction, so that an entry is
# followed only by one that can see it.
_ADD: Final = """
    create function audit_add(
        new_action text, new_model text, new_subject text, new_before jsonb, new_after jsonb, new_note text
    ) returns bigint language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $body$
    declare
        added public.audit;
        previous bytea;
        field text;
        content bytea := ''\\:\\:bytea;
    begin
        lock table public.audit in exclusive mode;
        select last.seq, last.hash into added.seq, previous from public.audit last order by last.seq desc limit 1;
        added.seq := coalesce(added.seq, 0) + 1;
        added.at := clock_timestamp();
        added.actor := session_user;
        added.action := new_action;
        added.model := coalesce(new_model, '');
        added.subject := coalesce(new_subject, '');
        added.before := new_before;
        added.after := new_after;
        added.note := coalesce(new_note, '');
        foreach field in array array[
            encode(coalesce(previous, ''\\:\\:bytea), 'hex'),
            added.seq\\:\\:text,
            (extract(epoch from added.at) * 1000000)\\:\\:bigint\\:\\:text,
            added.actor, added.action, added.model, added.subject,
            added.before\\:\\:text, added.after\\:\\:text, added.note
        ] loop
            content := content || convert_to(
                coalesce(octet_length(convert_to(field, 'UTF8'))\\:\\:text || '\\:' || field, '-'), 'UTF8'
            );
        end loop;
        added.hash := sha256(content);
        insert into public.audit select added.*;
        return added.seq;
    end $body$
"""
_REFUSE: Final = """
    create function audit_refuse() returns trigger language plpgsql set search_path = pg_catalog, pg_temp as $body$
    begin
        raise exception 'entries of the audit are never changed or deleted' using errcode = 'insufficient_privilege';
    end $body$
"""

"""The verdicts of gates in a table of their own, which a function alone writes, once.

Nothing that is there is removed: the release before runs on the schema. Its monitor sees no verdict of a gate of this release, and answers
`insufficient`; its command `gate --live` cannot record progress any more once `setup postgres --apply` has taken the right.

Revision ID: 0029
Revises: 0028
"""

from typing import Final

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.create_table(
        "gate_verdict",
        sa.Column("gate_id", sa.BigInteger(), autoincrement=False, nullable=False, comment="Gate."),
        sa.Column("verdict", sa.Text(), nullable=False, comment="pass, fail or insufficient."),
        sa.Column(
            "slice",
            sa.Text(),
            nullable=False,
            comment="Slice that was judged alone, beside all traffic (`--alert`); empty: every slice with traffic.",
        ),
        sa.Column(
            "configuration",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="Options of the model by which it was judged, as in the audit: those that differ from their default.",
        ),
        sa.Column(
            "made_by", sa.Text(), nullable=False, comment="Who ran it: the user that Postgres authenticated."
        ),
        sa.Column(
            "made_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="When it ended, by the clock of the database.",
        ),
        sa.CheckConstraint(
            "verdict in ('pass', 'fail', 'insufficient')", name=op.f("ck_gate_verdict_verdict")
        ),
        sa.ForeignKeyConstraint(
            ["gate_id"], ["gate_run.id"], name=op.f("fk_gate_verdict_gate_id_gate_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("gate_id", name=op.f("pk_gate_verdict")),
        comment="The verdict of a gate that has ended. Only the function `gate_end` writes it, once, for the user that began"
        " the gate, together with an entry of the audit; rows are never changed.",
    )
    op.execute(
        "comment on column gate_run.verdict is"
        " 'Not used: whoever wrote it was not checked. The verdict is in `gate_verdict`.'"
    )
    for statement, signature in ((_PROGRESS, _OF_PROGRESS), (_END, _OF_END)):
        op.execute(statement)
        op.execute(f"revoke all on function {signature} from public")


def downgrade() -> None:
    """Go one revision back."""
    for signature in (_OF_END, _OF_PROGRESS):
        op.execute(f"drop function {signature}")
    op.execute("comment on column gate_run.verdict is 'pass, fail or insufficient.'")
    op.drop_table("gate_verdict")


_OF_PROGRESS: Final = "gate_progress(bigint, bigint, jsonb)"
_OF_END: Final = "gate_end(bigint, text, bigint, jsonb, jsonb, text)"
# `session_user` is the user that Postgres authenticated: not the owner, with whose rights a function runs.
_PROGRESS: Final = """
    create function gate_progress(gate bigint, new_more bigint, new_answers jsonb) returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $body$
    begin
        update public.gate_run set more = new_more, answers = new_answers, checked_at = now()
        where id = gate and made_by = session_user and ended_at is null;
        if not found then
            raise exception 'gate % has ended, or another user began it', gate using errcode = 'insufficient_privilege';
        end if;
    end $body$
"""
# The audit keeps its entries for ever, so of the candidate it gets the digest alone: names of slices may be values of clients.
_END: Final = """
    create function gate_end(
        gate bigint, new_verdict text, new_more bigint, new_answers jsonb, new_configuration jsonb, new_slice text
    ) returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $body$
    declare
        run public.gate_run;
    begin
        perform public.gate_progress(gate, new_more, new_answers);
        update public.gate_run set ended_at = now() where id = gate returning * into run;
        insert into public.gate_verdict (gate_id, verdict, slice, configuration, made_by, made_at)
        values (gate, new_verdict, new_slice, new_configuration, session_user, now());
        perform public.audit_add('gate', run.model, 'gate ' || gate, null, jsonb_build_object(
            'verdict', new_verdict,
            'candidate', left(split_part(run.candidate, ' ', 1), 71),
            'configuration', encode(sha256(convert_to(new_configuration\\:\\:text, 'UTF8')), 'hex')
        ), '');
    end $body$
"""

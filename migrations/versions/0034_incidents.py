"""Incidents: alerts that explain each other, as one thing with a state, and the log of its states.

Two tables, two views and two columns are added: the release before can use the schema as before. Alerts that it opens have no incident
until a monitor of this release folds: it gives them one, and alerts of before this revision, too.

Revision ID: 0034
Revises: 0033
"""

from typing import Final

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.create_table(
        "incident",
        sa.Column(
            "id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Number of the incident."
        ),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column(
            "began_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Estimated start of the drift: the earliest of its alerts.",
        ),
        sa.Column(
            "opened_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Event time of its first warning or page.",
        ),
        sa.Column(
            "state",
            sa.Text(),
            nullable=False,
            comment="open; mitigated: nobody gets its answers any more; recovered: by evidence; closed: by a person, or its slices are not"
            " compared any more; merged: its alerts belong to merged_into.",
        ),
        sa.Column(
            "mitigation",
            sa.Text(),
            nullable=True,
            comment="Of mitigated: replaced (another version serves), routed (no request of its slices reaches the version) or reported (by a"
            " person).",
        ),
        sa.Column(
            "ended_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Since when it is not open any more; null while it is.",
        ),
        sa.Column(
            "merged_into",
            sa.BigInteger(),
            nullable=True,
            comment="The older incident of the same cause; null: it stands for itself.",
        ),
        sa.Column(
            "n_answers",
            sa.BigInteger(),
            nullable=True,
            comment="Answers of its slices that were compared from its beginning to its end; null: not counted yet, or not by answers.",
        ),
        sa.Column(
            "n_people",
            sa.BigInteger(),
            nullable=True,
            comment="People with at least one changed answer among these; null where sampling.sticky_header says nothing of them, or not"
            " counted.",
        ),
        sa.Column(
            "changed",
            sa.Double(),
            nullable=True,
            comment="Estimated changed answers of all traffic of its slices in this time; null: not counted yet.",
        ),
        sa.Column(
            "changed_low", sa.Double(), nullable=True, comment="Lower end of its 95 % interval; null: none."
        ),
        sa.Column(
            "changed_high", sa.Double(), nullable=True, comment="Upper end of its 95 % interval; null: none."
        ),
        sa.Column(
            "counted_until",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Event time up to which the figures count.",
        ),
        sa.CheckConstraint(
            "state in ('open', 'mitigated', 'recovered', 'closed', 'merged')", name=op.f("ck_incident_state")
        ),
        sa.CheckConstraint(
            "mitigation in ('replaced', 'routed', 'reported')", name=op.f("ck_incident_mitigation")
        ),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_incident_model_version_id_model_version"),
        ),
        sa.ForeignKeyConstraint(
            ["merged_into"], ["incident.id"], name=op.f("fk_incident_merged_into_incident")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_incident")),
        comment="Alerts of one version that explain each other, as one thing with a state. Read it through incidents. The log of"
        " its states is incident_change.",
    )
    op.create_index("ix_incident_model_version_id", "incident", ["model_version_id"])
    op.create_index(
        "ix_incident_open",
        "incident",
        ["id"],
        postgresql_where=sa.text("state = 'open' or mitigation in ('routed', 'reported')"),
    )
    op.create_table(
        "incident_change",
        sa.Column(
            "id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Order of changes."
        ),
        sa.Column("incident_id", sa.BigInteger(), nullable=False, comment="Incident that it is about."),
        sa.Column("state", sa.Text(), nullable=False, comment="From then on, as incident.state."),
        sa.Column("mitigation", sa.Text(), nullable=True, comment="As incident.mitigation."),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False, comment="Event time."),
        sa.Column(
            "made_by",
            sa.Text(),
            server_default=sa.text("session_user"),
            nullable=False,
            comment="Database user who wrote it: the monitor's, or a person's.",
        ),
        sa.Column(
            "identity",
            sa.Text(),
            server_default=sa.text("''"),
            nullable=False,
            comment="Person that the web server has authenticated, or who closed the last alert; empty: the database user acted.",
        ),
        sa.Column(
            "made_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was written.",
        ),
        sa.Column(
            "reason",
            sa.Text(),
            server_default=sa.text("''"),
            nullable=False,
            comment="Reason that a person gave; empty: the evidence says so.",
        ),
        sa.Column(
            "fold_seq",
            sa.BigInteger(),
            nullable=True,
            comment="The fold that wrote it, or took it over from a person; null until then.",
        ),
        sa.Column(
            "counts",
            JSONB(),
            nullable=True,
            comment="Of routed: by slice, what had been compared of it, and of its version, and the share that it had of the traffic.",
        ),
        sa.CheckConstraint(
            "state in ('open', 'mitigated', 'recovered', 'closed', 'merged')",
            name=op.f("ck_incident_change_state"),
        ),
        sa.CheckConstraint(
            "mitigation in ('replaced', 'routed', 'reported')", name=op.f("ck_incident_change_mitigation")
        ),
        sa.ForeignKeyConstraint(
            ["incident_id"],
            ["incident.id"],
            name=op.f("fk_incident_change_incident_id_incident"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_incident_change")),
        comment="The states of each incident, in order: who said so, when and why.",
    )
    op.create_index("ix_incident_change_incident_id", "incident_change", ["incident_id", "id"])
    op.add_column(
        "alert",
        sa.Column(
            "incident_id",
            sa.BigInteger(),
            nullable=True,
            comment="Incident that it belongs to, with the alerts that explain it or that it explains; null: the monitor has not looked yet.",
        ),
    )
    op.create_foreign_key(op.f("fk_alert_incident_id_incident"), "alert", "incident", ["incident_id"], ["id"])
    op.create_index("ix_alert_incident_id", "alert", ["incident_id"])
    op.add_column(
        "outbox",
        sa.Column(
            "incident_change_id",
            sa.BigInteger(),
            nullable=True,
            comment="Change of its alert's incident that it reports; `transition_id` is then the last change of the alert before it.",
        ),
    )
    op.create_foreign_key(
        op.f("fk_outbox_incident_change_id_incident_change"),
        "outbox",
        "incident_change",
        ["incident_change_id"],
        ["id"],
    )
    _view("incidents", _INCIDENTS, _COMMENT)
    _view("incident_now", _NOW, _NOW_COMMENT)


def downgrade() -> None:
    """Go one revision back."""
    op.execute("drop view incident_now")
    op.execute("drop view incidents")
    op.execute("delete from outbox where incident_change_id is not null")
    op.drop_constraint(op.f("fk_outbox_incident_change_id_incident_change"), "outbox")
    op.drop_column("outbox", "incident_change_id")
    op.drop_index("ix_alert_incident_id", "alert")
    op.drop_constraint(op.f("fk_alert_incident_id_incident"), "alert")
    op.drop_column("alert", "incident_id")
    op.drop_table("incident_change")
    op.drop_table("incident")


def _view(name: str, query: str, comment: str) -> None:
    op.execute(f"create view {name} ({', '.join(_COLUMNS)}) as {query}")
    op.execute(f"comment on view {name} is {_quoted(comment)}")
    for column, said in _COLUMNS.items():
        op.execute(f"comment on column {name}.{column} is {_quoted(said)}")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


_COLUMNS: Final = {
    "id": "Number of the incident.",
    "model": "Model name, as in requests.",
    "candidate_version": "Version of the quantised model in production.",
    "severity": "Highest of its alerts so far: warning opens a ticket, firing pages.",
    "slices": "Slices that drifted and that no other slice explains, the oldest alert first.",
    "state": "open; mitigated: nobody gets its answers any more; recovered: by evidence; closed: by a person, or not compared any more.",
    "mitigation": "Of mitigated: replaced (another version serves), routed (no request of its slices reaches the version) or reported (by a"
    " person).",
    "said_by": "Person who said so: in the state closed, and in mitigated where it is reported; empty: the evidence says so.",
    "reason": "Reason that this person gave.",
    "began_at": "Estimated start of the drift: the earliest of its alerts.",
    "opened_at": "Event time of its first warning or page.",
    "ended_at": "Since when it is not open any more; null while it is.",
    "changed": "Estimated changed answers of all traffic of these slices, from its beginning until counted_until; null: not counted yet.",
    "changed_low": "Lower end of its 95 % interval; null: none.",
    "changed_high": "Upper end of its 95 % interval; null: none.",
    "n_answers": "Answers that were compared in this time; null: not counted yet, or not by answers.",
    "n_people": "People with at least one changed answer among these: at least so many got one, since a sample is compared. Null where"
    " sampling.sticky_header says nothing of them.",
    "counted_until": "Event time up to which the figures count.",
    "alerts": "Numbers of its alerts, the oldest first.",
    "model_version_id": "Key of the version.",
    "slice_ids": "Keys of these slices.",
}
_COMMENT: Final = (
    "What people talk about: alerts of one version that explain each other, with a beginning, a state and an end. An incident whose"
    " alerts another one has taken over is left out."
)
_NOW_COMMENT: Final = "The incidents that are open, and those that ended within a day of the newest exchange; columns as in incidents."
_INCIDENTS: Final = """
    select i.id, mv.model, mv.candidate_version, m.severity, m.slices, i.state, i.mitigation, coalesce(c.said_by, ''),
        coalesce(c.reason, ''), i.began_at, i.opened_at, i.ended_at, i.changed, i.changed_low, i.changed_high, i.n_answers, i.n_people, i.counted_until, m.alerts,
        i.model_version_id, m.slice_ids
    from incident i
    join model_version mv on mv.id = i.model_version_id
    cross join lateral (
        select min(a.severity) as severity, array_agg(a.id order by a.id) as alerts,
            coalesce(
                array_agg(s.name order by a.id) filter (where not a.is_explained), array_agg(s.name order by a.id)
            ) as slices,
            coalesce(
                array_agg(s.id order by a.id) filter (where not a.is_explained), array_agg(s.id order by a.id)
            ) as slice_ids
        from (
            select b.id, b.severity, b.slice_id, exists (
                select from alert e
                where e.incident_id = i.id and e.slice_id = cast(b.details ->> 'explained_by_id' as int)
            ) as is_explained
            from alert b where b.incident_id = i.id
        ) a join slice s on s.id = a.slice_id
    ) m
    left join lateral (
        select reason, case when reason <> '' then coalesce(nullif(identity, ''), made_by) end as said_by
        from incident_change where incident_id = i.id order by id desc limit 1
    ) c on true
    where i.merged_into is null and m.alerts is not null
"""
_NOW: Final = """
    select * from incidents
    where state = 'open' or ended_at > (select event_time from fold) - interval '1 day'
"""

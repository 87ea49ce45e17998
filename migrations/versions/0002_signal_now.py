"""The view `signal_now`: each signal of each slice, those of plug-ins too.

The compatibility rule: it only adds a view, which the release before does not read.

Revision ID: 0002
Revises: 0001
"""

from alembic import op

from quantdrift.migrations.initial.views import View

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_SIGNAL_NOW = View(
    name="signal_now",
    comment="The signals of each slice that are measured against a budget, as the monitor last saw them: flip and divergence as in slice_now, the latency where it has a budget, and those of plug-ins.",
    columns={
        "model": "Model name, as in requests.",
        "candidate_version": "Version of the quantised model in production.",
        "slice": "Short name of the slice; `all` is the aggregate.",
        "metric": "flip, divergence, latency, or the name of a plug-in's signal.",
        "budget": "Accepted mean, in the unit of the signal: of shares from 0 to 1.",
        "mean": "Recent mean; null: nothing of it was observed.",
        "low": "Lower end of its 95 % interval; null: there is too little data for one.",
        "high": "Upper end of its 95 % interval; null: there is too little data for one.",
        "noise": "Part that was added to the budget for noise; null: none.",
        "n": "Exchanges or sessions that the mean is made of.",
        "model_version_id": "Key of model_version.",
        "slice_id": "Key of slice.",
    },
    query="""
        select
            mv.model,
            mv.candidate_version,
            s.name,
            estimate.metric,
            (estimate.of ->> 'budget')::double precision,
            (estimate.of ->> 'mean')::double precision,
            (estimate.of ->> 'low')::double precision,
            (estimate.of ->> 'high')::double precision,
            (estimate.of ->> 'noise')::double precision,
            coalesce((estimate.of ->> 'n')::bigint, 0),
            v.model_version_id,
            v.slice_id
        from verdict v
        join model_version mv on mv.id = v.model_version_id
        join slice s on s.id = v.slice_id
        cross join lateral jsonb_each(v.estimate) as estimate (metric, of)
        where estimate.of -> 'budget' is not null
    """,
)


def upgrade() -> None:
    """Go one revision forward."""
    # Not `op.execute`, which would read a colon as the beginning of a parameter.
    execute = op.get_bind().exec_driver_sql
    view = _SIGNAL_NOW
    execute(f"create view {view.name} ({', '.join(view.columns)}) as {view.query}")
    execute(f"comment on view {view.name} is {_quoted(view.comment)}")
    for column, comment in view.columns.items():
        execute(f"comment on column {view.name}.{column} is {_quoted(comment)}")


def downgrade() -> None:
    """Go one revision back."""
    op.execute(f"drop view {_SIGNAL_NOW.name}")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"

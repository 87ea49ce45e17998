"""Ties beside flips, the weight of each item in each slice, and how many exchanges an interval lacks.

The release before can use the schema as before: new columns are nullable or have a default, and the views gain columns at
their end.

Revision ID: 0002
Revises: 0001
"""

from typing import Final, NamedTuple

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "comparison",
        sa.Column(
            "tie",
            sa.Boolean(),
            nullable=True,
            comment="Whether the decision differs only because several entries share the largest score of a side; the model's"
            " count_ties says whether flip counts it. Null where the task chooses no entry, and before revision 0002.",
        ),
    )
    for table in _ROLLUPS:
        for name, comment in _ADDED.items():
            column: sa.Column[float] = sa.Column(
                name, sa.Double(), server_default=sa.text("0"), nullable=False, comment=comment
            )
            op.add_column(table, column)
        op.alter_column(table, "weight_sq", comment=_SESSIONS, existing_comment=_EXCHANGES)
    for view in (_SLICE_NOW, _SLICE_HISTORY, _SLICE_ITEM):
        _create(view)


def downgrade() -> None:
    """Go one revision back."""
    for view, n_added in ((_SLICE_ITEM, len(_SLICE_ITEM.columns)), (_SLICE_HISTORY, 2), (_SLICE_NOW, 2)):
        op.execute(f"drop view {view.name}")
        if n_added < len(view.columns):
            _create(_without(view, n_added))
    for table in _ROLLUPS:
        for name in _ADDED:
            op.drop_column(table, name)
        op.alter_column(table, "weight_sq", comment=_EXCHANGES, existing_comment=_SESSIONS)
    op.drop_column("comparison", "tie")


_ROLLUPS: Final = ("rollup_hour", "rollup_day")
_EXCHANGES: Final = "Sum of squared weights; n_eff = weight^2 / weight_sq."
_SESSIONS: Final = (
    "Sum of squared weights, of a closed session the square of their sum; n_eff = weight^2 / weight_sq."
)
_ADDED: Final = {
    "tie": "Weighted sum of tie; divide by tie_weight.",
    "tie_weight": "Part of weight whose items have a tie.",
}


class _View(NamedTuple):
    """A view with what the database says of it; `columns` in the order of its select list."""

    name: str
    comment: str
    columns: dict[str, str]
    query: str


_SLICE_NOW: Final = _View(
    name="slice_now",
    comment=(
        "The current state of each slice: one row per slice of a candidate version, together with the verdict on the"
        " aggregate. Order by evidence_ratio desc to see the worst first."
    ),
    columns={
        "model": "Model name, as in requests.",
        "candidate_version": "Version of the quantised model in production.",
        "reference_digest": "SHA-256 of the reference file; empty where the version has no reference.",
        "slice": "Short name of the slice, as in alerts; `all` is the aggregate.",
        "predicate": "Condition of the slice, as canonical text.",
        "verdict": "ok, warning, firing or unknown.",
        "reason": "Reason in words; for unknown, what is missing.",
        "since": "Event time of the last change of the verdict.",
        "n_groups": "Exchanges compared so far.",
        "evidence_ratio": "Evidence / threshold: 1 pages. While firing, the value at the alarm.",
        "flip_mean": "Share of exchanges whose decision changed, over the recent window, weighted.",
        "flip_low": "Lower end of its time-uniform 95 % interval.",
        "flip_high": "Upper end of its time-uniform 95 % interval.",
        "flip_budget": "The share that the owner accepts.",
        "divergence_mean": "Mean divergence over the recent window, weighted and capped: of a classifier KL in nats.",
        "divergence_low": "Lower end of its time-uniform 95 % interval.",
        "divergence_high": "Upper end of its time-uniform 95 % interval.",
        "divergence_budget": "The mean that the owner accepts.",
        "all_verdict": "Verdict on the aggregate, the slice `all` of the same candidate version.",
        "all_flip_mean": "flip_mean of the aggregate.",
        "all_divergence_mean": "divergence_mean of the aggregate.",
        "alert_id": "Open alert, if any.",
        "onset_at": "Estimated start of its drift.",
        "last_at": "Capture time of the slice's last comparison.",
        "updated_at": "Event time of the fold that wrote this.",
        "model_version_id": "Key of model_version.",
        "slice_id": "Key of slice.",
        "flip_missing": "Exchanges that are missing before flip_low and flip_high tell anything; null where they do.",
        "divergence_missing": "The same of divergence_low and divergence_high.",
    },
    query="""
        select
            mv.model,
            mv.candidate_version,
            mv.reference_digest,
            s.name,
            s.predicate,
            v.verdict,
            v.reason,
            v.since,
            v.n_groups,
            case when v.threshold > 0 then v.evidence / v.threshold end,
            (v.estimate #>> '{flip,mean}')::double precision,
            (v.estimate #>> '{flip,low}')::double precision,
            (v.estimate #>> '{flip,high}')::double precision,
            (v.estimate #>> '{flip,budget}')::double precision,
            (v.estimate #>> '{divergence,mean}')::double precision,
            (v.estimate #>> '{divergence,low}')::double precision,
            (v.estimate #>> '{divergence,high}')::double precision,
            (v.estimate #>> '{divergence,budget}')::double precision,
            a.verdict,
            (a.estimate #>> '{flip,mean}')::double precision,
            (a.estimate #>> '{divergence,mean}')::double precision,
            v.alert_id,
            alert.onset_at,
            v.last_at,
            v.updated_at,
            v.model_version_id,
            v.slice_id,
            (v.estimate #>> '{flip,missing}')::bigint,
            (v.estimate #>> '{divergence,missing}')::bigint
        from verdict v
        join model_version mv on mv.id = v.model_version_id
        join slice s on s.id = v.slice_id
        left join alert on alert.id = v.alert_id
        left join slice everything on everything.model = mv.model and everything.predicate = 'true'
        left join verdict a on a.model_version_id = v.model_version_id and a.slice_id = everything.id
    """,
)

_SLICE_HISTORY: Final = _View(
    name="slice_history",
    comment=(
        "The history of each slice: divergence per slice and hour of capture, together with the aggregate of the same"
        " hour. Means are weighted by 1 / pi, so they describe the traffic, not the sample."
    ),
    columns={
        "hour": "Start of the hour, UTC.",
        "model": "Model name, as in requests.",
        "candidate_version": "Version of the quantised model in production.",
        "reference_digest": "SHA-256 of the reference file; empty where the version has no reference.",
        "slice": "Short name of the slice; `all` is the aggregate.",
        "predicate": "Condition of the slice.",
        "n_items": "Items compared.",
        "n_groups": "Exchanges compared.",
        "n_eff": "Effective number of exchanges: so many equally weighted ones would be as informative. A session counts as one.",
        "weight": "Estimated exchanges offered in the slice: sum of 1 / pi.",
        "traffic_ratio": "Estimated share of the slice in the traffic of the candidate version.",
        "flip": "Share of exchanges whose decision changed; null, like all means, where no item has one.",
        "topk": "Share of exchanges whose set of the k top classes changed.",
        "js": "Mean Jensen-Shannon divergence, nats.",
        "divergence": "Mean divergence, each item capped at the model's budget.cap: of a classifier KL in nats.",
        "margin": "Mean absolute change of the gap between the two top probabilities.",
        "n_infinite": "Items whose divergence was infinite.",
        "all_flip": "flip of the aggregate in the same hour.",
        "all_topk": "topk of the aggregate in the same hour.",
        "all_js": "js of the aggregate in the same hour, nats.",
        "all_divergence": "divergence of the aggregate in the same hour.",
        "all_margin": "margin of the aggregate in the same hour.",
        "model_version_id": "Key of model_version.",
        "slice_id": "Key of slice.",
        "tie": (
            "Share of exchanges whose decision differs only because several entries share the largest score of a side; the"
            " model's count_ties says whether flip counts them. Null before revision 0002."
        ),
        "all_tie": "tie of the aggregate in the same hour.",
    },
    query="""
        select
            r.hour,
            mv.model,
            mv.candidate_version,
            mv.reference_digest,
            s.name,
            s.predicate,
            r.n_items,
            r.n_groups,
            r.weight * r.weight / nullif(r.weight_sq, 0),
            r.weight,
            r.weight / nullif(a.weight, 0),
            r.flip / nullif(r.flip_weight, 0),
            r.topk / nullif(r.topk_weight, 0),
            r.js / nullif(r.js_weight, 0),
            r.divergence / nullif(r.divergence_weight, 0),
            r.margin / nullif(r.margin_weight, 0),
            r.n_infinite,
            a.flip / nullif(a.flip_weight, 0),
            a.topk / nullif(a.topk_weight, 0),
            a.js / nullif(a.js_weight, 0),
            a.divergence / nullif(a.divergence_weight, 0),
            a.margin / nullif(a.margin_weight, 0),
            r.model_version_id,
            r.slice_id,
            r.tie / nullif(r.tie_weight, 0),
            a.tie / nullif(a.tie_weight, 0)
        from rollup_hour r
        join model_version mv on mv.id = r.model_version_id
        join slice s on s.id = r.slice_id
        left join slice everything on everything.model = mv.model and everything.predicate = 'true'
        left join rollup_hour a
            on a.model_version_id = r.model_version_id and a.slice_id = everything.id and a.hour = r.hour
    """,
)

_SLICE_ITEM: Final = _View(
    name="slice_item",
    comment=(
        "Every compared item in each of its slices, with its weight there. An exchange counts once in a slice, however many"
        " items it has: its items share its weight. Give a range of captured_at: comparison is partitioned by it."
    ),
    columns={
        "captured_at": "When the response was complete, at the sidecar.",
        "exchange_id": "Id of the exchange.",
        "item": "Index of the item in the exchange, from 0.",
        "model": "Model name, as in requests.",
        "candidate_version": "Version of the quantised model in production.",
        "slice": "Short name of the slice; `all` is the aggregate.",
        "weight": (
            "Weight of the item in the slice: 1 / (pi1 * pi2), divided by the number of the exchange's items in the slice. Means"
            " with it are those of slice_history, of slice_now and of the report."
        ),
        "flip": "Whether the decision differs.",
        "tie": "Whether it differs only because several entries share the largest score of a side.",
        "topk": "Whether the set of the k top classes differs.",
        "js": "Jensen-Shannon divergence, nats.",
        "divergence": "Graded divergence of the model's task, not capped; infinity is kept.",
        "margin": "Absolute change of the gap between the two top probabilities.",
        "detail": "Other measurements by name.",
        "model_version_id": "Key of model_version.",
        "slice_id": "Key of slice.",
    },
    query="""
        select
            c.captured_at,
            c.exchange_id,
            c.item,
            mv.model,
            mv.candidate_version,
            s.name,
            1 / (c.pi1 * c.pi2) / count(*) over (partition by c.captured_at, c.exchange_id, member.slice_id),
            c.flip,
            c.tie,
            c.topk,
            c.js,
            c.divergence,
            c.margin,
            c.detail,
            c.model_version_id,
            member.slice_id
        from comparison c
        cross join lateral unnest(c.slice_ids) as member (slice_id)
        join model_version mv on mv.id = c.model_version_id
        join slice s on s.id = member.slice_id
    """,
)


def _without(view: _View, n: int) -> _View:
    """Return the view without its last columns, which stand in lines of their own before `from`."""
    head, _, tail = view.query.partition("\n        from ")
    lines = head.split("\n")[:-n]
    lines[-1] = lines[-1].removesuffix(",")
    columns = dict(list(view.columns.items())[:-n])
    return view._replace(columns=columns, query="\n".join(lines) + "\n        from " + tail)


def _create(view: _View) -> None:
    op.execute(f"create or replace view {view.name} ({', '.join(view.columns)}) as {view.query}")
    op.execute(f"comment on view {view.name} is {_quoted(view.comment)}")
    for column, comment in view.columns.items():
        op.execute(f"comment on column {view.name}.{column} is {_quoted(comment)}")


def _quoted(text: str) -> str:
    # A colon would be read as a bound parameter.
    return "'" + text.replace("'", "''").replace(":", "\\:") + "'"

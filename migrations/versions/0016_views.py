"""Views that need no manual: `item`, `slice_day`, `release_compare`, `not_observed` and `change_log`.

Five views and two indexes are added: the release before can use the schema as before. While the indexes are made,
comparisons wait to be stored.

Revision ID: 0016
Revises: 0015
"""

from typing import Final, NamedTuple

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.execute("create index ix_comparison_divergence on comparison (divergence desc nulls last)")
    op.execute(
        "create index ix_comparison_request_id on comparison ((attributes ->> 'header.x-request-id'))"
        " where (attributes ->> 'header.x-request-id') is not null"
    )
    for view in _VIEWS:
        op.execute(f"create view {view.name} ({', '.join(view.columns)}) as {_plain(view.query)}")
        op.execute(f"comment on view {view.name} is {_quoted(view.comment)}")
        for column, comment in view.columns.items():
            op.execute(f"comment on column {view.name}.{column} is {_quoted(comment)}")


def downgrade() -> None:
    """Go one revision back."""
    for view in reversed(_VIEWS):
        op.execute(f"drop view {view.name}")
    op.execute("drop index ix_comparison_request_id")
    op.execute("drop index ix_comparison_divergence")


def _quoted(text: str) -> str:
    return "'" + _plain(text.replace("'", "''")) + "'"


def _plain(text: str) -> str:
    # A colon would be read as a bound parameter.
    return text.replace(":", "\\:")


class _View(NamedTuple):
    """A view with what the database says of it; `columns` in the order of its select list."""

    name: str
    comment: str
    columns: dict[str, str]
    query: str


_ITEM: Final = _View(
    name="item",
    comment=(
        "Every compared item in each of its slices, with its weight there and everything that was recorded of it. An exchange counts"
        " once in a slice, however many items it has: its items share its weight. Give a range of captured_at: comparison is"
        " partitioned by it."
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
            " with it describe the traffic, and are those of slice_day, of slice_now and of the report."
        ),
        "group_key": "Session (hashed), or the id of the exchange where it has none: what counts as one observation.",
        "flip": "Whether the decision differs.",
        "tie": "Whether it differs only because several entries share the largest score of a side.",
        "divergence": "Graded divergence of the model's task, not capped; infinity is kept.",
        "candidate_class": "Number of the candidate's top class, from 0; null where the task chooses none.",
        "reference_class": "Number of the reference's top class, from 0; null where the task chooses none.",
        "candidate_scores": "The candidate's top classes as pairs of number and probability; null where both sides look the same.",
        "reference_scores": "The same of the reference.",
        "candidate_margin": "Gap between the two top probabilities of the candidate.",
        "reference_margin": "Gap between the two top probabilities of the reference.",
        "request_id": "Recorded header x-request-id; null if it is not recorded.",
        "trace_id": "Trace id of the production request; null if it has none.",
        "attributes": "Recorded headers, parameters and JSON values.",
        "features": "Input features that slices use.",
        "detail": "Other measurements by name.",
        "header_stratum": "First-phase stratum.",
        "origin": "How it came in; null: through the relay.",
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
            1 / (c.pi1 * c.pi2) / case when c.n_items = 1 then 1 else (
                select count(*) from comparison other
                where other.captured_at = c.captured_at and other.exchange_id = c.exchange_id
                    and member.slice_id = any(other.slice_ids)
            ) end,
            case when c.group_key = '' then c.exchange_id::text else c.group_key end,
            c.flip,
            c.tie,
            c.divergence,
            nullif((c.detail ->> 'candidate_top')::int, -1),
            nullif((c.detail ->> 'reference_top')::int, -1),
            c.detail -> 'candidate_scores',
            c.detail -> 'reference_scores',
            c.candidate_margin,
            c.reference_margin,
            c.attributes ->> 'header.x-request-id',
            nullif(split_part(c.trace, '-', 2), ''),
            c.attributes,
            c.features,
            c.detail,
            c.header_stratum,
            c.origin,
            c.model_version_id,
            member.slice_id
        from comparison c
        cross join lateral unnest(c.slice_ids) as member (slice_id)
        join model_version mv on mv.id = c.model_version_id
        join slice s on s.id = member.slice_id
    """,
)

_SLICE_DAY: Final = _View(
    name="slice_day",
    comment=(
        "The history of each slice by day of capture: share of changed answers with its interval and budget, and divergence. Means"
        " are weighted by 1 / pi, so they describe the traffic, not the sample."
    ),
    columns={
        "day": "Start of the day, UTC.",
        "model": "Model name, as in requests.",
        "candidate_version": "Version of the quantised model in production.",
        "slice": "Short name of the slice; `all` is the aggregate.",
        "n_items": "Items compared.",
        "n_groups": "Exchanges compared.",
        "n_eff": "Effective number of exchanges: so many equally weighted ones would be as informative. A session counts as one.",
        "requests": "Estimated requests of the day: the sum of 1 / pi.",
        "traffic_ratio": "Estimated share of the slice in the traffic of the version.",
        "changed": "Estimated requests of the day whose answer changed.",
        "flip": "Share of requests whose answer changed; null where no item has one.",
        "flip_low": "Lower end of its 95 % interval for this day alone: Wilson's, at n_eff.",
        "flip_high": "Upper end of the same.",
        "flip_budget": "The share that the owner accepts now.",
        "divergence": "Mean divergence, each item capped at the model's budget.cap: of a classifier KL in nats.",
        "divergence_budget": "The mean that the owner accepts now.",
        "all_flip": "flip of the aggregate on the same day.",
        "all_divergence": "divergence of the aggregate on the same day.",
        "model_version_id": "Key of model_version.",
        "slice_id": "Key of slice.",
    },
    query="""
        select
            r.day,
            mv.model,
            mv.candidate_version,
            s.name,
            r.n_items,
            r.n_groups,
            k.n,
            r.weight,
            r.weight / nullif(a.weight, 0),
            k.p * r.weight,
            k.p,
            (k.p + 1.9207 / k.n - 1.96 * sqrt(k.p * (1 - k.p) / k.n + 0.9604 / (k.n * k.n))) / (1 + 3.8415 / k.n),
            (k.p + 1.9207 / k.n + 1.96 * sqrt(k.p * (1 - k.p) / k.n + 0.9604 / (k.n * k.n))) / (1 + 3.8415 / k.n),
            (v.estimate #>> '{flip,budget}')::double precision,
            r.divergence / nullif(r.divergence_weight, 0),
            (v.estimate #>> '{divergence,budget}')::double precision,
            a.flip / nullif(a.flip_weight, 0),
            a.divergence / nullif(a.divergence_weight, 0),
            r.model_version_id,
            r.slice_id
        from rollup_day r
        cross join lateral (
            select r.weight * r.weight / nullif(r.weight_sq, 0) as n, least(r.flip / nullif(r.flip_weight, 0), 1.0) as p
        ) k
        join model_version mv on mv.id = r.model_version_id
        join slice s on s.id = r.slice_id
        left join verdict v on v.model_version_id = r.model_version_id and v.slice_id = r.slice_id
        left join slice everything on everything.model = mv.model and everything.predicate = 'true'
        left join rollup_day a
            on a.model_version_id = r.model_version_id and a.slice_id = everything.id and a.day = r.day
    """,
)

_RELEASE_COMPARE: Final = _View(
    name="release_compare",
    comment=(
        "Each version of a model beside the one that came before it, slice by slice, over all days that are kept. Intervals of the"
        " difference: `quantdrift compare`."
    ),
    columns={
        "model": "Model name, as in requests.",
        "before_version": "The version that came before.",
        "version": "The version.",
        "released_at": "When the first exchange of the version was stored.",
        "slice": "Short name of the slice; `all` is the aggregate.",
        "n_before": "Exchanges compared of the version before.",
        "n": "Exchanges compared of the version.",
        "flip_before": "Share of requests whose answer changed, in the version before.",
        "flip": "The same in the version.",
        "flip_difference": "flip - flip_before: above 0 the version is worse.",
        "divergence_before": "Mean capped divergence in the version before.",
        "divergence": "The same in the version.",
        "divergence_difference": "divergence - divergence_before.",
        "before_version_id": "Key of model_version of the version before.",
        "model_version_id": "Key of model_version of the version.",
        "slice_id": "Key of slice.",
    },
    query="""
        with version as (
            select id, model, candidate_version, first_seen_at,
                lag(id) over of_model as before_id, lag(candidate_version) over of_model as before_version
            from model_version window of_model as (partition by model order by first_seen_at, id)
        ), total as (
            select model_version_id, slice_id, sum(n_groups)::bigint as n,
                sum(flip) / nullif(sum(flip_weight), 0) as flip,
                sum(divergence) / nullif(sum(divergence_weight), 0) as divergence
            from rollup_day group by 1, 2
        )
        select
            version.model,
            version.before_version,
            version.candidate_version,
            version.first_seen_at,
            s.name,
            old.n,
            new.n,
            old.flip,
            new.flip,
            new.flip - old.flip,
            old.divergence,
            new.divergence,
            new.divergence - old.divergence,
            version.before_id,
            version.id,
            s.id
        from version
        join total new on new.model_version_id = version.id
        join total old on old.model_version_id = version.before_id and old.slice_id = new.slice_id
        join slice s on s.id = new.slice_id
    """,
)

_NOT_OBSERVED: Final = _View(
    name="not_observed",
    comment=(
        "What nobody looked at in the last 24 hours, in one place: requests that were not sampled, left out, lost or expired, by header"
        " stratum; exchanges that could not be compared, by model; and slices without a verdict."
    ),
    columns={
        "model": "Model; null where requests are counted before their model is known.",
        "slice": "Slice without a verdict; null: it is not about one slice.",
        "stratum": "Header stratum; null: it is not about one stratum.",
        "what": "What happened: not sampled, left out, lost, expired, not comparable, or no verdict.",
        "reason": "Why, where something says it.",
        "requests": "Requests that it happened to; null: not known.",
        "share": "Of the requests that were offered in the stratum, in [0, 1]; null: not known.",
    },
    query="""
        with covered as (
            select stratum, sum(offered) as offered, sum(taken) as taken, sum(thinned) as thinned, sum(n_expired) as expired,
                jsonb_agg(lost) as lost
            from coverage_hour where hour >= now() - interval '24 hours' group by stratum
        )
        select null::text, null::text, stratum, 'not sampled', 'the sampling rate', (offered - taken)::bigint,
            (offered - taken)::double precision / nullif(offered, 0)
        from covered where offered > taken
        union all
        select null, null, stratum, 'left out', 'the sampling policy', thinned::bigint,
            thinned::double precision / nullif(offered, 0)
        from covered where thinned > 0
        union all
        select null, null, stratum, 'lost', reason.key, sum(reason.value::bigint)::bigint,
            sum(reason.value::bigint)::double precision / nullif(max(offered), 0)
        from covered, jsonb_array_elements(lost) part, jsonb_each_text(part.value) reason group by stratum, reason.key
        having sum(reason.value::bigint) > 0
        union all
        select null, null, stratum, 'expired', 'no worker replayed it in time', expired::bigint,
            expired::double precision / nullif(offered, 0)
        from covered where expired > 0
        union all
        select nullif(model, ''), null, null, 'not comparable', reason, count(*), null from quarantine
        where quarantined_at >= now() - interval '24 hours' group by model, reason
        union all
        select mv.model, s.name, null, 'no verdict', v.reason, null, null
        from verdict v join model_version mv on mv.id = v.model_version_id join slice s on s.id = v.slice_id
        where v.verdict = 'unknown' and v.last_at >= now() - interval '24 hours'
    """,
)

_CHANGE_LOG: Final = _View(
    name="change_log",
    comment=(
        "Who changed what, when and why: the entries of the audit (configuration, policies, pauses, baselines, alerts and so on),"
        " releases of versions, and baselines that the monitor learned."
    ),
    columns={
        "at": "When.",
        "who": "The user that Postgres authenticated, or monitor; of a release: traffic.",
        "what": "The action, as the command is called; release: a version was seen for the first time.",
        "model": "Model; empty: no single one.",
        "subject": "What was changed.",
        "before": "The former state; null: there was none, or it is unknown.",
        "after": "The new state; null: there is none.",
        "why": "The reason that was given; may be empty.",
    },
    query="""
        select at, actor, action, model, subject, before, after, note from audit
        union all
        select first_seen_at, 'traffic', 'release', model, candidate_version, null, null, '' from model_version
        union all
        select b.made_at, b.made_by, 'baseline ' || b.source, mv.model, s.name || ' ' || b.metric || ' ' || b.kind, null, null,
            b.reason
        from baseline b join model_version mv on mv.id = b.model_version_id join slice s on s.id = b.slice_id
        where b.source in ('learned', 'inherited')
    """,
)

_VIEWS: Final = (_ITEM, _SLICE_DAY, _RELEASE_COMPARE, _NOT_OBSERVED, _CHANGE_LOG)

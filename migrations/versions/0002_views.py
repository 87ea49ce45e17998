"""The views that answer what everybody asks: how bad is each slice now, how did it get there, what did we see.

Revision ID: 0002
Revises: 0001
"""

from typing import NamedTuple

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


class View(NamedTuple):
    """A view with what the database says of it; `columns` in the order of its select list."""

    name: str
    comment: str
    columns: dict[str, str]
    query: str


SLICE_NOW = View(
    name="slice_now",
    comment=(
        "How bad is each slice now: one row per slice of a candidate version, with the verdict on the aggregate"
        " beside it. Order by evidence_ratio desc for the worst first."
    ),
    columns={
        "model": "Model name on the wire.",
        "candidate_version": "Version of the quantised model that serves.",
        "reference_digest": "SHA-256 of the reference file; empty where the version has no reference.",
        "slice": "Short name of the slice, as in alerts; `all` is the aggregate.",
        "predicate": "What belongs to the slice, in words that stay the same.",
        "verdict": "ok, warning, firing or unknown.",
        "reason": "Why, in words; for unknown what is missing.",
        "since": "Event time of the last change of the verdict.",
        "n_groups": "Exchanges compared so far.",
        "evidence_ratio": "Evidence over the threshold: pages at 1; while firing, as at the alarm.",
        "flip_mean": "Share of exchanges whose top class changed, over the recent window, weighted.",
        "flip_low": "Lower end of its time-uniform 95 % interval.",
        "flip_high": "Upper end of its time-uniform 95 % interval.",
        "flip_budget": "The share that the owner accepts.",
        "kl_mean": "Mean KL(reference || candidate) over the recent window, weighted and capped, nats.",
        "kl_low": "Lower end of its time-uniform 95 % interval, nats.",
        "kl_high": "Upper end of its time-uniform 95 % interval, nats.",
        "kl_budget": "The mean that the owner accepts, nats.",
        "all_verdict": "Verdict on the aggregate, the slice `all` of the same candidate version.",
        "all_flip_mean": "flip_mean of the aggregate.",
        "all_kl_mean": "kl_mean of the aggregate, nats.",
        "alert_id": "Open alert, if any.",
        "onset_at": "Estimated begin of its drift.",
        "last_at": "Capture time of the slice's last comparison.",
        "updated_at": "Event time of the fold that wrote this.",
        "model_version_id": "Key of model_version.",
        "slice_id": "Key of slice.",
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
            (v.estimate #>> '{kl,mean}')::double precision,
            (v.estimate #>> '{kl,low}')::double precision,
            (v.estimate #>> '{kl,high}')::double precision,
            (v.estimate #>> '{kl,budget}')::double precision,
            a.verdict,
            (a.estimate #>> '{flip,mean}')::double precision,
            (a.estimate #>> '{kl,mean}')::double precision,
            v.alert_id,
            alert.onset_at,
            v.last_at,
            v.updated_at,
            v.model_version_id,
            v.slice_id
        from verdict v
        join model_version mv on mv.id = v.model_version_id
        join slice s on s.id = v.slice_id
        left join alert on alert.id = v.alert_id
        left join slice everything on everything.model = mv.model and everything.predicate = 'true'
        left join verdict a on a.model_version_id = v.model_version_id and a.slice_id = everything.id
    """,
)

SLICE_HISTORY = View(
    name="slice_history",
    comment=(
        "How did each slice get there: divergence per slice and hour of capture, with the aggregate of the same"
        " hour beside it. Means are weighted by 1 / pi, so they speak of the traffic, not of the sample."
    ),
    columns={
        "hour": "Start of the hour, UTC.",
        "model": "Model name on the wire.",
        "candidate_version": "Version of the quantised model that serves.",
        "reference_digest": "SHA-256 of the reference file; empty where the version has no reference.",
        "slice": "Short name of the slice; `all` is the aggregate.",
        "predicate": "What belongs to the slice.",
        "n_items": "Items compared.",
        "n_groups": "Exchanges compared.",
        "n_eff": "Effective number of exchanges: what as many equally weighted ones would tell.",
        "weight": "Estimated exchanges offered in the slice: sum of 1 / pi.",
        "traffic_ratio": "Estimated share of the slice in the traffic of the candidate version.",
        "flip": "Share of exchanges whose top class changed; null, as all means, where no item has one.",
        "topk": "Share whose set of the k top classes changed.",
        "js": "Mean Jensen-Shannon divergence, nats.",
        "kl": "Mean KL(reference || candidate), each item capped at the model's kl_cap, nats.",
        "margin": "Mean absolute change of the gap of the two top probabilities.",
        "n_kl_infinite": "Items whose KL was infinite.",
        "all_flip": "flip of the aggregate in the same hour.",
        "all_topk": "topk of the aggregate in the same hour.",
        "all_js": "js of the aggregate in the same hour, nats.",
        "all_kl": "kl of the aggregate in the same hour, nats.",
        "all_margin": "margin of the aggregate in the same hour.",
        "model_version_id": "Key of model_version.",
        "slice_id": "Key of slice.",
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
            r.kl / nullif(r.kl_weight, 0),
            r.margin / nullif(r.margin_weight, 0),
            r.n_kl_infinite,
            a.flip / nullif(a.flip_weight, 0),
            a.topk / nullif(a.topk_weight, 0),
            a.js / nullif(a.js_weight, 0),
            a.kl / nullif(a.kl_weight, 0),
            a.margin / nullif(a.margin_weight, 0),
            r.model_version_id,
            r.slice_id
        from rollup_hour r
        join model_version mv on mv.id = r.model_version_id
        join slice s on s.id = r.slice_id
        left join slice everything on everything.model = mv.model and everything.predicate = 'true'
        left join rollup_hour a
            on a.model_version_id = r.model_version_id and a.slice_id = everything.id and a.hour = r.hour
    """,
)

# Tallies are cumulative, so an hour is the last tally in it minus the last one before it, of the same boot. The
# tally before is looked up by key, not by lag() over everything: a condition on the hour then bounds the work.
COVERAGE_HOUR = View(
    name="coverage_hour",
    comment=(
        "What the sidecars saw and what became of it: exact counts per hour, sidecar and header stratum, from the"
        " tallies. taken = thinned + published + n_lost + what was in flight at the end of the hour. A boot's first"
        " tally counts from zero; what a sidecar saw after its last tally is not in here."
    ),
    columns={
        "hour": "Start of the hour of the tally, UTC.",
        "source": "Sidecar.",
        "stratum": "Header stratum.",
        "n_tallies": "Tallies that arrived; a sidecar sends one every few seconds.",
        "n_boots": "Starts of the sidecar that these tallies come from.",
        "offered": "Inference requests seen on the wire.",
        "taken": "Of these, chosen by the first phase.",
        "thinned": "Of the taken, let go by the second phase; no loss.",
        "published": "Of the taken, acknowledged by the stream.",
        "n_lost": "Of the taken, lost.",
        "lost": "The same, number by reason; reasons that took nothing are left out.",
        "blind_connections": "Connections of the whole sidecar that went unseen: the same on each of its strata.",
    },
    query="""
        with bound as (
            select
                date_bin('1 hour', at, '2000-01-01 00:00:00+00') as hour,
                source,
                stratum,
                boot,
                min(sequence) as first,
                max(sequence) as last,
                count(*) as n_tallies
            from tally
            group by 1, 2, 3, 4
        ),
        delta as (
            select
                bound.hour,
                bound.source,
                bound.stratum,
                bound.n_tallies,
                now_.offered - coalesce(before.offered, 0) as offered,
                now_.taken - coalesce(before.taken, 0) as taken,
                now_.thinned - coalesce(before.thinned, 0) as thinned,
                now_.published - coalesce(before.published, 0) as published,
                now_.blind_connections - coalesce(before.blind_connections, 0) as blind_connections,
                coalesce((
                    select jsonb_object_agg(key, value::bigint - coalesce((before.lost ->> key)::bigint, 0))
                    from jsonb_each_text(now_.lost)
                ), '{}') as lost
            from bound
            join tally now_
                on now_.source = bound.source and now_.boot = bound.boot and now_.stratum = bound.stratum
                and now_.sequence = bound.last
            left join lateral (
                select t.offered, t.taken, t.thinned, t.published, t.lost, t.blind_connections
                from tally t
                where t.source = bound.source and t.boot = bound.boot and t.stratum = bound.stratum
                    and t.sequence < bound.first
                order by t.sequence desc
                limit 1
            ) before on true
        ),
        total as (
            select
                hour,
                source,
                stratum,
                sum(n_tallies)::bigint as n_tallies,
                count(*) as n_boots,
                sum(offered)::bigint as offered,
                sum(taken)::bigint as taken,
                sum(thinned)::bigint as thinned,
                sum(published)::bigint as published,
                sum(blind_connections)::bigint as blind_connections,
                jsonb_agg(lost) as lost
            from delta
            group by hour, source, stratum
        )
        select
            total.hour,
            total.source,
            total.stratum,
            total.n_tallies,
            total.n_boots,
            total.offered,
            total.taken,
            total.thinned,
            total.published,
            coalesce(by_reason.n_lost, 0),
            coalesce(by_reason.lost, '{}'),
            total.blind_connections
        from total
        left join lateral (
            select jsonb_object_agg(reason, n) as lost, sum(n)::bigint as n_lost
            from (
                select one.key as reason, sum(one.value::bigint)::bigint as n
                from jsonb_array_elements(total.lost) boot, jsonb_each_text(boot.value) one
                group by one.key
                having sum(one.value::bigint) <> 0
            ) counted
        ) by_reason on true
    """,
)

VIEWS = (SLICE_NOW, SLICE_HISTORY, COVERAGE_HOUR)


def upgrade() -> None:
    """Go one revision forward."""
    for view in VIEWS:
        op.execute(f"create view {view.name} ({', '.join(view.columns)}) as {view.query}")
        op.execute(f"comment on view {view.name} is {_quoted(view.comment)}")
        for column, comment in view.columns.items():
            op.execute(f"comment on column {view.name}.{column} is {_quoted(comment)}")


def downgrade() -> None:
    """Go one revision back."""
    for view in reversed(VIEWS):
        op.execute(f"drop view {view.name}")


def _quoted(text: str) -> str:
    # A colon would be read as a bound parameter.
    return "'" + text.replace("'", "''").replace(":", "\\:") + "'"

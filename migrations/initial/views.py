"""The views of the first schema, each with a comment, and one for each of its columns."""

from typing import Final, NamedTuple


class View(NamedTuple):
    """A view."""

    name: str
    comment: str
    columns: dict[str, str]
    """Comment by column, in their order."""
    query: str


# Tallies are cumulative, so an hour is the last tally in it minus the last one before it, of the same boot. The tally before is
# looked up by key, not by lag() over everything: a condition on the hour then bounds the work.
_COVERAGE_HOUR: Final = View(
    name="coverage_hour",
    comment="What the sidecars saw and what became of it: exact counts per hour, sidecar and header stratum, from the tallies. taken = thinned + published + n_lost + what was in flight at the end of the hour. The first tally of a boot counts from zero; what a sidecar saw after its last tally is not included.",
    columns={
        "hour": "Start of the hour of the tally, UTC.",
        "source": "Sidecar.",
        "stratum": "Header stratum.",
        "n_tallies": "Tallies that arrived; a sidecar sends one every few seconds.",
        "n_boots": "Starts of the sidecar that these tallies come from.",
        "offered": "Inference requests seen on the wire.",
        "taken": "Of these, chosen by the first phase.",
        "thinned": "Of the taken, left out by the second phase on purpose; no loss.",
        "published": "Of the taken, acknowledged by the stream.",
        "n_lost": "Of the taken, lost.",
        "lost": "n_lost by reason; reasons without a loss are left out.",
        "blind_connections": "Connections of the whole sidecar that were not observed: the same number for each of its strata.",
        "n_expired": "Of the published, expired in the stream before they were replayed, in the hour in which that was found; not part of n_lost. Negative where a worker still had some in progress and finished them later.",
    },
    query="""
        with seen (
            hour, source, stratum, n_tallies, n_boots, offered,
            taken, thinned, published, n_lost, lost, blind_connections
        ) as (
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
        ),
        expiries as (
            select date_bin('1 hour', batch.stored_at, '2000-01-01 00:00:00+00') as hour, source, stratum,
                sum(n)::bigint as n_expired
            from expiry join batch on batch.id = expiry.batch_id
            group by 1, 2, 3
        ),
        combined (
            hour, source, stratum, n_tallies, n_boots, offered,
            taken, thinned, published, n_lost, lost, blind_connections, n_expired
        ) as (
            select seen.*, 0::bigint from seen
            union all
            select
                expiries.hour, expiries.source, expiries.stratum, 0, 0, 0, 0, 0, 0, 0, '{}'::jsonb, 0, expiries.n_expired
            from expiries
        )
        select
            hour,
            source,
            stratum,
            sum(n_tallies)::bigint,
            sum(n_boots)::bigint,
            sum(offered)::bigint,
            sum(taken)::bigint,
            sum(thinned)::bigint,
            sum(published)::bigint,
            sum(n_lost)::bigint,
            coalesce((array_agg(lost) filter (where n_tallies > 0))[1], '{}'),
            sum(blind_connections)::bigint,
            sum(n_expired)::bigint
        from combined
        group by hour, source, stratum
    """,
)
_SLICE_ITEM: Final = View(
    name="slice_item",
    comment="Every compared item in each of its slices, with its weight there. An exchange counts once in a slice, however many items it has: its items share its weight. Give a range of captured_at: comparison is partitioned by it.",
    columns={
        "captured_at": "When the response was complete, at the sidecar.",
        "exchange_id": "Id of the exchange.",
        "item": "Index of the item in the exchange, from 0.",
        "model": "Model name, as in requests.",
        "candidate_version": "Version of the quantised model in production.",
        "slice": "Short name of the slice; `all` is the aggregate.",
        "weight": "Weight of the item in the slice: 1 / (pi1 * pi2), divided by the number of the exchange's items in the slice. Means with it are those of slice_history, of slice_now and of the report.",
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
# The newest tally of each start and stratum: one step for each along the primary key.
_ACCOUNT: Final = View(
    name="account",
    comment="What became of every sampled request: one row for each start of a sidecar, header stratum and model, as of the newest tally. taken = thinned + lost + expired + finished + in_stream + in_sidecar. If the start has ended, in_sidecar is 0, or those requests are not accounted for.",
    columns={
        "source": "Sidecar.",
        "boot": "Start of the sidecar.",
        "stratum": "Header stratum.",
        "model": "Model; empty: requests whose model was not known when they were counted.",
        "at": "When the newest counts were read.",
        "final": "Whether these are the last counts of this start.",
        "offered": "Inference requests seen on the wire. Null where a model is given: requests are counted before it is known.",
        "taken": "Of the offered, chosen by the first phase.",
        "thinned": "Of the taken, left out by the second phase on purpose; no loss.",
        "lost": "Of the taken, lost before the stream, for all reasons together.",
        "expired": "Of the taken, published and removed from the stream before they were replayed.",
        "finished": "Of the taken, compared, quarantined, or skipped without a reference.",
        "in_stream": "Of the taken, published and neither finished nor expired: they wait in the stream or in a worker.",
        "in_sidecar": "Of the taken, none of these yet: they were in the memory or the sockets of the sidecar.",
    },
    query="""
        with recursive known as (
            (select t.source, t.boot, t.stratum from tally t order by t.source, t.boot, t.stratum limit 1)
            union all
            select n.source, n.boot, n.stratum from known k cross join lateral (
                select t.source, t.boot, t.stratum from tally t
                where (t.source, t.boot, t.stratum) > (k.source, k.boot, k.stratum)
                order by t.source, t.boot, t.stratum limit 1
            ) n
        ), newest as (
            select newest_of.*,
                (select coalesce(sum(n.value::bigint), 0) from jsonb_each_text(newest_of.lost) n)::bigint as n_lost
            from known k cross join lateral (
                select * from tally t where t.source = k.source and t.boot = k.boot and t.stratum = k.stratum
                order by t.sequence desc limit 1
            ) newest_of
        ), named as (
            select n.source, n.boot, n.stratum, n.at, n.final, m.key as model, (m.value ->> 'taken')::bigint as taken,
                coalesce((m.value ->> 'thinned')::bigint, 0) as thinned,
                coalesce((m.value ->> 'published')::bigint, 0) as published,
                (select coalesce(sum(r.value::bigint), 0) from jsonb_each_text(m.value -> 'lost') r)::bigint as lost,
                coalesce((m.value ->> 'row')::int, -1) as counts_row,
                coalesce((m.value ->> 'numbered')::bigint, 0) as numbered
            from newest n cross join lateral jsonb_each(n.models) m
        ), rest as (
            select n.source, n.boot, n.stratum, n.at, n.final, n.offered, n.taken - coalesce(s.taken, 0) as taken,
                n.thinned - coalesce(s.thinned, 0) as thinned, n.published - coalesce(s.published, 0) as published,
                n.n_lost - coalesce(s.lost, 0) as lost
            from newest n left join (
                select m.source, m.boot, m.stratum, sum(m.taken)::bigint as taken, sum(m.thinned)::bigint as thinned,
                    sum(m.published)::bigint as published, sum(m.lost)::bigint as lost
                from named m group by 1, 2, 3
            ) s on s.source = n.source and s.boot = n.boot and s.stratum = n.stratum
        ), done as (
            select m.source, m.boot, m.stratum, m.model, a.expired, coalesce((
                select sum(upper(one) - lower(one))
                from unnest(a.numbers * int8multirange(int8range(1, m.numbered + 1))) one
            ), 0)::bigint - a.closed as finished
            from named m join arrival a on a.boot = m.boot and a.counts_row = m.counts_row
        )
        select r.source, r.boot, r.stratum, '' as model, r.at, r.final, r.offered, r.taken, r.thinned, r.lost, 0::bigint,
            0::bigint, r.published, r.taken - r.thinned - r.lost - r.published
        from rest r
        union all
        select m.source, m.boot, m.stratum, m.model, m.at, m.final, null, m.taken, m.thinned, m.lost,
            coalesce(d.expired, 0), coalesce(d.finished, 0),
            m.published - coalesce(d.finished, 0) - coalesce(d.expired, 0),
            m.taken - m.thinned - m.lost - m.published
        from named m left join done d
            on d.source = m.source and d.boot = m.boot and d.stratum = m.stratum and d.model = m.model
        where m.taken > 0
    """,
)
_LEADER_LOCK: Final = View(
    name="leader_lock",
    comment="A name without rows: the monitor that leads has it locked. Whoever locks it needs the right to update it.",
    columns={
        "id": "Always 1.",
    },
    query="select 1 as id",
)
_PARTITION_LOCK: Final = View(
    name="partition_lock",
    comment="A name without rows: whoever creates or drops partitions has it locked. To lock it needs the right to update it.",
    columns={
        "id": "Always 1.",
    },
    query="select 1 as id",
)
_DISCOVERY_LOCK: Final = View(
    name="discovery_lock",
    comment="A name without rows: whoever changes discovered slices has it locked. To lock it needs the right to update it.",
    columns={
        "id": "Always 1.",
    },
    query="select 1 as id",
)
_RELEASE_COMPARE: Final = View(
    name="release_compare",
    comment="Each version of a model beside the one that came before it, slice by slice, over all days that are kept. Intervals of the difference: `quantdrift compare`.",
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
_NOT_OBSERVED: Final = View(
    name="not_observed",
    comment="What nobody looked at in the last 24 hours, in one place: requests that were not sampled, left out, lost or expired, by header stratum and, where it is known, by model; exchanges that could not be compared, by model; and slices without a verdict. Of another time: `select * from not_observed_in('7 days')`.",
    columns={
        "model": "Model; null where requests are counted, or were lost, before their model was known.",
        "slice": "Slice without a verdict; null: it is not about one slice.",
        "stratum": "Header stratum; null: it is not about one stratum.",
        "what": "What happened: not sampled, left out, lost, expired, not comparable, or no verdict.",
        "reason": "Why, where something says it.",
        "requests": "Requests that it happened to; null: not known.",
        "share": "Of the requests that were offered in the stratum, in [0, 1]; null: not known.",
    },
    query="select * from not_observed_in('24 hours')",
)
_CHANGE_LOG: Final = View(
    name="change_log",
    comment="Who changed what, when and why: the entries of the audit (configuration with its budgets, pauses, baselines, acknowledgements and so on), releases of versions, sampling policies, baselines that the monitor learned, and alerts that became worse after somebody had acknowledged them.",
    columns={
        "at": "When.",
        "who": "The user that Postgres authenticated, or monitor; of a release and of a policy: traffic.",
        "what": "The action, as the command is called; release: a version was seen for the first time; policy: the same of sampling rates; alert escalate: an acknowledgement ended.",
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

        union all
        select e.made_at, 'monitor', 'alert escalate', mv.model, 'alert ' || e.alert_id, null, null, e.reason
        from alert_action e join alert on alert.id = e.alert_id join model_version mv on mv.id = alert.model_version_id
        where e.action = 'escalate'
        union all
        select p.first_seen_at, 'traffic', 'policy', '', 'epoch ' || p.epoch, p.before, p.definition, '' from (
            select *, lag(definition) over (order by id) as before from policy
        ) p
    """,
)
_ITEM: Final = View(
    name="item",
    comment="Every compared item in each of its slices, with its weight there and everything that was recorded of it. An exchange counts once in a slice, however many items it has: its items share its weight. Give a range of captured_at: comparison is partitioned by it.",
    columns={
        "captured_at": "When the response was complete, at the sidecar.",
        "exchange_id": "Id of the exchange.",
        "item": "Index of the item in the exchange, from 0.",
        "model": "Model name, as in requests.",
        "candidate_version": "Version of the quantised model in production.",
        "slice": "Short name of the slice; `all` is the aggregate.",
        "weight": "Weight of the item in the slice: 1 / (pi1 * pi2), divided by the number of the exchange's items in the slice. Means with it describe the traffic, and are those of slice_day, of slice_now and of the report.",
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
        "topk": "Whether the set of the k top classes differs.",
        "js": "Jensen-Shannon divergence, nats.",
        "margin": "Absolute change of the gap between the two top probabilities.",
        "slice_ids": "Keys of all slices of the item. With `slice_ids @> array[KEY]` beside `slice_id = KEY`, an index finds the items of a rare slice.",
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
                    member.slice_id,
        c.topk,
        c.js,
        c.margin,
        c.slice_ids
                from comparison c
                cross join lateral unnest(c.slice_ids) as member (slice_id)
                join model_version mv on mv.id = c.model_version_id
                join slice s on s.id = member.slice_id
    """,
)
_VERSION_NOW: Final = View(
    name="version_now",
    comment="Each version of each model: whether it serves.",
    columns={
        "model": "Model name, as in requests.",
        "candidate_version": "Version of the quantised model.",
        "serving": "serving, replaced (another version serves instead) or silent (nothing of it was seen for ten times its usual gap, at least ten minutes); null: no exchange was folded yet.",
        "replaced_by": "Version that was seen last of those that serve instead; null while it serves.",
        "seen_at": "Capture time of its newest exchange.",
        "model_version_id": "Key of model_version.",
    },
    query="""
        select mv.model, mv.candidate_version,
            case when serving.last_at is null then null when serving.replaced_at is not null then 'replaced'
                when serving.last_at < now() - make_interval(secs => greatest(10 * serving.gap_s, 600)) then 'silent' else 'serving' end,
            case when serving.replaced_at is not null then instead.candidate_version end,
            serving.last_at, mv.id
        from model_version mv
        left join serving on serving.model_version_id = mv.id
        left join lateral (
            select other.candidate_version
            from model_version other join serving o on o.model_version_id = other.id and o.replaced_at is null
            where other.model = mv.model and other.candidate_version <> mv.candidate_version and o.last_at >= serving.last_at
            order by o.last_at desc, other.id limit 1
        ) instead on serving.replaced_at is not null
    """,
)
_SLICE_NOW: Final = View(
    name="slice_now",
    comment="The current state of each slice: one row per slice of a candidate version, together with the verdict on the aggregate. Order by evidence_ratio desc to see the worst first.",
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
        "flip_n": "Exchanges in the window of flip_mean; a session counts as one.",
        "divergence_n": "The same of divergence_mean.",
        "window_days": "About how many days the window spans: its exchanges, divided by those that were compared in the last 24 hours of data. A session counts as one in both: of how many exchanges one is made is the mean since the slice's first comparison. Null: none was compared in these hours.",
        "requests_day": "Estimated requests in the last 24 hours of data, the newest one not complete: the sum of 1 / pi. Null: none was compared.",
        "changed_day": "Estimated requests in these hours whose answer changed; null where no item has an answer.",
        "people_day": "Sessions (hashed) with a changed answer in these hours, among the sampled requests: there were at least so many. Null: none was found, or sampling.sticky_header does not say who sends a request.",
        "serving": "serving, replaced (another version serves instead) or silent (nothing of it was seen for ten times its usual gap, at least ten minutes); null: no exchange was folded yet.",
        "replaced_by": "Version that was seen last of those that serve instead; null while it serves.",
        "seen_at": "Capture time of its newest exchange.",
        "changed_share_day": "Share of changed answers in the last 24 hours of data; of a longer time, with an interval that holds at every look: flip_mean.",
        "changed_share_day_low": "Lower end of its 95 % interval.",
        "changed_share_day_high": "Upper end of the same.",
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
                    (v.estimate #>> '{divergence,missing}')::bigint,
        (v.estimate #>> '{flip,n}')::bigint,
        (v.estimate #>> '{divergence,n}')::bigint,
        greatest((v.estimate #>> '{flip,n}')::bigint, (v.estimate #>> '{divergence,n}')::bigint) / nullif(d.n_groups * least(v.n_groups / nullif(e.n_groups, 0)::double precision, 1), 0)::double precision,
        d.weight,
        case when d.flip_weight > 0 then d.flip end,
        p.n,
        serves.serving,
        serves.replaced_by,
        serves.seen_at,
        d.flip / nullif(d.flip_weight, 0),
        (mean_interval(d.n_groups::bigint, d.flip_weight, d.flip_ww, least(d.flip, d.flip_weight), d.flip_yy, d.flip_wy, d.heaviest, d.people))[1],
        (mean_interval(d.n_groups::bigint, d.flip_weight, d.flip_ww, least(d.flip, d.flip_weight), d.flip_yy, d.flip_wy, d.heaviest, d.people))[2]
                from verdict v
                join model_version mv on mv.id = v.model_version_id
                join slice s on s.id = v.slice_id
                left join alert on alert.id = v.alert_id
                left join slice everything on everything.model = mv.model and everything.predicate = 'true'
                left join verdict a on a.model_version_id = v.model_version_id and a.slice_id = everything.id

                left join (
                    select model_version_id, slice_id, sum(weight) as weight, sum(flip) as flip, sum(flip_weight) as flip_weight,
                        sum(n_groups) as n_groups,
                        sum(coalesce(flip_weight_sq, flip_weight * weight_sq / nullif(weight, 0))) as flip_ww,
                        sum(coalesce(flip_sq, least(flip, flip_weight) * weight_sq / nullif(weight, 0))) as flip_yy,
                        sum(coalesce(flip_cross, least(flip, flip_weight) * weight_sq / nullif(weight, 0))) as flip_wy,
                        max(coalesce(heaviest, 0)) as heaviest, array_sum(people[1:67]) as people
                    from rollup_hour where hour > (select max(hour) from rollup_hour) - interval '24 hours' group by 1, 2
                ) d on d.model_version_id = v.model_version_id + 0 and d.slice_id = v.slice_id + 0
                left join (
                    select c.model_version_id, member.slice_id, count(distinct c.group_key) as n
                    from comparison c cross join lateral unnest(c.slice_ids) as member (slice_id)
                    where c.flip and c.group_key <> ''
                        and c.captured_at >= (select max(hour) from rollup_hour) - interval '23 hours'
                    group by 1, 2
                ) p on p.model_version_id = v.model_version_id + 0 and p.slice_id = v.slice_id + 0

                left join (
                    select model_version_id, slice_id, sum(n_groups) as n_groups from rollup_day group by 1, 2
                ) e on e.model_version_id = v.model_version_id + 0 and e.slice_id = v.slice_id + 0

                left join version_now serves on serves.model_version_id = v.model_version_id
    """,
)
_SLICE_HISTORY: Final = View(
    name="slice_history",
    comment="The history of each slice: divergence per slice and hour of capture, together with the aggregate of the same hour. Means are weighted by 1 / pi, so they describe the traffic, not the sample.",
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
        "tie": "Share of exchanges whose decision differs only because several entries share the largest score of a side; the model's count_ties says whether flip counts them.",
        "all_tie": "tie of the aggregate in the same hour.",
        "flip_low": "Lower end of the 95 % interval of flip for this time alone; people who come back count as they do (mean_interval).",
        "flip_high": "Upper end of the same.",
        "divergence_low": "Lower end of the 95 % interval of divergence for this time alone.",
        "divergence_high": "Upper end of the same.",
        "flip_budget": "The share that the owner accepts now.",
        "divergence_budget": "The mean that the owner accepts now.",
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
                    a.tie / nullif(a.tie_weight, 0),
        i.flip[1],
        i.flip[2],
        i.divergence[1],
        i.divergence[2],
        (v.estimate #>> '{flip,budget}')::double precision,
        (v.estimate #>> '{divergence,budget}')::double precision
                from rollup_hour r
                join model_version mv on mv.id = r.model_version_id
                join slice s on s.id = r.slice_id
                left join slice everything on everything.model = mv.model and everything.predicate = 'true'
                left join rollup_hour a
                    on a.model_version_id = r.model_version_id and a.slice_id = everything.id and a.hour = r.hour

                cross join lateral (
                    select
                        mean_interval(
                            r.n_groups, r.flip_weight, coalesce(r.flip_weight_sq, r.flip_weight * r.weight_sq / nullif(r.weight, 0)),
                            least(r.flip, r.flip_weight), coalesce(r.flip_sq, least(r.flip, r.flip_weight) * r.weight_sq / nullif(r.weight, 0)),
                            coalesce(r.flip_cross, least(r.flip, r.flip_weight) * r.weight_sq / nullif(r.weight, 0)), coalesce(r.heaviest, 0),
                            r.people[1:67]
                        ) as flip,
                        mean_interval(
                            r.n_groups, r.divergence_weight, r.divergence_weight_sq, r.divergence, r.divergence_sq, r.divergence_cross,
                            r.heaviest, r.people[68:134], r.cap
                        ) as divergence
                    offset 0
                ) i left join verdict v on v.model_version_id = r.model_version_id and v.slice_id = r.slice_id
    """,
)
_SLICE_DAY: Final = View(
    name="slice_day",
    comment="The history of each slice by day of capture: share of changed answers with its interval and budget, and divergence. Means are weighted by 1 / pi, so they describe the traffic, not the sample.",
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
        "changed": "Estimated requests of the day whose answer changed; items without an answer are not counted, and null where none has one.",
        "flip": "Share of requests whose answer changed; null where no item has one.",
        "flip_low": "Lower end of the 95 % interval of flip for this time alone; people who come back count as they do (mean_interval).",
        "flip_high": "Upper end of the same.",
        "flip_budget": "The share that the owner accepts now.",
        "divergence": "Mean divergence, each item capped at the model's budget.cap: of a classifier KL in nats.",
        "divergence_budget": "The mean that the owner accepts now.",
        "all_flip": "flip of the aggregate on the same day.",
        "all_divergence": "divergence of the aggregate on the same day.",
        "model_version_id": "Key of model_version.",
        "slice_id": "Key of slice.",
        "divergence_low": "Lower end of the 95 % interval of divergence for this time alone.",
        "divergence_high": "Upper end of the same.",
    },
    query="""
                select
                    r.day,
                    mv.model,
                    mv.candidate_version,
                    s.name,
                    r.n_items,
                    r.n_groups,
                    k.n_eff,
                    r.weight,
                    r.weight / nullif(a.weight, 0),
                    case when r.flip_weight > 0 then r.flip end,
                    k.p,
                    i.flip[1],
                    i.flip[2],
                    (v.estimate #>> '{flip,budget}')::double precision,
                    k.divergence,
                    (v.estimate #>> '{divergence,budget}')::double precision,
                    a.flip / nullif(a.flip_weight, 0),
                    a.divergence / nullif(a.divergence_weight, 0),
                    r.model_version_id,
                    r.slice_id,
        i.divergence[1],
        i.divergence[2]
                from rollup_day r
                join model_version mv on mv.id = r.model_version_id
                join slice s on s.id = r.slice_id
                left join verdict v on v.model_version_id = r.model_version_id and v.slice_id = r.slice_id
                left join slice everything on everything.model = mv.model and everything.predicate = 'true'
                left join rollup_day a
                    on a.model_version_id = r.model_version_id and a.slice_id = everything.id and a.day = r.day
                cross join lateral (
                    select r.weight * r.weight / nullif(r.weight_sq, 0) as n_eff,
                        r.weight * r.flip_weight / nullif(r.weight_sq, 0) as n,
                        least(r.flip, r.flip_weight) / nullif(r.flip_weight, 0) as p,
                        r.weight * r.divergence_weight / nullif(r.weight_sq, 0) as divergence_n,
                        r.divergence / nullif(r.divergence_weight, 0) as divergence
                ) k
                cross join lateral (
                    select
                        mean_interval(
                            r.n_groups, r.flip_weight, coalesce(r.flip_weight_sq, r.flip_weight * r.weight_sq / nullif(r.weight, 0)),
                            least(r.flip, r.flip_weight), coalesce(r.flip_sq, least(r.flip, r.flip_weight) * r.weight_sq / nullif(r.weight, 0)),
                            coalesce(r.flip_cross, least(r.flip, r.flip_weight) * r.weight_sq / nullif(r.weight, 0)), coalesce(r.heaviest, 0),
                            r.people[1:67]
                        ) as flip,
                        mean_interval(
                            r.n_groups, r.divergence_weight, r.divergence_weight_sq, r.divergence, r.divergence_sq, r.divergence_cross,
                            r.heaviest, r.people[68:134], r.cap
                        ) as divergence
                    offset 0
                ) i
    """,
)
_INCIDENTS: Final = View(
    name="incidents",
    comment="What people talk about: alerts of one version that explain each other, with a beginning, a state and an end. An incident whose alerts another one has taken over is left out.",
    columns={
        "id": "Number of the incident.",
        "model": "Model name, as in requests.",
        "candidate_version": "Version of the quantised model in production.",
        "severity": "Highest of its alerts so far: warning opens a ticket, firing pages.",
        "slices": "Slices that drifted and that no other slice explains, the oldest alert first.",
        "state": "open; mitigated: nobody gets its answers any more; recovered: by evidence; closed: by a person, or not compared any more.",
        "mitigation": "Of mitigated: replaced (another version serves), routed (no request of its slices reaches the version) or reported (by a person).",
        "said_by": "Person who said so: in the state closed, and in mitigated where it is reported; empty: the evidence says so.",
        "reason": "Reason that this person gave.",
        "began_at": "Estimated start of the drift: the earliest of its alerts.",
        "opened_at": "Event time of its first warning or page.",
        "ended_at": "Since when it is not open any more; null while it is.",
        "changed": "Estimated changed answers of all traffic of these slices, from its beginning until counted_until; null: not counted yet.",
        "changed_low": "Lower end of its 95 % interval; null: none.",
        "changed_high": "Upper end of its 95 % interval; null: none.",
        "n_answers": "Answers that were compared in this time; null: not counted yet, or not by answers.",
        "n_people": "People with at least one changed answer among these: at least so many got one, since a sample is compared. Null where sampling.sticky_header says nothing of them.",
        "counted_until": "Event time up to which the figures count.",
        "alerts": "Numbers of its alerts, the oldest first.",
        "model_version_id": "Key of the version.",
        "slice_ids": "Keys of these slices.",
    },
    query="""
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
    """,
)
_INCIDENT_NOW: Final = View(
    name="incident_now",
    comment="The incidents that are open, and those that ended within a day of the newest exchange; columns as in incidents.",
    columns={
        "id": "Number of the incident.",
        "model": "Model name, as in requests.",
        "candidate_version": "Version of the quantised model in production.",
        "severity": "Highest of its alerts so far: warning opens a ticket, firing pages.",
        "slices": "Slices that drifted and that no other slice explains, the oldest alert first.",
        "state": "open; mitigated: nobody gets its answers any more; recovered: by evidence; closed: by a person, or not compared any more.",
        "mitigation": "Of mitigated: replaced (another version serves), routed (no request of its slices reaches the version) or reported (by a person).",
        "said_by": "Person who said so: in the state closed, and in mitigated where it is reported; empty: the evidence says so.",
        "reason": "Reason that this person gave.",
        "began_at": "Estimated start of the drift: the earliest of its alerts.",
        "opened_at": "Event time of its first warning or page.",
        "ended_at": "Since when it is not open any more; null while it is.",
        "changed": "Estimated changed answers of all traffic of these slices, from its beginning until counted_until; null: not counted yet.",
        "changed_low": "Lower end of its 95 % interval; null: none.",
        "changed_high": "Upper end of its 95 % interval; null: none.",
        "n_answers": "Answers that were compared in this time; null: not counted yet, or not by answers.",
        "n_people": "People with at least one changed answer among these: at least so many got one, since a sample is compared. Null where sampling.sticky_header says nothing of them.",
        "counted_until": "Event time up to which the figures count.",
        "alerts": "Numbers of its alerts, the oldest first.",
        "model_version_id": "Key of the version.",
        "slice_ids": "Keys of these slices.",
    },
    query="""
        select * from incidents
        where state = 'open' or ended_at > (select event_time from fold) - interval '1 day'
    """,
)

VIEWS: Final = (
    _COVERAGE_HOUR,
    _SLICE_ITEM,
    _ACCOUNT,
    _LEADER_LOCK,
    _PARTITION_LOCK,
    _DISCOVERY_LOCK,
    _RELEASE_COMPARE,
    _NOT_OBSERVED,
    _CHANGE_LOG,
    _ITEM,
    _VERSION_NOW,
    _SLICE_NOW,
    _SLICE_HISTORY,
    _SLICE_DAY,
    _INCIDENTS,
    _INCIDENT_NOW,
)
"""In an order in which each finds what it reads."""

"""The SQL of the slice page: each text stands under its table or plot with the values filled in, to be copied.

Their only values are numbers and times, so a text with values needs no quoting of anything from the wire.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from quantdrift.facts.status import WORST_FIRST

STATE: Final = """
select verdict, reason, since, n_groups, flip_mean, flip_low, flip_high, flip_budget, divergence_mean, divergence_budget, requests_day,
  changed_day, people_day, alert_id
from slice_now
where model_version_id = :version and slice_id = :slice;
"""
SLICES: Final = f"""
select slice, verdict, reason, since, flip_mean, flip_low, flip_high, flip_budget, changed_day, people_day, alert_id
from slice_now
where model_version_id = :version
order by array_position({WORST_FIRST}, verdict), evidence_ratio desc nulls last, slice
limit 100;
"""  # noqa: S608 -- a constant
ALERTS: Final = """
select alert.id, severity, slice.name as slice, slice.model, candidate_version, opened_at, resolved_at, ended
from alert join model_version on model_version.id = model_version_id join slice on slice.id = slice_id
order by resolved_at is not null, severity, opened_at desc, alert.id desc
limit 100;
"""
INCIDENTS: Final = """
select id, severity, slices, model, candidate_version, began_at, state, mitigation, ended_at, changed, n_people
from incidents
order by state <> 'open', severity, coalesce(ended_at, opened_at) desc, id desc
limit 100;
"""
ROLLED_UP: Final = """
  select {time} as at, n_items as answers, {total} as total, {measure}_weight as weight
  from rollup_{time}
  where model_version_id = :version and slice_id = :slice
    and {time} >= :begin and {time} < :end{but}
"""
ITEMS: Final = """
  select captured_at as at, 1 as answers, weight * {value} as total, case when {value} is not null then weight end as weight
  from item c
  where model_version_id = :version and slice_id = :slice and slice_ids @> array[:slice]
    and captured_at >= :{begin} and captured_at < :{end}
"""
POINTS: Final = """
with part as ({parts}), point as (
  select {point} as at, answers, total, weight
  from part
)
select at, sum(answers) as answers, sum(total) / sum(weight) as {measure}
from point{but}
group by at
having sum(weight) > 0
order by at;
"""
SPREAD: Final = """
select hour < :split as is_before, (bin.n - 1) / 4 as bar, sum(bin.weight) as weight
from rollup_hour cross join unnest(divergence_bins) with ordinality as bin (weight, n)
where model_version_id = :version and slice_id = :slice
  and hour >= :begin and hour < :end
group by is_before, bar
order by is_before desc, bar;
"""
TOKENS: Final = """
select cast(split_part(pair, ':', 1) as int) as bin, sum(cast(split_part(pair, ':', 2) as float) / (pi1 * pi2)) as weight,
  sum(cast(split_part(pair, ':', 2) as int)) as tokens
from (
  select pi1, pi2, detail ->> 'divergence_bins' as bins
  from comparisons(:begin, :end, array[:slice])
  where model_version_id = :version and slice_ids @> array[:slice] and detail ? 'divergence_bins'
  order by captured_at desc
  limit 5000
) as newest
cross join string_to_table(bins, ' ') as pair
group by bin
order by bin;
"""
DIRECTIONS: Final = """
select coalesce(reference_class, -1)::text as reference, coalesce(candidate_class, -1)::text as candidate, count(*) as n,
  count(*) filter (where tie) as n_tie, sum(weight) as weight, sum(weight) / sum(sum(weight)) over () as share
from some_items(:begin, :end, array[:slice], true, '{slice_ids,in_slices,pi1,pi2,flip,tie,detail}')
where model_version_id = :version and slice_id = :slice and slice_ids @> array[:slice]
  and flip and detail ? 'reference_top'
group by 1, 2
order by weight desc, reference, candidate
limit :most;
"""
MARGINS: Final = """
select flip, least(width_bucket(reference_margin, 0, 1, 20), 20) as bar, count(*) as n, sum(weight) as weight
from (
  select flip, reference_margin, weight
  from some_items(:begin, :end, array[:slice], false, '{slice_ids,in_slices,pi1,pi2,flip,reference_margin}')
  where model_version_id = :version and slice_id = :slice and slice_ids @> array[:slice]
    and flip is not null and reference_margin >= 0
  order by captured_at desc
  limit 200000
) as newest
group by flip, bar
order by flip, bar;
"""
WORST: Final = """
select captured_at, exchange_id, item, flip, tie, divergence, reference_class, candidate_class, reference_scores, candidate_scores,
  reference_margin, candidate_margin, request_id, trace_id, attributes, weight
from items(:begin, :end, array[:slice])
where model_version_id = :version and slice_id = :slice and slice_ids @> array[:slice]
order by flip desc nulls last, divergence desc nulls last
limit 20;
"""
TIMES: Final = """
select part, count(*) as n, min(seconds) filter (where up_to >= 0.5 * total) as median, min(seconds) filter (where up_to >= 0.99 * total) as p99,
  coalesce(sum(weight) filter (where seconds > :budget / 1e6), 0) / sum(weight) as slower
from (
  select part, seconds, weight, sum(weight) over (partition by part order by seconds) as up_to, sum(weight) over (partition by part) as total
  from (
    select distinct on (captured_at, exchange_id) latency_s, first_token_s, per_token_s, 1 / (pi1 * pi2) as weight
    from comparisons(:begin, :end, array[:slice])
    where model_version_id = :version and slice_ids @> array[:slice] and latency_s is not null
    order by captured_at desc, exchange_id
    limit 20000
  ) as newest
  cross join lateral (values ('answer', latency_s), ('first token', first_token_s), ('further token', per_token_s)) as of (part, seconds)
  where seconds is not null
) as timed
group by part
order by part;
"""
EVENTS: Final = """
select first_seen_at as at, 'release' as kind, candidate_version as subject, 'traffic' as who, '' as why,
  null as old_value, null as new_value
from model_version
where model = (select model from model_version where id = :version) and first_seen_at >= :begin and first_seen_at < :end
union all
select made_at, 'baseline ' || source, metric || ' ' || kind, made_by, reason, null, null
from baseline
where model_version_id = :version and slice_id = :slice and made_at >= :begin and made_at < :end
union all
select made_at, 'alert ' || action, 'alert ' || alert_id, coalesce(nullif(identity, ''), made_by), reason, null, null
from alert_action join alert on alert.id = alert_id
where model_version_id = :version and slice_id = :slice and made_at >= :begin and made_at < :end
union all
select at, 'budget', name, actor, note, before -> 'options' ->> name, after -> 'options' ->> name
from audit cross join jsonb_array_elements_text(after -> 'changed') as name
where action = 'configuration' and subject = 'monitor' and before is not null and at >= :begin and at < :end
  and starts_with(name, 'models.' || (select model from model_version where id = :version) || '.budget.')
order by at, kind, subject
limit 200;
"""
BASELINES: Final = """
select distinct on (metric) metric, source, made_by, made_at, from_at, to_at, n_groups,
  (select sum(cast(value as float)) from jsonb_array_elements_text(content -> 'total')) as total,
  (select sum(cast(value as float)) from jsonb_array_elements_text(content -> 'share')) as share,
  cast(content ->> 'learned_s' as float) as learned_s
from baseline
where model_version_id = :version and slice_id = :slice and kind in ('change', 'growth') and content is not null and fold_seq is not null
order by metric, id desc;
"""
REPLAYS: Final = """
select provenance ->> 'runtime' as runtime, provenance ->> 'device' as device, sum(n_rows) as items, sum(n_rows) / 3600.0 as per_second,
  sum(replay_s) as seconds, 1e6 * sum(replay_s) / sum(n_rows) filter (where replay_s is not null) as seconds_per_million
from batch
where kind = 'comparison' and stored_at >= now() - interval '1 hour'
group by 1, 2
order by items desc;
"""
ITEM_TIMES: Final = """
select model, candidate_version as version, device, count(*) as items, avg(replay_s / n_rows) as reference, avg(latency_s / n_items) as candidate
from (
  select id, coalesce(provenance ->> 'device', '') as device, replay_s, n_rows, captured_from, captured_to
  from batch
  where kind = 'comparison' and stored_at >= :begin and stored_at < :end and replay_s is not null and n_rows > 0
  order by id desc
  limit 500
) as newest
cross join lateral comparisons(captured_from, captured_to + interval '1 microsecond') as compared
join model_version on model_version.id = model_version_id
where latency_s is not null and batch_id = newest.id
group by model, candidate_version, device
order by model, candidate_version, device
limit 100;
"""
CHANGES: Final = """
select at, actor as who, action as what, model, subject, note as why
from audit
order by seq desc
limit 50;
"""
_NAME: Final = re.compile(r"(?<!:):([a-z]+)")


def filled(query: str, **values: float | datetime | Sequence[datetime]) -> str:
    """Return a query with its values, as somebody types it."""
    return _NAME.sub(lambda found: _written(values[found[1]]), query.strip())


def _written(value: float | datetime | Sequence[datetime]) -> str:
    if isinstance(value, datetime):
        return f"'{value.astimezone(UTC).isoformat()}'"
    return f"{value:.15g}" if isinstance(value, float | int) else ", ".join(map(_written, value))

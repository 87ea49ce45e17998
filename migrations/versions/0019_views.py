"""Views without gaps: windows, days, people, intervals, measures, models, escalations and policies.

Columns are added at the end of views, `not_observed` names models, `change_log` has more rows, and a function and an index
are added: the release before can use the schema as before. While the index is made, comparisons wait to be stored.

Revision ID: 0019
Revises: 0017
"""

from importlib import import_module
from typing import Any, Final, NamedTuple

from alembic import op

revision = "0019"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.execute("create index ix_comparison_flip on comparison (captured_at) where flip and group_key <> ''")
    op.execute(
        "create function not_observed_in(period interval) returns table (model text, slice text, stratum text, what text,"
        f" reason text, requests bigint, share double precision) language sql stable as $${_plain(_NOT_OBSERVED_IN)}$$"
    )
    op.execute(f"comment on function not_observed_in is {_quoted(_NOT_OBSERVED_IN_COMMENT)}")
    for view in _views():
        _create(view)


def downgrade() -> None:
    """Go one revision back."""
    old = [*_old("0002_ties_and_weights", "_SLICE_NOW", "_SLICE_HISTORY"), *_old("0016_views", *_OF_0016)]
    for view in old:
        op.execute(f"drop view {view.name}")
    op.execute("drop function not_observed_in")
    op.execute("drop index ix_comparison_flip")
    for view in old:
        _create(view)


class _View(NamedTuple):
    """A view with what the database says of it; `columns` in the order of its select list."""

    name: str
    comment: str
    columns: dict[str, str]
    query: str


class _Column(NamedTuple):
    """A column that is added at the end of a view."""

    expression: str
    comment: str


_OF_0016: Final = ("_ITEM", "_SLICE_DAY", "_NOT_OBSERVED", "_CHANGE_LOG")


def _views() -> tuple[_View, ...]:
    (now, history) = _old("0002_ties_and_weights", "_SLICE_NOW", "_SLICE_HISTORY")
    (item, day, not_observed, changes) = _old("0016_views", *_OF_0016)
    return (
        _extended(now, _NOW, _NOW_JOINS),
        _extended(history, {**_FLIP_INTERVAL, **_DIVERGENCE_INTERVAL, **_BUDGETS}, _HISTORY_JOINS),
        _extended(
            day._replace(columns={**day.columns, **_DAY_COMMENTS}, query=_SLICE_DAY), _DIVERGENCE_INTERVAL
        ),
        _extended(item, _ITEM),
        not_observed._replace(
            comment=_NOT_OBSERVED_COMMENT,
            columns={**not_observed.columns, "model": _NOT_OBSERVED_MODEL},
            query="select * from not_observed_in('24 hours')",
        ),
        changes._replace(
            comment=_CHANGE_LOG_COMMENT,
            columns={**changes.columns, **_CHANGE_LOG_COLUMNS},
            query=changes.query + _CHANGES,
        ),
    )


def _old(module: str, *names: str) -> list[_View]:
    """Return views as an earlier revision made them."""
    revision_: Any = import_module(f"quantdrift.migrations.versions.{module}")
    return [_View(*getattr(revision_, name)) for name in names]


def _extended(view: _View, added: dict[str, _Column], joins: str = "") -> _View:
    """Return the view with columns at its end and joins after those that it has."""
    head, start, tail = view.query.partition("\n        from ")
    assert start
    expressions = ",\n".join(column.expression for column in added.values())
    return view._replace(
        columns={**view.columns, **{name: column.comment for name, column in added.items()}},
        query=f"{head},\n{expressions}{start}{tail}{joins}",
    )


def _create(view: _View) -> None:
    op.execute(f"create or replace view {view.name} ({', '.join(view.columns)}) as {_plain(view.query)}")
    op.execute(f"comment on view {view.name} is {_quoted(view.comment)}")
    for column, comment in view.columns.items():
        op.execute(f"comment on column {view.name}.{column} is {_quoted(comment)}")


def _quoted(text: str) -> str:
    return "'" + _plain(text.replace("'", "''")) + "'"


def _plain(text: str) -> str:
    # A colon would be read as a bound parameter.
    return text.replace(":", "\\:")


# Each joined query has one row for each slice, by its `group by`: Postgres leaves the join out of a query that needs none of
# its columns. `+ 0` keeps it so where a condition fixes the version or the slice: its constant would replace the join's clause.
_NOW_JOINS: Final = """
        left join (
            select model_version_id, slice_id, sum(weight) as weight, sum(flip) as flip, sum(flip_weight) as flip_weight,
                sum(n_groups) as n_groups
            from rollup_hour where hour > (select max(hour) from rollup_hour) - interval '24 hours' group by 1, 2
        ) d on d.model_version_id = v.model_version_id + 0 and d.slice_id = v.slice_id + 0
        left join (
            select c.model_version_id, member.slice_id, count(distinct c.group_key) as n
            from comparison c cross join lateral unnest(c.slice_ids) as member (slice_id)
            where c.flip and c.group_key <> ''
                and c.captured_at >= (select max(hour) from rollup_hour) - interval '23 hours'
            group by 1, 2
        ) p on p.model_version_id = v.model_version_id + 0 and p.slice_id = v.slice_id + 0
"""
_NOW: Final = {
    "flip_n": _Column(
        "(v.estimate #>> '{flip,n}')::bigint",
        "Exchanges in the window of flip_mean; a session counts as one.",
    ),
    "divergence_n": _Column("(v.estimate #>> '{divergence,n}')::bigint", "The same of divergence_mean."),
    "window_days": _Column(
        "greatest((v.estimate #>> '{flip,n}')::bigint, (v.estimate #>> '{divergence,n}')::bigint)"
        " / nullif(d.n_groups, 0)::double precision",
        "About how many days the window spans: its exchanges, divided by those that were compared in the last 24 hours of data."
        " With sessions it is longer, since each counts as one in the window. Null: none was compared in these hours.",
    ),
    "requests_day": _Column(
        "d.weight",
        "Estimated requests in the last 24 hours of data, the newest one not complete: the sum of 1 / pi. Null: none was compared.",
    ),
    "changed_day": _Column(
        "case when d.flip_weight > 0 then d.flip end",
        "Estimated requests in these hours whose answer changed; null where no item has an answer.",
    ),
    "people_day": _Column(
        "p.n",
        "Sessions (hashed) with a changed answer in these hours, among the sampled requests: there were at least so many. Null: none"
        " was found, or sampling.sticky_header does not say who sends a request.",
    ),
}

_K: Final = """
        cross join lateral (
            select r.weight * r.weight / nullif(r.weight_sq, 0) as n_eff,
                r.weight * r.flip_weight / nullif(r.weight_sq, 0) as n,
                least(r.flip, r.flip_weight) / nullif(r.flip_weight, 0) as p,
                r.weight * r.divergence_weight / nullif(r.weight_sq, 0) as divergence_n,
                r.divergence / nullif(r.divergence_weight, 0) as divergence
        ) k"""
# The middles of the 64 bins of a divergence, in units of the lower edge of the first one.
_MIDDLES: Final = ", ".join(repr(1e7 ** ((number + 0.5) / 64)) for number in range(64))
# The coefficient of variation, which has no unit. A constant array and a subscript take a third of the time that `exp` takes.
_CV: Final = f"""
        left join lateral (
            select sqrt(greatest(sum(b.w * b.x * b.x) * sum(b.w) / (sum(b.w * b.x) * sum(b.w * b.x)) - 1, 0)) as cv
            from (
                select r.divergence_bins[middle.bin] as w, middle.x
                from unnest(array[{_MIDDLES}]::double precision[]) with ordinality as middle (x, bin)
            ) b where b.w > 0
        ) s_ on true"""  # noqa: S608 - constant text
_HISTORY_JOINS: Final = f"""{_K}{_CV}
        left join verdict v on v.model_version_id = r.model_version_id and v.slice_id = r.slice_id
"""
_ROOT: Final = "1.96 * sqrt(k.p * (1 - k.p) / k.n + 0.9604 / (k.n * k.n))"
# At 0 and 1 the bound is exact; rounding must not move it past the mean. `least` and `greatest` take no notice of null.
_WILSON_LOW: Final = (
    f"case when k.n > 0 then greatest(0, least(k.p, (k.p + 1.9207 / k.n - {_ROOT}) / (1 + 3.8415 / k.n))) end"
)
_WILSON_HIGH: Final = (
    f"case when k.n > 0 then least(1, greatest(k.p, (k.p + 1.9207 / k.n + {_ROOT}) / (1 + 3.8415 / k.n))) end"
)
_SPREAD: Final = "least(1.959964 * s_.cv / sqrt(k.divergence_n), 20)"
_ENOUGH: Final = "case when k.divergence_n >= 30 and k.divergence > 0 then k.divergence"
_FLIP_INTERVAL: Final = {
    "flip_low": _Column(
        _WILSON_LOW,
        "Lower end of the 95 % interval of flip for this hour alone: Wilson's, at the part of n_eff that has an answer.",
    ),
    "flip_high": _Column(_WILSON_HIGH, "Upper end of the same."),
}
_DIVERGENCE_INTERVAL: Final = {
    "divergence_low": _Column(
        f"{_ENOUGH} * exp(-{_SPREAD}) end",
        "Lower end of the 95 % interval of divergence for this time alone: normal in its logarithm, with the coefficient of"
        " variation of the histogram, which is that of values without the cap and so not too small. Null below 30 exchanges.",
    ),
    "divergence_high": _Column(f"{_ENOUGH} * exp({_SPREAD}) end", "Upper end of the same."),
}
_BUDGETS: Final = {
    "flip_budget": _Column(
        "(v.estimate #>> '{flip,budget}')::double precision", "The share that the owner accepts now."
    ),
    "divergence_budget": _Column(
        "(v.estimate #>> '{divergence,budget}')::double precision", "The mean that the owner accepts now."
    ),
}

_DAY_COMMENTS: Final = {
    "changed": "Estimated requests of the day whose answer changed; items without an answer are not counted, and null where none has one.",
    "flip_low": "Lower end of its 95 % interval for this day alone: Wilson's, at the part of n_eff that has an answer.",
}
_SLICE_DAY: Final = f"""
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
            {_WILSON_LOW},
            {_WILSON_HIGH},
            (v.estimate #>> '{{flip,budget}}')::double precision,
            k.divergence,
            (v.estimate #>> '{{divergence,budget}}')::double precision,
            a.flip / nullif(a.flip_weight, 0),
            a.divergence / nullif(a.divergence_weight, 0),
            r.model_version_id,
            r.slice_id
        from rollup_day r
        join model_version mv on mv.id = r.model_version_id
        join slice s on s.id = r.slice_id
        left join verdict v on v.model_version_id = r.model_version_id and v.slice_id = r.slice_id
        left join slice everything on everything.model = mv.model and everything.predicate = 'true'
        left join rollup_day a
            on a.model_version_id = r.model_version_id and a.slice_id = everything.id and a.day = r.day{_K}{_CV}
"""  # noqa: S608 - constant text

_ITEM: Final = {
    "topk": _Column("c.topk", "Whether the set of the k top classes differs."),
    "js": _Column("c.js", "Jensen-Shannon divergence, nats."),
    "margin": _Column("c.margin", "Absolute change of the gap between the two top probabilities."),
}

_NOT_OBSERVED_COMMENT: Final = (
    "What nobody looked at in the last 24 hours, in one place: requests that were not sampled, left out, lost or expired, by header"
    " stratum and, where it is known, by model; exchanges that could not be compared, by model; and slices without a verdict. Of"
    " another time: `select * from not_observed_in('7 days')`."
)
_NOT_OBSERVED_MODEL: Final = (
    "Model; null where requests are counted, or were lost, before their model was known."
)
_NOT_OBSERVED_IN_COMMENT: Final = "The view not_observed, of the time from this long ago until now."
# Tallies are cumulative: what was counted in the time is the last one of each start of a sidecar minus the last one before it.
_NOT_OBSERVED_IN: Final = """
    with bound as (
        select t.source, t.boot, t.stratum, min(t.sequence) as first, max(t.sequence) as last
        from tally t where t.at >= now() - period group by 1, 2, 3
    ), seen as (
        select b.stratum, t.offered - coalesce(o.offered, 0) as offered, t.taken - coalesce(o.taken, 0) as taken,
            t.thinned - coalesce(o.thinned, 0) as thinned, t.lost, o.lost as old_lost, t.models, o.models as old_models
        from bound b
        join tally t on t.source = b.source and t.boot = b.boot and t.stratum = b.stratum and t.sequence = b.last
        left join lateral (
            select e.offered, e.taken, e.thinned, e.lost, e.models from tally e
            where e.source = b.source and e.boot = b.boot and e.stratum = b.stratum and e.sequence < b.first
            order by e.sequence desc limit 1
        ) o on true
    ), total as (
        select s.stratum, sum(s.offered)::bigint as offered, sum(s.taken)::bigint as taken from seen s group by 1
    ), named as (
        select s.stratum, m.key as model, m.value, s.old_models -> m.key as old
        from seen s cross join lateral jsonb_each(s.models) m
    ), of_model as (
        select n.stratum, n.model, 'left out' as what, 'the sampling policy' as reason,
            coalesce((n.value ->> 'thinned')::bigint, 0) - coalesce((n.old ->> 'thinned')::bigint, 0) as n
        from named n
        union all
        select n.stratum, n.model, 'lost', r.key, r.value::bigint - coalesce((n.old -> 'lost' ->> r.key)::bigint, 0)
        from named n cross join lateral jsonb_each_text(n.value -> 'lost') r
    ), counted as (
        select o.stratum, o.model, o.what, o.reason, o.n from of_model o
        union all
        select o.stratum, null, o.what, o.reason, -o.n from of_model o
        union all
        select s.stratum, null, 'left out', 'the sampling policy', s.thinned from seen s
        union all
        select s.stratum, null, 'lost', r.key, r.value::bigint - coalesce((s.old_lost ->> r.key)::bigint, 0)
        from seen s cross join lateral jsonb_each_text(s.lost) r
        union all
        select e.stratum, nullif(e.model, ''), 'expired', 'no worker replayed it in time', e.n
        from expiry e join batch on batch.id = e.batch_id where batch.stored_at >= now() - period
    )
    select null::text, null::text, t.stratum, 'not sampled', 'the sampling rate', t.offered - t.taken,
        (t.offered - t.taken)::double precision / nullif(t.offered, 0)
    from total t where t.offered > t.taken
    union all
    select c.model, null, c.stratum, c.what, c.reason, sum(c.n)::bigint,
        sum(c.n)::double precision / nullif(max(t.offered), 0)
    from counted c left join total t on t.stratum = c.stratum group by c.stratum, c.model, c.what, c.reason
    having sum(c.n) > 0
    union all
    select nullif(q.model, ''), null, null, 'not comparable', q.reason, count(*), null from quarantine q
    where q.quarantined_at >= now() - period group by q.model, q.reason
    union all
    select mv.model, s.name, null, 'no verdict', v.reason, null, null
    from verdict v join model_version mv on mv.id = v.model_version_id join slice s on s.id = v.slice_id
    where v.verdict = 'unknown' and v.last_at >= now() - period
"""

_CHANGE_LOG_COMMENT: Final = (
    "Who changed what, when and why: the entries of the audit (configuration with its budgets, pauses, baselines, acknowledgements"
    " and so on), releases of versions, sampling policies, baselines that the monitor learned, and alerts that became worse after"
    " somebody had acknowledged them."
)
_CHANGE_LOG_COLUMNS: Final = {
    "who": "The user that Postgres authenticated, or monitor; of a release and of a policy: traffic.",
    "what": (
        "The action, as the command is called; release: a version was seen for the first time; policy: the same of sampling rates;"
        " alert escalate: an acknowledgement ended."
    ),
}
_CHANGES: Final = """
        union all
        select e.made_at, 'monitor', 'alert escalate', mv.model, 'alert ' || e.alert_id, null, null, e.reason
        from alert_action e join alert on alert.id = e.alert_id join model_version mv on mv.id = alert.model_version_id
        where e.action = 'escalate'
        union all
        select p.first_seen_at, 'traffic', 'policy', '', 'epoch ' || p.epoch, p.before, p.definition, '' from (
            select *, lag(definition) over (order by id) as before from policy
        ) p
"""

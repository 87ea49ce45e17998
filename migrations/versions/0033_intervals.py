"""Intervals of roll-ups that count people as they come back; whether versions serve, in slice_now.

Columns and functions are added, and views have columns at their end: the release before can use the schema as before. Rows that it
writes, and those of before, have null in the new columns: their intervals count each exchange, or closed session, as one.

Revision ID: 0033
Revises: 0032
"""

from importlib import import_module
from typing import Any, Final

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

_COLUMNS: Final = {
    "cap": "The budget.cap of divergence; null before revision 0033.",
    "flip_weight_sq": "Sum over exchanges of w^2, w being the weight of the items that have a flip; null before revision 0033.",
    "flip_sq": "Sum over exchanges of y^2, y being the weighted sum of flip over the items.",
    "flip_cross": "Sum over exchanges of w y.",
    "divergence_weight_sq": "As flip_weight_sq, of divergence.",
    "divergence_sq": "As flip_sq, of divergence.",
    "divergence_cross": "As flip_cross, of divergence.",
    "heaviest": "Largest weight of an exchange.",
}
_PEOPLE: Final = (
    "Of flip, then of divergence, 67 numbers: w and y, each summed in 32 random groups of people (hashed), and the sums of w^2, y^2 and"
    " w y over the exchanges of people. Null: no exchange names a person. For intervals, by mean_interval()."
)


def upgrade() -> None:
    """Go one revision forward."""
    for table in ("rollup_hour", "rollup_day"):
        for name, comment in _COLUMNS.items():
            op.add_column(table, sa.Column(name, sa.Double(), nullable=True, comment=comment))
        op.add_column(table, sa.Column("people", sa.ARRAY(sa.Double()), nullable=True, comment=_PEOPLE))
    for statement in (_ARRAY_ADDED, _ARRAY_SUM, _MEAN_INTERVAL):
        op.execute(statement.replace(":", "\\:"))
    for name, comment in _COMMENTS.items():
        op.execute(f"comment on {name} is '{comment}'")
    op.execute(_VERSION_NOW)
    op.execute("comment on view version_now is 'Each version of each model: whether it serves.'")
    for name, comment in _VERSION_TEXTS.items():
        op.execute(f"comment on column version_now.{name} is '{comment}'")
    for view in _views():
        _of_0019()["_create"](view)


def downgrade() -> None:
    """Go one revision back."""
    old = _of_0019()
    (now,) = old["_old"]("0002_ties_and_weights", "_SLICE_NOW")
    people = vars(import_module("quantdrift.migrations.versions.0026_people"))
    added = {
        **old["_NOW"],
        "window_days": old["_Column"](people["_WINDOW_DAYS"], people["_WINDOW_DAYS_COMMENT"]),
    }
    _, history, day, *_ = old["_views"]()
    for view in (old["_extended"](now, added, old["_NOW_JOINS"] + people["_EVER"]), history, day):
        op.execute(f"drop view {view.name}")
        old["_create"](view)
    op.execute("drop view version_now")
    op.execute("drop function mean_interval")
    op.execute("drop aggregate array_sum(double precision[])")
    op.execute("drop function array_added")
    for table in ("rollup_day", "rollup_hour"):
        for name in ("people", *reversed(_COLUMNS)):
            op.drop_column(table, name)


def _of_0019() -> dict[str, Any]:
    return vars(import_module("quantdrift.migrations.versions.0019_views"))


def _views() -> list[Any]:
    old = _of_0019()
    column = old["_Column"]
    (now,) = old["_old"]("0002_ties_and_weights", "_SLICE_NOW")
    people = vars(import_module("quantdrift.migrations.versions.0026_people"))
    added = {**old["_NOW"], "window_days": column(people["_WINDOW_DAYS"], people["_WINDOW_DAYS_COMMENT"])}
    added |= {name: column(*what) for name, what in _SERVING.items()}
    added |= {name: column(*what) for name, what in _DAY.items()}
    (history,) = old["_old"]("0002_ties_and_weights", "_SLICE_HISTORY")
    (day,) = old["_old"]("0016_views", "_SLICE_DAY")
    intervals = {name: column(expression, _TEXTS[name]) for name, expression in _ENDS.items()}
    flips = {name: intervals[name] for name in ("flip_low", "flip_high")}
    divergences = {name: intervals[name] for name in ("divergence_low", "divergence_high")}
    verdicts = " left join verdict v on v.model_version_id = r.model_version_id and v.slice_id = r.slice_id"
    texts = {**old["_DAY_COMMENTS"], **{name: _TEXTS[name] for name in flips}}
    of_day = old["_SLICE_DAY"].replace(old["_CV"], _INTERVALS)
    of_day = of_day.replace(old["_WILSON_LOW"], _ENDS["flip_low"]).replace(
        old["_WILSON_HIGH"], _ENDS["flip_high"]
    )
    joins = old["_NOW_JOINS"].replace("sum(n_groups) as n_groups", _DAY_SUMS) + people["_EVER"]
    return [
        old["_extended"](now, added, joins + _NOW_JOINS),
        old["_extended"](history, {**flips, **divergences, **old["_BUDGETS"]}, _INTERVALS + verdicts),
        old["_extended"](day._replace(columns={**day.columns, **texts}, query=of_day), divergences),
    ]


_ARRAY_ADDED: Final = """
    create function array_added(a double precision[], b double precision[]) returns double precision[]
    language sql immutable parallel safe as $$
        select case when a is null then b when b is null then a
            else array(select x + y from unnest(a, b) with ordinality as u (x, y, i) order by i) end
    $$
"""
_ARRAY_SUM: Final = """
    create aggregate array_sum(double precision[]) (sfunc = array_added, stype = double precision[], parallel = safe)
"""
# The same steps, in the same order, as `quantdrift.facts.estimate.ratio`: the two give one number.
_MEAN_INTERVAL: Final = """
    create function mean_interval(
        n bigint, weight double precision, weight_sq double precision, total double precision, total_sq double precision,
        cross_sum double precision, heaviest double precision, people double precision[] default null, cap double precision default 1
    ) returns double precision[] language plpgsql immutable parallel safe as $$
    declare
        z constant double precision := 1.959963984540054;
        g constant int := 32;
        ww double precision := weight_sq;
        yy double precision := total_sq;
        wy double precision := cross_sum;
        y double precision := total;
        is_grouped boolean := people is not null;
        s_w double precision := 0; s_y double precision := 0;
        g_ww double precision := 0; g_yy double precision := 0; g_wy double precision := 0;
        p double precision; mean double precision; variance double precision; n_eff double precision;
        t double precision; events double precision; phi double precision; large double precision;
        allowance double precision; added double precision; spread double precision; swap double precision;
        a double precision; b double precision; s double precision; d double precision;
        low double precision; high double precision; is_turned boolean;
    begin
        if weight is null or weight <= 0 or ww is null or ww <= 0 or cap is null or y is null or yy is null or wy is null then
            return null;
        end if;
        if is_grouped then
            for i in 1..g loop
                s_w := s_w + people[i];
                s_y := s_y + people[g + i];
                g_ww := g_ww + people[i] * people[i];
                g_yy := g_yy + people[g + i] * people[g + i];
                g_wy := g_wy + people[i] * people[g + i];
            end loop;
            g_ww := (g_ww - s_w * s_w / g) * g / (g - 1);
            g_yy := (g_yy - s_y * s_y / g) * g / (g - 1);
            g_wy := (g_wy - s_w * s_y / g) * g / (g - 1);
            p := y / weight;
            if g_yy - 2 * p * g_wy + p * p * g_ww < people[2 * g + 2] - 2 * p * people[2 * g + 3] + p * p * people[2 * g + 1] then
                g_ww := people[2 * g + 1];
                g_yy := people[2 * g + 2];
                g_wy := people[2 * g + 3];
            end if;
            ww := ww - people[2 * g + 1] + greatest(g_ww, people[2 * g + 1]);
            yy := yy - people[2 * g + 2] + g_yy;
            wy := wy - people[2 * g + 3] + g_wy;
        end if;
        y := y / cap;
        yy := yy / (cap * cap);
        wy := wy / cap;
        mean := least(y / weight, 1.0);
        is_turned := mean > 0.5;
        if is_turned then
            yy := greatest(ww - 2 * wy + yy, 0);
            wy := greatest(ww - wy, 0);
            y := greatest(weight - y, 0);
        end if;
        p := y / weight;
        n_eff := weight * weight / ww;
        variance := greatest(yy - 2 * p * wy + p * p * ww, 0) / (weight * weight);
        if n > 1 and p > 0 and variance > 1e-24 then
            variance := variance * (n::double precision / (n - 1));
            t := greatest(least(n_eff, case when is_grouped then g else n_eff end) - 1.0, 1.0);
            s := z * (8.0 * t + 3.0) / (8.0 * t + 1.0);
            t := sqrt(t * (exp(s * s / t) - 1.0));
            n_eff := p * (1.0 - p) / variance * ((z / t) * (z / t));
        end if;
        if p <= 0 then
            low := 0;
            high := 1.0 - 0.025 ^ (1.0 / n_eff);
        else
            events := n_eff * p;
            low := 0;
            a := events;
            b := n_eff - events + 1.0;
            s := 1.0 / (9.0 * a);
            t := 1.0 / (9.0 * b);
            d := (1.0 - t) * (1.0 - t) - t * z * z;
            if d > 0 then
                d := ((1.0 - t) * (1.0 - s)
                    - z * sqrt(greatest((1.0 - t) * (1.0 - t) * s + (1.0 - s) * (1.0 - s) * t - s * t * z * z, 0))) / d;
                d := case when d < 1e-90 then 0 else d end;
                d := d * d * d;
                low := a * d / (a * d + b);
            end if;
            -- The first two terms of the series, for few events.
            s := 0;
            for k in 1..3 loop
                t := case k when 1 then a when 2 then b else a + b end;
                d := t + 4.0;
                d := (d - 0.5) * ln(d) - d + 0.9189385332046727 + 1.0 / (12.0 * d) - ln(t * (t + 1.0) * (t + 2.0) * (t + 3.0));
                s := case k when 3 then s - d else s + d end;
            end loop;
            d := (ln(0.025 * a) + s) / a;
            d := case when d < -700 then 0 else exp(d) end;  -- Postgres refuses what is smaller than it can store
            low := greatest(low, d * (1.0 + (b - 1.0) * d / (a + 1.0)));
            phi := case when wy > 0 then (yy - p * wy) / ((1.0 - p) * wy) else 1.0 end;
            large := greatest(heaviest, least(greatest(phi, 0), 1) * (ww / weight));
            s := least(events, y / large);
            allowance := least(greatest((20.0 - s) / 10.0, 0), 1);
            added := y / events + allowance * greatest(large - y / events, 0);
            spread := y * y / events + added * added;
            d := (y + added) / (weight + added);
            high := 1;
            if d < 1 then
                a := (y + added) * (y + added) / spread;
                b := a / d - a;
                s := 1.0 / (9.0 * a);
                t := 1.0 / (9.0 * b);
                d := (1.0 - t) * (1.0 - t) - t * z * z;
                if d > 0 then
                    d := ((1.0 - t) * (1.0 - s)
                        + z * sqrt(greatest((1.0 - t) * (1.0 - t) * s + (1.0 - s) * (1.0 - s) * t - s * t * z * z, 0))) / d;
                    d := case when d < 1e-90 then 0 else d end;
                    d := d * d * d;
                    high := a * d / (a * d + b);
                end if;
            end if;
        end if;
        if is_turned then
            swap := low;
            low := 1.0 - high;
            high := 1.0 - swap;
        end if;
        return array[cap * least(low, mean), cap * greatest(high, mean)];
    end
    $$
"""
_COMMENTS: Final = {
    "function array_added": "The sums of two arrays, element by element; null counts as nothing.",
    "aggregate array_sum(double precision[])": "The sums of arrays, element by element: merges rollup_hour.people over hours.",
    "function mean_interval": "Lower and upper end of the 95 % interval of a weighted mean of values in [0, cap], of sums over exchanges and"
    " the random groups of people of a roll-up (rollup_hour.people[1:67] for flip, [68:134] for divergence). It counts people as they come"
    " back, and is the interval of the live page and of the report.",
}
_INTERVALS: Final = """
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
        ) i"""
_ENDS: Final = {
    "flip_low": "i.flip[1]",
    "flip_high": "i.flip[2]",
    "divergence_low": "i.divergence[1]",
    "divergence_high": "i.divergence[2]",
}
_TEXTS: Final = {
    "flip_low": "Lower end of the 95 % interval of flip for this time alone; people who come back count as they do (mean_interval).",
    "flip_high": "Upper end of the same.",
    "divergence_low": "Lower end of the 95 % interval of divergence for this time alone; null before revision 0033.",
    "divergence_high": "Upper end of the same.",
}
_DAY_SUMS: Final = """sum(n_groups) as n_groups,
                sum(coalesce(flip_weight_sq, flip_weight * weight_sq / nullif(weight, 0))) as flip_ww,
                sum(coalesce(flip_sq, least(flip, flip_weight) * weight_sq / nullif(weight, 0))) as flip_yy,
                sum(coalesce(flip_cross, least(flip, flip_weight) * weight_sq / nullif(weight, 0))) as flip_wy,
                max(coalesce(heaviest, 0)) as heaviest, array_sum(people[1:67]) as people"""
_DAY_INTERVAL: Final = (
    "mean_interval(d.n_groups::bigint, d.flip_weight, d.flip_ww, least(d.flip, d.flip_weight), d.flip_yy, d.flip_wy, d.heaviest,"
    " d.people)"
)
_DAY: Final = {
    "changed_share_day": (
        "d.flip / nullif(d.flip_weight, 0)",
        "Share of changed answers in the last 24 hours of data; of a longer time, with an interval that holds at every look: flip_mean.",
    ),
    "changed_share_day_low": (f"({_DAY_INTERVAL})[1]", "Lower end of its 95 % interval."),
    "changed_share_day_high": (f"({_DAY_INTERVAL})[2]", "Upper end of the same."),
}
_VERSION_NOW: Final = """
    create view version_now (model, candidate_version, serving, replaced_by, seen_at, model_version_id) as
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
"""
_VERSION_TEXTS: Final = {
    "model": "Model name, as in requests.",
    "candidate_version": "Version of the quantised model.",
    "serving": (
        "serving, replaced (another version serves instead) or silent (nothing of it was seen for ten times its usual gap, at least ten"
        " minutes); null: no exchange was folded yet."
    ),
    "replaced_by": "Version that was seen last of those that serve instead; null while it serves.",
    "seen_at": "Capture time of its newest exchange.",
    "model_version_id": "Key of model_version.",
}
_SERVING: Final = {
    name: (f"serves.{name}", _VERSION_TEXTS[name]) for name in ("serving", "replaced_by", "seen_at")
}
_NOW_JOINS: Final = """
        left join version_now serves on serves.model_version_id = v.model_version_id
"""

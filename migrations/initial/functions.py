"""The functions of the first schema, and the triggers of the audit."""

from typing import Final

# Each field is its length in bytes, a colon and its bytes, or `-` for null: no two entries have the same bytes.
# `quantdrift.storage.audit.canonical` computes the same. The lock is released with the transaction, so that an entry is followed only
# by one that can see it.
_AUDIT_ADD: Final = """
    create function audit_add(
        new_action text, new_model text, new_subject text, new_before jsonb, new_after jsonb, new_note text
    ) returns bigint language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $body$
    declare
        added public.audit;
        previous bytea;
        field text;
        content bytea := ''::bytea;
    begin
        lock table public.audit in exclusive mode;
        select last.seq, last.hash into added.seq, previous from public.audit last order by last.seq desc limit 1;
        added.seq := coalesce(added.seq, 0) + 1;
        added.at := clock_timestamp();
        added.actor := session_user;
        added.action := new_action;
        added.model := coalesce(new_model, '');
        added.subject := coalesce(new_subject, '');
        added.before := new_before;
        added.after := new_after;
        added.note := coalesce(new_note, '');
        foreach field in array array[
            encode(coalesce(previous, ''::bytea), 'hex'),
            added.seq::text,
            (extract(epoch from added.at) * 1000000)::bigint::text,
            added.actor, added.action, added.model, added.subject,
            added.before::text, added.after::text, added.note
        ] loop
            content := content || convert_to(
                coalesce(octet_length(convert_to(field, 'UTF8'))::text || ':' || field, '-'), 'UTF8'
            );
        end loop;
        added.hash := sha256(content);
        insert into public.audit select added.*;
        return added.seq;
    end $body$
"""
_AUDIT_REFUSE: Final = """
    create function audit_refuse() returns trigger language plpgsql set search_path = pg_catalog, pg_temp as $body$
    begin
        raise exception 'entries of the audit are never changed or deleted' using errcode = 'insufficient_privilege';
    end $body$
"""
# Tallies are cumulative: what was counted in the time is the last one of each start of a sidecar minus the last one before it.
_NOT_OBSERVED_IN: Final = """
    create function not_observed_in(period interval) returns table (model text, slice text, stratum text, what text, reason text, requests bigint, share double precision) language sql stable as $$
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
    $$
"""
# `session_user` is the user that Postgres authenticated: not the owner, with whose rights a function runs.
_GATE_PROGRESS: Final = """
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
_GATE_END: Final = """
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
            'configuration', encode(sha256(convert_to(new_configuration::text, 'UTF8')), 'hex')
        ), '');
    end $body$
"""
# The table is created on its own and then attached, which, unlike `create table ... partition of`, does not lock `comparison`
# against readers and writers.
_PARTITION_MAKE: Final = """
    create function partition_make(day date) returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $body$
    declare
        name text := 'comparison_' || to_char(day, 'YYYYMMDD');
    begin
        execute format('create table public.%I (like public.comparison including all)', name);
        execute format(
            'comment on table public.%I is %L', name,
            'Comparisons captured on ' || to_char(day, 'YYYY-MM-DD') || ', UTC.'
        );
        execute format(
            'alter table public.comparison attach partition public.%I for values from (%L) to (%L)', name,
            to_char(day, 'YYYY-MM-DD') || ' 00:00:00+00', to_char(day + 1, 'YYYY-MM-DD') || ' 00:00:00+00'
        );
    end $body$
"""
_PARTITION_DROP: Final = """
    create function partition_drop(day date) returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $body$
    begin
        execute format('drop table if exists public.%I', 'comparison_' || to_char(day, 'YYYYMMDD'));
    end $body$
"""
_COMPARISON_ERASE: Final = """
    create function comparison_erase(times timestamptz[], ids uuid[]) returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $body$
    begin
        delete from public.comparison where (captured_at, exchange_id) in (select * from unnest(times, ids));
    end $body$
"""
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

FUNCTIONS: Final = {
    "array_added": _ARRAY_ADDED,
    "array_sum": _ARRAY_SUM,
    "mean_interval": _MEAN_INTERVAL,
    "not_observed_in": _NOT_OBSERVED_IN,
    "partition_make": _PARTITION_MAKE,
    "partition_drop": _PARTITION_DROP,
    "comparison_erase": _COMPARISON_ERASE,
    "gate_progress": _GATE_PROGRESS,
    "gate_end": _GATE_END,
    "audit_add": _AUDIT_ADD,
    "audit_refuse": _AUDIT_REFUSE,
}
"""By name; each of them has a name of its own."""
PRIVATE: Final = (
    "partition_make",
    "partition_drop",
    "comparison_erase",
    "gate_progress",
    "gate_end",
    "audit_add",
)
"""Those that run with the rights of their owner: `quantdrift setup postgres` says who may call them."""
COMMENTS: Final = {
    "function not_observed_in": "The view not_observed, of the time from this long ago until now.",
    "function array_added": "The sums of two arrays, element by element; null counts as nothing.",
    "aggregate array_sum(double precision[])": "The sums of arrays, element by element: merges rollup_hour.people over hours.",
    "function mean_interval": "Lower and upper end of the 95 % interval of a weighted mean of values in [0, cap], of sums over exchanges and the random groups of people of a roll-up (rollup_hour.people[1:67] for flip, [68:134] for divergence). It counts people as they come back, and is the interval of the live page and of the report.",
}
TRIGGERS: Final = (
    "create trigger audit_rows before update or delete on audit for each row execute function audit_refuse()",
    "alter table audit enable always trigger audit_rows",
    "create trigger audit_all before truncate on audit execute function audit_refuse()",
    "alter table audit enable always trigger audit_all",
)

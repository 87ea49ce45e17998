"""Models of every task have one graded divergence: what was the KL of classifiers becomes `divergence`.

Revision ID: 0008
Revises: 0007
"""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

# Tables with rows of a metric, and texts of JSON that names it.
_METRICS = ("detector", "alert", "baseline", "discovery")
_TEXTS = (("verdict", "estimate"), ("alert", "details"), ("transition", "details"), ("report_run", "figures"))
_PARTS = ("damage", "damage_se", "shift", "shift_se", "unseen", "unseen_se", "budget")
_KEYS = [
    ('"kl":', '"divergence":'),
    ('"metric": "kl"', '"metric": "divergence"'),
    ('"n_kl_infinite":', '"n_infinite":'),
    *((f'"kl_{part}":', f'"divergence_{part}":') for part in _PARTS),
]
_COLUMNS = [("kl", "divergence"), ("kl_weight", "divergence_weight"), ("n_kl_infinite", "n_infinite")]
_COLUMNS += [("kl_bins", "divergence_bins")]
_NOW = [(f"{whose}kl_mean", f"{whose}divergence_mean") for whose in ("", "all_")]
_NOW += [(f"kl_{part}", f"divergence_{part}") for part in ("low", "high", "budget")]
_HISTORY = [("kl", "divergence"), ("all_kl", "all_divergence"), ("n_kl_infinite", "n_infinite")]

_COMMENTS = {
    "comparison.flip": ("Top class differs.", "Decision differs: of a classifier the top class."),
    "comparison.divergence": (
        "Kullback-Leibler divergence KL(reference || candidate), nats; infinity is kept.",
        "Graded divergence of the model's task, of a classifier KL(reference || candidate), nats; infinity is kept.",
    ),
    "comparison.detail": (
        "What else the comparator says, e.g. top classes.",
        "What else was measured, e.g. top classes, by name.",
    ),
    **{
        f"{table}.{column}": texts
        for table in ("rollup_hour", "rollup_day")
        for column, texts in {
            "divergence": (
                "The same of kl, each item capped at the model's kl_cap, nats.",
                "The same of divergence, each item capped at the model's budget.cap.",
            ),
            "divergence_weight": ("The same of kl.", "The same of divergence."),
            "n_infinite": ("Items whose KL was infinite.", "Items whose divergence was infinite."),
            "divergence_bins": (
                "Weighted histogram of kl: 64 log-spaced bins from 1e-6 to 10 nats, ends open.",
                "Weighted histogram of divergence: 64 log-spaced bins from 1e-6 to 10, ends open.",
            ),
        }.items()
    },
}
_OF_VIEWS = {
    "slice_now.flip_mean": (
        "Share of exchanges whose top class changed, over the recent window, weighted.",
        "Share of exchanges whose decision changed, over the recent window, weighted.",
    ),
    "slice_now.divergence_mean": (
        "Mean KL(reference || candidate) over the recent window, weighted and capped, nats.",
        "Mean divergence over the recent window, weighted and capped: of a classifier KL in nats.",
    ),
    "slice_now.divergence_low": (
        "Lower end of its time-uniform 95 % interval, nats.",
        "Lower end of its time-uniform 95 % interval.",
    ),
    "slice_now.divergence_high": (
        "Upper end of its time-uniform 95 % interval, nats.",
        "Upper end of its time-uniform 95 % interval.",
    ),
    "slice_now.divergence_budget": (
        "The mean that the owner accepts, nats.",
        "The mean that the owner accepts.",
    ),
    "slice_now.all_divergence_mean": (
        "kl_mean of the aggregate, nats.",
        "divergence_mean of the aggregate.",
    ),
    "slice_history.flip": (
        "Share of exchanges whose top class changed; null, as all means, where no item has one.",
        "Share of exchanges whose decision changed; null, as all means, where no item has one.",
    ),
    "slice_history.divergence": (
        "Mean KL(reference || candidate), each item capped at the model's kl_cap, nats.",
        "Mean divergence, each item capped at the model's budget.cap: of a classifier KL in nats.",
    ),
    "slice_history.n_infinite": ("Items whose KL was infinite.", "Items whose divergence was infinite."),
    "slice_history.all_divergence": (
        "kl of the aggregate in the same hour, nats.",
        "divergence of the aggregate in the same hour.",
    ),
}


def upgrade() -> None:
    """Go one revision forward."""
    op.alter_column("comparison", "kl", new_column_name="divergence")
    for table in ("rollup_hour", "rollup_day"):
        for old, new in _COLUMNS:
            _rename(table, old, new)
    _rename_in_views(forward=True)
    _rename_in_rows(forward=True)
    _comment(forward=True)


def downgrade() -> None:
    """Go one revision back; what other tasks have measured is taken for KL then."""
    _comment(forward=False)
    _rename_in_rows(forward=False)
    _rename_in_views(forward=False)
    for table in ("rollup_hour", "rollup_day"):
        for old, new in _COLUMNS:
            _rename(table, new, old)
    op.alter_column("comparison", "divergence", new_column_name="kl")


def _rename(table: str, old: str, new: str) -> None:
    op.alter_column(table, old, new_column_name=new)
    # From Postgres 18 on, that a column is never null is a constraint with a name.
    op.execute(
        f"""
        do $$ begin
            if exists (select from pg_constraint where conname = '{table}_{old}_not_null') then
                alter table {table} rename constraint {table}_{old}_not_null to {table}_{new}_not_null;
            end if;
        end $$
        """
    )


def _rename_in_views(*, forward: bool) -> None:
    for view, columns in (("slice_now", _NOW), ("slice_history", _HISTORY)):
        for pair in columns:
            old, new = pair if forward else pair[::-1]
            op.execute(f"alter view {view} rename column {old} to {new}")
    old, new = ("{kl,", "{divergence,") if forward else ("{divergence,", "{kl,")
    # The view says itself how it is made; only the path into `verdict.estimate` is another one.
    op.execute(
        f"""
        do $$ begin
            execute 'create or replace view slice_now as ' ||
                replace(pg_get_viewdef('slice_now'::regclass), '{old}', '{new}');
        end $$
        """
    )


def renamed(text: str) -> str:
    """Return a stored JSON text as it reads after this revision."""
    for old, new in _KEYS:
        text = text.replace(old, new)
    return text


def _rename_in_rows(*, forward: bool) -> None:
    old, new = ("kl", "divergence") if forward else ("divergence", "kl")
    for table in _METRICS:
        op.execute(f"update {table} set metric = '{new}' where metric = '{old}'")  # noqa: S608 - our own names
    for table, column in _TEXTS:
        text = f"{column}::text"
        for pair in _KEYS:
            before, after = (key.replace(":", "\\:") for key in (pair if forward else pair[::-1]))
            text = f"replace({text}, '{before}', '{after}')"
        op.execute(f"update {table} set {column} = ({text})::jsonb where {column}::text like '%\"{old}%'")  # noqa: S608


def _comment(*, forward: bool) -> None:
    for place, texts in {**_COMMENTS, **_OF_VIEWS}.items():
        said = texts[1 if forward else 0].replace("'", "''").replace(":", "\\:")
        op.execute(f"comment on column {place} is '{said}'")

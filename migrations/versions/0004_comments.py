"""Comments that no longer name options that are constants now.

Comments alone change: the release before can use the schema as before.

Revision ID: 0004
Revises: 0003
"""

from typing import Final, NamedTuple

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    for comment in _COMMENTS:
        _write(comment, comment.after)


def downgrade() -> None:
    """Go one revision back."""
    for comment in _COMMENTS:
        _write(comment, comment.before)


class _Comment(NamedTuple):
    """The comment of a table, or of one of its columns."""

    table: str
    column: str
    before: str
    after: str


def _write(comment: _Comment, text: str) -> None:
    what = f"column {comment.table}.{comment.column}" if comment.column else f"table {comment.table}"
    quoted = text.replace("'", "''")
    op.execute(f"comment on {what} is '{quoted}'")


_COMMENTS: Final = (
    _Comment(
        "detector",
        "",
        before="State of a sequential detector of one metric on one slice, as of its last fold. Kept for "
        "storage.superseded_days after it is retired.",
        after="State of a sequential detector of one metric on one slice, as of its last fold. Kept for 90 "
        "days, or storage.retention_days if that is longer, after it is retired.",
    ),
    _Comment(
        "baseline",
        "",
        before="Baselines of signals, and every decision about them. Rows stay; content that is no longer in "
        "effect is deleted after storage.superseded_days.",
        after="Baselines of signals, and every decision about them. Rows stay; content that is no longer in "
        "effect is deleted after 90 days, or storage.retention_days if that is longer.",
    ),
    _Comment(
        "noise_change",
        "",
        before="When noise was shown to exceed monitor.noise_bound of the budget, and when to be below it "
        "again.",
        after="When noise was shown to exceed half of the budget, and when to be below it again.",
    ),
    _Comment(
        "baseline",
        "content",
        before="The baseline, or an imported budget. Null: a decision about the baseline in effect, or not "
        "in effect for longer than storage.superseded_days.",
        after="The baseline, or an imported budget. Null: a decision about the baseline in effect, or not "
        "in effect for longer than 90 days, or storage.retention_days if that is longer.",
    ),
    _Comment(
        "noise_floor",
        "exceeds",
        before="Whether noise exceeds monitor.noise_bound of the budget: the version's slices are then "
        "unknown.",
        after="Whether noise exceeds half of the budget: the version's slices are then unknown.",
    ),
    _Comment(
        "discovery",
        "waits_since",
        before="Since when it is proven and waits for one of the discovery.most_slices slots; null if it "
        "does not wait.",
        after="Since when it is proven and waits for one of the places of a model's discovered slices; null "
        "if it does not wait.",
    ),
    _Comment(
        "tally",
        "models",
        before="By model, where requests name one: taken; of these, published, and lost by reason; the row "
        "of the sidecar's table of counts, and the last number given to an exchange of it.",
        after="By model, where requests name one: taken; of these, thinned, published, and lost by reason; "
        "the row of the sidecar's table of counts, and the last number given to an exchange of it; of "
        "a model that is not configured, how many requests named it (unknown).",
    ),
)

"""Indexes on the slices and on the changed answers of comparisons, a smaller one on the request id, and `item.slice_ids`.

The release before can use the schema as before: indexes change, and a view has one more column at its end. While the indexes
are made, comparisons wait to be stored.

Revision ID: 0022
Revises: 0021
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

_SLICE_IDS: Final = (
    "Keys of all slices of the item. With `slice_ids @> array[KEY]` beside `slice_id = KEY`, an index finds the items of a rare"
    " slice."
)
_REQUEST_ID: Final = "(attributes ->> 'header.x-request-id')"


def upgrade() -> None:
    """Go one revision forward."""
    op.execute("create index ix_comparison_slice_ids on comparison using gin (slice_ids)")
    op.execute("drop index ix_comparison_flip")
    op.execute("create index ix_comparison_flip on comparison (captured_at) where flip")
    op.execute("drop index ix_comparison_request_id")
    op.execute(
        f"create index ix_comparison_request_id on comparison using hash ({_REQUEST_ID}) where {_REQUEST_ID} is not null"
    )
    item, create = _item()
    head, start, tail = item.query.partition("\n        from ")
    create(
        item._replace(
            columns={**item.columns, "slice_ids": _SLICE_IDS}, query=f"{head},\nc.slice_ids{start}{tail}"
        )
    )


def downgrade() -> None:
    """Go one revision back."""
    item, create = _item()
    op.execute("drop view item")
    create(item)
    op.execute("drop index ix_comparison_request_id")
    op.execute(
        f"create index ix_comparison_request_id on comparison ({_REQUEST_ID}) where {_REQUEST_ID} is not null"
    )
    op.execute("drop index ix_comparison_flip")
    op.execute("create index ix_comparison_flip on comparison (captured_at) where flip and group_key <> ''")
    op.execute("drop index ix_comparison_slice_ids")


def _item() -> tuple[Any, Callable[[Any], None]]:
    """Return the view `item` as revision 0019 makes it, and the function that makes a view."""
    earlier = import_module("quantdrift.migrations.versions.0019_views")
    views, create = (getattr(earlier, name) for name in ("_views", "_create"))
    return next(view for view in views() if view.name == "item"), create

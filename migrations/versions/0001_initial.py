"""The first schema: every table, function and view.

Revision ID: 0001
Revises:
"""

from alembic import op

from quantdrift.migrations.initial.functions import COMMENTS, FUNCTIONS, PRIVATE, TRIGGERS
from quantdrift.migrations.initial.tables import TABLES
from quantdrift.migrations.initial.views import VIEWS

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    # Not `op.execute`, which would read a colon as the beginning of a parameter.
    execute = op.get_bind().exec_driver_sql
    for create in TABLES.values():
        create()
    for statement in (*FUNCTIONS.values(), *TRIGGERS):
        execute(statement)
    for name in PRIVATE:
        execute(f"revoke all on function {name} from public")
    for subject, comment in COMMENTS.items():
        execute(f"comment on {subject} is {_quoted(comment)}")
    for view in VIEWS:
        execute(f"create view {view.name} ({', '.join(view.columns)}) as {view.query}")
        execute(f"comment on view {view.name} is {_quoted(view.comment)}")
        for column, comment in view.columns.items():
            execute(f"comment on column {view.name}.{column} is {_quoted(comment)}")


def downgrade() -> None:
    """Go one revision back."""
    for view in reversed(VIEWS):
        op.execute(f"drop view {view.name}")
    for table in reversed(TABLES):
        op.drop_table(table)
    for name in reversed(FUNCTIONS):
        op.execute(f"drop routine {name}")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"

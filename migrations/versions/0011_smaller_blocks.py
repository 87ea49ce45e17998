"""Smaller blocks, of which a reader may read some columns alone: the column `form`, and functions that say which columns they need.

The compatibility rule: it adds a column and functions; those of 0008 and 0009 return the same rows, of the blocks that the release before
writes, too.

Revision ID: 0011
Revises: 0010
"""

from importlib import import_module
from typing import Final

import sqlalchemy as sa
from alembic import op

_OF_0008: Final = vars(import_module("quantdrift.migrations.versions.0008_condensed_blocks"))
_OF_0009: Final = vars(import_module("quantdrift.migrations.versions.0009_blocks_of_workers"))

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_NAMES: Final[tuple[str, ...]] = tuple(_OF_0008["_VALUES"])
_JOINED: Final = ("slice_ids", "in_slices", "detail", "attributes", "features")
"""Columns whose values have no control characters: JSON, and arrays of numbers."""
_FORM: Final = (
    "How the columns are to be read. Null: an array of n values each. 1: slice_ids, in_slices, detail, attributes and features have one"
    " text, of all values with chr(1) between them, and chr(2) for null. 2: the same, and margin is |candidate_margin - reference_margin|."
)
_APART: Final = "string_to_array({0}[1], chr(1), chr(2))"
# What a column of comparison is made of in a block, beside the column of its name.
_MADE_OF: Final = {
    "group_id": "group_key",
    "group_text": "group_key",
    "request_id": "attributes",
    "trace_id": "trace",
    "span_id": "trace",
    "trace_text": "trace",
}


def _given(name: str, block: str, *, some: bool = False) -> str:
    """Return the array of the values of a column; with `some` null where `wanted` has neither it nor what is made of it."""
    array = f"{block}.{name}"
    if name in _JOINED:
        array = f"case when {block}.form is null then {array} else {_APART.format(array)} end"
    if not some or name == "captured_at":
        return array
    names = [_MADE_OF.get(name, name)]
    if name in {"candidate_margin", "reference_margin"}:
        names.append("margin")
    condition = " or ".join(f"'{one}' = any(wanted)" for one in names)
    return f"case when wanted is null or {condition} then {array} end"


_MARGIN: Final = "case when {}.form = 2 then abs(v.candidate_margin - v.reference_margin) else v.margin end"
_REBUILT: Final = {
    **{name: f"v.{name}" for name in _OF_0008["_COLUMNS"]},
    **_OF_0008["_REBUILT"],
    **{name: value.format("v", "block") for name, value in _OF_0009["_MIXED"].items()},
    "margin": _MARGIN.format("block"),
}
_KINDS: Final = ", ".join(f"{name} {_OF_0008['_kind'](name)}" for name in _OF_0008["_COLUMNS"])
_SOME_BLOCK_VALUES: Final = f"""
    create function some_block_values(block condensed_block, wanted text[]) returns table ({_KINDS}, in_slices integer[])
    language sql stable parallel safe rows 1024 as $$
        select {", ".join(_REBUILT[name] for name in _OF_0008["_COLUMNS"])}, v.in_slices::integer[]
        from unnest({", ".join(_given(name, "block", some=True) for name in _NAMES)}) as v ({", ".join(_NAMES)})
    $$
"""  # noqa: S608 - constants
_BLOCK_VALUES: Final = f"""
    create or replace function block_values(block condensed_block) returns table ({_KINDS}, in_slices integer[])
    language sql stable parallel safe rows 1024 as $$ select * from public.some_block_values(block, null) $$
"""  # noqa: S608 - constants
_SOME_ITEMS: Final[str] = (
    _OF_0008["_ITEMS"]
    .replace("create function items(", "create function some_items(")
    .replace(
        "of_slices integer[] default null, only_changed boolean default false",
        "of_slices integer[], only_changed boolean, wanted text[]",
    )
    .replace("public.block_values(b)", "public.some_block_values(b, wanted)")
)


def _gathered(name: str, value: str) -> str:
    """Return the array of a column of the blocks that are made, as `a_NAME`."""
    array = f"array_agg({value})"
    if name in _JOINED:
        array = f"array[string_agg(coalesce({value}, chr(2)), chr(1))]"
    if name == "margin":
        return f"case when count({value}) > 0 and not ({_IS_DIFFERENCE}) then {array} end as a_margin"
    return f"case when count({value}) > 0 then {array} end as a_{name}"


# Bit for bit, so that zero and minus zero differ; and far from an overflow, which would be an error.
_IS_DIFFERENCE: Final = (
    "count(margin) > 0 and bool_and(float8send(margin) is not distinct from float8send("
    "case when abs(candidate_margin) < 1e300 and abs(reference_margin) < 1e300 then abs(candidate_margin - reference_margin) end))"
)


def _with_form(function: str, gathered: str) -> str:
    """Return a function that makes blocks of form 1 and 2; `gathered` are the arrays of its columns."""
    names, arrays = ", ".join(_NAMES), ", ".join(f"b.a_{name}" for name in _NAMES)
    return (
        function.replace("{names}\n            )", "{names}, form\n            )")
        .replace("{arrays}\n", "{arrays}, b.a_form\n")
        .replace("{gathered}", f"{gathered}, case when {_IS_DIFFERENCE} then 2 else 1 end as a_form")
        .replace("{names}", names)
        .replace("{arrays}", arrays)
        .replace("create function", "create or replace function")
    )


_CONDENSE: Final[str] = _OF_0009["_locked"](
    _with_form(
        _OF_0008["_CONDENSE"],
        ", ".join(_gathered(name, value) for name, (_, _, value) in _OF_0008["_VALUES"].items()),
    )
)
_MIXED: Final = {name: value.format("v", "g") for name, value in _OF_0009["_MIXED"].items()} | {
    "margin": _MARGIN.format("g")
}
_MERGE: Final[str] = _with_form(
    _OF_0009["_MERGE"]
    .replace("{lock}", _OF_0009["_LOCK"])
    .replace("{values}", ", ".join(f"{_MIXED[n]} as {n}" if n in _MIXED else f"v.{n}" for n in _NAMES))
    .replace("{given}", ", ".join(_given(name, "g") for name in _NAMES)),
    ", ".join(_gathered(name, name) for name in _NAMES),
)
_COMMENTS: Final = {
    "function some_block_values": "As block_values, but only the columns of comparison that are wanted are read; the others are null, but for captured_at.",
    "function some_items": "As items, but of blocks only the columns of comparison that are wanted are read: what is made of others is null. slice_ids, in_slices, pi1 and pi2 must be among them.",
}
_PLAIN: Final = f"""
    update condensed_block b set
        {", ".join(f"{name} = {_APART.format(f'b.{name}')}" for name in _JOINED)},
        margin = case when b.form = 2 then array(
            select abs(v.candidate - v.reference)
            from unnest(b.candidate_margin, b.reference_margin) with ordinality as v (candidate, reference, place) order by place
        ) else b.margin end
    where b.form is not null
"""  # noqa: S608 - constants


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column("condensed_block", sa.Column("form", sa.SmallInteger(), nullable=True, comment=_FORM))
    # Not `op.execute`, which would read a colon as the beginning of a parameter.
    execute = op.get_bind().exec_driver_sql
    for statement in (_SOME_BLOCK_VALUES, _BLOCK_VALUES, _SOME_ITEMS, _CONDENSE, _MERGE):
        execute(statement)
    execute("revoke all on function some_items from public")
    for subject, comment in _COMMENTS.items():
        execute(f"comment on {subject} is '{comment}'")


def downgrade() -> None:
    """Go one revision back: each block gets the form of before."""
    execute = op.get_bind().exec_driver_sql
    execute(_PLAIN)
    for statement in (
        _OF_0009["_NEW_BLOCK_VALUES"],
        _OF_0009["_locked"](_OF_0009["_CONDENSE"]),
        _OF_0009["_MERGE_FILLED"].replace("create function", "create or replace function"),
    ):
        execute(statement)
    for name in ("some_items", "some_block_values"):
        execute(f"drop function {name}")
    op.drop_column("condensed_block", "form")

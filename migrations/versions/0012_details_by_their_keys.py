"""The keys of `detail` once for each block: the column `detail_formats`; and the function `items_of`, which finds many exchanges at once.

The compatibility rule: it adds a column and a function; those of 0008, 0009 and 0011 return the same rows, of the blocks that the release
before writes, too.

Revision ID: 0012
Revises: 0011
"""

from importlib import import_module
from typing import Final

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

_OF_0008: Final = vars(import_module("quantdrift.migrations.versions.0008_condensed_blocks"))
_OF_0009: Final = vars(import_module("quantdrift.migrations.versions.0009_blocks_of_workers"))
_OF_0011: Final = vars(import_module("quantdrift.migrations.versions.0011_smaller_blocks"))

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_NAMES: Final[tuple[str, ...]] = _OF_0011["_NAMES"]
_COLUMNS: Final[tuple[str, ...]] = _OF_0008["_COLUMNS"]
_MOST_FORMATS: Final = 16
_FORMATS: Final = (
    "The format strings of detail: each has the keys, and %s for each value, as format() reads it. Each value of detail is then the number"
    " of its format string and the values of the keys, with chr(3) between them. Null: detail is JSON."
)
# The block's `form` and `detail_formats`, with the alias `of`. `offset 0` and `|| null` have them read and decompressed once, and not for
# each comparison.
_OF_BLOCK: Final = "(select {block}.form, {formats} || null::text[] as formats offset 0) of"
_JSON: Final = (
    "case when of.formats is null then v.detail"
    " else format(of.formats[split_part(v.detail, chr(3), 1)::integer], variadic string_to_array(v.detail, chr(3))) end"
)


def _given(name: str, block: str, *, some: bool = False) -> str:
    """Return the array of the values of a column, as in 0011."""
    array: str = _OF_0011["_given"](name, block, some=some)
    return array.replace(f"{block}.form", "of.form")


_REBUILT: Final = {
    **_OF_0011["_REBUILT"],
    "margin": _OF_0011["_MARGIN"].format("of"),
    "detail": f"({_JSON})::jsonb",
}
_WANTED_FORMATS: Final = "case when wanted is null or 'detail' = any(wanted) then block.detail_formats end"
_SOME_BLOCK_VALUES: Final = f"""
    create or replace function some_block_values(block condensed_block, wanted text[]) returns table ({_OF_0011["_KINDS"]}, in_slices integer[])
    language sql stable parallel safe rows 1024 as $$
        select {", ".join(_REBUILT[name] for name in _COLUMNS)}, v.in_slices::integer[]
        from {_OF_BLOCK.format(block="block", formats=_WANTED_FORMATS)}
        cross join lateral unnest({", ".join(_given(name, "block", some=True) for name in _NAMES)}) as v ({", ".join(_NAMES)})
    $$
"""  # noqa: S608 - constants


# An object has the keys in the order in which Postgres keeps them; anything else is one value without a key.
_KEYED: Final = """
            cross join lateral (
                select case when jsonb_typeof({0}) = 'object' then coalesce(array_agg(key), '{{}}') else array[null] end as keys,
                    case when jsonb_typeof({0}) = 'object' then string_agg(value::text, chr(3)) else {0}::text end as vals
                from jsonb_each(case when jsonb_typeof({0}) = 'object' then {0} end)
            ) d
"""
_NUMBERED: Final = """
        ), of_keys as (
            select {by}, keys, row_number() over (partition by {by} order by count(*) desc, keys) as number,
                count(*) over (partition by {by}) <= {most} as is_used,
                case when keys = array[null::text] then '%2$s' else '{' || coalesce((
                    select string_agg(replace(to_json(key)::text, '%', '%%') || case when place = 1 then ': %2$s' else ': %s' end, ', ' order by place)
                    from unnest(keys) with ordinality as one (key, place)
                ), '') || '}' end as format
            from placed where detail is not null group by {by}, keys
        ), of_formats as (
            select {by}, array_agg(format order by number) as formats from of_keys where is_used group by {by}
        ), of_slice as (
""".replace("{most}", str(_MOST_FORMATS)).strip()
_DETAIL: Final = "case when detail is null then null when is_used then concat_ws(chr(3), number, vals) else detail::text end"


def _replaced(text: str, changes: dict[str, str]) -> str:
    """Return a text with some of its parts replaced, each of which it has once."""
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def _making(function: str, by: str, values: dict[str, str]) -> str:
    """Return a function that makes blocks.

    Parameters
    ----------
    function
        That of before; its `placed` has `keys` and `vals`, too.
    by
        The columns that tell its blocks apart.
    values
        The value of each column, as an expression of a row of `placed`; each is computed once.
    """
    order = f"{by.replace('part', 'captured_at')}, exchange_id, item"
    chosen = ", ".join(f"{value} as {name}" for name, value in (values | {"detail": _DETAIL}).items())
    sorted_rows = f"select {by}, {chosen} from placed left join of_keys using ({by}, keys) order by {order}"  # noqa: S608 - constants
    arrays = ", ".join(f"b.a_{name}" for name in _NAMES)
    gathered = ", ".join(_OF_0011["_gathered"](name, name) for name in _NAMES)
    return _replaced(
        function,
        {
            "), of_slice as (": _NUMBERED.replace("{by}", by),
            f"(select * from placed order by {order}) sorted": f"({sorted_rows}) sorted",  # noqa: S608 - constants
            "{gathered}": f"{gathered}, case when {_OF_0011['_IS_DIFFERENCE']} then 2 else 1 end as a_form",
            "{names}\n            )": f"{', '.join(_NAMES)}, form, detail_formats\n            )",
            "{arrays}\n": f"{arrays}, b.a_form, f.formats\n",
            f"left join of_slices s using ({by})": f"left join of_slices s using ({by}) left join of_formats f using ({by})",
            "create function": "create or replace function",
        },
    )


_COUNTED: Final = "from gone g left join counted using (captured_at, exchange_id, item)"
_CONDENSE: Final[str] = _OF_0009["_locked"](
    _making(
        _replaced(
            _OF_0008["_CONDENSE"],
            {
                "select g.*, counted.in_slices,": "select g.*, counted.in_slices, d.keys, d.vals,",
                _COUNTED: f"{_COUNTED} {_KEYED.format('g.detail')}",
            },
        ),
        "model_version_id, part",
        {name: value for name, (_, _, value) in _OF_0008["_VALUES"].items()},
    )
)
_MIXED: Final = {
    **{name: value.format("v", "g") for name, value in _OF_0009["_MIXED"].items()},
    "margin": _OF_0011["_MARGIN"].format("of"),
    "detail": "j.detail",
}
_MERGE: Final = _making(
    _replaced(
        _OF_0009["_MERGE"],
        {
            "{lock}": _OF_0009["_LOCK"],
            "select {values},": f"select {', '.join(_MIXED.get(n, f'v.{n}') + f' as {n}' for n in _NAMES)}, d.keys, d.vals,",
            "from gone g cross join lateral unnest({given}) as v ({names})": f"""from gone g
            cross join lateral {_OF_BLOCK.format(block="g", formats="g.detail_formats")}
            cross join lateral unnest({", ".join(_given(name, "g") for name in _NAMES)}) as v ({", ".join(_NAMES)})
            cross join lateral (select ({_JSON})::jsonb as detail offset 0) j {_KEYED.format("j.detail")}""",
        },
    ),
    "part",
    {name: name for name in _NAMES},
)
# The items of exchanges by their keys. Each block that has one is read once, and of its comparisons the JSON of those alone is parsed.
_KEYS: Final = "select at, id from unnest(times, ids) as key (at, id)"
_HOT_KEYS: Final = f"where (c.captured_at, c.exchange_id) in ({_KEYS})"
_COLD_KEYS: Final = f"""
    where b.id in (
        select found.id from ({_KEYS}) key join public.condensed_block found
            on found.captured_to >= key.at and found.captured_to < date_trunc('day', key.at, 'UTC') + interval '24 hours'
            and found.captured_from <= key.at and key.id = any(found.exchange_id)
    ) and (r.captured_at, r.exchange_id) in ({_KEYS})
"""  # noqa: S608 - constants
_ITEMS_OF: Final = f"""
    create function items_of(times timestamptz[], ids uuid[]) returns setof item
    language sql stable parallel safe as $$ {_OF_0008["_item"](hot_times=_HOT_KEYS, cold_times=_COLD_KEYS)} $$
"""
_COMMENTS: Final = {
    "column condensed_block.detail": "As in comparison, as text; with detail_formats the values of its keys alone.",
    "function items_of": "The rows of the view item that belong to the exchanges with these times and ids. Each condensed block that has one of them is read once.",
}
# As it was in 0011: JSON.
_PLAIN: Final = f"""
    update condensed_block b set detail = array[(
        select string_agg(coalesce({_JSON}, chr(2)), chr(1) order by v.place)
        from {_OF_BLOCK.format(block="b", formats="b.detail_formats")}
        cross join lateral unnest(string_to_array(b.detail[1], chr(1), chr(2))) with ordinality as v (detail, place)
    )]
    where b.detail_formats is not null
"""  # noqa: S608 - constants


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "condensed_block",
        sa.Column("detail_formats", postgresql.ARRAY(sa.Text()), nullable=True, comment=_FORMATS),
    )
    # Not `op.execute`, which would read a colon as the beginning of a parameter.
    execute = op.get_bind().exec_driver_sql
    for statement in (_SOME_BLOCK_VALUES, _CONDENSE, _MERGE, _ITEMS_OF):
        execute(statement)
    execute("revoke all on function items_of from public")
    for subject, comment in _COMMENTS.items():
        execute(f"comment on {subject} is '{comment}'")


def downgrade() -> None:
    """Go one revision back: each block gets the form of before."""
    execute = op.get_bind().exec_driver_sql
    execute(_PLAIN)
    for statement in (
        _OF_0011["_SOME_BLOCK_VALUES"].replace("create function", "create or replace function"),
        _OF_0011["_CONDENSE"],
        _OF_0011["_MERGE"],
    ):
        execute(statement)
    execute("drop function items_of")
    execute("comment on column condensed_block.detail is 'As in comparison, as text.'")
    op.drop_column("condensed_block", "detail_formats")

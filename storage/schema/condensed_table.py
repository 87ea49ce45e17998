"""The table of comparisons that are kept up to 1,024 in a row: those of old days, and those that workers store so."""

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    SmallInteger,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, UUID
from sqlalchemy.orm import Mapped, mapped_column

from quantdrift.storage.schema.columns import NOW, Base, BigInt, Int, Time

_Values = Mapped[list[Any] | None]


def _values(kind: Any, comment: str) -> _Values:
    """Return a column with a value of each comparison of a block, in their order; null where all of them are null."""
    return mapped_column(ARRAY(kind), comment=comment)


_AT: Final = DateTime(timezone=True)
_ID: Final = UUID(as_uuid=False)


class CondensedBlockTable(Base):
    """Up to 1,024 comparisons of one version and UTC day in one row."""

    __tablename__ = "condensed_block"
    __table_args__ = (
        Index("ix_condensed_block_model_version_id_captured_to", "model_version_id", "captured_to"),
        Index("ix_condensed_block_captured_to", "captured_to"),
        Index("ix_condensed_block_of_batch", "of_batch", postgresql_where=text("of_batch is not null")),
        Index("ix_condensed_block_small", "captured_to", postgresql_where=text("n <= 512")),
        {
            "comment": "Up to 1,024 comparisons of one version that are older than storage.condense_after_days, or that a worker stored as a"
            " block (storage.write_blocks), with an array of values for each column of comparison. Read it through comparisons(SINCE, UNTIL)"
            " or the views."
        },
    )
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Surrogate key.")
    model_version_id: Mapped[Int] = mapped_column(comment="model_version that all of them belong to.")
    captured_from: Mapped[Time] = mapped_column(comment="Earliest capture time in it.")
    captured_to: Mapped[Time] = mapped_column(comment="Latest capture time in it, on the same UTC day.")
    n: Mapped[Int] = mapped_column(comment="Comparisons in it.")
    n_changed: Mapped[Int] = mapped_column(comment="Those whose decision differs.")
    slices: Mapped[list[int]] = mapped_column(
        ARRAY(Integer), comment="Every slice that one of them belongs to."
    )
    changed: Mapped[list[int]] = mapped_column(
        ARRAY(Integer), comment="Of each of these slices, how many decisions differ."
    )
    worst_changed: Mapped[list[Any]] = mapped_column(
        ARRAY(Double),
        comment="Of each of these slices, the largest divergence where the decision differs, or null.",
    )
    worst_other: Mapped[list[Any]] = mapped_column(
        ARRAY(Double), comment="Of each of these slices, the largest divergence of the others, or null."
    )
    condensed_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When the block was made.")
    captured_at: _Values = _values(_AT, "Values of comparison.captured_at, in this order.")
    exchange_id: _Values = _values(_ID, "As in comparison.")
    item: _Values = _values(SmallInteger, "As in comparison.")
    batch_id: _Values = _values(BigInteger, "As in comparison; null where all are of of_batch.")
    policy_id: _Values = _values(Integer, "As in comparison.")
    slice_ids: _Values = _values(Text, "As in comparison, as text.")
    n_items: _Values = _values(SmallInteger, "As in comparison.")
    in_slices: _Values = _values(
        Text,
        "Of an item whose exchange has several, how many of these are in each of its slices, as text; else null.",
    )
    source: _Values = _values(Text, "As in comparison.")
    header_stratum: _Values = _values(Text, "As in comparison.")
    body_stratum: _Values = _values(Text, "As in comparison.")
    pi1: _Values = _values(Double, "As in comparison.")
    pi2: _Values = _values(Double, "As in comparison.")
    u1: _Values = _values(Double, "As in comparison.")
    u2: _Values = _values(Double, "As in comparison.")
    group_id: _Values = _values(_ID, "group_key of comparison where it has 32 hexadecimal digits, else null.")
    group_text: _Values = _values(Text, "group_key of comparison where group_id is null.")
    flip: _Values = _values(Boolean, "As in comparison.")
    topk: _Values = _values(Boolean, "As in comparison.")
    js: _Values = _values(Double, "As in comparison.")
    divergence: _Values = _values(Double, "As in comparison.")
    margin: _Values = _values(Double, "As in comparison.")
    candidate_margin: _Values = _values(Double, "As in comparison.")
    reference_margin: _Values = _values(Double, "As in comparison.")
    detail: _Values = _values(
        Text, "As in comparison, as text; with detail_formats the values of its keys alone."
    )
    request_id: _Values = _values(
        _ID, "header.x-request-id of comparison.attributes where it is a UUID, else null."
    )
    attributes: _Values = _values(Text, "The other attributes of comparison, as text.")
    features: _Values = _values(Text, "As in comparison, as text.")
    trace_id: _Values = _values(
        _ID, "Trace of comparison where it is a sampled traceparent of version 00, else null."
    )
    span_id: _Values = _values(BigInteger, "Span of that traceparent.")
    trace_text: _Values = _values(Text, "trace of comparison where trace_id is null.")
    stored_at: _Values = _values(_AT, "As in comparison; null where it is condensed_at.")
    tie: _Values = _values(Boolean, "As in comparison.")
    origin: _Values = _values(Text, "As in comparison.")
    latency_s: _Values = _values(Double, "As in comparison.")
    first_token_s: _Values = _values(Double, "As in comparison.")
    per_token_s: _Values = _values(Double, "As in comparison.")
    of_batch: Mapped[BigInt | None] = mapped_column(
        comment="batch whose worker stored the block; null: the monitor made it."
    )
    form: Mapped[int | None] = mapped_column(
        SmallInteger,
        comment="How the columns are to be read. Null: an array of n values each. 1: slice_ids, in_slices, detail, attributes and features have"
        " one text, of all values with chr(1) between them, and chr(2) for null. 2: the same, and margin is |candidate_margin - reference_margin|.",
    )
    detail_formats: Mapped[list[str] | None] = mapped_column(
        ARRAY(Text),
        comment="The format strings of detail: each has the keys, and %s for each value, as format() reads it. Each value of detail is then the"
        " number of its format string and the values of the keys, with chr(3) between them. Null: detail is JSON.",
    )

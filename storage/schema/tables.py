"""Every table of the database: the samples and counts here, the other groups in the modules that are imported.

`migrations/` creates the same schema; a test compares the two.

`comparison` is wide: one row per item, metrics as columns, slices as an array, never a row per metric or slice. It
has no foreign keys, because COPY writes it at line rate, after the rows that it points to, in the same transaction.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    UniqueConstraint,
    text,
    true,
)
from sqlalchemy.dialects.postgresql import ARRAY, INT8MULTIRANGE, JSONB
from sqlalchemy.orm import Mapped, mapped_column

from quantdrift.storage.schema.columns import NOW, Base, BigInt, Float, Int, Json, SmallInt, Str, Time, Uuid
from quantdrift.storage.schema.condensed_table import CondensedBlockTable
from quantdrift.storage.schema.gate_table import GateRunTable, GateVerdictTable
from quantdrift.storage.schema.monitor_tables import (
    AlertActionTable,
    AlertTable,
    BaselineTable,
    DetectorTable,
    FoldTable,
    OutboxTable,
    RollupDay,
    RollupHour,
    ServingTable,
    SessionTable,
    TransitionTable,
    UndeclaredSessionTable,
    VerdictTable,
)
from quantdrift.storage.schema.noise_tables import (
    NoiseChangeTable,
    NoiseFloorTable,
    NoiseSliceTable,
    NoiseTable,
    NoiseTestTable,
)
from quantdrift.storage.schema.slice_tables import (
    ClusteringTable,
    DiscoveryChangeTable,
    DiscoverySearchTable,
    DiscoveryTable,
    EmbeddingTable,
    SliceChangeTable,
    ValueShareTable,
)

__all__ = [
    "AlertActionTable",
    "AlertTable",
    "ArrivalTable",
    "AuditTable",
    "Base",
    "BaselineTable",
    "BatchTable",
    "ClusteringTable",
    "ComparisonTable",
    "CondensedBlockTable",
    "ConfigWarningTable",
    "DetectorTable",
    "DiscoveryChangeTable",
    "DiscoverySearchTable",
    "DiscoveryTable",
    "EmbeddingTable",
    "ExpiryTable",
    "FoldTable",
    "GateRunTable",
    "GateVerdictTable",
    "LabelTable",
    "ModelVersionTable",
    "NoiseChangeTable",
    "NoiseFloorTable",
    "NoiseSliceTable",
    "NoiseTable",
    "NoiseTestTable",
    "OutboxTable",
    "PolicyTable",
    "ProcessReportTable",
    "QuarantineTable",
    "ReportRunTable",
    "RollupDay",
    "RollupHour",
    "ServingTable",
    "SessionTable",
    "SliceChangeTable",
    "SliceTable",
    "TallyTable",
    "TransitionTable",
    "UndeclaredSessionTable",
    "ValueShareTable",
    "VerdictTable",
]


class ModelVersionTable(Base):
    """A candidate version with the reference it is compared with."""

    __tablename__ = "model_version"
    __table_args__ = (
        UniqueConstraint("model", "candidate_version", "reference_digest"),
        {
            "comment": "A candidate version with the reference it is compared with; most other tables refer to it."
        },
    )
    id: Mapped[Int] = mapped_column(Identity(always=True), primary_key=True, comment="Surrogate key.")
    model: Mapped[Str] = mapped_column(comment="Model name, as in requests.")
    candidate_version: Mapped[Str] = mapped_column(comment="Version of the quantised model in production.")
    reference_digest: Mapped[Str] = mapped_column(
        comment="SHA-256 of the reference file; empty where the version has no reference (always unknown)."
    )
    reference: Mapped[Json] = mapped_column(
        server_default=text("'{}'"), comment="Provenance of the reference: path, precision, opset, producer."
    )
    first_seen_at: Mapped[Time] = mapped_column(
        server_default=NOW, comment="When its first exchange was stored."
    )
    lapsed_at: Mapped[Time | None] = mapped_column(
        comment="Since when the version has no place among those of its model and counts as `(other)`; null: it has one."
    )


class SliceTable(Base):
    """A slice of the inputs."""

    __tablename__ = "slice"
    __table_args__ = (
        UniqueConstraint("model", "predicate"),
        {"comment": "A slice of the inputs: a readable predicate with a stable id."},
    )
    id: Mapped[Int] = mapped_column(Identity(always=True), primary_key=True, comment="Stable id.")
    model: Mapped[Str] = mapped_column(comment="Model whose items it takes.")
    predicate: Mapped[Str] = mapped_column(
        comment='Canonical text, e.g. header.x-scanner = "faint"; it identifies the slice.'
    )
    name: Mapped[Str] = mapped_column(comment="Short name shown in alerts; may change.")
    definition: Mapped[Json] = mapped_column(
        comment="The predicate as JSON: a list of conditions under `where`."
    )
    created_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When its first item was stored.")
    lapsed_at: Mapped[Time | None] = mapped_column(
        comment="Since when its value has no place among its rule's slices and counts as `(other)`; null: it has one."
    )


class PolicyTable(Base):
    """The sampling rates of one epoch."""

    __tablename__ = "policy"
    __table_args__ = (
        UniqueConstraint("epoch"),
        {"comment": "Sampling rates of one epoch, as the sidecars sent them with their exchanges."},
    )
    id: Mapped[Int] = mapped_column(Identity(always=True), primary_key=True, comment="Surrogate key.")
    epoch: Mapped[Str] = mapped_column(comment="Identifies rates and salt together.")
    definition: Mapped[Json] = mapped_column(
        comment="Header strata and body strata with their rates, in order."
    )
    first_seen_at: Mapped[Time] = mapped_column(
        server_default=NOW, comment="When its first exchange was stored."
    )


class BatchTable(Base):
    """One transaction of a shadow worker."""

    __tablename__ = "batch"
    __table_args__ = (
        UniqueConstraint("fold_seq"),
        CheckConstraint("kind in ('comparison', 'tally')", name="kind"),
        Index("ix_batch_unfolded", "id", postgresql_where=text("fold_seq is null")),
        Index("ix_batch_stored_at", "stored_at"),
        Index("ix_batch_compared_model", "compared_model", "fold_seq"),
        {
            "comment": "One transaction of a shadow worker; the monitor numbers batches, and folds the exchanges of a model in the order"
            " of their capture."
        },
    )
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Surrogate key.")
    kind: Mapped[Str] = mapped_column(comment="comparison or tally: which rows belong to it.")
    worker: Mapped[Str] = mapped_column(comment="Shadow worker that wrote it.")
    stored_at: Mapped[Time] = mapped_column(server_default=NOW, comment="Start of the transaction.")
    captured_from: Mapped[Time] = mapped_column(comment="Earliest capture time in it.")
    captured_to: Mapped[Time] = mapped_column(comment="Latest capture time in it.")
    n_rows: Mapped[Int] = mapped_column(comment="Rows that belong to it.")
    provenance: Mapped[Json] = mapped_column(
        server_default=text("'{}'"), comment="Runtime that replayed it, with version, provider and device."
    )
    skipped: Mapped[Json] = mapped_column(
        server_default=text("'{}'"),
        comment="Exchanges read but not compared, count by reason: no_reference counts at every delivery, a quarantine"
        " reason once.",
    )
    fold_seq: Mapped[BigInt | None] = mapped_column(
        comment="Number in the order of the fold; null until the monitor has numbered it."
    )
    unreferenced: Mapped[list[int]] = mapped_column(
        ARRAY(Integer),
        server_default=text("'{}'"),
        comment="model_version of the skipped exchanges that have no reference: these versions are still in production.",
    )
    replay_s: Mapped[Float | None] = mapped_column(
        comment="Seconds in which the reference computed it, on the device of provenance; null where it computed nothing."
    )
    compared_model: Mapped[Str | None] = mapped_column(
        comment="Model of its comparisons; null where it has none."
    )
    read_after: Mapped[Time | None] = mapped_column(
        comment="Capture time up to which the model was folded before this batch; null where its rows are folded with it."
    )
    read_until: Mapped[Time | None] = mapped_column(
        comment="Capture time up to which the model was folded with this batch."
    )
    rest_until: Mapped[Time | None] = mapped_column(
        comment="read_until of the batch with which the last of its own rows are folded, at most."
    )
    horizon_s: Mapped[Float | None] = mapped_column(
        comment="Seconds for which exchanges of the model wait for earlier ones from this batch on."
    )
    read_from: Mapped[BigInt | None] = mapped_column(
        comment="fold_seq of the earliest batch with rows that may be folded with this one."
    )


class ComparisonTable(Base):
    """The divergence of one item."""

    __tablename__ = "comparison"
    __table_args__ = (
        Index("ix_comparison_batch_id", "batch_id"),
        Index("ix_comparison_divergence", text("divergence desc nulls last")),
        Index(
            "ix_comparison_request_id",
            text("(attributes ->> 'header.x-request-id')"),
            postgresql_using="hash",
            postgresql_where=text("(attributes ->> 'header.x-request-id') is not null"),
        ),
        Index("ix_comparison_slice_ids", "slice_ids", postgresql_using="gin"),
        Index("ix_comparison_flip", "captured_at", postgresql_where=text("flip")),
        CheckConstraint("pi1 > 0 and pi1 <= 1 and pi2 > 0 and pi2 <= 1", name="inclusion_probability"),
        {
            "comment": "The divergence of one item: candidate output against reference output. One row per item. Days older than"
            " storage.condense_after_days are in condensed_block, with storage.write_blocks the newest, too: comparisons(SINCE, UNTIL) has the"
            " rows of both.",
            "postgresql_partition_by": "RANGE (captured_at)",
        },
    )
    captured_at: Mapped[Time] = mapped_column(
        primary_key=True, comment="When the response was complete, at the sidecar; immutable partition key."
    )
    exchange_id: Mapped[Uuid] = mapped_column(
        primary_key=True, comment="Id of the exchange, created at capture."
    )
    item: Mapped[SmallInt] = mapped_column(
        primary_key=True, comment="Index of the item in the exchange, from 0."
    )
    batch_id: Mapped[BigInt] = mapped_column(comment="batch that stored it.")
    model_version_id: Mapped[Int] = mapped_column(comment="model_version it belongs to.")
    policy_id: Mapped[Int] = mapped_column(comment="policy in effect when it was sampled.")
    slice_ids: Mapped[list[int]] = mapped_column(ARRAY(Integer), comment="Every slice it belongs to.")
    n_items: Mapped[SmallInt] = mapped_column(
        comment="Items of its exchange, which are one group in the statistics."
    )
    source: Mapped[Str] = mapped_column(comment="Sidecar that sampled it.")
    header_stratum: Mapped[Str] = mapped_column(comment="First-phase stratum.")
    body_stratum: Mapped[Str] = mapped_column(comment="Second-phase stratum.")
    pi1: Mapped[Float] = mapped_column(comment="First-phase inclusion probability.")
    pi2: Mapped[Float] = mapped_column(
        comment="Second-phase inclusion probability; weight = 1 / (pi1 * pi2)."
    )
    u1: Mapped[Float] = mapped_column(
        comment="Random number of the first phase in [0, 1): sampled because u1 < pi1."
    )
    u2: Mapped[Float] = mapped_column(
        comment="Random number of the second phase; use it to thin to a constant probability."
    )
    group_key: Mapped[Str] = mapped_column(
        comment="Session (hashed) that counts as one observation, or empty."
    )
    flip: Mapped[bool | None] = mapped_column(
        Boolean, comment="Whether the decision differs; of a classifier, the top class."
    )
    topk: Mapped[bool | None] = mapped_column(
        Boolean, comment="Whether the set of the k top classes differs."
    )
    js: Mapped[Float | None] = mapped_column(comment="Jensen-Shannon divergence, nats, 0 to ln 2.")
    divergence: Mapped[Float | None] = mapped_column(
        comment="Graded divergence of the model's task; of a classifier, KL(reference || candidate) in nats. Infinity is kept."
    )
    margin: Mapped[Float | None] = mapped_column(
        comment="Absolute change of the gap between the two top probabilities."
    )
    candidate_margin: Mapped[Float | None] = mapped_column(
        comment="Gap between the two top probabilities in the candidate's output."
    )
    reference_margin: Mapped[Float | None] = mapped_column(
        comment="Gap between the two top probabilities in the reference's output."
    )
    detail: Mapped[Json | None] = mapped_column(comment="Other measurements by name, e.g. the top classes.")
    attributes: Mapped[Json] = mapped_column(comment="Recorded headers, parameters and JSON values.")
    features: Mapped[Json] = mapped_column(comment="Input features that slices use.")
    trace: Mapped[Str] = mapped_column(comment="traceparent of the production request, or empty.")
    stored_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When it was stored.")
    tie: Mapped[bool | None] = mapped_column(
        Boolean,
        comment="Whether the decision differs only because several entries share the largest score of a side; the model's"
        " count_ties says whether flip counts it. Null where the task chooses no entry.",
    )
    origin: Mapped[Str | None] = mapped_column(
        comment="How it came in, and a space and the caller where that was checked, as `intake NAME`; null: through the"
        " relay.",
    )
    latency_s: Mapped[Float | None] = mapped_column(
        comment="Seconds that the candidate took for the whole exchange, as the relay saw it: from the last byte of the request to"
        " the last byte of the response, waiting at the server included. Null for other ways in.",
    )
    first_token_s: Mapped[Float | None] = mapped_column(
        comment="Of a stream, seconds from the last byte of the request to the first byte of the response's content; else null.",
    )
    per_token_s: Mapped[Float | None] = mapped_column(
        comment="Of a stream whose tokens are counted, seconds for each token after the first; else null.",
    )


class ConfigWarningTable(Base):
    """The latest check of a reference's outputs against the configuration."""

    __tablename__ = "doubt"
    __table_args__ = ({"comment": "Latest check of each reference's outputs against the configuration."},)
    model: Mapped[Str] = mapped_column(primary_key=True, comment="Name of the model.")
    reference_digest: Mapped[Str] = mapped_column(
        primary_key=True, comment="SHA-256 of the reference that was checked."
    )
    option: Mapped[Str] = mapped_column(comment="Option that may be wrong; empty if none.")
    doubt: Mapped[Str] = mapped_column(comment="What seems wrong, and what to set; empty if nothing.")
    found_at: Mapped[Time] = mapped_column(comment="When a worker last checked.")


class TallyTable(Base):
    """Exact counts of one header stratum of one sidecar."""

    __tablename__ = "tally"
    __table_args__ = (
        Index("ix_tally_at", "at"),
        Index("ix_tally_batch_id", "batch_id"),
        {"comment": "Exact counts of one header stratum of one sidecar, cumulative since its boot."},
    )
    source: Mapped[Str] = mapped_column(primary_key=True, comment="Sidecar.")
    boot: Mapped[Uuid] = mapped_column(
        primary_key=True, comment="Id of this start of its supervisor; counts begin at zero."
    )
    stratum: Mapped[Str] = mapped_column(primary_key=True, comment="Header stratum.")
    sequence: Mapped[BigInt] = mapped_column(primary_key=True, comment="Number of the tally within the boot.")
    at: Mapped[Time] = mapped_column(comment="When the counts were read.")
    batch_id: Mapped[BigInt] = mapped_column(
        ForeignKey("batch.id", ondelete="CASCADE"), comment="batch it belongs to."
    )
    offered: Mapped[BigInt] = mapped_column(comment="Inference requests seen on the wire.")
    taken: Mapped[BigInt] = mapped_column(comment="Of these, chosen by the first phase.")
    thinned: Mapped[BigInt] = mapped_column(
        comment="Of the taken, left out by the second phase on purpose; no loss."
    )
    published: Mapped[BigInt] = mapped_column(comment="Of the taken, acknowledged by the stream.")
    lost: Mapped[Json] = mapped_column(comment="Of the taken, lost: count by reason.")
    blind_connections: Mapped[BigInt] = mapped_column(
        comment="Connections of the whole sidecar that were not observed."
    )
    models: Mapped[Json] = mapped_column(
        server_default=text("'{}'"),
        comment="By model, where requests name one: taken; of these, thinned, published, and lost by reason; the row of the"
        " sidecar's table of counts, and the last number given to an exchange of it; of a model that is not configured,"
        " how many requests named it (unknown).",
    )
    streamed_at: Mapped[Time | None] = mapped_column(
        comment="When the stream stored it, by the server's clock; null if unknown."
    )
    final: Mapped[bool] = mapped_column(
        server_default=text("false"),
        comment="Whether it is the last one of its boot: no process of it is left, and whatever it took is published,"
        " thinned or lost.",
    )
    relay_cpu_s: Mapped[Float | None] = mapped_column(
        comment="Processor seconds of the relay workers of the whole sidecar since its boot; null if unknown."
    )


class QuarantineTable(Base):
    """A quarantined exchange."""

    __tablename__ = "quarantine"
    __table_args__ = (
        Index("ix_quarantine_quarantined_at", "quarantined_at"),
        UniqueConstraint("stream_sequence", "digest", "reason"),
        {
            "comment": "Exchanges that could not be compared, with the reason. Payloads are deleted after"
            " storage.quarantine_days."
        },
    )
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Surrogate key.")
    stream_sequence: Mapped[BigInt] = mapped_column(
        comment="Sequence in the stream; it begins at 1 again when the stream is created again."
    )
    digest: Mapped[bytes] = mapped_column(
        LargeBinary,
        comment="SHA-256 of the message; the same message with the same sequence counts once per reason.",
    )
    exchange_id: Mapped[Uuid | None] = mapped_column(comment="Id of the exchange, if it could be read.")
    model: Mapped[Str] = mapped_column(comment="Model, if it could be read, else empty.")
    captured_at: Mapped[Time | None] = mapped_column(comment="Capture time, if it could be read.")
    quarantined_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When it was quarantined.")
    reason: Mapped[Str] = mapped_column(comment="One of a closed set of reasons, which metrics count too.")
    detail: Mapped[Str] = mapped_column(comment="What was wrong, without the payload.")
    payload: Mapped[bytes | None] = mapped_column(
        LargeBinary, comment="The message; deleted after storage.quarantine_days."
    )


class ReportRunTable(Base):
    """A report that was written."""

    __tablename__ = "report_run"
    __table_args__ = ({"comment": "Reports that were written, with the figures they show."},)
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Surrogate key.")
    kind: Mapped[Str] = mapped_column(comment="week, day or range.")
    from_at: Mapped[Time] = mapped_column(comment="Start of the period.")
    to_at: Mapped[Time] = mapped_column(comment="End of the period, exclusive.")
    created_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When it was written.")
    path: Mapped[Str] = mapped_column(comment="File it was written to.")
    figures: Mapped[Json] = mapped_column(comment="The figures of the report, as JSON.")


class CompatibilityTable(Base):
    """The oldest release that can work with the schema."""

    __tablename__ = "compatibility"
    __table_args__ = (
        CheckConstraint("id = 1", name="singleton"),
        {
            "comment": "The oldest release that can work with this schema: one row, written by `quantdrift db upgrade`."
        },
    )
    id: Mapped[SmallInt] = mapped_column(primary_key=True, autoincrement=False, comment="Always 1.")
    oldest_revision: Mapped[Str] = mapped_column(
        comment="Newest revision that the oldest of these releases knows."
    )


class LabelTable(Base):
    """Which side was right about one compared item, by its true label."""

    __tablename__ = "label"
    __table_args__ = (
        Index("ix_label_model_version_id", "model_version_id", "captured_at"),
        {
            "comment": "Which side was right about a compared item, by the true label that somebody loaded with"
            " `quantdrift labels load`. One row per labelled item."
        },
    )
    captured_at: Mapped[Time] = mapped_column(primary_key=True, comment="Of the item, as in comparison.")
    exchange_id: Mapped[Uuid] = mapped_column(primary_key=True, comment="Of the item, as in comparison.")
    item: Mapped[SmallInt] = mapped_column(
        primary_key=True, comment="Index of the item in the exchange, from 0."
    )
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), comment="model_version it belongs to."
    )
    label: Mapped[Str | None] = mapped_column(
        comment="The true class, by its number or its name in models.labels, as loaded; null where the file said which side was"
        " right."
    )
    candidate_right: Mapped[bool] = mapped_column(comment="Whether the candidate's answer was right.")
    reference_right: Mapped[bool] = mapped_column(comment="Whether the reference's answer was right.")
    loaded_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When it was loaded.")
    drawn_for: Mapped[Int | None] = mapped_column(
        comment="Slice of which `quantdrift labels wanted` drew it among the changed answers; null: it was not drawn."
    )
    as_it_came: Mapped[bool] = mapped_column(
        server_default=true(), comment="Whether it was loaded from a file that says nothing of a draw."
    )


class AuditTable(Base):
    """One action of a person or a process."""

    __tablename__ = "audit"
    __table_args__ = (
        {
            "comment": "Who changed what and when, in a chain of hashes. Only the function `audit_add` writes it; rows are never"
            " changed or deleted."
        },
    )
    seq: Mapped[BigInt] = mapped_column(
        primary_key=True, autoincrement=False, comment="1, 2, 3, ... without a gap."
    )
    at: Mapped[Time] = mapped_column(comment="When it was written, by the database's clock.")
    actor: Mapped[Str] = mapped_column(comment="Who: the user that Postgres authenticated (session_user).")
    action: Mapped[Str] = mapped_column(comment="What was done, as the command is called.")
    model: Mapped[Str] = mapped_column(comment="Model; empty: no single one.")
    subject: Mapped[Str] = mapped_column(
        comment="What was changed: `slice 12`, `discovery 3`, `revision 7` of the bucket of pauses, or a process; may be"
        " empty."
    )
    before: Mapped[dict[str, Any] | None] = mapped_column(
        JSONB(none_as_null=True), comment="The former state; null: there was none, or it is unknown."
    )
    after: Mapped[dict[str, Any] | None] = mapped_column(
        JSONB(none_as_null=True), comment="The new state; null: there is none."
    )
    note: Mapped[Str] = mapped_column(comment="Reason that the person gave; may be empty.")
    hash: Mapped[bytes] = mapped_column(
        LargeBinary,
        comment="SHA-256 of the hash of the entry before and of all other columns; `quantdrift audit verify` computes it"
        " again.",
    )


class ProcessReportTable(Base):
    """The newest report of one process."""

    __tablename__ = "process_report"
    __table_args__ = (
        {
            "comment": "Configuration and local pause of each sidecar and shadow worker, as it reported them last, and as the"
            " audit has them. One row per process."
        },
    )
    role: Mapped[Str] = mapped_column(primary_key=True, comment="sidecar or shadow.")
    source: Mapped[Str] = mapped_column(primary_key=True, comment="Pod, or host.")
    reported_at: Mapped[Time] = mapped_column(comment="When the stream took the newest report of a change.")
    seen_at: Mapped[Time] = mapped_column(
        server_default=NOW, comment="When its last report was stored, to the hour."
    )
    stored_by: Mapped[Str] = mapped_column(
        server_default=text("session_user"), comment="Database user who stored the first report."
    )
    digest: Mapped[Str] = mapped_column(comment="SHA-256 of its options.")
    options: Mapped[Json] = mapped_column(
        comment="Options that differ from their default, without credentials.",
    )
    pause: Mapped[dict[str, Any] | None] = mapped_column(
        JSONB(none_as_null=True), comment="What is paused at this process alone; null: nothing."
    )
    audited_digest: Mapped[Str | None] = mapped_column(comment="digest, as the audit has it; null: not yet.")
    audited_options: Mapped[dict[str, Any] | None] = mapped_column(
        JSONB(none_as_null=True), comment="options, as the audit has them."
    )
    audited_pause: Mapped[dict[str, Any] | None] = mapped_column(
        JSONB(none_as_null=True), comment="pause, as the audit has it."
    )


class ArrivalTable(Base):
    """Numbers of the exchanges that workers have finished, for one row of a sidecar's table of counts."""

    __tablename__ = "arrival"
    __table_args__ = (
        {
            "comment": "Exchanges that the workers have finished, per header stratum and model of one sidecar. A published"
            " exchange that is missing here and in the stream has expired."
        },
    )
    boot: Mapped[Uuid] = mapped_column(primary_key=True, comment="Start of the sidecar, as in tally.")
    counts_row: Mapped[Int] = mapped_column(
        Integer,
        primary_key=True,
        comment="Row of the sidecar's table of counts, as in the message header Quantdrift-Number.",
    )
    source: Mapped[Str | None] = mapped_column(comment="Sidecar; null until its first tally is stored.")
    stratum: Mapped[Str | None] = mapped_column(
        comment="Header stratum; null until its first tally is stored."
    )
    model: Mapped[Str | None] = mapped_column(comment="Model; null until its first tally is stored.")
    numbers: Mapped[object] = mapped_column(
        INT8MULTIRANGE,
        server_default=text("'{}'"),
        comment="Numbers of the exchanges that were compared, quarantined or skipped.",
    )
    closed: Mapped[BigInt] = mapped_column(
        BigInteger,
        server_default=text("0"),
        comment="Numbers in `numbers` that never arrived: gaps are closed when there are too many.",
    )
    expired: Mapped[BigInt] = mapped_column(
        BigInteger, server_default=text("0"), comment="Exchanges that expired, as of the tally in `checked`."
    )
    checked: Mapped[BigInt] = mapped_column(
        BigInteger,
        server_default=text("0"),
        comment="Sequence of the last tally that the numbers were compared with.",
    )
    due: Mapped[bool] = mapped_column(
        server_default=text("true"), comment="Whether new numbers or a new tally wait to be compared."
    )
    created_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When this row was created.")


class ExpiryTable(Base):
    """An increase of the number of expired exchanges."""

    __tablename__ = "expiry"
    __table_args__ = (
        {
            "comment": "Exchanges that expired in the stream before they were replayed: one row per increase of a count."
            " Deleted with its batch."
        },
    )
    batch_id: Mapped[BigInt] = mapped_column(
        ForeignKey("batch.id", ondelete="CASCADE"),
        primary_key=True,
        comment="batch it belongs to, of kind tally.",
    )
    boot: Mapped[Uuid] = mapped_column(primary_key=True, comment="Start of the sidecar, as in tally.")
    counts_row: Mapped[Int] = mapped_column(
        Integer, primary_key=True, comment="Row of the sidecar's table of counts."
    )
    source: Mapped[Str] = mapped_column(comment="Sidecar.")
    stratum: Mapped[Str] = mapped_column(comment="Header stratum.")
    model: Mapped[Str] = mapped_column(comment="Model.")
    n: Mapped[BigInt] = mapped_column(
        comment="Exchanges that expired; negative where a worker still had some in progress and finished them later."
    )

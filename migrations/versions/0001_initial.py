"""The first schema: every table and view.

Revision ID: 0001
Revises:
"""

from typing import Final, NamedTuple

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_TIME: Final = sa.DateTime(timezone=True)
_UUID: Final = sa.UUID(as_uuid=False)


def upgrade() -> None:
    """Go one revision forward."""
    _exchanges()
    _expiries()
    _noise()
    _monitor()
    _slices()
    _reports()
    for view in _VIEWS:
        _create(view)


def downgrade() -> None:
    """Go one revision back."""
    for view in reversed(_VIEWS):
        op.execute(f"drop view {view.name}")
    for table in reversed(_TABLES):
        op.drop_table(table)


_TABLES: Final = (
    "model_version",
    "slice",
    "policy",
    "batch",
    "comparison",
    "tally",
    "quarantine",
    "doubt",
    "arrival",
    "expiry",
    "noise",
    "noise_floor",
    "noise_change",
    "fold",
    "detector",
    "baseline",
    "session",
    "alert",
    "verdict",
    "transition",
    "outbox",
    "rollup_hour",
    "rollup_day",
    "discovery",
    "discovery_change",
    "discovery_search",
    "clustering",
    "embedding",
    "report_run",
)


def _exchanges() -> None:
    op.create_table(
        "model_version",
        sa.Column("id", sa.Integer(), sa.Identity(always=True), nullable=False, comment="Surrogate key."),
        sa.Column("model", sa.Text(), nullable=False, comment="Model name, as in requests."),
        sa.Column(
            "candidate_version",
            sa.Text(),
            nullable=False,
            comment="Version of the quantised model in production.",
        ),
        sa.Column(
            "reference_digest",
            sa.Text(),
            nullable=False,
            comment="SHA-256 of the reference file; empty where the version has no reference (always unknown).",
        ),
        sa.Column(
            "reference",
            postgresql.JSONB(),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="Provenance of the reference: path, precision, opset, producer.",
        ),
        sa.Column(
            "first_seen_at",
            _TIME,
            server_default=sa.text("now()"),
            nullable=False,
            comment="When its first exchange was stored.",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_model_version")),
        sa.UniqueConstraint(
            "model",
            "candidate_version",
            "reference_digest",
            name=op.f("uq_model_version_model_candidate_version_reference_digest"),
        ),
        comment="A candidate version with the reference it is compared with; most other tables refer to it.",
    )
    op.create_table(
        "slice",
        sa.Column("id", sa.Integer(), sa.Identity(always=True), nullable=False, comment="Stable id."),
        sa.Column("model", sa.Text(), nullable=False, comment="Model whose items it takes."),
        sa.Column(
            "predicate",
            sa.Text(),
            nullable=False,
            comment='Canonical text, e.g. header.x-scanner = "faint"; it identifies the slice.',
        ),
        sa.Column("name", sa.Text(), nullable=False, comment="Short name shown in alerts; may change."),
        sa.Column(
            "definition",
            postgresql.JSONB(),
            nullable=False,
            comment="The predicate as JSON: a list of conditions under `where`.",
        ),
        sa.Column(
            "created_at",
            _TIME,
            server_default=sa.text("now()"),
            nullable=False,
            comment="When its first item was stored.",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_slice")),
        sa.UniqueConstraint("model", "predicate", name=op.f("uq_slice_model_predicate")),
        comment="A slice of the inputs: a readable predicate with a stable id.",
    )
    op.create_table(
        "policy",
        sa.Column("id", sa.Integer(), sa.Identity(always=True), nullable=False, comment="Surrogate key."),
        sa.Column("epoch", sa.Text(), nullable=False, comment="Identifies rates and salt together."),
        sa.Column(
            "definition",
            postgresql.JSONB(),
            nullable=False,
            comment="Header strata and body strata with their rates, in order.",
        ),
        sa.Column(
            "first_seen_at",
            _TIME,
            server_default=sa.text("now()"),
            nullable=False,
            comment="When its first exchange was stored.",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policy")),
        sa.UniqueConstraint("epoch", name=op.f("uq_policy_epoch")),
        comment="Sampling rates of one epoch, as the sidecars sent them with their exchanges.",
    )
    op.create_table(
        "batch",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Surrogate key."),
        sa.Column("kind", sa.Text(), nullable=False, comment="comparison or tally: which rows belong to it."),
        sa.Column("worker", sa.Text(), nullable=False, comment="Shadow worker that wrote it."),
        sa.Column(
            "stored_at",
            _TIME,
            server_default=sa.text("now()"),
            nullable=False,
            comment="Start of the transaction.",
        ),
        sa.Column("captured_from", _TIME, nullable=False, comment="Earliest capture time in it."),
        sa.Column("captured_to", _TIME, nullable=False, comment="Latest capture time in it."),
        sa.Column("n_rows", sa.Integer(), nullable=False, comment="Rows that belong to it."),
        sa.Column(
            "provenance",
            postgresql.JSONB(),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="Runtime that replayed it, with version, provider and device.",
        ),
        sa.Column(
            "skipped",
            postgresql.JSONB(),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="Exchanges read but not compared, count by reason: no_reference counts at every delivery, a quarantine reason once.",
        ),
        sa.Column(
            "fold_seq",
            sa.BigInteger(),
            nullable=True,
            comment="Number in the order of the fold; null until the monitor has numbered it.",
        ),
        sa.Column(
            "unreferenced",
            sa.ARRAY(sa.Integer()),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="model_version of the skipped exchanges that have no reference: these versions are still in production.",
        ),
        sa.CheckConstraint("kind in ('comparison', 'tally')", name=op.f("ck_batch_kind")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batch")),
        sa.UniqueConstraint("fold_seq", name=op.f("uq_batch_fold_seq")),
        comment="One transaction of a shadow worker; the monitor numbers batches and folds them in that order.",
    )
    op.create_index("ix_batch_stored_at", "batch", ["stored_at"], unique=False)
    op.create_index(
        "ix_batch_unfolded", "batch", ["id"], unique=False, postgresql_where=sa.text("fold_seq is null")
    )
    op.create_table(
        "comparison",
        sa.Column(
            "captured_at",
            _TIME,
            nullable=False,
            comment="When the response was complete, at the sidecar; immutable partition key.",
        ),
        sa.Column("exchange_id", _UUID, nullable=False, comment="Id of the exchange, created at capture."),
        sa.Column(
            "item", sa.SmallInteger(), nullable=False, comment="Index of the item in the exchange, from 0."
        ),
        sa.Column("batch_id", sa.BigInteger(), nullable=False, comment="batch that stored it."),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="model_version it belongs to."),
        sa.Column("policy_id", sa.Integer(), nullable=False, comment="policy in effect when it was sampled."),
        sa.Column("slice_ids", sa.ARRAY(sa.Integer()), nullable=False, comment="Every slice it belongs to."),
        sa.Column(
            "n_items",
            sa.SmallInteger(),
            nullable=False,
            comment="Items of its exchange, which are one group in the statistics.",
        ),
        sa.Column("source", sa.Text(), nullable=False, comment="Sidecar that sampled it."),
        sa.Column("header_stratum", sa.Text(), nullable=False, comment="First-phase stratum."),
        sa.Column("body_stratum", sa.Text(), nullable=False, comment="Second-phase stratum."),
        sa.Column("pi1", sa.Double(), nullable=False, comment="First-phase inclusion probability."),
        sa.Column(
            "pi2",
            sa.Double(),
            nullable=False,
            comment="Second-phase inclusion probability; weight = 1 / (pi1 * pi2).",
        ),
        sa.Column(
            "u1",
            sa.Double(),
            nullable=False,
            comment="Random number of the first phase in [0, 1): sampled because u1 < pi1.",
        ),
        sa.Column(
            "u2",
            sa.Double(),
            nullable=False,
            comment="Random number of the second phase; use it to thin to a constant probability.",
        ),
        sa.Column(
            "group_key",
            sa.Text(),
            nullable=False,
            comment="Session (hashed) that counts as one observation, or empty.",
        ),
        sa.Column(
            "flip",
            sa.Boolean(),
            nullable=True,
            comment="Whether the decision differs; of a classifier, the top class.",
        ),
        sa.Column(
            "topk", sa.Boolean(), nullable=True, comment="Whether the set of the k top classes differs."
        ),
        sa.Column("js", sa.Double(), nullable=True, comment="Jensen-Shannon divergence, nats, 0 to ln 2."),
        sa.Column(
            "divergence",
            sa.Double(),
            nullable=True,
            comment="Graded divergence of the model's task; of a classifier, KL(reference || candidate) in nats. Infinity is kept.",
        ),
        sa.Column(
            "margin",
            sa.Double(),
            nullable=True,
            comment="Absolute change of the gap between the two top probabilities.",
        ),
        sa.Column(
            "candidate_margin",
            sa.Double(),
            nullable=True,
            comment="Gap between the two top probabilities in the candidate's output.",
        ),
        sa.Column(
            "reference_margin",
            sa.Double(),
            nullable=True,
            comment="Gap between the two top probabilities in the reference's output.",
        ),
        sa.Column(
            "detail",
            postgresql.JSONB(),
            nullable=True,
            comment="Other measurements by name, e.g. the top classes.",
        ),
        sa.Column(
            "attributes",
            postgresql.JSONB(),
            nullable=False,
            comment="Recorded headers, parameters and JSON values.",
        ),
        sa.Column("features", postgresql.JSONB(), nullable=False, comment="Input features that slices use."),
        sa.Column(
            "trace", sa.Text(), nullable=False, comment="traceparent of the production request, or empty."
        ),
        sa.Column(
            "stored_at", _TIME, server_default=sa.text("now()"), nullable=False, comment="When it was stored."
        ),
        sa.CheckConstraint(
            "pi1 > 0 and pi1 <= 1 and pi2 > 0 and pi2 <= 1", name=op.f("ck_comparison_inclusion_probability")
        ),
        sa.PrimaryKeyConstraint("captured_at", "exchange_id", "item", name=op.f("pk_comparison")),
        comment="The divergence of one item: candidate output against reference output. One row per item.",
        postgresql_partition_by="RANGE (captured_at)",
    )
    op.create_index("ix_comparison_batch_id", "comparison", ["batch_id"], unique=False)
    op.create_table(
        "tally",
        sa.Column("source", sa.Text(), nullable=False, comment="Sidecar."),
        sa.Column(
            "boot", _UUID, nullable=False, comment="Id of this start of its supervisor; counts begin at zero."
        ),
        sa.Column("stratum", sa.Text(), nullable=False, comment="Header stratum."),
        sa.Column(
            "sequence", sa.BigInteger(), nullable=False, comment="Number of the tally within the boot."
        ),
        sa.Column("at", _TIME, nullable=False, comment="When the counts were read."),
        sa.Column("batch_id", sa.BigInteger(), nullable=False, comment="batch it belongs to."),
        sa.Column("offered", sa.BigInteger(), nullable=False, comment="Inference requests seen on the wire."),
        sa.Column("taken", sa.BigInteger(), nullable=False, comment="Of these, chosen by the first phase."),
        sa.Column(
            "thinned",
            sa.BigInteger(),
            nullable=False,
            comment="Of the taken, left out by the second phase on purpose; no loss.",
        ),
        sa.Column(
            "published", sa.BigInteger(), nullable=False, comment="Of the taken, acknowledged by the stream."
        ),
        sa.Column("lost", postgresql.JSONB(), nullable=False, comment="Of the taken, lost: count by reason."),
        sa.Column(
            "blind_connections",
            sa.BigInteger(),
            nullable=False,
            comment="Connections of the whole sidecar that were not observed.",
        ),
        sa.Column(
            "models",
            postgresql.JSONB(),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="By model, where requests name one: taken; of these, published, and lost by reason; the row of the sidecar's table of counts, and the last number given to an exchange of it.",
        ),
        sa.Column(
            "streamed_at",
            _TIME,
            nullable=True,
            comment="When the stream stored it, by the server's clock; null if unknown.",
        ),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batch.id"], name=op.f("fk_tally_batch_id_batch"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("source", "boot", "stratum", "sequence", name=op.f("pk_tally")),
        comment="Exact counts of one header stratum of one sidecar, cumulative since its boot.",
    )
    op.create_index("ix_tally_at", "tally", ["at"], unique=False)
    op.create_index("ix_tally_batch_id", "tally", ["batch_id"], unique=False)
    op.create_table(
        "quarantine",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Surrogate key."),
        sa.Column(
            "stream_sequence",
            sa.BigInteger(),
            nullable=False,
            comment="Sequence in the stream; it begins at 1 again when the stream is created again.",
        ),
        sa.Column(
            "digest",
            sa.LargeBinary(),
            nullable=False,
            comment="SHA-256 of the message; the same message with the same sequence counts once per reason.",
        ),
        sa.Column("exchange_id", _UUID, nullable=True, comment="Id of the exchange, if it could be read."),
        sa.Column("model", sa.Text(), nullable=False, comment="Model, if it could be read, else empty."),
        sa.Column("captured_at", _TIME, nullable=True, comment="Capture time, if it could be read."),
        sa.Column(
            "quarantined_at",
            _TIME,
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was quarantined.",
        ),
        sa.Column(
            "reason",
            sa.Text(),
            nullable=False,
            comment="One of a closed set of reasons, which metrics count too.",
        ),
        sa.Column("detail", sa.Text(), nullable=False, comment="What was wrong, without the payload."),
        sa.Column(
            "payload",
            sa.LargeBinary(),
            nullable=True,
            comment="The message; deleted after storage.quarantine_days.",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_quarantine")),
        sa.UniqueConstraint(
            "stream_sequence", "digest", "reason", name=op.f("uq_quarantine_stream_sequence_digest_reason")
        ),
        comment="Exchanges that could not be compared, with the reason. Payloads are deleted after storage.quarantine_days.",
    )
    op.create_index("ix_quarantine_quarantined_at", "quarantine", ["quarantined_at"], unique=False)
    op.create_table(
        "doubt",
        sa.Column("model", sa.Text(), nullable=False, comment="Name of the model."),
        sa.Column(
            "reference_digest",
            sa.Text(),
            nullable=False,
            comment="SHA-256 of the reference that was checked.",
        ),
        sa.Column("option", sa.Text(), nullable=False, comment="Option that may be wrong; empty if none."),
        sa.Column(
            "doubt", sa.Text(), nullable=False, comment="What seems wrong, and what to set; empty if nothing."
        ),
        sa.Column("found_at", _TIME, nullable=False, comment="When a worker last checked."),
        sa.PrimaryKeyConstraint("model", "reference_digest", name=op.f("pk_doubt")),
        comment="Latest check of each reference's outputs against the configuration.",
    )


def _expiries() -> None:
    op.create_table(
        "arrival",
        sa.Column("boot", _UUID, nullable=False, comment="Start of the sidecar, as in tally."),
        sa.Column(
            "counts_row",
            sa.Integer(),
            nullable=False,
            comment="Row of the sidecar's table of counts, as in the message header Quantdrift-Number.",
        ),
        sa.Column(
            "source", sa.Text(), nullable=True, comment="Sidecar; null until its first tally is stored."
        ),
        sa.Column(
            "stratum",
            sa.Text(),
            nullable=True,
            comment="Header stratum; null until its first tally is stored.",
        ),
        sa.Column("model", sa.Text(), nullable=True, comment="Model; null until its first tally is stored."),
        sa.Column(
            "numbers",
            postgresql.INT8MULTIRANGE(),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="Numbers of the exchanges that were compared, quarantined or skipped.",
        ),
        sa.Column(
            "closed",
            sa.BigInteger(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Numbers in `numbers` that never arrived: gaps are closed when there are too many.",
        ),
        sa.Column(
            "expired",
            sa.BigInteger(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Exchanges that expired, as of the tally in `checked`.",
        ),
        sa.Column(
            "checked",
            sa.BigInteger(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Sequence of the last tally that the numbers were compared with.",
        ),
        sa.Column(
            "due",
            sa.Boolean(),
            server_default=sa.text("true"),
            nullable=False,
            comment="Whether new numbers or a new tally wait to be compared.",
        ),
        sa.Column(
            "created_at",
            _TIME,
            server_default=sa.text("now()"),
            nullable=False,
            comment="When this row was created.",
        ),
        sa.PrimaryKeyConstraint("boot", "counts_row", name=op.f("pk_arrival")),
        comment="Exchanges that the workers have finished, per header stratum and model of one sidecar. A published exchange that is missing here and in the stream has expired.",
    )
    op.create_table(
        "expiry",
        sa.Column("batch_id", sa.BigInteger(), nullable=False, comment="batch it belongs to, of kind tally."),
        sa.Column("boot", _UUID, nullable=False, comment="Start of the sidecar, as in tally."),
        sa.Column(
            "counts_row", sa.Integer(), nullable=False, comment="Row of the sidecar's table of counts."
        ),
        sa.Column("source", sa.Text(), nullable=False, comment="Sidecar."),
        sa.Column("stratum", sa.Text(), nullable=False, comment="Header stratum."),
        sa.Column("model", sa.Text(), nullable=False, comment="Model."),
        sa.Column(
            "n",
            sa.BigInteger(),
            nullable=False,
            comment="Exchanges that expired; negative where a worker still had some in progress and finished them later.",
        ),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batch.id"], name=op.f("fk_expiry_batch_id_batch"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("batch_id", "boot", "counts_row", name=op.f("pk_expiry")),
        comment="Exchanges that expired in the stream before they were replayed: one row per increase of a count. Deleted with its batch.",
    )


def _noise() -> None:
    op.create_table(
        "noise",
        sa.Column("exchange_id", _UUID, nullable=False, comment="Id of the exchange, as in comparison."),
        sa.Column(
            "item", sa.SmallInteger(), nullable=False, comment="Index of the item in the exchange, from 0."
        ),
        sa.Column(
            "side", sa.Text(), nullable=False, comment="reference or candidate: which of them was repeated."
        ),
        sa.Column(
            "captured_at", _TIME, nullable=False, comment="When the response was complete, as in comparison."
        ),
        sa.Column(
            "batch_id",
            sa.BigInteger(),
            nullable=False,
            comment="batch that stored it: one after that of its comparison.",
        ),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="model_version it belongs to."),
        sa.Column("policy_id", sa.Integer(), nullable=False, comment="policy in effect when it was sampled."),
        sa.Column("pi1", sa.Double(), nullable=False, comment="First-phase inclusion probability."),
        sa.Column(
            "pi2",
            sa.Double(),
            nullable=False,
            comment="Second-phase inclusion probability; weight = 1 / (pi1 * pi2).",
        ),
        sa.Column("flip", sa.Boolean(), nullable=True, comment="Whether the two decisions differ."),
        sa.Column(
            "divergence",
            sa.Double(),
            nullable=True,
            comment="Graded divergence of the second output from the first, as in comparison; infinity is kept.",
        ),
        sa.CheckConstraint("side in ('reference', 'candidate')", name=op.f("ck_noise_side")),
        sa.CheckConstraint(
            "pi1 > 0 and pi1 <= 1 and pi2 > 0 and pi2 <= 1", name=op.f("ck_noise_inclusion_probability")
        ),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batch.id"], name=op.f("fk_noise_batch_id_batch"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("exchange_id", "item", "side", name=op.f("pk_noise")),
        comment="The divergence of one item from itself: the reference replayed it again in another batch, or the candidate answered it again. Deleted with its batch.",
    )
    op.create_index("ix_noise_batch_id", "noise", ["batch_id"], unique=False)
    op.create_table(
        "noise_floor",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("side", sa.Text(), nullable=False, comment="reference or candidate."),
        sa.Column("metric", sa.Text(), nullable=False, comment="flip or divergence."),
        sa.Column(
            "scale",
            sa.Double(),
            nullable=False,
            comment="One unit of the values below, in the metric's own unit.",
        ),
        sa.Column("older_n", sa.Integer(), nullable=False, comment="Exchanges in the window in use."),
        sa.Column("older_weight", sa.Double(), nullable=False, comment="Sum of their weights."),
        sa.Column("older_total", sa.Double(), nullable=False, comment="Sum of their weighted values."),
        sa.Column("newer_n", sa.Integer(), nullable=False, comment="Exchanges in the next window."),
        sa.Column("newer_weight", sa.Double(), nullable=False, comment="Sum of their weights."),
        sa.Column("newer_total", sa.Double(), nullable=False, comment="Sum of their weighted values."),
        sa.Column("low", sa.Double(), nullable=False, comment="Time-uniform lower bound of the mean."),
        sa.Column("high", sa.Double(), nullable=False, comment="Time-uniform upper bound of the mean."),
        sa.Column(
            "added", sa.Double(), nullable=False, comment="Amount added to every budget of the version."
        ),
        sa.Column(
            "budget", sa.Double(), nullable=False, comment="Accepted mean that the noise is compared with."
        ),
        sa.Column(
            "exceeds",
            sa.Boolean(),
            nullable=False,
            comment="Whether noise exceeds monitor.noise_bound of the budget: the version's slices are then unknown.",
        ),
        sa.Column("updated_at", _TIME, nullable=False, comment="Event time of the fold that wrote this."),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="Number of that fold."),
        sa.CheckConstraint("side in ('reference', 'candidate')", name=op.f("ck_noise_floor_side")),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_noise_floor_model_version_id_model_version"),
        ),
        sa.PrimaryKeyConstraint("model_version_id", "side", "metric", name=op.f("pk_noise_floor")),
        comment="Estimated noise of a reference or candidate, as of its last fold. Values are divided by `scale`.",
    )
    op.create_table(
        "noise_change",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Surrogate key."),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("side", sa.Text(), nullable=False, comment="reference or candidate."),
        sa.Column("metric", sa.Text(), nullable=False, comment="flip or divergence."),
        sa.Column(
            "exceeds", sa.Boolean(), nullable=False, comment="Whether it exceeds the bound from here on."
        ),
        sa.Column("at", _TIME, nullable=False, comment="Event time."),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="Fold that made it."),
        sa.Column(
            "details",
            postgresql.JSONB(),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="Attributes of the event that is sent.",
        ),
        sa.CheckConstraint("side in ('reference', 'candidate')", name=op.f("ck_noise_change_side")),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_noise_change_model_version_id_model_version"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_noise_change")),
        comment="When noise was shown to exceed monitor.noise_bound of the budget, and when to be below it again.",
    )
    op.create_index("ix_noise_change_at", "noise_change", ["at"], unique=False)


def _monitor() -> None:
    op.create_table(
        "fold",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False, comment="Always 1."),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="Last batch folded."),
        sa.Column(
            "event_time", _TIME, nullable=True, comment="Running maximum of capture times: the fold's clock."
        ),
        sa.Column(
            "mass",
            sa.Double(),
            nullable=False,
            comment="Lambda: integral of dt / (30 days * live detectors).",
        ),
        sa.Column("n_detectors", sa.Integer(), nullable=False, comment="Live detectors."),
        sa.Column(
            "folded_at",
            _TIME,
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was folded, by the database's clock.",
        ),
        sa.CheckConstraint("id = 1", name=op.f("ck_fold_singleton")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_fold")),
        comment="The monitor's progress: one row.",
    )
    op.create_table(
        "detector",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice it watches."),
        sa.Column("metric", sa.Text(), nullable=False, comment="Metric it watches."),
        sa.Column(
            "kind",
            sa.Text(),
            nullable=False,
            comment="Kind of detector: budget, change (against a learned baseline) or tail.",
        ),
        sa.Column(
            "state",
            sa.LargeBinary(),
            nullable=False,
            comment="Binary state with version and checksum; a restart resumes bit for bit.",
        ),
        sa.Column(
            "budget", sa.Double(), nullable=False, comment="Accepted mean, divided by the metric's cap."
        ),
        sa.Column("n_groups", sa.BigInteger(), nullable=False, comment="Groups folded since the last reset."),
        sa.Column(
            "evidence",
            sa.Double(),
            nullable=False,
            comment="Evidence towards a page; the evidence of a slice's detectors is summed.",
        ),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="Last fold that changed it."),
        sa.Column("created_at", _TIME, nullable=False, comment="Event time of its first group."),
        sa.Column("last_at", _TIME, nullable=False, comment="Event time of its last group."),
        sa.Column(
            "retired_at",
            _TIME,
            nullable=True,
            comment="When it was retired, and no longer counted as live; null while it is live.",
        ),
        sa.Column(
            "noise",
            sa.Double(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Part of `budget` that covers noise; the owner accepts the rest.",
        ),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_detector_model_version_id_model_version"),
        ),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_detector_slice_id_slice")),
        sa.PrimaryKeyConstraint("model_version_id", "slice_id", "metric", "kind", name=op.f("pk_detector")),
        comment="State of a sequential detector of one metric on one slice, as of its last fold. Kept for storage.superseded_days after it is retired.",
    )
    op.create_table(
        "baseline",
        sa.Column(
            "id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Order of decisions."
        ),
        sa.Column(
            "model_version_id",
            sa.Integer(),
            nullable=False,
            comment="Candidate and reference that it applies to.",
        ),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice."),
        sa.Column("metric", sa.Text(), nullable=False, comment="Metric."),
        sa.Column("kind", sa.Text(), nullable=False, comment="Detector: budget, change or tail."),
        sa.Column(
            "source",
            sa.Text(),
            nullable=False,
            comment="learned or inherited (by the monitor); accepted, imported, frozen or kept (by a person).",
        ),
        sa.Column("made_by", sa.Text(), nullable=False, comment="Who decided: a user name, or monitor."),
        sa.Column(
            "made_at", _TIME, server_default=sa.text("now()"), nullable=False, comment="When it was decided."
        ),
        sa.Column("reason", sa.Text(), nullable=False, comment="Reason that the person gave; may be empty."),
        sa.Column("from_at", _TIME, nullable=True, comment="Capture time of the first row it was made from."),
        sa.Column("to_at", _TIME, nullable=True, comment="Capture time of the last row it was made from."),
        sa.Column("n_groups", sa.BigInteger(), nullable=False, comment="Groups it was made from."),
        sa.Column(
            "from_version_id",
            sa.Integer(),
            nullable=True,
            comment="Version whose rows these were, if another one.",
        ),
        sa.Column(
            "content",
            postgresql.JSONB(none_as_null=True, astext_type=sa.Text()),
            nullable=True,
            comment="The baseline, or an imported budget. Null: a decision about the baseline in effect, or not in effect for longer than storage.superseded_days.",
        ),
        sa.Column(
            "fold_seq",
            sa.BigInteger(),
            nullable=True,
            comment="In effect from this fold on; null until the monitor has taken it over.",
        ),
        sa.CheckConstraint(
            "source in ('learned', 'inherited', 'accepted', 'imported', 'frozen', 'kept')",
            name=op.f("ck_baseline_source"),
        ),
        sa.ForeignKeyConstraint(
            ["from_version_id"], ["model_version.id"], name=op.f("fk_baseline_from_version_id_model_version")
        ),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_baseline_model_version_id_model_version"),
        ),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_baseline_slice_id_slice")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_baseline")),
        comment="Baselines of signals, and every decision about them. Rows stay; content that is no longer in effect is deleted after storage.superseded_days.",
    )
    op.create_index(
        "ix_baseline_signal",
        "baseline",
        ["model_version_id", "slice_id", "metric", "kind", "id"],
        unique=False,
    )
    op.create_index(
        "ix_baseline_unfolded", "baseline", ["id"], unique=False, postgresql_where=sa.text("fold_seq is null")
    )
    op.create_table(
        "session",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column(
            "policy_id",
            sa.Integer(),
            nullable=False,
            comment="policy in effect: a new epoch starts a new session.",
        ),
        sa.Column("group_key", sa.Text(), nullable=False, comment="comparison.group_key."),
        sa.Column(
            "opened_at",
            _TIME,
            nullable=False,
            comment="Event time of its first item; it closes session_s later.",
        ),
        sa.Column(
            "items", sa.LargeBinary(), nullable=False, comment="Measurements of its items, MessagePack."
        ),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="Last fold that added to it."),
        sa.ForeignKeyConstraint(
            ["model_version_id"], ["model_version.id"], name=op.f("fk_session_model_version_id_model_version")
        ),
        sa.ForeignKeyConstraint(["policy_id"], ["policy.id"], name=op.f("fk_session_policy_id_policy")),
        sa.PrimaryKeyConstraint("model_version_id", "policy_id", "group_key", name=op.f("pk_session")),
        comment="Open sessions: each counts as one observation when it closes.",
    )
    op.create_table(
        "alert",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Surrogate key."),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice that drifted."),
        sa.Column(
            "severity",
            sa.Text(),
            nullable=False,
            comment="Highest so far: warning opens a ticket, firing pages.",
        ),
        sa.Column(
            "metric", sa.Text(), nullable=False, comment="Metric with the most evidence when it opened."
        ),
        sa.Column("onset_at", _TIME, nullable=False, comment="Estimated start of the drift."),
        sa.Column("opened_at", _TIME, nullable=False, comment="Event time of the first warning or page."),
        sa.Column(
            "resolved_at", _TIME, nullable=True, comment="Event time of the resolution; null while it lasts."
        ),
        sa.Column(
            "details",
            postgresql.JSONB(),
            nullable=False,
            comment="What changed, from which value to which, as the on-call engineer sees it.",
        ),
        sa.CheckConstraint("severity in ('warning', 'firing')", name=op.f("ck_alert_severity")),
        sa.ForeignKeyConstraint(
            ["model_version_id"], ["model_version.id"], name=op.f("fk_alert_model_version_id_model_version")
        ),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_alert_slice_id_slice")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert")),
        comment="An episode of drift on one slice, from the first warning or page to its resolution.",
    )
    op.create_index(
        "uq_alert_open",
        "alert",
        ["model_version_id", "slice_id"],
        unique=True,
        postgresql_where=sa.text("resolved_at is null"),
    )
    op.create_table(
        "verdict",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice."),
        sa.Column("verdict", sa.Text(), nullable=False, comment="ok, warning, firing or unknown."),
        sa.Column(
            "reason", sa.Text(), nullable=False, comment="Reason in words; for unknown, what is missing."
        ),
        sa.Column("since", _TIME, nullable=False, comment="Event time of the last change."),
        sa.Column("n_groups", sa.BigInteger(), nullable=False, comment="Exchanges compared so far."),
        sa.Column(
            "evidence",
            sa.Double(),
            nullable=False,
            comment="Summed evidence; it pages at the threshold. While firing: the value at the alarm.",
        ),
        sa.Column(
            "threshold",
            sa.Double(),
            nullable=False,
            comment="Evidence that pages now: at least 1 / q, where q is the expected number of false pages per 30 days of the fleet.",
        ),
        sa.Column(
            "estimate",
            postgresql.JSONB(),
            nullable=False,
            comment="Per metric: mean with its time-uniform 95 % interval over the recent window, and the budget.",
        ),
        sa.Column("alert_id", sa.BigInteger(), nullable=True, comment="Open episode, if any."),
        sa.Column("last_at", _TIME, nullable=False, comment="Capture time of its last comparison."),
        sa.Column("updated_at", _TIME, nullable=False, comment="Event time of the fold that wrote this."),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="Number of that fold."),
        sa.CheckConstraint(
            "verdict in ('ok', 'warning', 'firing', 'unknown')", name=op.f("ck_verdict_verdict")
        ),
        sa.ForeignKeyConstraint(["alert_id"], ["alert.id"], name=op.f("fk_verdict_alert_id_alert")),
        sa.ForeignKeyConstraint(
            ["model_version_id"], ["model_version.id"], name=op.f("fk_verdict_model_version_id_model_version")
        ),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_verdict_slice_id_slice")),
        sa.PrimaryKeyConstraint("model_version_id", "slice_id", name=op.f("pk_verdict")),
        comment="Current verdict on each slice of each candidate version. Read it through slice_now.",
    )
    op.create_table(
        "transition",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Surrogate key."),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice."),
        sa.Column("alert_id", sa.BigInteger(), nullable=True, comment="Episode it belongs to, if any."),
        sa.Column("from_verdict", sa.Text(), nullable=False, comment="Verdict before."),
        sa.Column("to_verdict", sa.Text(), nullable=False, comment="Verdict after."),
        sa.Column("at", _TIME, nullable=False, comment="Event time."),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="Fold that made it."),
        sa.Column(
            "details", postgresql.JSONB(), nullable=False, comment="Attributes of the event that is sent."
        ),
        sa.CheckConstraint(
            "from_verdict in ('ok', 'warning', 'firing', 'unknown') and to_verdict in ('ok', 'warning', 'firing', 'unknown')",
            name=op.f("ck_transition_verdict"),
        ),
        sa.ForeignKeyConstraint(["alert_id"], ["alert.id"], name=op.f("fk_transition_alert_id_alert")),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_transition_model_version_id_model_version"),
        ),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_transition_slice_id_slice")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_transition")),
        comment="Every change of verdict of a slice, in the order of the fold.",
    )
    op.create_index("ix_transition_at", "transition", ["at"], unique=False)
    op.create_table(
        "outbox",
        sa.Column(
            "id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Order of sending."
        ),
        sa.Column(
            "transition_id", sa.BigInteger(), nullable=True, comment="Change of verdict that it reports."
        ),
        sa.Column(
            "created_at",
            _TIME,
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was written.",
        ),
        sa.Column(
            "attempts",
            sa.Integer(),
            server_default=sa.text("0"),
            nullable=False,
            comment="How often the collector refused it while it accepted other events.",
        ),
        sa.Column("last_error", sa.Text(), nullable=True, comment="Error of the last failed attempt."),
        sa.Column(
            "sent_at", _TIME, nullable=True, comment="When the collector accepted it; null until then."
        ),
        sa.Column(
            "noise_change_id",
            sa.BigInteger(),
            nullable=True,
            comment="Change of noise that it reports, if it reports no change of verdict.",
        ),
        sa.CheckConstraint("num_nonnulls(transition_id, noise_change_id) = 1", name=op.f("ck_outbox_event")),
        sa.ForeignKeyConstraint(
            ["noise_change_id"], ["noise_change.id"], name=op.f("fk_outbox_noise_change_id_noise_change")
        ),
        sa.ForeignKeyConstraint(
            ["transition_id"], ["transition.id"], name=op.f("fk_outbox_transition_id_transition")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        comment="Events to be exported by OTLP at least once; written with the transition.",
    )
    op.create_index(
        "ix_outbox_unsent", "outbox", ["id"], unique=False, postgresql_where=sa.text("sent_at is null")
    )
    op.create_table(
        "rollup_hour",
        sa.Column("hour", _TIME, nullable=False, comment="Start of the hour, UTC."),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="model_version."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="slice."),
        sa.Column("n_items", sa.BigInteger(), nullable=False, comment="Items compared."),
        sa.Column("n_groups", sa.BigInteger(), nullable=False, comment="Exchanges compared."),
        sa.Column(
            "weight",
            sa.Double(),
            nullable=False,
            comment="Sum of weights 1 / pi over groups: estimated exchanges offered.",
        ),
        sa.Column(
            "weight_sq",
            sa.Double(),
            nullable=False,
            comment="Sum of squared weights; n_eff = weight^2 / weight_sq.",
        ),
        sa.Column(
            "flip",
            sa.Double(),
            nullable=False,
            comment="Weighted sum of flip over items; divide by flip_weight.",
        ),
        sa.Column(
            "topk", sa.Double(), nullable=False, comment="Weighted sum of topk; divide by topk_weight."
        ),
        sa.Column(
            "js", sa.Double(), nullable=False, comment="Weighted sum of js, nats; divide by js_weight."
        ),
        sa.Column(
            "divergence",
            sa.Double(),
            nullable=False,
            comment="Weighted sum of divergence, each item capped at the model's budget.cap; divide by divergence_weight.",
        ),
        sa.Column(
            "margin", sa.Double(), nullable=False, comment="Weighted sum of margin; divide by margin_weight."
        ),
        sa.Column(
            "flip_weight",
            sa.Double(),
            nullable=False,
            comment="Part of weight whose items have a flip; items share the weight of their exchange.",
        ),
        sa.Column(
            "topk_weight", sa.Double(), nullable=False, comment="Part of weight whose items have a topk."
        ),
        sa.Column("js_weight", sa.Double(), nullable=False, comment="Part of weight whose items have a js."),
        sa.Column(
            "divergence_weight",
            sa.Double(),
            nullable=False,
            comment="Part of weight whose items have a divergence.",
        ),
        sa.Column(
            "margin_weight", sa.Double(), nullable=False, comment="Part of weight whose items have a margin."
        ),
        sa.Column(
            "n_infinite", sa.BigInteger(), nullable=False, comment="Items whose divergence was infinite."
        ),
        sa.Column(
            "divergence_bins",
            sa.ARRAY(sa.Double()),
            nullable=False,
            comment="Weighted histogram of divergence: 64 log-spaced bins from 1e-6 to 10; the outer two are open.",
        ),
        sa.PrimaryKeyConstraint("hour", "model_version_id", "slice_id", name=op.f("pk_rollup_hour")),
        comment="Divergence per slice and hour of capture; written by the monitor alone.",
    )
    op.create_table(
        "rollup_day",
        sa.Column("day", _TIME, nullable=False, comment="Start of the day, UTC."),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="model_version."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="slice."),
        sa.Column("n_items", sa.BigInteger(), nullable=False, comment="Items compared."),
        sa.Column("n_groups", sa.BigInteger(), nullable=False, comment="Exchanges compared."),
        sa.Column(
            "weight",
            sa.Double(),
            nullable=False,
            comment="Sum of weights 1 / pi over groups: estimated exchanges offered.",
        ),
        sa.Column(
            "weight_sq",
            sa.Double(),
            nullable=False,
            comment="Sum of squared weights; n_eff = weight^2 / weight_sq.",
        ),
        sa.Column(
            "flip",
            sa.Double(),
            nullable=False,
            comment="Weighted sum of flip over items; divide by flip_weight.",
        ),
        sa.Column(
            "topk", sa.Double(), nullable=False, comment="Weighted sum of topk; divide by topk_weight."
        ),
        sa.Column(
            "js", sa.Double(), nullable=False, comment="Weighted sum of js, nats; divide by js_weight."
        ),
        sa.Column(
            "divergence",
            sa.Double(),
            nullable=False,
            comment="Weighted sum of divergence, each item capped at the model's budget.cap; divide by divergence_weight.",
        ),
        sa.Column(
            "margin", sa.Double(), nullable=False, comment="Weighted sum of margin; divide by margin_weight."
        ),
        sa.Column(
            "flip_weight",
            sa.Double(),
            nullable=False,
            comment="Part of weight whose items have a flip; items share the weight of their exchange.",
        ),
        sa.Column(
            "topk_weight", sa.Double(), nullable=False, comment="Part of weight whose items have a topk."
        ),
        sa.Column("js_weight", sa.Double(), nullable=False, comment="Part of weight whose items have a js."),
        sa.Column(
            "divergence_weight",
            sa.Double(),
            nullable=False,
            comment="Part of weight whose items have a divergence.",
        ),
        sa.Column(
            "margin_weight", sa.Double(), nullable=False, comment="Part of weight whose items have a margin."
        ),
        sa.Column(
            "n_infinite", sa.BigInteger(), nullable=False, comment="Items whose divergence was infinite."
        ),
        sa.Column(
            "divergence_bins",
            sa.ARRAY(sa.Double()),
            nullable=False,
            comment="Weighted histogram of divergence: 64 log-spaced bins from 1e-6 to 10; the outer two are open.",
        ),
        sa.PrimaryKeyConstraint("day", "model_version_id", "slice_id", name=op.f("pk_rollup_day")),
        comment="Divergence per slice and day of capture; written by the monitor alone.",
    )


def _slices() -> None:
    op.create_table(
        "discovery",
        sa.Column("id", sa.Integer(), sa.Identity(always=True), nullable=False, comment="Stable id."),
        sa.Column("model", sa.Text(), nullable=False, comment="Model whose items it takes."),
        sa.Column(
            "predicate",
            sa.Text(),
            nullable=False,
            comment="Canonical text of its conditions; it identifies the slice.",
        ),
        sa.Column("name", sa.Text(), nullable=False, comment="Short name."),
        sa.Column(
            "definition",
            postgresql.JSONB(),
            nullable=False,
            comment="The predicate as JSON: a list of conditions under `where`.",
        ),
        sa.Column(
            "status",
            sa.Text(),
            nullable=False,
            comment="candidate: under test. confirmed: a monitored slice. expired: not confirmed in time. retired: no longer monitored. discovery_change has the reasons.",
        ),
        sa.Column(
            "slice_id",
            sa.Integer(),
            nullable=True,
            comment="slice that was created when it was first confirmed.",
        ),
        sa.Column(
            "model_version_id",
            sa.Integer(),
            nullable=False,
            comment="Version on which it was found and is tested.",
        ),
        sa.Column("metric", sa.Text(), nullable=False, comment="Metric that is concentrated in it."),
        sa.Column(
            "found_mean",
            sa.Double(),
            nullable=False,
            comment="Weighted mean in the slice when it was found, in the metric's unit; biased upwards.",
        ),
        sa.Column(
            "overall_mean", sa.Double(), nullable=False, comment="Weighted mean over all items at that time."
        ),
        sa.Column(
            "found_share",
            sa.Double(),
            nullable=False,
            comment="Its share of the traffic at that time, weighted.",
        ),
        sa.Column(
            "null_mean",
            sa.Double(),
            nullable=False,
            comment="Mean that the test must show it exceeds, in the metric's unit.",
        ),
        sa.Column(
            "scale",
            sa.Double(),
            nullable=False,
            comment="Cap of the metric, in its unit: the test divides values by it.",
        ),
        sa.Column(
            "log_threshold",
            sa.Double(),
            nullable=False,
            comment="Natural logarithm of the evidence that confirms it: number of candidates of its search / allowance.",
        ),
        sa.Column(
            "log_evidence",
            sa.Double(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Natural logarithm of the largest evidence so far.",
        ),
        sa.Column(
            "log_wealth",
            sa.ARRAY(sa.Double()),
            nullable=False,
            comment="Natural logarithm of each bet's wealth.",
        ),
        sa.Column(
            "n_groups",
            sa.BigInteger(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Groups tested since it was frozen.",
        ),
        sa.Column(
            "n_found",
            sa.Integer(),
            server_default=sa.text("1"),
            nullable=False,
            comment="How many searches have frozen it.",
        ),
        sa.Column("first_found_at", _TIME, nullable=False, comment="When a search first found it."),
        sa.Column(
            "frozen_at",
            _TIME,
            nullable=False,
            comment="Only traffic captured from here on is tested; it is later than all traffic that was searched.",
        ),
        sa.Column(
            "tested_at", _TIME, nullable=False, comment="Traffic captured before this has been tested."
        ),
        sa.Column("confirmed_at", _TIME, nullable=True, comment="When it was last confirmed."),
        sa.Column("expired_at", _TIME, nullable=True, comment="When it last expired."),
        sa.Column(
            "waits_since",
            _TIME,
            nullable=True,
            comment="Since when it is proven and waits for one of the discovery.most_slices slots; null if it does not wait.",
        ),
        sa.Column(
            "held",
            sa.Boolean(),
            server_default=sa.text("false"),
            nullable=False,
            comment="Whether a person retired it: no search tests it until it is restored.",
        ),
        sa.CheckConstraint(
            "status in ('candidate', 'confirmed', 'expired', 'retired')", name=op.f("ck_discovery_status")
        ),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_discovery_model_version_id_model_version"),
        ),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_discovery_slice_id_slice")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_discovery")),
        sa.UniqueConstraint("model", "predicate", name=op.f("uq_discovery_model_predicate")),
        comment="A slice that a search found: tested on traffic captured after it was frozen, monitored once confirmed. Its id and its slice's id stay the same when it expires or is retired and is found again.",
    )
    op.create_table(
        "discovery_change",
        sa.Column(
            "id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Order of changes."
        ),
        sa.Column("discovery_id", sa.Integer(), nullable=False, comment="Discovered slice."),
        sa.Column("status", sa.Text(), nullable=False, comment="Status from here on."),
        sa.Column("made_by", sa.Text(), nullable=False, comment="Who changed it: a user name, or monitor."),
        sa.Column(
            "made_at", _TIME, server_default=sa.text("now()"), nullable=False, comment="When it was changed."
        ),
        sa.Column("reason", sa.Text(), nullable=False, comment="Reason in words."),
        sa.Column(
            "fold_seq",
            sa.BigInteger(),
            nullable=True,
            comment="The fold applies it from here on; null until the monitor has taken it over.",
        ),
        sa.CheckConstraint(
            "status in ('candidate', 'confirmed', 'expired', 'retired')",
            name=op.f("ck_discovery_change_status"),
        ),
        sa.ForeignKeyConstraint(
            ["discovery_id"], ["discovery.id"], name=op.f("fk_discovery_change_discovery_id_discovery")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_discovery_change")),
        comment="Every change of status of a discovered slice, with who and why; rows are never changed.",
    )
    op.create_index("ix_discovery_change_discovery", "discovery_change", ["discovery_id", "id"], unique=False)
    op.create_index(
        "ix_discovery_change_unfolded",
        "discovery_change",
        ["id"],
        unique=False,
        postgresql_where=sa.text("fold_seq is null"),
    )
    op.create_table(
        "discovery_search",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Version searched."),
        sa.Column("searched_at", _TIME, nullable=False, comment="When it ran."),
        sa.Column(
            "allowance",
            sa.Double(),
            nullable=False,
            comment="Expected number of false confirmations that this round of searches may cost, over all versions.",
        ),
        sa.Column("n_items", sa.Integer(), nullable=False, comment="Items searched."),
        sa.Column("n_scored", sa.BigInteger(), nullable=False, comment="Slices scored."),
        sa.Column("n_found", sa.Integer(), nullable=False, comment="Slices found, known ones included."),
        sa.Column("n_frozen", sa.Integer(), nullable=False, comment="Of these, new candidates."),
        sa.Column(
            "n_left_out",
            sa.BigInteger(),
            nullable=False,
            comment="Attributes, values, conditions and slices that were left out because of the limits.",
        ),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_discovery_search_model_version_id_model_version"),
        ),
        sa.PrimaryKeyConstraint("model_version_id", name=op.f("pk_discovery_search")),
        comment="The last search of each candidate version, and what it cost.",
    )
    op.create_table(
        "clustering",
        sa.Column("id", sa.Integer(), sa.Identity(always=True), nullable=False, comment="Order of the fits."),
        sa.Column("model", sa.Text(), nullable=False, comment="Model whose inputs it clusters."),
        sa.Column(
            "version",
            sa.Integer(),
            nullable=False,
            comment="Number of the fit, one higher with each fit of the model; comparison.detail names it under `clustering`.",
        ),
        sa.Column(
            "reference_digest",
            sa.Text(),
            nullable=False,
            comment="SHA-256 of the reference that embeds the inputs.",
        ),
        sa.Column(
            "space",
            sa.Text(),
            nullable=False,
            comment="Vector space: an output or layer of the reference, or named features.",
        ),
        sa.Column(
            "made_at", _TIME, server_default=sa.text("now()"), nullable=False, comment="When it was fitted."
        ),
        sa.Column("made_by", sa.Text(), nullable=False, comment="Who asked for it: a user name, or monitor."),
        sa.Column(
            "from_at", _TIME, nullable=False, comment="Capture time of the first vector it was fitted to."
        ),
        sa.Column("to_at", _TIME, nullable=False, comment="Capture time of the last one."),
        sa.Column("n_vectors", sa.Integer(), nullable=False, comment="Number of vectors it was fitted to."),
        sa.Column(
            "next_id",
            sa.Integer(),
            nullable=False,
            comment="First cluster id that the model had not used by that time.",
        ),
        sa.Column(
            "clusters",
            postgresql.JSONB(),
            nullable=False,
            comment="Per cluster: id, n, estimated share of the traffic, radius, over-represented declared slices with their lift, and the exchanges nearest to its centroid.",
        ),
        sa.Column(
            "content",
            sa.LargeBinary(),
            nullable=False,
            comment="Centroids, radii, scaling and known attribute values, with version and checksum.",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_clustering")),
        sa.UniqueConstraint("model", "version", name=op.f("uq_clustering_model_version")),
        comment="Learned slices of a model, one row per fit; the newest of a reference and space is in effect.",
    )
    op.create_table(
        "embedding",
        sa.Column("captured_at", _TIME, nullable=False, comment="As in comparison."),
        sa.Column("exchange_id", _UUID, nullable=False, comment="As in comparison."),
        sa.Column("item", sa.SmallInteger(), nullable=False, comment="As in comparison."),
        sa.Column("model", sa.Text(), nullable=False, comment="Model."),
        sa.Column(
            "reference_digest",
            sa.Text(),
            nullable=False,
            comment="SHA-256 of the reference that embedded it.",
        ),
        sa.Column(
            "space",
            sa.Text(),
            nullable=False,
            comment="Vector space: an output or layer of the reference, or named features.",
        ),
        sa.Column(
            "pi",
            sa.Double(),
            nullable=False,
            comment="Total inclusion probability of the item, without that of this sample, which is equal for all.",
        ),
        sa.Column("vector", sa.LargeBinary(), nullable=False, comment="Float32, little-endian."),
        sa.CheckConstraint("pi > 0 and pi <= 1", name=op.f("ck_embedding_inclusion_probability")),
        sa.PrimaryKeyConstraint("captured_at", "exchange_id", "item", name=op.f("pk_embedding")),
        comment="A bounded sample of vectors that learned slices are fitted to; the oldest are deleted first. A vector can reveal much of an input: readers cannot see that column.",
    )
    op.create_index(
        "ix_embedding_space", "embedding", ["model", "reference_digest", "space", "captured_at"], unique=False
    )


def _reports() -> None:
    op.create_table(
        "report_run",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Surrogate key."),
        sa.Column("kind", sa.Text(), nullable=False, comment="week, day or range."),
        sa.Column("from_at", _TIME, nullable=False, comment="Start of the period."),
        sa.Column("to_at", _TIME, nullable=False, comment="End of the period, exclusive."),
        sa.Column(
            "created_at",
            _TIME,
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was written.",
        ),
        sa.Column("path", sa.Text(), nullable=False, comment="File it was written to."),
        sa.Column(
            "figures", postgresql.JSONB(), nullable=False, comment="The figures of the report, as JSON."
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_report_run")),
        comment="Reports that were written, with the figures they show.",
    )


class _View(NamedTuple):
    """A view with what the database says of it; `columns` in the order of its select list."""

    name: str
    comment: str
    columns: dict[str, str]
    query: str


_SLICE_NOW: Final = _View(
    name="slice_now",
    comment=(
        "The current state of each slice: one row per slice of a candidate version, together with the verdict on the"
        " aggregate. Order by evidence_ratio desc to see the worst first."
    ),
    columns={
        "model": "Model name, as in requests.",
        "candidate_version": "Version of the quantised model in production.",
        "reference_digest": "SHA-256 of the reference file; empty where the version has no reference.",
        "slice": "Short name of the slice, as in alerts; `all` is the aggregate.",
        "predicate": "Condition of the slice, as canonical text.",
        "verdict": "ok, warning, firing or unknown.",
        "reason": "Reason in words; for unknown, what is missing.",
        "since": "Event time of the last change of the verdict.",
        "n_groups": "Exchanges compared so far.",
        "evidence_ratio": "Evidence / threshold: 1 pages. While firing, the value at the alarm.",
        "flip_mean": "Share of exchanges whose decision changed, over the recent window, weighted.",
        "flip_low": "Lower end of its time-uniform 95 % interval.",
        "flip_high": "Upper end of its time-uniform 95 % interval.",
        "flip_budget": "The share that the owner accepts.",
        "divergence_mean": "Mean divergence over the recent window, weighted and capped: of a classifier KL in nats.",
        "divergence_low": "Lower end of its time-uniform 95 % interval.",
        "divergence_high": "Upper end of its time-uniform 95 % interval.",
        "divergence_budget": "The mean that the owner accepts.",
        "all_verdict": "Verdict on the aggregate, the slice `all` of the same candidate version.",
        "all_flip_mean": "flip_mean of the aggregate.",
        "all_divergence_mean": "divergence_mean of the aggregate.",
        "alert_id": "Open alert, if any.",
        "onset_at": "Estimated start of its drift.",
        "last_at": "Capture time of the slice's last comparison.",
        "updated_at": "Event time of the fold that wrote this.",
        "model_version_id": "Key of model_version.",
        "slice_id": "Key of slice.",
    },
    query="""
        select
            mv.model,
            mv.candidate_version,
            mv.reference_digest,
            s.name,
            s.predicate,
            v.verdict,
            v.reason,
            v.since,
            v.n_groups,
            case when v.threshold > 0 then v.evidence / v.threshold end,
            (v.estimate #>> '{flip,mean}')::double precision,
            (v.estimate #>> '{flip,low}')::double precision,
            (v.estimate #>> '{flip,high}')::double precision,
            (v.estimate #>> '{flip,budget}')::double precision,
            (v.estimate #>> '{divergence,mean}')::double precision,
            (v.estimate #>> '{divergence,low}')::double precision,
            (v.estimate #>> '{divergence,high}')::double precision,
            (v.estimate #>> '{divergence,budget}')::double precision,
            a.verdict,
            (a.estimate #>> '{flip,mean}')::double precision,
            (a.estimate #>> '{divergence,mean}')::double precision,
            v.alert_id,
            alert.onset_at,
            v.last_at,
            v.updated_at,
            v.model_version_id,
            v.slice_id
        from verdict v
        join model_version mv on mv.id = v.model_version_id
        join slice s on s.id = v.slice_id
        left join alert on alert.id = v.alert_id
        left join slice everything on everything.model = mv.model and everything.predicate = 'true'
        left join verdict a on a.model_version_id = v.model_version_id and a.slice_id = everything.id
    """,
)

_SLICE_HISTORY: Final = _View(
    name="slice_history",
    comment=(
        "The history of each slice: divergence per slice and hour of capture, together with the aggregate of the same"
        " hour. Means are weighted by 1 / pi, so they describe the traffic, not the sample."
    ),
    columns={
        "hour": "Start of the hour, UTC.",
        "model": "Model name, as in requests.",
        "candidate_version": "Version of the quantised model in production.",
        "reference_digest": "SHA-256 of the reference file; empty where the version has no reference.",
        "slice": "Short name of the slice; `all` is the aggregate.",
        "predicate": "Condition of the slice.",
        "n_items": "Items compared.",
        "n_groups": "Exchanges compared.",
        "n_eff": "Effective number of exchanges: so many equally weighted ones would be as informative.",
        "weight": "Estimated exchanges offered in the slice: sum of 1 / pi.",
        "traffic_ratio": "Estimated share of the slice in the traffic of the candidate version.",
        "flip": "Share of exchanges whose decision changed; null, like all means, where no item has one.",
        "topk": "Share of exchanges whose set of the k top classes changed.",
        "js": "Mean Jensen-Shannon divergence, nats.",
        "divergence": "Mean divergence, each item capped at the model's budget.cap: of a classifier KL in nats.",
        "margin": "Mean absolute change of the gap between the two top probabilities.",
        "n_infinite": "Items whose divergence was infinite.",
        "all_flip": "flip of the aggregate in the same hour.",
        "all_topk": "topk of the aggregate in the same hour.",
        "all_js": "js of the aggregate in the same hour, nats.",
        "all_divergence": "divergence of the aggregate in the same hour.",
        "all_margin": "margin of the aggregate in the same hour.",
        "model_version_id": "Key of model_version.",
        "slice_id": "Key of slice.",
    },
    query="""
        select
            r.hour,
            mv.model,
            mv.candidate_version,
            mv.reference_digest,
            s.name,
            s.predicate,
            r.n_items,
            r.n_groups,
            r.weight * r.weight / nullif(r.weight_sq, 0),
            r.weight,
            r.weight / nullif(a.weight, 0),
            r.flip / nullif(r.flip_weight, 0),
            r.topk / nullif(r.topk_weight, 0),
            r.js / nullif(r.js_weight, 0),
            r.divergence / nullif(r.divergence_weight, 0),
            r.margin / nullif(r.margin_weight, 0),
            r.n_infinite,
            a.flip / nullif(a.flip_weight, 0),
            a.topk / nullif(a.topk_weight, 0),
            a.js / nullif(a.js_weight, 0),
            a.divergence / nullif(a.divergence_weight, 0),
            a.margin / nullif(a.margin_weight, 0),
            r.model_version_id,
            r.slice_id
        from rollup_hour r
        join model_version mv on mv.id = r.model_version_id
        join slice s on s.id = r.slice_id
        left join slice everything on everything.model = mv.model and everything.predicate = 'true'
        left join rollup_hour a
            on a.model_version_id = r.model_version_id and a.slice_id = everything.id and a.hour = r.hour
    """,
)

# Tallies are cumulative, so an hour is the last tally in it minus the last one before it, of the same boot. The
# tally before is looked up by key, not by lag() over everything: a condition on the hour then bounds the work.
_COVERAGE_HOUR: Final = _View(
    name="coverage_hour",
    comment=(
        "What the sidecars saw and what became of it: exact counts per hour, sidecar and header stratum, from the"
        " tallies. taken = thinned + published + n_lost + what was in flight at the end of the hour. The first"
        " tally of a boot counts from zero; what a sidecar saw after its last tally is not included."
    ),
    columns={
        "hour": "Start of the hour of the tally, UTC.",
        "source": "Sidecar.",
        "stratum": "Header stratum.",
        "n_tallies": "Tallies that arrived; a sidecar sends one every few seconds.",
        "n_boots": "Starts of the sidecar that these tallies come from.",
        "offered": "Inference requests seen on the wire.",
        "taken": "Of these, chosen by the first phase.",
        "thinned": "Of the taken, left out by the second phase on purpose; no loss.",
        "published": "Of the taken, acknowledged by the stream.",
        "n_lost": "Of the taken, lost.",
        "lost": "n_lost by reason; reasons without a loss are left out.",
        "blind_connections": "Connections of the whole sidecar that were not observed: the same number for each of its strata.",
        "n_expired": (
            "Of the published, expired in the stream before they were replayed, in the hour in which that was found; not part of"
            " n_lost. Negative where a worker still had some in progress and finished them later."
        ),
    },
    query="""
        with seen (
            hour, source, stratum, n_tallies, n_boots, offered,
            taken, thinned, published, n_lost, lost, blind_connections
        ) as (
            with bound as (
                select
                    date_bin('1 hour', at, '2000-01-01 00:00:00+00') as hour,
                    source,
                    stratum,
                    boot,
                    min(sequence) as first,
                    max(sequence) as last,
                    count(*) as n_tallies
                from tally
                group by 1, 2, 3, 4
            ),
            delta as (
                select
                    bound.hour,
                    bound.source,
                    bound.stratum,
                    bound.n_tallies,
                    now_.offered - coalesce(before.offered, 0) as offered,
                    now_.taken - coalesce(before.taken, 0) as taken,
                    now_.thinned - coalesce(before.thinned, 0) as thinned,
                    now_.published - coalesce(before.published, 0) as published,
                    now_.blind_connections - coalesce(before.blind_connections, 0) as blind_connections,
                    coalesce((
                        select jsonb_object_agg(key, value::bigint - coalesce((before.lost ->> key)::bigint, 0))
                        from jsonb_each_text(now_.lost)
                    ), '{}') as lost
                from bound
                join tally now_
                    on now_.source = bound.source and now_.boot = bound.boot and now_.stratum = bound.stratum
                    and now_.sequence = bound.last
                left join lateral (
                    select t.offered, t.taken, t.thinned, t.published, t.lost, t.blind_connections
                    from tally t
                    where t.source = bound.source and t.boot = bound.boot and t.stratum = bound.stratum
                        and t.sequence < bound.first
                    order by t.sequence desc
                    limit 1
                ) before on true
            ),
            total as (
                select
                    hour,
                    source,
                    stratum,
                    sum(n_tallies)::bigint as n_tallies,
                    count(*) as n_boots,
                    sum(offered)::bigint as offered,
                    sum(taken)::bigint as taken,
                    sum(thinned)::bigint as thinned,
                    sum(published)::bigint as published,
                    sum(blind_connections)::bigint as blind_connections,
                    jsonb_agg(lost) as lost
                from delta
                group by hour, source, stratum
            )
            select
                total.hour,
                total.source,
                total.stratum,
                total.n_tallies,
                total.n_boots,
                total.offered,
                total.taken,
                total.thinned,
                total.published,
                coalesce(by_reason.n_lost, 0),
                coalesce(by_reason.lost, '{}'),
                total.blind_connections
            from total
            left join lateral (
                select jsonb_object_agg(reason, n) as lost, sum(n)::bigint as n_lost
                from (
                    select one.key as reason, sum(one.value::bigint)::bigint as n
                    from jsonb_array_elements(total.lost) boot, jsonb_each_text(boot.value) one
                    group by one.key
                    having sum(one.value::bigint) <> 0
                ) counted
            ) by_reason on true
        ),
        expiries as (
            select date_bin('1 hour', batch.stored_at, '2000-01-01 00:00:00+00') as hour, source, stratum,
                sum(n)::bigint as n_expired
            from expiry join batch on batch.id = expiry.batch_id
            group by 1, 2, 3
        ),
        combined (
            hour, source, stratum, n_tallies, n_boots, offered,
            taken, thinned, published, n_lost, lost, blind_connections, n_expired
        ) as (
            select seen.*, 0::bigint from seen
            union all
            select
                expiries.hour, expiries.source, expiries.stratum, 0, 0, 0, 0, 0, 0, 0, '{}'::jsonb, 0, expiries.n_expired
            from expiries
        )
        select
            hour,
            source,
            stratum,
            sum(n_tallies)::bigint,
            sum(n_boots)::bigint,
            sum(offered)::bigint,
            sum(taken)::bigint,
            sum(thinned)::bigint,
            sum(published)::bigint,
            sum(n_lost)::bigint,
            coalesce((array_agg(lost) filter (where n_tallies > 0))[1], '{}'),
            sum(blind_connections)::bigint,
            sum(n_expired)::bigint
        from combined
        group by hour, source, stratum
    """,
)

_VIEWS: Final = (_SLICE_NOW, _SLICE_HISTORY, _COVERAGE_HOUR)


def _create(view: _View) -> None:
    op.execute(f"create view {view.name} ({', '.join(view.columns)}) as {view.query}")
    op.execute(f"comment on view {view.name} is {_quoted(view.comment)}")
    for column, comment in view.columns.items():
        op.execute(f"comment on column {view.name}.{column} is {_quoted(comment)}")


def _quoted(text: str) -> str:
    # A colon would be read as a bound parameter.
    return "'" + text.replace("'", "''").replace(":", "\\:") + "'"

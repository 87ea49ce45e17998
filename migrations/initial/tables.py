"""The tables of the first schema, with their indexes."""

from collections.abc import Callable
from typing import Final

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

_TIME: Final = sa.DateTime(timezone=True)
_UUID: Final = sa.UUID(as_uuid=False)


def _arrival() -> None:
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


def _audit() -> None:
    op.create_table(
        "audit",
        sa.Column(
            "seq", sa.BigInteger(), autoincrement=False, nullable=False, comment="1, 2, 3, ... without a gap."
        ),
        sa.Column("at", _TIME, nullable=False, comment="When it was written, by the database's clock."),
        sa.Column(
            "actor",
            sa.Text(),
            nullable=False,
            comment="Who: the user that Postgres authenticated (session_user).",
        ),
        sa.Column("action", sa.Text(), nullable=False, comment="What was done, as the command is called."),
        sa.Column("model", sa.Text(), nullable=False, comment="Model; empty: no single one."),
        sa.Column(
            "subject",
            sa.Text(),
            nullable=False,
            comment="What was changed: `slice 12`, `discovery 3`, `revision 7` of the bucket of pauses, or a process; may be empty.",
        ),
        sa.Column(
            "before",
            postgresql.JSONB(),
            nullable=True,
            comment="The former state; null: there was none, or it is unknown.",
        ),
        sa.Column("after", postgresql.JSONB(), nullable=True, comment="The new state; null: there is none."),
        sa.Column("note", sa.Text(), nullable=False, comment="Reason that the person gave; may be empty."),
        sa.Column(
            "hash",
            sa.LargeBinary(),
            nullable=False,
            comment="SHA-256 of the hash of the entry before and of all other columns; `quantdrift audit verify` computes it again.",
        ),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit")),
        comment="Who changed what and when, in a chain of hashes. Only the function `audit_add` writes it; rows are never changed or deleted.",
    )


def _batch() -> None:
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
            postgresql.ARRAY(sa.Integer()),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="model_version of the skipped exchanges that have no reference: these versions are still in production.",
        ),
        sa.Column(
            "replay_s",
            sa.Double(),
            nullable=True,
            comment="Seconds in which the reference computed it, on the device of provenance; null where it computed nothing.",
        ),
        sa.Column(
            "compared_model",
            sa.Text(),
            nullable=True,
            comment="Model of its comparisons; null where it has none.",
        ),
        sa.Column(
            "read_after",
            _TIME,
            nullable=True,
            comment="Capture time up to which the model was folded before this batch; null where its rows are folded with it.",
        ),
        sa.Column(
            "read_until",
            _TIME,
            nullable=True,
            comment="Capture time up to which the model was folded with this batch.",
        ),
        sa.Column(
            "rest_until",
            _TIME,
            nullable=True,
            comment="read_until of the batch with which the last of its own rows are folded, at most.",
        ),
        sa.Column(
            "horizon_s",
            sa.Double(),
            nullable=True,
            comment="Seconds for which exchanges of the model wait for earlier ones from this batch on.",
        ),
        sa.Column(
            "read_from",
            sa.BigInteger(),
            nullable=True,
            comment="fold_seq of the earliest batch with rows that may be folded with this one.",
        ),
        sa.CheckConstraint("kind in ('comparison', 'tally')", name=op.f("ck_batch_kind")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batch")),
        sa.UniqueConstraint("fold_seq", name=op.f("uq_batch_fold_seq")),
        comment="One transaction of a shadow worker; the monitor numbers batches, and folds the exchanges of a model in the order of their capture.",
    )
    op.create_index("ix_batch_compared_model", "batch", ["compared_model", "fold_seq"])
    op.create_index("ix_batch_stored_at", "batch", ["stored_at"])
    op.create_index("ix_batch_unfolded", "batch", ["id"], postgresql_where=sa.text("fold_seq is null"))


def _clustering() -> None:
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
        sa.Column(
            "made_by",
            sa.Text(),
            nullable=False,
            comment="Who asked for it: the user of the database, or monitor.",
        ),
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


def _comparison() -> None:
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
        sa.Column(
            "slice_ids", postgresql.ARRAY(sa.Integer()), nullable=False, comment="Every slice it belongs to."
        ),
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
        sa.Column(
            "tie",
            sa.Boolean(),
            nullable=True,
            comment="Whether the decision differs only because several entries share the largest score of a side; the model's count_ties says whether flip counts it. Null where the task chooses no entry.",
        ),
        sa.Column(
            "origin",
            sa.Text(),
            nullable=True,
            comment="How it came in, and a space and the caller where that was checked, as `intake NAME`; null: through the relay.",
        ),
        sa.Column(
            "latency_s",
            sa.Double(),
            nullable=True,
            comment="Seconds that the candidate took for the whole exchange, as the relay saw it: from the last byte of the request to the last byte of the response, waiting at the server included. Null for other ways in.",
        ),
        sa.Column(
            "first_token_s",
            sa.Double(),
            nullable=True,
            comment="Of a stream, seconds from the last byte of the request to the first byte of the response's content; else null.",
        ),
        sa.Column(
            "per_token_s",
            sa.Double(),
            nullable=True,
            comment="Of a stream whose tokens are counted, seconds for each token after the first; else null.",
        ),
        sa.CheckConstraint(
            "pi1 > 0 and pi1 <= 1 and pi2 > 0 and pi2 <= 1", name=op.f("ck_comparison_inclusion_probability")
        ),
        sa.PrimaryKeyConstraint("captured_at", "exchange_id", "item", name=op.f("pk_comparison")),
        comment="The divergence of one item: candidate output against reference output. One row per item.",
        postgresql_partition_by="RANGE (captured_at)",
    )
    op.create_index("ix_comparison_batch_id", "comparison", ["batch_id"])
    op.create_index(
        "ix_comparison_divergence", "comparison", [sa.literal_column("divergence desc nulls last")]
    )
    op.create_index("ix_comparison_flip", "comparison", ["captured_at"], postgresql_where=sa.text("flip"))
    op.create_index(
        "ix_comparison_request_id",
        "comparison",
        [sa.literal_column("(attributes ->> 'header.x-request-id')")],
        postgresql_using="hash",
        postgresql_where=sa.text("(attributes ->> 'header.x-request-id') is not null"),
    )
    op.create_index("ix_comparison_slice_ids", "comparison", ["slice_ids"], postgresql_using="gin")


def _compatibility() -> None:
    op.create_table(
        "compatibility",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False, comment="Always 1."),
        sa.Column(
            "oldest_revision",
            sa.Text(),
            nullable=False,
            comment="Newest revision that the oldest of these releases knows.",
        ),
        sa.CheckConstraint("id = 1", name=op.f("ck_compatibility_singleton")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_compatibility")),
        comment="The oldest release that can work with this schema: one row, written by `quantdrift db upgrade`.",
    )


def _doubt() -> None:
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


def _embedding() -> None:
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
    op.create_index("ix_embedding_space", "embedding", ["model", "reference_digest", "space", "captured_at"])


def _fold() -> None:
    op.create_table(
        "fold",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False, comment="Always 1."),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="Last batch folded."),
        sa.Column(
            "event_time",
            _TIME,
            nullable=True,
            comment="Running maximum of the times of exchanges and tallies: the fold's time.",
        ),
        sa.Column(
            "mass",
            sa.Double(),
            nullable=False,
            comment="Lambda: integral of dt / (30 days * live detectors) until exchange_time.",
        ),
        sa.Column("n_detectors", sa.Integer(), nullable=False, comment="Live detectors."),
        sa.Column(
            "folded_at",
            _TIME,
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was folded, by the database's clock.",
        ),
        sa.Column(
            "exchange_time",
            _TIME,
            nullable=True,
            comment="Running maximum of capture times of exchanges: the clock of the allowance.",
        ),
        sa.CheckConstraint("id = 1", name=op.f("ck_fold_singleton")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_fold")),
        comment="The monitor's progress: one row.",
    )


def _gate_run() -> None:
    op.create_table(
        "gate_run",
        sa.Column(
            "id",
            sa.BigInteger(),
            sa.Identity(always=True),
            nullable=False,
            comment="Number of the gate, as in `GET /gate/ID`.",
        ),
        sa.Column("model", sa.Text(), nullable=False, comment="Model."),
        sa.Column(
            "candidate", sa.Text(), nullable=False, comment="Digest of the candidate's file: sha256:..."
        ),
        sa.Column(
            "made_by",
            sa.Text(),
            server_default=sa.text("session_user"),
            nullable=False,
            comment="User of the database that ran it.",
        ),
        sa.Column(
            "alpha",
            sa.Double(),
            nullable=False,
            comment="Probability of a false pass, and of a false failure, at most.",
        ),
        sa.Column(
            "begun_at",
            _TIME,
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the digest was recorded: only later exchanges count.",
        ),
        sa.Column(
            "checked_at",
            _TIME,
            nullable=True,
            comment="When the answers were computed; null: nothing was judged yet.",
        ),
        sa.Column(
            "ended_at", _TIME, nullable=True, comment="When the command ended; null: it runs, or was killed."
        ),
        sa.Column(
            "verdict",
            sa.Text(),
            server_default=sa.text("'insufficient'"),
            nullable=False,
            comment="Not used: whoever wrote it was not checked. The verdict is in `gate_verdict`.",
        ),
        sa.Column(
            "more",
            sa.BigInteger(),
            nullable=True,
            comment="About how many exchanges are missing to the slice that lacks most; null: unknown.",
        ),
        sa.Column(
            "answers",
            postgresql.JSONB(),
            server_default=sa.text("'[]'"),
            nullable=False,
            comment="The answer to each question about each slice: slice, question, verdict, n, mean, low, high, limit, more.",
        ),
        sa.CheckConstraint("verdict in ('pass', 'fail', 'insufficient')", name=op.f("ck_gate_run_verdict")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gate_run")),
        comment="A candidate that `quantdrift gate --live` judges, on exchanges that were captured after this row was written. One row per run.",
    )


def _leader() -> None:
    op.create_table(
        "leader",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False, comment="Always 1."),
        sa.Column(
            "term",
            sa.BigInteger(),
            nullable=False,
            comment="Number of the present lead; it rises whenever a monitor takes the lead.",
        ),
        sa.Column(
            "holder", sa.Text(), nullable=False, comment="Host name and process id of the monitor that leads."
        ),
        sa.Column(
            "since",
            _TIME,
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it took the lead, by the database's clock.",
        ),
        sa.CheckConstraint("id = 1", name=op.f("ck_leader_singleton")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leader")),
        comment="The monitor that leads: one row. Its transactions lock the row for share and compare the term.",
    )


def _model_version() -> None:
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
        sa.Column(
            "lapsed_at",
            _TIME,
            nullable=True,
            comment="Since when the version has no place among those of its model and counts as `(other)`; null: it has one.",
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


def _policy() -> None:
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


def _process_report() -> None:
    op.create_table(
        "process_report",
        sa.Column("role", sa.Text(), nullable=False, comment="sidecar or shadow."),
        sa.Column("source", sa.Text(), nullable=False, comment="Pod, or host."),
        sa.Column(
            "reported_at",
            _TIME,
            nullable=False,
            comment="When the stream took the newest report of a change.",
        ),
        sa.Column(
            "seen_at",
            _TIME,
            server_default=sa.text("now()"),
            nullable=False,
            comment="When its last report was stored, to the hour.",
        ),
        sa.Column(
            "stored_by",
            sa.Text(),
            server_default=sa.text("session_user"),
            nullable=False,
            comment="Database user who stored the first report.",
        ),
        sa.Column("digest", sa.Text(), nullable=False, comment="SHA-256 of its options."),
        sa.Column(
            "options",
            postgresql.JSONB(),
            nullable=False,
            comment="Options that differ from their default, without credentials.",
        ),
        sa.Column(
            "pause",
            postgresql.JSONB(),
            nullable=True,
            comment="What is paused at this process alone; null: nothing.",
        ),
        sa.Column(
            "audited_digest", sa.Text(), nullable=True, comment="digest, as the audit has it; null: not yet."
        ),
        sa.Column(
            "audited_options", postgresql.JSONB(), nullable=True, comment="options, as the audit has them."
        ),
        sa.Column("audited_pause", postgresql.JSONB(), nullable=True, comment="pause, as the audit has it."),
        sa.PrimaryKeyConstraint("role", "source", name=op.f("pk_process_report")),
        comment="Configuration and local pause of each sidecar and shadow worker, as it reported them last, and as the audit has them. One row per process.",
    )


def _quarantine() -> None:
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
    op.create_index("ix_quarantine_quarantined_at", "quarantine", ["quarantined_at"])


def _report_run() -> None:
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


def _rollup_day() -> None:
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
            comment="Sum of squared weights, of a closed session the square of their sum; n_eff = weight^2 / weight_sq.",
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
            postgresql.ARRAY(sa.Double()),
            nullable=False,
            comment="Weighted histogram of divergence: 64 log-spaced bins from 1e-6 to 10; the outer two are open.",
        ),
        sa.Column(
            "tie",
            sa.Double(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Weighted sum of tie; divide by tie_weight.",
        ),
        sa.Column(
            "tie_weight",
            sa.Double(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Part of weight whose items have a tie.",
        ),
        sa.Column(
            "n_unmeasured",
            sa.BigInteger(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Items that nothing was measured of, for instance sampled answers without log-probabilities.",
        ),
        sa.Column(
            "cap",
            sa.Double(),
            nullable=True,
            comment="The budget.cap of divergence.",
        ),
        sa.Column(
            "flip_weight_sq",
            sa.Double(),
            nullable=True,
            comment="Sum over exchanges of w^2, w being the weight of the items that have a flip.",
        ),
        sa.Column(
            "flip_sq",
            sa.Double(),
            nullable=True,
            comment="Sum over exchanges of y^2, y being the weighted sum of flip over the items.",
        ),
        sa.Column("flip_cross", sa.Double(), nullable=True, comment="Sum over exchanges of w y."),
        sa.Column(
            "divergence_weight_sq", sa.Double(), nullable=True, comment="As flip_weight_sq, of divergence."
        ),
        sa.Column("divergence_sq", sa.Double(), nullable=True, comment="As flip_sq, of divergence."),
        sa.Column("divergence_cross", sa.Double(), nullable=True, comment="As flip_cross, of divergence."),
        sa.Column("heaviest", sa.Double(), nullable=True, comment="Largest weight of an exchange."),
        sa.Column(
            "people",
            postgresql.ARRAY(sa.Double()),
            nullable=True,
            comment="Of flip, then of divergence, 67 numbers: w and y, each summed in 32 random groups of people (hashed), and the sums of w^2, y^2 and w y over the exchanges of people. Null: no exchange names a person. For intervals, by mean_interval().",
        ),
        sa.PrimaryKeyConstraint("day", "model_version_id", "slice_id", name=op.f("pk_rollup_day")),
        comment="Divergence per slice and day of capture; written by the monitor alone.",
    )


def _rollup_hour() -> None:
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
            comment="Sum of squared weights, of a closed session the square of their sum; n_eff = weight^2 / weight_sq.",
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
            postgresql.ARRAY(sa.Double()),
            nullable=False,
            comment="Weighted histogram of divergence: 64 log-spaced bins from 1e-6 to 10; the outer two are open.",
        ),
        sa.Column(
            "tie",
            sa.Double(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Weighted sum of tie; divide by tie_weight.",
        ),
        sa.Column(
            "tie_weight",
            sa.Double(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Part of weight whose items have a tie.",
        ),
        sa.Column(
            "n_unmeasured",
            sa.BigInteger(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Items that nothing was measured of, for instance sampled answers without log-probabilities.",
        ),
        sa.Column(
            "cap",
            sa.Double(),
            nullable=True,
            comment="The budget.cap of divergence.",
        ),
        sa.Column(
            "flip_weight_sq",
            sa.Double(),
            nullable=True,
            comment="Sum over exchanges of w^2, w being the weight of the items that have a flip.",
        ),
        sa.Column(
            "flip_sq",
            sa.Double(),
            nullable=True,
            comment="Sum over exchanges of y^2, y being the weighted sum of flip over the items.",
        ),
        sa.Column("flip_cross", sa.Double(), nullable=True, comment="Sum over exchanges of w y."),
        sa.Column(
            "divergence_weight_sq", sa.Double(), nullable=True, comment="As flip_weight_sq, of divergence."
        ),
        sa.Column("divergence_sq", sa.Double(), nullable=True, comment="As flip_sq, of divergence."),
        sa.Column("divergence_cross", sa.Double(), nullable=True, comment="As flip_cross, of divergence."),
        sa.Column("heaviest", sa.Double(), nullable=True, comment="Largest weight of an exchange."),
        sa.Column(
            "people",
            postgresql.ARRAY(sa.Double()),
            nullable=True,
            comment="Of flip, then of divergence, 67 numbers: w and y, each summed in 32 random groups of people (hashed), and the sums of w^2, y^2 and w y over the exchanges of people. Null: no exchange names a person. For intervals, by mean_interval().",
        ),
        sa.PrimaryKeyConstraint("hour", "model_version_id", "slice_id", name=op.f("pk_rollup_hour")),
        comment="Divergence per slice and hour of capture; written by the monitor alone.",
    )


def _slice() -> None:
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
        sa.Column(
            "lapsed_at",
            _TIME,
            nullable=True,
            comment="Since when its value has no place among its rule's slices and counts as `(other)`; null: it has one.",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_slice")),
        sa.UniqueConstraint("model", "predicate", name=op.f("uq_slice_model_predicate")),
        comment="A slice of the inputs: a readable predicate with a stable id.",
    )


def _value_share() -> None:
    op.create_table(
        "value_share",
        sa.Column("model", sa.Text(), nullable=False, comment="Model."),
        sa.Column(
            "source",
            sa.Text(),
            nullable=False,
            comment="Key of the attribute, name of the crossed rule with a colon and a space, or `version`.",
        ),
        sa.Column(
            "places",
            sa.Integer(),
            nullable=False,
            comment="Most values that have a slice, or version, of their own.",
        ),
        sa.Column("counted_at", _TIME, nullable=False, comment="Time of the weights: they halve every day."),
        sa.Column("total", sa.Double(), nullable=False, comment="Weight of all items."),
        sa.Column(
            "error", sa.Double(), nullable=False, comment="What each weight in the sketch can be too low by."
        ),
        sa.Column(
            "counts",
            postgresql.JSONB(),
            nullable=False,
            comment="Per value: predicate (or version), name, conditions, weight.",
        ),
        sa.Column(
            "reserved",
            sa.ARRAY(sa.Text()),
            nullable=False,
            comment="Versions that were given a place and have no row in model_version yet.",
        ),
        sa.PrimaryKeyConstraint("model", "source", name=op.f("pk_value_share")),
        comment="How much of the recent traffic has each value of an attribute, as a sketch of bounded size: the values with the largest shares are slices, or versions, of their own.",
    )


def _baseline() -> None:
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
        sa.Column("kind", sa.Text(), nullable=False, comment="Detector: budget, change, tail or growth."),
        sa.Column(
            "source",
            sa.Text(),
            nullable=False,
            comment="learned or inherited (by the monitor); accepted, imported, frozen or kept (by a person).",
        ),
        sa.Column(
            "made_by", sa.Text(), nullable=False, comment="Who decided: the user of the database, or monitor."
        ),
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
            postgresql.JSONB(),
            nullable=True,
            comment="The baseline, or an imported budget. Null: a decision about the baseline in effect, or not in effect for longer than 90 days, or storage.retention_days if that is longer.",
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
        comment="Baselines of signals, and every decision about them. Content that is no longer in effect is deleted after 90 days, or storage.retention_days if that is longer, and its row after storage.history_days.",
    )
    op.create_index(
        "ix_baseline_signal", "baseline", ["model_version_id", "slice_id", "metric", "kind", "id"]
    )
    op.create_index("ix_baseline_unfolded", "baseline", ["id"], postgresql_where=sa.text("fold_seq is null"))


def _detector() -> None:
    op.create_table(
        "detector",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice it watches."),
        sa.Column("metric", sa.Text(), nullable=False, comment="Metric it watches."),
        sa.Column(
            "kind",
            sa.Text(),
            nullable=False,
            comment="Kind of detector: budget, change (against a learned baseline), tail or growth (of the latency).",
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
        comment="State of a sequential detector of one metric on one slice, as of its last fold. Kept for 90 days, or storage.retention_days if that is longer, after it is retired.",
    )


def _discovery() -> None:
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
            comment="Since when it is proven and waits for one of the places of a model's discovered slices; null if it does not wait.",
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


def _discovery_search() -> None:
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


def _expiry() -> None:
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


def _gate_verdict() -> None:
    op.create_table(
        "gate_verdict",
        sa.Column("gate_id", sa.BigInteger(), autoincrement=False, nullable=False, comment="Gate."),
        sa.Column("verdict", sa.Text(), nullable=False, comment="pass, fail or insufficient."),
        sa.Column(
            "slice",
            sa.Text(),
            nullable=False,
            comment="Slice that was judged alone, beside all traffic (`--alert`); empty: every slice with traffic.",
        ),
        sa.Column(
            "configuration",
            postgresql.JSONB(),
            nullable=False,
            comment="Options of the model by which it was judged, as in the audit: those that differ from their default.",
        ),
        sa.Column(
            "made_by", sa.Text(), nullable=False, comment="Who ran it: the user that Postgres authenticated."
        ),
        sa.Column("made_at", _TIME, nullable=False, comment="When it ended, by the clock of the database."),
        sa.CheckConstraint(
            "verdict in ('pass', 'fail', 'insufficient')", name=op.f("ck_gate_verdict_verdict")
        ),
        sa.ForeignKeyConstraint(
            ["gate_id"], ["gate_run.id"], name=op.f("fk_gate_verdict_gate_id_gate_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("gate_id", name=op.f("pk_gate_verdict")),
        comment="The verdict of a gate that has ended. Only the function `gate_end` writes it, once, for the user that began the gate, together with an entry of the audit; rows are never changed.",
    )


def _incident() -> None:
    op.create_table(
        "incident",
        sa.Column(
            "id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Number of the incident."
        ),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column(
            "began_at",
            _TIME,
            nullable=False,
            comment="Estimated start of the drift: the earliest of its alerts.",
        ),
        sa.Column("opened_at", _TIME, nullable=False, comment="Event time of its first warning or page."),
        sa.Column(
            "state",
            sa.Text(),
            nullable=False,
            comment="open; mitigated: nobody gets its answers any more; recovered: by evidence; closed: by a person, or its slices are not compared any more; merged: its alerts belong to merged_into.",
        ),
        sa.Column(
            "mitigation",
            sa.Text(),
            nullable=True,
            comment="Of mitigated: replaced (another version serves), routed (no request of its slices reaches the version) or reported (by a person).",
        ),
        sa.Column(
            "ended_at", _TIME, nullable=True, comment="Since when it is not open any more; null while it is."
        ),
        sa.Column(
            "merged_into",
            sa.BigInteger(),
            nullable=True,
            comment="The older incident of the same cause; null: it stands for itself.",
        ),
        sa.Column(
            "n_answers",
            sa.BigInteger(),
            nullable=True,
            comment="Answers of its slices that were compared from its beginning to its end; null: not counted yet, or not by answers.",
        ),
        sa.Column(
            "n_people",
            sa.BigInteger(),
            nullable=True,
            comment="People with at least one changed answer among these; null where sampling.sticky_header says nothing of them, or not counted.",
        ),
        sa.Column(
            "changed",
            sa.Double(),
            nullable=True,
            comment="Estimated changed answers of all traffic of its slices in this time; null: not counted yet.",
        ),
        sa.Column(
            "changed_low", sa.Double(), nullable=True, comment="Lower end of its 95 % interval; null: none."
        ),
        sa.Column(
            "changed_high", sa.Double(), nullable=True, comment="Upper end of its 95 % interval; null: none."
        ),
        sa.Column("counted_until", _TIME, nullable=True, comment="Event time up to which the figures count."),
        sa.CheckConstraint(
            "mitigation in ('replaced', 'routed', 'reported')", name=op.f("ck_incident_mitigation")
        ),
        sa.CheckConstraint(
            "state in ('open', 'mitigated', 'recovered', 'closed', 'merged')", name=op.f("ck_incident_state")
        ),
        sa.ForeignKeyConstraint(
            ["merged_into"], ["incident.id"], name=op.f("fk_incident_merged_into_incident")
        ),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_incident_model_version_id_model_version"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_incident")),
        comment="Alerts of one version that explain each other, as one thing with a state. Read it through incidents. The log of its states is incident_change.",
    )
    op.create_index("ix_incident_model_version_id", "incident", ["model_version_id"])
    op.create_index(
        "ix_incident_open",
        "incident",
        ["id"],
        postgresql_where=sa.text("state = 'open' or mitigation in ('routed', 'reported')"),
    )


def _label() -> None:
    op.create_table(
        "label",
        sa.Column("captured_at", _TIME, nullable=False, comment="Of the item, as in comparison."),
        sa.Column("exchange_id", _UUID, nullable=False, comment="Of the item, as in comparison."),
        sa.Column(
            "item", sa.SmallInteger(), nullable=False, comment="Index of the item in the exchange, from 0."
        ),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="model_version it belongs to."),
        sa.Column(
            "label",
            sa.Text(),
            nullable=True,
            comment="The true class, by its number or its name in models.labels, as loaded; null where the file said which side was right.",
        ),
        sa.Column(
            "candidate_right",
            sa.Boolean(),
            nullable=False,
            comment="Whether the candidate's answer was right.",
        ),
        sa.Column(
            "reference_right",
            sa.Boolean(),
            nullable=False,
            comment="Whether the reference's answer was right.",
        ),
        sa.Column(
            "loaded_at", _TIME, server_default=sa.text("now()"), nullable=False, comment="When it was loaded."
        ),
        sa.Column(
            "drawn_for",
            sa.Integer(),
            nullable=True,
            comment="Slice of which `quantdrift labels wanted` drew it among the changed answers; null: it was not drawn.",
        ),
        sa.Column(
            "as_it_came",
            sa.Boolean(),
            server_default=sa.text("true"),
            nullable=False,
            comment="Whether it was loaded from a file that says nothing of a draw.",
        ),
        sa.ForeignKeyConstraint(
            ["model_version_id"], ["model_version.id"], name=op.f("fk_label_model_version_id_model_version")
        ),
        sa.PrimaryKeyConstraint("captured_at", "exchange_id", "item", name=op.f("pk_label")),
        comment="Which side was right about a compared item, by the true label that somebody loaded with `quantdrift labels load`. One row per labelled item.",
    )
    op.create_index("ix_label_model_version_id", "label", ["model_version_id", "captured_at"])


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
        sa.Column(
            "slice_ids",
            sa.ARRAY(sa.Integer()),
            nullable=True,
            comment="Slices that it counts for, which are some of those of its comparison; null from an older worker: the slice of all traffic alone.",
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
    op.create_index("ix_noise_batch_id", "noise", ["batch_id"])


def _noise_change() -> None:
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
        sa.Column(
            "slice_id", sa.Integer(), nullable=True, comment="Slice; null: all traffic of the version."
        ),
        sa.CheckConstraint("side in ('reference', 'candidate')", name=op.f("ck_noise_change_side")),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_noise_change_model_version_id_model_version"),
        ),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_noise_change_slice_id_slice")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_noise_change")),
        comment="When noise was shown to exceed half of the budget, and when to be below it again.",
    )
    op.create_index("ix_noise_change_at", "noise_change", ["at"])


def _noise_floor() -> None:
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
            "added",
            sa.Double(),
            nullable=False,
            comment="Amount added to the budget of the slice of all traffic, and of each slice without a figure of its own.",
        ),
        sa.Column(
            "budget", sa.Double(), nullable=False, comment="Accepted mean that the noise is compared with."
        ),
        sa.Column(
            "exceeds",
            sa.Boolean(),
            nullable=False,
            comment="Whether noise exceeds half of the budget: the slice of all traffic, and each slice without a figure of its own, are then unknown.",
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
        comment="Estimated noise of a reference or candidate over all traffic, as of its last fold. Values are divided by `scale`.",
    )


def _noise_slice() -> None:
    op.create_table(
        "noise_slice",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice."),
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
            "own",
            sa.Boolean(),
            nullable=False,
            comment="Whether the slice uses the two figures below; if not, it uses those of its version in noise_floor.",
        ),
        sa.Column("added", sa.Double(), nullable=False, comment="Amount added to the budget of the slice."),
        sa.Column(
            "budget", sa.Double(), nullable=False, comment="Accepted mean that the noise is compared with."
        ),
        sa.Column(
            "exceeds",
            sa.Boolean(),
            nullable=False,
            comment="Whether noise exceeds half of the budget, or is not yet shown to be below: the slice is then unknown.",
        ),
        sa.Column(
            "announced",
            sa.Boolean(),
            nullable=False,
            comment="Whether a noise_change says that it exceeds; there is none while the noise of the version exceeds too.",
        ),
        sa.Column("updated_at", _TIME, nullable=False, comment="Event time of the fold that wrote this."),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="Number of that fold."),
        sa.CheckConstraint("side in ('reference', 'candidate')", name=op.f("ck_noise_slice_side")),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_noise_slice_model_version_id_model_version"),
        ),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_noise_slice_slice_id_slice")),
        sa.PrimaryKeyConstraint(
            "model_version_id", "slice_id", "side", "metric", name=op.f("pk_noise_slice")
        ),
        comment="Estimated noise of a reference or candidate in one slice, as of its last fold; that of the slice of all traffic is in noise_floor. Values are divided by `scale`. Deleted when the slice is retired.",
    )


def _serving() -> None:
    op.create_table(
        "serving",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("last_at", _TIME, nullable=False, comment="Capture time of its newest exchange."),
        sa.Column(
            "gap_s",
            sa.Double(),
            nullable=False,
            comment="Usual gap between its exchanges in seconds: their mean over the last hour, weighted by their lengths.",
        ),
        sa.Column(
            "gaps_s", sa.Double(), nullable=False, comment="Seconds that gap_s is a mean of, at most an hour."
        ),
        sa.Column(
            "replaced_at",
            _TIME,
            nullable=True,
            comment="Event time at which it was found that another version serves instead; null while it serves.",
        ),
        sa.Column(
            "back_at",
            _TIME,
            nullable=True,
            comment="Of a version that was replaced: since when its exchanges are seen again; it serves again after two minutes.",
        ),
        sa.ForeignKeyConstraint(
            ["model_version_id"], ["model_version.id"], name=op.f("fk_serving_model_version_id_model_version")
        ),
        sa.PrimaryKeyConstraint("model_version_id", name=op.f("pk_serving")),
        comment="Whether each candidate version serves, as the monitor sees it: another version of its model replaces it once nothing of it was seen for ten times its usual gap, at least two minutes.",
    )


def _session() -> None:
    op.create_table(
        "session",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("policy_id", sa.Integer(), nullable=False, comment="policy of its first item."),
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


def _slice_change() -> None:
    op.create_table(
        "slice_change",
        sa.Column(
            "id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Order of changes."
        ),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice."),
        sa.Column(
            "status",
            sa.Text(),
            nullable=False,
            comment="lapsed: its items count as `(other)` from here on, and its detectors end. admitted: it is a slice again.",
        ),
        sa.Column(
            "made_by",
            sa.Text(),
            nullable=False,
            comment="Who changed it: the user of the database, monitor or shadow.",
        ),
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
        sa.CheckConstraint("status in ('admitted', 'lapsed')", name=op.f("ck_slice_change_status")),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_slice_change_slice_id_slice")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_slice_change")),
        comment="When a slice made of a value lost its place or got it back, with who and why; rows are never changed.",
    )
    op.create_index("ix_slice_change_slice", "slice_change", ["slice_id", "id"])
    op.create_index(
        "ix_slice_change_unfolded", "slice_change", ["id"], postgresql_where=sa.text("fold_seq is null")
    )


def _tally() -> None:
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
            comment="By model, where requests name one: taken; of these, thinned, published, and lost by reason; the row of the sidecar's table of counts, and the last number given to an exchange of it; of a model that is not configured, how many requests named it (unknown).",
        ),
        sa.Column(
            "streamed_at",
            _TIME,
            nullable=True,
            comment="When the stream stored it, by the server's clock; null if unknown.",
        ),
        sa.Column(
            "final",
            sa.Boolean(),
            server_default=sa.text("false"),
            nullable=False,
            comment="Whether it is the last one of its boot: no process of it is left, and whatever it took is published, thinned or lost.",
        ),
        sa.Column(
            "relay_cpu_s",
            sa.Double(),
            nullable=True,
            comment="Processor seconds of the relay workers of the whole sidecar since its boot; null if unknown.",
        ),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batch.id"], name=op.f("fk_tally_batch_id_batch"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("source", "boot", "stratum", "sequence", name=op.f("pk_tally")),
        comment="Exact counts of one header stratum of one sidecar, cumulative since its boot.",
    )
    op.create_index("ix_tally_at", "tally", ["at"])
    op.create_index("ix_tally_batch_id", "tally", ["batch_id"])


def _undeclared_session() -> None:
    op.create_table(
        "undeclared_session",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice."),
        sa.Column(
            "attribute", sa.Text(), nullable=False, comment="Recorded attribute, for instance header.x-user."
        ),
        sa.Column("n_exchanges", sa.BigInteger(), nullable=False, comment="Exchanges tested so far."),
        sa.Column("log_evidence", sa.Double(), nullable=False, comment="Logarithm of the evidence so far."),
        sa.Column(
            "log_threshold", sa.Double(), nullable=False, comment="Evidence from which on it counts as found."
        ),
        sa.Column("tested_at", _TIME, nullable=False, comment="Time of the newest exchange that was tested."),
        sa.Column(
            "found_at",
            _TIME,
            nullable=True,
            comment="Time of the newest exchange when the evidence reached the threshold; it stays.",
        ),
        sa.Column(
            "comes_back",
            sa.Boolean(),
            server_default=sa.text("false"),
            nullable=False,
            comment="Whether values come back, as those of sources do: bursts of a value are compared with its other bursts.",
        ),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_undeclared_session_model_version_id_model_version"),
        ),
        sa.ForeignKeyConstraint(
            ["slice_id"], ["slice.id"], name=op.f("fk_undeclared_session_slice_id_slice")
        ),
        sa.PrimaryKeyConstraint(
            "model_version_id", "slice_id", "attribute", name=op.f("pk_undeclared_session")
        ),
        comment="Evidence that requests with one value of an attribute come in bursts and have alike outcomes, although the attribute is not sampling.sticky_header. From `found_at` on the slice is unknown, and its alerts are tickets.",
    )


def _alert() -> None:
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
            comment="How it is related to other alerts: explained_by, incident, explains. What it is about is in the newest row of transition that opened it or made it worse.",
        ),
        sa.Column(
            "ended",
            sa.Text(),
            nullable=True,
            comment="Why it is over: recovered (by evidence), replaced (its version serves no more; null again if it does), retired (its slice is not compared any more) or closed (by a person). Null while it lasts.",
        ),
        sa.Column(
            "incident_id",
            sa.BigInteger(),
            nullable=True,
            comment="Incident that it belongs to, with the alerts that explain it or that it explains; null: the monitor has not looked yet.",
        ),
        sa.CheckConstraint(
            "ended in ('recovered', 'replaced', 'retired', 'closed')", name=op.f("ck_alert_ended")
        ),
        sa.CheckConstraint("severity in ('warning', 'firing')", name=op.f("ck_alert_severity")),
        sa.ForeignKeyConstraint(["incident_id"], ["incident.id"], name=op.f("fk_alert_incident_id_incident")),
        sa.ForeignKeyConstraint(
            ["model_version_id"], ["model_version.id"], name=op.f("fk_alert_model_version_id_model_version")
        ),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_alert_slice_id_slice")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert")),
        comment="An episode of drift on one slice, from the first warning or page to its resolution.",
    )
    op.create_index("ix_alert_incident_id", "alert", ["incident_id"])
    op.create_index(
        "uq_alert_open",
        "alert",
        ["model_version_id", "slice_id"],
        unique=True,
        postgresql_where=sa.text("resolved_at is null"),
    )


def _discovery_change() -> None:
    op.create_table(
        "discovery_change",
        sa.Column(
            "id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Order of changes."
        ),
        sa.Column("discovery_id", sa.Integer(), nullable=False, comment="Discovered slice."),
        sa.Column("status", sa.Text(), nullable=False, comment="Status from here on."),
        sa.Column(
            "made_by",
            sa.Text(),
            nullable=False,
            comment="Who changed it: the user of the database, or monitor.",
        ),
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
    op.create_index("ix_discovery_change_discovery", "discovery_change", ["discovery_id", "id"])
    op.create_index(
        "ix_discovery_change_unfolded",
        "discovery_change",
        ["id"],
        postgresql_where=sa.text("fold_seq is null"),
    )


def _incident_change() -> None:
    op.create_table(
        "incident_change",
        sa.Column(
            "id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Order of changes."
        ),
        sa.Column("incident_id", sa.BigInteger(), nullable=False, comment="Incident that it is about."),
        sa.Column("state", sa.Text(), nullable=False, comment="From then on, as incident.state."),
        sa.Column("mitigation", sa.Text(), nullable=True, comment="As incident.mitigation."),
        sa.Column("at", _TIME, nullable=False, comment="Event time."),
        sa.Column(
            "made_by",
            sa.Text(),
            server_default=sa.text("session_user"),
            nullable=False,
            comment="Database user who wrote it: the monitor's, or a person's.",
        ),
        sa.Column(
            "identity",
            sa.Text(),
            server_default=sa.text("''"),
            nullable=False,
            comment="Person that the web server has authenticated, or who closed the last alert; empty: the database user acted.",
        ),
        sa.Column(
            "made_at", _TIME, server_default=sa.text("now()"), nullable=False, comment="When it was written."
        ),
        sa.Column(
            "reason",
            sa.Text(),
            server_default=sa.text("''"),
            nullable=False,
            comment="Reason that a person gave; empty: the evidence says so.",
        ),
        sa.Column(
            "fold_seq",
            sa.BigInteger(),
            nullable=True,
            comment="The fold that wrote it, or took it over from a person; null until then.",
        ),
        sa.Column(
            "counts",
            postgresql.JSONB(),
            nullable=True,
            comment="Of routed: by slice, what had been compared of it, and of its version, and the share that it had of the traffic.",
        ),
        sa.CheckConstraint(
            "mitigation in ('replaced', 'routed', 'reported')", name=op.f("ck_incident_change_mitigation")
        ),
        sa.CheckConstraint(
            "state in ('open', 'mitigated', 'recovered', 'closed', 'merged')",
            name=op.f("ck_incident_change_state"),
        ),
        sa.ForeignKeyConstraint(
            ["incident_id"],
            ["incident.id"],
            name=op.f("fk_incident_change_incident_id_incident"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_incident_change")),
        comment="The states of each incident, in order: who said so, when and why.",
    )
    op.create_index("ix_incident_change_incident_id", "incident_change", ["incident_id", "id"])


def _alert_action() -> None:
    op.create_table(
        "alert_action",
        sa.Column(
            "id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Order of actions."
        ),
        sa.Column("alert_id", sa.BigInteger(), nullable=False, comment="Alert that it is about."),
        sa.Column(
            "action",
            sa.Text(),
            nullable=False,
            comment="ack, unack, note or close (by a person); escalate: the alert has become worse, and is not acknowledged any more.",
        ),
        sa.Column(
            "made_by",
            sa.Text(),
            server_default=sa.text("session_user"),
            nullable=False,
            comment="Database user who wrote it; nobody can give another one.",
        ),
        sa.Column(
            "identity",
            sa.Text(),
            server_default=sa.text("''"),
            nullable=False,
            comment="Person that the web server has authenticated; empty: the database user acted.",
        ),
        sa.Column("made_at", _TIME, server_default=sa.text("now()"), nullable=False, comment="When."),
        sa.Column(
            "reason",
            sa.Text(),
            nullable=False,
            comment="Reason or note that the person gave; for an escalation, what became worse.",
        ),
        sa.Column(
            "severity", sa.Text(), nullable=True, comment="Of ack and escalate: the alert's severity then."
        ),
        sa.Column(
            "level",
            sa.Double(),
            nullable=True,
            comment="Of ack: the alert escalates once the lower end of the 95 % interval of its metric is above this; null: unknown.",
        ),
        sa.Column(
            "finding",
            postgresql.JSONB(),
            nullable=True,
            comment="Of a note that a command wrote: what it found, with `kind` cause, repair or gate; null: a person wrote the note.",
        ),
        sa.Column(
            "fold_seq",
            sa.BigInteger(),
            nullable=True,
            comment="Of close: in effect from this fold on; null until the monitor has taken it over.",
        ),
        sa.CheckConstraint(
            "action in ('ack', 'unack', 'note', 'escalate', 'close')", name=op.f("ck_alert_action_action")
        ),
        sa.ForeignKeyConstraint(
            ["alert_id"], ["alert.id"], name=op.f("fk_alert_action_alert_id_alert"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert_action")),
        comment="What people did about alerts, and escalations that ended an acknowledgement. An alert is acknowledged if the newest row that is no note is `ack`.",
    )
    op.create_index("ix_alert_action_alert_id", "alert_action", ["alert_id", "id"])
    op.create_index(
        "ix_alert_action_unfolded",
        "alert_action",
        ["id"],
        postgresql_where=sa.text("action = 'close' and fold_seq is null"),
    )


def _transition() -> None:
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
        sa.Column(
            "text",
            postgresql.JSONB(),
            nullable=True,
            comment="What it says, worded when it was written: headline, lines, do_now, tomorrow, details. Null: no alert changed.",
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
    op.create_index(
        "ix_transition_alert_id",
        "transition",
        ["alert_id", "id"],
        postgresql_where=sa.text("alert_id is not null"),
    )
    op.create_index("ix_transition_at", "transition", ["at"])


def _verdict() -> None:
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


def _outbox() -> None:
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
        sa.Column(
            "escalation_id",
            sa.BigInteger(),
            nullable=True,
            comment="Escalation of an acknowledged alert that it reports; `transition_id` is then the last change before it.",
        ),
        sa.Column(
            "webhook_due_at",
            _TIME,
            nullable=True,
            comment="When it is sent to the webhook next; null: it was accepted, or is not for the webhook.",
        ),
        sa.Column(
            "webhook_attempts",
            sa.Integer(),
            server_default=sa.text("0"),
            nullable=False,
            comment="How often sending it to the webhook failed.",
        ),
        sa.Column(
            "webhook_error", sa.Text(), nullable=True, comment="Why the webhook did not accept it last."
        ),
        sa.Column(
            "incident_change_id",
            sa.BigInteger(),
            nullable=True,
            comment="Change of its alert's incident that it reports; `transition_id` is then the last change of the alert before it.",
        ),
        sa.CheckConstraint("num_nonnulls(transition_id, noise_change_id) = 1", name=op.f("ck_outbox_event")),
        sa.ForeignKeyConstraint(
            ["escalation_id"], ["alert_action.id"], name=op.f("fk_outbox_escalation_id_alert_action")
        ),
        sa.ForeignKeyConstraint(
            ["incident_change_id"],
            ["incident_change.id"],
            name=op.f("fk_outbox_incident_change_id_incident_change"),
        ),
        sa.ForeignKeyConstraint(
            ["noise_change_id"], ["noise_change.id"], name=op.f("fk_outbox_noise_change_id_noise_change")
        ),
        sa.ForeignKeyConstraint(
            ["transition_id"], ["transition.id"], name=op.f("fk_outbox_transition_id_transition")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        comment="Events to be sent by OTLP and to the webhook at least once; written with the transition.",
    )
    op.create_index("ix_outbox_unsent", "outbox", ["id"], postgresql_where=sa.text("sent_at is null"))
    op.create_index(
        "ix_outbox_webhook",
        "outbox",
        ["webhook_due_at"],
        postgresql_where=sa.text("webhook_due_at is not null"),
    )


TABLES: Final[dict[str, Callable[[], None]]] = {
    "arrival": _arrival,
    "audit": _audit,
    "batch": _batch,
    "clustering": _clustering,
    "comparison": _comparison,
    "compatibility": _compatibility,
    "doubt": _doubt,
    "embedding": _embedding,
    "fold": _fold,
    "gate_run": _gate_run,
    "leader": _leader,
    "model_version": _model_version,
    "policy": _policy,
    "process_report": _process_report,
    "quarantine": _quarantine,
    "report_run": _report_run,
    "rollup_day": _rollup_day,
    "rollup_hour": _rollup_hour,
    "slice": _slice,
    "value_share": _value_share,
    "baseline": _baseline,
    "detector": _detector,
    "discovery": _discovery,
    "discovery_search": _discovery_search,
    "expiry": _expiry,
    "gate_verdict": _gate_verdict,
    "incident": _incident,
    "label": _label,
    "noise": _noise,
    "noise_change": _noise_change,
    "noise_floor": _noise_floor,
    "noise_slice": _noise_slice,
    "serving": _serving,
    "session": _session,
    "slice_change": _slice_change,
    "tally": _tally,
    "undeclared_session": _undeclared_session,
    "alert": _alert,
    "discovery_change": _discovery_change,
    "incident_change": _incident_change,
    "alert_action": _alert_action,
    "transition": _transition,
    "verdict": _verdict,
    "outbox": _outbox,
}
"""What creates each table, in an order in which each finds those that it refers to."""

"""Rows of `comparison` from a few exchanges of every sort, as text. `python -m tests.support.shadow.stored_rows` writes them again."""

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Config, Model, Reference, Slice
from quantdrift.core.records import Latency, Predicate, Sampling, Way
from quantdrift.core.slices import slice_of
from quantdrift.core.tasks import Task
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.shadow.pipeline.assess import Assessor
from quantdrift.shadow.pipeline.classify import classify
from quantdrift.shadow.pipeline.validate import AttributeRules, PolicyCheck, StreamedMessage
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import References
from quantdrift.storage.comparisons.copy import COLUMNS, comparison_columns, rows_of
from tests.support.shadow.onnx_models import BIAS, POLICY, WEIGHT, exchange_of, logits_of

GOLDEN: Final = Path(__file__).with_name("stored_rows.txt")
_AT: Final = datetime(2026, 11, 28, 3, tzinfo=UTC)
_SLICES: Final = (
    Slice(name="site", header="x-site"),
    Slice(name="mean", feature="mean", edges=(-0.2, 0.2)),
    Slice(name="day", time="day"),
    Slice(name="both", cross=("site", "mean")),
    Slice(name="plan", header="x-plan", values=("free", "paid")),
    Slice(name="loan", json="loan", edges=(10.0, 20.0)),
)
_FOUND: Final = [
    Predicate(key="header.x-site", equals="north"),
    Predicate(key="feature.mean", low=0.0, high=1.0),
]


def stored_rows() -> str:
    """Return the rows of two tasks, without columns that are null; numbers with nine digits, since processors differ in the last ones."""
    return "\n".join(line for task in (Task.CLASSIFICATION, Task.TENSOR) for line in _of_task(task)) + "\n"


def _of_task(task: Task) -> Iterator[str]:
    model = Model(
        name="digits", task=task, top_k=2, output="logits", references=(Reference(path="x", versions=("*",)),)
    )
    config = Config(models=(model,), slices=_SLICES)
    references = References(config.models, lambda *_: LinearRuntime(WEIGHT, BIAS))
    rules, check = AttributeRules.of(config.capture, config.slices), PolicyCheck()
    assessor = Assessor(config, "worker")
    assessor.watch_discovered({"digits": (slice_of("digits", _FOUND),)})
    batch = [
        classify(
            encode(_exchange(number)),
            sequence=number,
            n_delivered=1,
            max_deliveries=5,
            references=references,
            envelope=StreamedMessage(model="digits", streamed_at=_AT + timedelta(days=9)),
            rules=rules,
            check_policy=check,
        )
        for number in range(20)
    ]
    stored = assessor.assess(batch, _AT)
    assert all(isinstance(case, PreparedExchange) for case in batch)
    predicates = sorted(
        {(key.model, key.predicate) for of_item in stored.combinations.values() for key in of_item}
    )
    slice_ids = {
        name: sorted({predicates.index((key.model, key.predicate)) for key in of_item})
        for name, of_item in stored.combinations.items()
    }
    yield from (f"slice {number}: {predicate}" for number, (_, predicate) in enumerate(predicates))
    for compared in stored.compared:
        yield f"exchange of {compared.version.candidate_version!r}"
        columns = comparison_columns(
            [compared], 1, {compared.version: 2}, {compared.exchange.sampling.policy.epoch: 3}, slice_ids
        )
        for row in rows_of(columns):
            yield "  " + ", ".join(
                f"{name}={_text(value)}"
                for name, value in zip(COLUMNS, row, strict=True)
                if value is not None
            )
    for quarantined in stored.quarantined:
        yield f"quarantined {quarantined.exchange_id} {quarantined.reason}: {quarantined.detail}"


def _exchange(number: int) -> Any:
    rng = np.random.default_rng(number)
    x = rng.normal(size=(1 + number % 3, 4)).astype(np.float32)
    y = logits_of(x) + (0.3 * rng.normal(size=(len(x), 3))).astype(np.float32)
    if number % 9 == 2:
        y[0, 1] = np.nan
    if number % 9 == 4:
        y[0, 2] = -np.inf
    if number % 9 == 6:
        y = np.round(y)
    if number == 17:
        y = y[:, :2]
    attributes = {"header.x-secret": "dropped"} if number % 5 == 0 else {}
    if number % 4:
        attributes["header.x-site"] = ("north", "south", "\u202eeast")[number % 3]
    if number % 6 == 0:
        attributes |= {"header.x-plan": "free", "json.loan": str(number)}
    exchange = exchange_of(x, y, attributes=attributes)
    return msgspec.structs.replace(
        exchange,
        id=hashlib.sha256(str(number).encode()).hexdigest()[:32],
        captured_at=_AT + timedelta(hours=5 * number),
        model="digits",
        version="int8 (unverified)" if number % 7 == 3 else "int8",
        group="session" if number % 3 == 0 else "",
        trace=f"00-{'a' * 32}-{'b' * 16}-01-more" if number % 4 == 1 else "",
        way=Way.TAP if number % 6 == 2 else Way.RELAY,
        caller="somebody" if number % 12 == 2 else "",
        latency=Latency(last_byte_s=number / 64, first_token_s=0.25 if number % 4 == 1 else None)
        if number % 2
        else None,
        sampling=Sampling(
            policy=POLICY,
            header_stratum="default",
            body_stratum="default",
            pi1=0.5,
            pi2=1.0,
            u1=number / 128,
            u2=0.0,
        ),
    )


def _text(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else repr(value)


if __name__ == "__main__":
    GOLDEN.write_text(stored_rows(), "utf-8")

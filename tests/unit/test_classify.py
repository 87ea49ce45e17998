"""Messages of the stream: which are replayed, set aside, or skipped."""

from datetime import datetime
from typing import Any

import msgspec
import numpy as np
import pytest

from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Model, Reference
from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.records import BodyStratum, StratumCount, Tally
from quantdrift.core.stream.tallies import read_tally
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.shadow.pipeline.classify import Case, classify
from quantdrift.shadow.pipeline.validate import PolicyCheck, read_exchange
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import References
from quantdrift.storage.comparisons.rows import Quarantined, Unreferenced
from tests.support.shadow.onnx_models import BIAS, WEIGHT, exchange_of, inputs_of

pytestmark = pytest.mark.unit


def _load(_: Model, reference: Reference) -> ReferenceRuntime:
    return LinearRuntime(WEIGHT, BIAS + np.float32(reference.path == "second.onnx"))


REFERENCES = References(
    [
        Model(
            name="digits",
            references=(
                Reference(path="first.onnx", versions=("7", "int8-*")),
                Reference(path="second.onnx", versions=("int?",)),
                Reference(path="first.onnx", versions=("8",)),
            ),
        )
    ],
    _load,
)


def _triage(payload: bytes, n_delivered: int = 1) -> Case:
    return classify(payload, sequence=3, n_delivered=n_delivered, max_deliveries=5, references=REFERENCES)


def test_a_version_finds_the_first_reference_whose_pattern_matches() -> None:
    """Shell wildcards, case by case; a file that is named twice is loaded once."""
    found = {version: REFERENCES.find("digits", version) for version in ("7", "8", "int8-a", "int8", "INT8")}
    assert found["7"] is not None
    assert found["8"] is not None
    assert found["int8"] is not None
    assert found["7"].runtime is found["8"].runtime
    assert found["7"].runtime is not found["int8"].runtime
    assert found["int8-a"] is found["7"]
    assert found["INT8"] is None
    assert REFERENCES.find("letters", "7") is None


def test_a_good_exchange_is_prepared() -> None:
    """Exchanges of one version with equal shapes share a signature, others do not."""
    one, two = _triage(encode(exchange_of(inputs_of(2)))), _triage(encode(exchange_of(inputs_of(3))))
    other = _triage(encode(exchange_of(inputs_of(2), version="7")))
    assert isinstance(one, PreparedExchange)
    assert isinstance(two, PreparedExchange)
    assert isinstance(other, PreparedExchange)
    assert (one.n_items, two.n_items) == (2, 3)
    assert one.signature == two.signature != other.signature


def test_a_version_without_a_reference_is_counted() -> None:
    """It is known by name and has no digest."""
    case = _triage(encode(exchange_of(inputs_of(1), version="fp4")))
    assert isinstance(case, Unreferenced)
    assert (case.version.candidate_version, case.version.reference_digest) == ("fp4", "")


def test_what_was_delivered_too_often_is_not_even_read() -> None:
    """Beyond the last try a message is poison, whatever it holds."""
    case = _triage(b"anything", n_delivered=6)
    assert isinstance(case, Quarantined)
    assert (case.reason, case.stream_sequence, case.payload) == (QuarantineReason.POISON, 3, b"anything")


def test_inputs_that_do_not_fit_are_set_aside_with_their_exchange() -> None:
    """The quarantine knows id, model and capture time."""
    exchange = exchange_of(inputs_of(1)[:, :2], inputs_of(1)[:, :3])
    case = _triage(encode(exchange))
    assert isinstance(case, Quarantined)
    assert (case.reason, case.exchange_id, case.model) == (QuarantineReason.SCHEMA, exchange.id, "digits")


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "short"},
        {"id": "g" * 32},
        {"captured_at": datetime(2026, 1, 1)},  # noqa: DTZ001 - that is what is refused
        {"pi1": 0.0},
        {"pi2": 1.5},
        {"pi1": float("nan")},
    ],
)
def test_what_the_record_could_not_hold_is_refused_before_it(changes: dict[str, Any]) -> None:
    """An id, a time and probabilities that are none are quarantined as `decode`, not met by a failing COPY."""
    exchange = exchange_of(inputs_of(1))
    if "id" in changes or "captured_at" in changes:
        exchange = msgspec.structs.replace(exchange, **changes)
    else:
        sampling = msgspec.structs.replace(exchange.sampling, **changes)
        exchange = msgspec.structs.replace(exchange, sampling=sampling)
    case = _triage(encode(exchange))
    assert isinstance(case, Quarantined)
    assert case.reason is QuarantineReason.DECODE


def test_texts_lose_what_postgres_cannot_hold() -> None:
    """A zero character becomes the replacement character, in exchanges and in tallies."""
    exchange = exchange_of(inputs_of(1), version="a\0b", attributes={"json.a\0": "\0"})
    read = read_exchange(encode(exchange))
    assert read.version == "a\N{REPLACEMENT CHARACTER}b"
    assert read.attributes == {"json.a\N{REPLACEMENT CHARACTER}": "\N{REPLACEMENT CHARACTER}"}
    stratum = StratumCount(stratum="s\0", offered=1, taken=1, thinned=0, published=1)
    tally = Tally(
        source="pod\0",
        boot="f" * 32,
        sequence=1,
        at=exchange.captured_at,
        strata=(stratum,),
        blind_connections=0,
    )
    assert "\0" not in read_tally(encode(tally)).source + read_tally(encode(tally)).strata[0].stratum


def test_a_policy_is_checked_again_where_it_changes() -> None:
    """What was sound is remembered, and says nothing of the next policy."""
    check = PolicyCheck()
    sound = exchange_of(inputs_of(1))
    policy = sound.sampling.policy
    rates = (BodyStratum(name="default", rate=1.5),)
    broken = msgspec.structs.replace(
        sound,
        sampling=msgspec.structs.replace(
            sound.sampling, policy=msgspec.structs.replace(policy, body_strata=rates)
        ),
    )
    for _ in range(2):
        assert read_exchange(encode(sound), None, check) == sound
        with pytest.raises(QuarantineError, match="does not lie between 0 and 1"):
            read_exchange(encode(broken), None, check)

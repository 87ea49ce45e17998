"""The wire form of the records."""

from datetime import UTC, datetime

import pytest

from quantdrift.core.codec import decode_exchange, decode_tally, encode
from quantdrift.core.errors import QuarantineError
from quantdrift.core.records import (
    Exchange,
    HeaderStratum,
    Loss,
    Policy,
    Sampling,
    StratumCount,
    Tally,
    Tensor,
)

pytestmark = pytest.mark.unit

AT = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
POLICY = Policy(epoch="e1", header_strata=(HeaderStratum(name="default", rate=0.5),), body_strata=())
EXCHANGE = Exchange(
    id="0" * 32,
    captured_at=AT,
    source="pod",
    model="m",
    version="1",
    protocol="oip-v2-rest",
    inputs=(Tensor(name="x", datatype="FP32", shape=(1, 2), data=b"\0" * 8),),
    outputs=(),
    sampling=Sampling(
        policy=POLICY, header_stratum="default", body_stratum="default", pi1=0.5, pi2=0.5, u1=0.25, u2=0.25
    ),
)
TALLY = Tally(
    source="pod",
    boot="f" * 32,
    sequence=3,
    at=AT,
    strata=(
        StratumCount(stratum="default", offered=9, taken=5, thinned=1, published=3, lost={Loss.DECODE: 1}),
    ),
    blind_connections=0,
)


def test_records_come_back_equal() -> None:
    """What was encoded is decoded, microseconds, bytes and enums included."""
    assert decode_exchange(encode(EXCHANGE)) == EXCHANGE
    assert decode_tally(encode(TALLY)) == TALLY
    assert EXCHANGE.sampling.pi == 0.25


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"E",
        b"T\x01",
        b"E\x02" + encode(EXCHANGE)[2:],
        b"X" + encode(EXCHANGE)[1:],
        encode(EXCHANGE)[:-1],
    ],
)
def test_what_is_not_an_exchange_is_refused_by_name(wire: bytes) -> None:
    """Another kind, another version and cut bytes are quarantined with the reason `decode`."""
    with pytest.raises(QuarantineError, match="decode"):
        decode_exchange(wire)

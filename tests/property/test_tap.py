"""The tap draws as the relay does: the same stratum for the same headers, the same share of calls."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.core.config.schema import SamplingOptions
from quantdrift.core.records import HeaderStratum
from quantdrift.core.sampling.rates import policy_of
from quantdrift.sidecar.sampling.first_phase import ExchangeIds, Sampler
from quantdrift.sidecar.tap.tap import TapSampler
from quantdrift.sidecar.tap.wire import Rates

pytestmark = pytest.mark.property

PATH = "/v2/models/a/infer"
NAMES = st.sampled_from(["x-a", "x-b", "x-c"])
VALUES = st.sampled_from(["1", "2", "3"])
HEADERS = st.dictionaries(NAMES, VALUES, max_size=3)
STRATA = st.lists(
    st.builds(
        HeaderStratum,
        name=st.uuids().map(str),
        rate=st.floats(0, 1),
        headers=HEADERS,
        method=st.sampled_from(["", "POST", "GET"]),
        path_prefix=st.sampled_from(["", "/v2", "/v1"]),
    ),
    max_size=6,
)


def chooser_of(sampling: SamplingOptions, seed: int = 1) -> TapSampler:
    """Return what a tap makes of a configuration's rates."""
    rates = Rates(
        epoch="e",
        salt=b"s",
        sticky=sampling.sticky_header,
        strata=policy_of(sampling, "e").header_strata,
        rows=tuple(range(len(sampling.header_strata) + 1)),
        max_exchange_bytes=1000,
    )
    return TapSampler(rates, PATH, random.Random(seed).random)


@given(STRATA, HEADERS)
def test_a_call_is_in_the_stratum_that_the_relay_would_find(
    strata: list[HeaderStratum], headers: dict[str, str]
) -> None:
    """Any strata, any headers."""
    sampling = SamplingOptions(header_strata=tuple(strata))
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    raw = f"POST {PATH} HTTP/1.1\r\n{head}\r\n".encode()
    drawn = Sampler(sampling, b"", ExchangeIds(), 0.0).draw(b"POST", PATH.encode(), raw, 0, len(raw))
    chooser = chooser_of(sampling)
    names = [stratum.name for stratum in policy_of(sampling, "").header_strata]
    assert (chooser.stratum(headers) if headers else chooser.default_stratum) == names[drawn.stratum]


def test_the_share_that_is_taken_is_the_rate() -> None:
    """Of 40,000 calls at 0.25: outside of five standard deviations once in 1.7 million runs; draws lie below the rate."""
    chooser = chooser_of(SamplingOptions(rate=0.25))
    taken = [
        chosen for _ in range(40_000) if (chosen := chooser.draw(chooser.default_stratum, {})) is not None
    ]
    assert abs(len(taken) - 10_000) < 5 * (40_000 * 0.25 * 0.75) ** 0.5
    assert all(chosen.u1 < chosen.pi1 == 0.25 for chosen in taken)
    assert len({chosen.id for chosen in taken}) == len(taken)


def test_a_sticky_header_takes_a_user_whole() -> None:
    """Each of 200 users is taken always or never, and some of them are."""
    chooser = chooser_of(SamplingOptions(rate=0.25, sticky_header="x-user"))
    shares = set()
    n_taken = 0
    for user in range(200):
        headers = {"x-user": f"{user}"}
        taken = sum(chooser.draw(chooser.stratum(headers), headers) is not None for _ in range(5))
        shares.add(taken)
        n_taken += bool(taken)
    assert shares == {0, 5}
    assert 20 < n_taken < 80

"""The first sampling phase, in the relay."""

import itertools
import time

import pytest

from quantdrift.core.config import Capture, SamplingOptions
from quantdrift.core.records import HeaderStratum
from quantdrift.core.sampling.rates import EPOCH_S, epoch_salt, uniform
from quantdrift.sidecar.capture.attributes import Attributes, KeyedHash
from quantdrift.sidecar.protocols.http_message import parse_head
from quantdrift.sidecar.sampling.first_phase import Draw, ExchangeIds, Sampler

pytestmark = pytest.mark.unit

PATH = b"/v2/models/digits/infer"


def sampler(now_s: float = 0.0, **options: object) -> Sampler:
    """Return a sampler with the secret `s`."""
    return Sampler(SamplingOptions(**options), b"s", ExchangeIds(), now_s)  # type: ignore[arg-type]


def draw(of: Sampler, *fields: bytes, path: bytes = PATH) -> Draw:
    """Return what becomes of a request with these header fields."""
    data = b"POST " + path + b" HTTP/1.1\r\n" + b"".join(field + b"\r\n" for field in fields) + b"\r\n"
    return of.draw(b"POST", path, data, 0, len(data))


def test_identifiers_are_32_digits_and_never_equal() -> None:
    """Two processes that start counting at the same number differ in their other half."""
    entropy = itertools.chain([b"\1" * 8, b"\xff" * 8, b"\2" * 8, b"\xff" * 8])
    mints = [ExchangeIds(lambda _: next(entropy)) for _ in range(2)]
    identifiers = [mint() for mint in mints for _ in range(1000)]
    assert len(set(identifiers)) == 2000
    assert all(len(identifier) == 32 and int(identifier, 16) >= 0 for identifier in identifiers)


def test_the_stored_identifier_explains_the_decision() -> None:
    """Who knows the salt can tell from identifier, epoch and rate that the exchange was rightly taken."""
    of = sampler(rate=0.5)
    draws = [draw(of) for _ in range(200)]
    assert {each.taken for each in draws} == {True, False}
    for each in draws:
        assert each.taken == (uniform(each.id.encode(), epoch_salt(b"s", each.epoch, 1)) < 0.5)


@pytest.mark.parametrize("value", [b"faint\x7f", b"\x01faint", b"fa\tint"])
def test_a_stratum_is_found_by_the_value_that_is_recorded(value: bytes) -> None:
    """Attributes lose control characters: what is in the slice by then was drawn at the slice's rate."""
    head = b"POST " + PATH + b" HTTP/1.1\r\nx-scanner: " + value + b"\r\n\r\n"
    recorded = Attributes(Capture(headers=("x-scanner",)), KeyedHash(b"")).pick(
        parse_head(head).headers, {}, {}
    )
    assert recorded == {"header.x-scanner": "faint"}
    for method in ("", "POST"):
        by_value = HeaderStratum(name="faint", rate=1.0, headers={"x-scanner": "faint"}, method=method)
        assert draw(sampler(header_strata=(by_value,)), b"x-scanner: " + value).stratum == 0


def test_the_rate_is_the_share_that_is_taken() -> None:
    """Of 4,000 requests at 0.3 between 1,080 and 1,320 are taken: outside 4 standard deviations with p < 1e-4."""
    of = sampler(rate=0.3)
    assert 1080 < sum(draw(of).taken for _ in range(4000)) < 1320


@pytest.mark.parametrize(("rate", "taken"), [(0.0, False), (1.0, True)])
def test_nothing_and_everything_are_exact(rate: float, *, taken: bool) -> None:
    """The rates 0 and 1 leave nothing to chance."""
    of = sampler(rate=rate)
    assert all(draw(of).taken is taken for _ in range(100))


def test_at_rate_0_nothing_is_taken() -> None:
    """Strata are told all the same: counting goes on."""
    of = sampler(rate=0.0, header_strata=(HeaderStratum(name="a", rate=0.0, headers={"x": "1"}),))
    assert not draw(of).taken
    assert (draw(of, b"X: 1").stratum, draw(of, b"X: 1").taken) == (0, False)


def test_the_first_stratum_that_matches_decides() -> None:
    """Method, path and every header must fit; what fits nowhere is the last, `default`."""
    of = sampler(
        rate=0.0,
        header_strata=(
            HeaderStratum(name="get", rate=1.0, method="GET"),
            HeaderStratum(name="both", rate=1.0, headers={"x-scanner": "faint", "x-site": "b"}),
            HeaderStratum(name="faint", rate=0.5, headers={"x-scanner": "faint"}),
            HeaderStratum(name="path", rate=0.25, path_prefix="/v2/models/other/"),
        ),
    )
    found = [
        draw(of, b"X-Scanner: faint", b"x-SITE:b \t"),
        draw(of, b"X-Scanner:\tfaint"),
        draw(of, path=b"/v2/models/other/infer"),
        draw(of, b"X-Scanner: Faint"),
        draw(of, b"X-Scanner: faint", b"X-Scanner: faint"),
        draw(of, b"Not-X-Scanner: faint"),
    ]
    assert [each.stratum for each in found] == [1, 2, 3, 4, 4, 4]
    assert [each.pi1 for each in found] == [1.0, 0.5, 0.25, 0.0, 0.0, 0.0]


def test_a_sticky_header_takes_its_bearer_whole_or_not_at_all() -> None:
    """Within an epoch one value is decided once; in the next it is decided anew. Without it chance decides."""
    of = sampler(rate=0.5, sticky_header="X-User")
    users = [b"X-User: %d" % n for n in range(64)]
    first = [{draw(of, user).taken for _ in range(5)} for user in users]
    assert all(len(each) == 1 for each in first)
    assert {True} in first
    assert {False} in first
    of.refresh(EPOCH_S - 1.0)
    assert [{draw(of, user).taken} for user in users] == first
    of.refresh(EPOCH_S)
    assert [{draw(of, user).taken} for user in users] != first
    assert {draw(of).taken for _ in range(64)} == {True, False}


def test_looking_for_headers_costs_linear_time() -> None:
    """64 KiB of spaces do not hold the loop: they take no second of this thread, where their square takes many."""
    of = sampler(rate=1.0, sticky_header="x-user")
    began = time.thread_time()
    draw(of, b"X-User:" + b" " * 65_536, b"x-user" * 10_000)
    assert time.thread_time() - began < 1.0


def test_strata_by_the_values_of_one_header_decide_as_if_asked_in_turn() -> None:
    """Neighbours are found in one look; of two for a value the first decides, and others stand between."""
    strata = (
        HeaderStratum(name="a", rate=0.5, headers={"x-site": "a"}),
        HeaderStratum(name="b", rate=0.25, headers={"x-site": "b"}),
        HeaderStratum(name="again", rate=0.125, headers={"x-site": "a"}),
        HeaderStratum(name="path", rate=0.75, headers={"x-site": "c"}, path_prefix="/v2/models/other/"),
        HeaderStratum(name="c", rate=1.0, headers={"x-site": "c"}),
        HeaderStratum(name="scanner", rate=0.0625, headers={"x-scanner": "a"}),
    )
    of = sampler(rate=0.0, header_strata=strata)
    other = b"/v2/models/other/infer"
    found = [
        draw(of, b"X-Site: a"),
        draw(of, b"X-Site: b", b"X-Scanner: a"),
        draw(of, b"X-Site: c", path=other),
        draw(of, b"X-Site: c"),
        draw(of, b"X-Site: d", b"X-Scanner: a"),
        draw(of, b"X-Scanner: b"),
        draw(of),
    ]
    assert [each.stratum for each in found] == [0, 1, 3, 4, 5, 6, 6]
    assert [each.pi1 for each in found] == [0.5, 0.25, 0.75, 1.0, 0.0625, 0.0, 0.0]

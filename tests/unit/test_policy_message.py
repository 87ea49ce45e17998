"""The wire form of the sampling policy, and the rates that a sidecar takes from it."""

from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from quantdrift.core.config.schema import Config, SamplingOptions
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate
from quantdrift.core.sampling.policy_message import (
    MAX_BYTES,
    PlannedSlice,
    PolicyMessage,
    PolicyRefusal,
    PolicyRefusedError,
    PolicySummary,
    decode_policy_message,
    decode_policy_summary,
    encode,
    name_of,
)
from quantdrift.core.sampling.rates import EPOCH_S, policy_at
from quantdrift.sidecar.state.policy import MAX_KNOWN, PolicyFile, PolicyHistory, check_policy
from tests.support.sidecar.policy_messages import BEGIN, CONFIG, directive, named

pytestmark = pytest.mark.unit

NOW_S = BEGIN.timestamp()


def refusal(wire: bytes, config: Config = CONFIG, now_s: float = NOW_S) -> PolicyRefusal:
    """Return why the wire is refused."""
    with pytest.raises(PolicyRefusedError) as caught:
        check_policy(wire, config.sampling, now_s)
    return caught.value.refusal


def test_records_come_back_as_they_were() -> None:
    """Directive and account, each by its own decoder."""
    sent = directive(1.0, 0.5, 0.25, 0.125)
    assert decode_policy_message(encode(sent)) == sent
    share = PlannedSlice(model="m", name="all", traffic_per_s=1.0, replays_per_s=0.5, evidence_share=1.0)
    account = PolicySummary(
        epoch="m0",
        made_at=BEGIN,
        budget_per_s=1.0,
        replays_per_s=1.0,
        taken_per_s=2.0,
        n_items=3,
        n_unboosted=0,
        n_slices=1,
        slices=(share,),
    )
    assert decode_policy_summary(encode(account)) == account


def test_equal_rates_have_one_name_and_others_another() -> None:
    """What was the epoch before does not count."""
    first, second = directive(1.0, 0.5, 0.25, 0.125).policy, directive(1.0, 0.5, 0.25, 0.25).policy
    assert name_of(msgspec.structs.replace(first, epoch="x")) == first.epoch != second.epoch


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"garbage",
        b"D\x02\x80",
        b"D\x01\xff",
        b"D\x01" + bytes(MAX_BYTES),
        b"E\x01\x80",
        encode(
            msgspec.structs.replace(
                directive(1.0, 0.5, 0.25, 0.125),
                policy=msgspec.structs.replace(
                    directive(1.0, 0.5, 0.25, 0.125).policy, epoch="m0123456789ab"
                ),
            )
        ),
        encode(directive(1.0, 0.5, 0.25, 0.125, issued_at=BEGIN.replace(tzinfo=None))),
    ],
    ids=lambda _: "wire",
)
def test_what_cannot_be_read_is_refused(wire: bytes) -> None:
    """Garbage, another version or kind, too long, a name that lies, a time without a zone."""
    assert refusal(wire) is PolicyRefusal.UNREADABLE


def test_a_directive_that_is_too_long_is_not_even_sent() -> None:
    """Each exchange would carry it."""
    where = (Predicate(key="header.x-scanner", equals="v" * 200),)
    strata = tuple(BodyStratum(name=f"{n}", rate=1.0, where=where) for n in range(400))
    with pytest.raises(ValueError, match="bytes"):
        encode(directive(1.0, 0.5, 0.25, 0.125, body=strata))


def test_other_strata_than_the_configurations_are_refused() -> None:
    """By name, by condition, by order, by number: counts are kept by index."""
    good = directive(1.0, 0.5, 0.25, 0.125)
    strata = good.policy.header_strata
    renamed = (msgspec.structs.replace(strata[0], name="other"), *strata[1:])
    changed = (msgspec.structs.replace(strata[0], headers={"x-scanner": "x"}), *strata[1:])
    for wrong in (renamed, changed, strata[::-1], strata[1:]):
        policy = named(msgspec.structs.replace(good.policy, header_strata=wrong))
        assert refusal(encode(msgspec.structs.replace(good, policy=policy))) is PolicyRefusal.STRATA
    assert check_policy(encode(good), CONFIG.sampling, NOW_S) == good


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan"), float("inf")])
def test_rates_are_probabilities(rate: float) -> None:
    """In both phases."""
    assert refusal(encode(directive(1.0, 0.5, 0.25, rate))) is PolicyRefusal.RATES
    assert refusal(encode(directive(1.0, 0.5, 0.25, 0.125, base=rate))) is PolicyRefusal.RATES


@pytest.mark.parametrize("valid_s", [1e9, float("inf"), float("nan")])
def test_one_forged_message_does_not_silence_a_sidecar_for_years(valid_s: float) -> None:
    """With the rates of a monitor or without: no policy lasts longer than an hour unless it is confirmed."""
    for rates in ((1.0, 0.5, 0.25, 0.125), (1e-6, 1e-6, 1e-6, 1e-6)):
        assert refusal(encode(directive(*rates, valid_s=valid_s))) is PolicyRefusal.LASTS


@pytest.mark.parametrize("rate", [0.0, 1e-12])
def test_a_message_without_rates_silences_nobody(rate: float) -> None:
    """In either phase; what the configuration does not sample stays so."""
    assert refusal(encode(directive(rate, rate, rate, rate))) is PolicyRefusal.RATES
    assert refusal(encode(directive(1.0, 0.5, 0.25, rate))) is PolicyRefusal.RATES
    assert refusal(encode(directive(1.0, 0.5, 0.25, 0.125, base=rate))) is PolicyRefusal.RATES


def test_a_policy_has_a_base_rate() -> None:
    """Without one some exchange would be in no stratum."""
    good = directive(1.0, 0.5, 0.25, 0.125).policy
    only = BodyStratum(name="a", rate=1.0, where=(Predicate(key="header.x-scanner", equals="a"),))
    for body in ((), (only,)):
        policy = named(msgspec.structs.replace(good, body_strata=body))
        assert (
            refusal(encode(PolicyMessage(policy=policy, issued_at=BEGIN, valid_s=900.0)))
            is PolicyRefusal.RATES
        )


def test_what_the_configuration_takes_nothing_of_stays_so() -> None:
    """A rate of 0 is a decision that the monitor cannot overrule."""
    strata = tuple(
        msgspec.structs.replace(s, rate=0.0 if s.name == "archive" else s.rate)
        for s in CONFIG.sampling.header_strata
    )
    sampling = msgspec.structs.replace(CONFIG.sampling, header_strata=strata)
    barred = msgspec.structs.replace(CONFIG, sampling=sampling)
    assert refusal(encode(directive(0.5, 0.5, 0.5, 0.5)), barred) is PolicyRefusal.RATES
    allowed = directive(0.0, 0.5, 0.5, 0.5)
    assert check_policy(encode(allowed), barred.sampling, NOW_S) == allowed
    silent = msgspec.structs.replace(CONFIG, sampling=msgspec.structs.replace(CONFIG.sampling, rate=0.0))
    assert refusal(encode(directive(0.5, 0.5, 0.5, 0.5)), silent) is PolicyRefusal.RATES


def test_a_directive_holds_from_its_issue_for_its_time() -> None:
    """One that nobody confirmed is stale; one from the future tells of a wrong clock."""
    given = directive(1.0, 0.5, 0.25, 0.125)
    wire = encode(given)
    assert check_policy(wire, CONFIG.sampling, NOW_S + 899) == given
    assert refusal(wire, now_s=NOW_S + 900) is PolicyRefusal.STALE
    assert check_policy(wire, CONFIG.sampling, NOW_S - 299) == given
    assert refusal(wire, now_s=NOW_S - 301) is PolicyRefusal.EARLY


def test_the_configurations_rates_hold_without_a_directive_and_after_it() -> None:
    """Before the first, after the last has lapsed, and once it is dropped."""
    directives, given = PolicyHistory(CONFIG.sampling), directive(1.0, 0.5, 0.25, 0.125)
    assert directives.at(NOW_S) == policy_at(CONFIG.sampling, NOW_S)
    directives.follow(given)
    followed = directives.at(NOW_S + 899)
    assert followed.header_strata == given.policy.header_strata
    assert followed.epoch.endswith(f"-{given.policy.epoch}")
    assert directives.at(NOW_S + 900) == policy_at(CONFIG.sampling, NOW_S + 900)
    directives.follow(None)
    assert directives.at(NOW_S) == policy_at(CONFIG.sampling, NOW_S)


@pytest.mark.parametrize("local", [{"replays_per_s": 0.0}])
def test_the_local_switch_wins(local: dict[str, float]) -> None:
    """Without `replays_per_s` the configuration's rates apply, whatever the monitor says."""
    sampling = msgspec.structs.replace(CONFIG.sampling, **local)
    directives = PolicyHistory(sampling)
    directives.follow(directive(1.0, 1.0, 1.0, 1.0))
    assert directives.at(NOW_S) == policy_at(sampling, NOW_S)


def test_the_epoch_changes_with_time_under_one_directive() -> None:
    """A sticky sample is no fixed panel, also while no new directive comes."""
    directives = PolicyHistory(SamplingOptions(replays_per_s=1.0))
    directives.follow(
        PolicyMessage(
            policy=named(
                Policy(
                    epoch="",
                    header_strata=(HeaderStratum(name="default", rate=0.5),),
                    body_strata=(BodyStratum(name="default", rate=1.0),),
                )
            ),
            issued_at=BEGIN,
            valid_s=2 * EPOCH_S,
        )
    )
    first, second = directives.at(NOW_S), directives.at(NOW_S + EPOCH_S)
    assert first.epoch != second.epoch
    assert first.header_strata == second.header_strata


def test_epochs_on_their_way_are_told_a_bounded_few_back() -> None:
    """What was drawn under a directive that is replaced has its rates; one that is long gone is not guessed."""
    directives = PolicyHistory(CONFIG.sampling)
    drawn = []
    for n in range(MAX_KNOWN + 1):
        at = BEGIN + timedelta(seconds=n)
        directives.follow(directive(1.0, 0.5, 0.25, n / 32, issued_at=at))
        drawn.append(directives.at(at.timestamp()))
    assert directives.of(drawn[0].epoch) is None
    for policy in drawn[1:]:
        assert directives.of(policy.epoch) == policy
    local = policy_at(CONFIG.sampling, NOW_S)
    assert directives.of(local.epoch) == local
    assert len(directives.known) == MAX_KNOWN


def test_a_notice_that_cannot_be_read_now_is_read_later(tmp_path: Path) -> None:
    """Too few open files, say: what was followed goes on, and the next look finds it."""
    path, poster = tmp_path / "policy", PolicyHistory(CONFIG.sampling)
    given = directive(1.0, 0.5, 0.25, 0.125)
    poster.follow(given)
    reader, reads = PolicyHistory(CONFIG.sampling), PolicyFile(path)
    PolicyFile(path).write(poster, follow=True)
    reads.read(reader)
    content = path.read_bytes()
    path.unlink()
    path.mkdir()  # there, and not to be read
    reads.read(reader)
    assert reader.active(NOW_S) == given
    path.rmdir()
    reads.read(reader)
    assert reader.active(NOW_S) is None
    path.write_bytes(content)
    reads.read(reader)
    assert reader.active(NOW_S) == given


def test_a_directive_for_other_strata_is_not_followed_whoever_judged_it() -> None:
    """A relay worker may hold a newer configuration than the process that has judged: rates belong to their strata."""
    strata = (HeaderStratum(name="other", rate=0.5, headers={"x-other": "1"}),)
    other = msgspec.structs.replace(CONFIG.sampling, header_strata=strata)
    directives, given = PolicyHistory(other), directive(1.0, 0.5, 0.25, 0.125)
    directives.follow(given)
    assert directives.at(NOW_S) == policy_at(other, NOW_S)
    assert directives.knows(f"1-{given.policy.epoch}")

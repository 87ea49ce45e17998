"""Directives and configurations for the tests of the policy's way."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from quantdrift.core.config.schema import Capture, Config, Model, SamplingOptions, Slice
from quantdrift.core.config.strata import with_strata
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Verdict
from quantdrift.core.sampling.policy_message import PolicyMessage, name_of
from quantdrift.drift.detectors.protocol import BUDGET
from quantdrift.drift.evidence import header as fields
from quantdrift.drift.evidence.state import dump_state
from quantdrift.storage.sampling import SignalEvidence

BEGIN = datetime(2026, 3, 1, 12, tzinfo=UTC)
SAMPLING = SamplingOptions(
    rate=0.25,
    replays_per_s=10.0,
    header_strata=(HeaderStratum(name="archive", rate=1.0, headers={"x-scanner": "archive"}),),
)
CONFIG = with_strata(
    Config(
        models=(Model(name="digits"),),
        capture=Capture(headers=("x-scanner",)),
        sampling=SAMPLING,
        slices=(Slice(name="scanner", header="x-scanner", values=("faint", "archive", "clear")),),
    )
)


def policy_of_rates(
    rates: tuple[float, ...],
    *,
    base: float = 1.0,
    config: Config = CONFIG,
    body: tuple[BodyStratum, ...] = (),
) -> Policy:
    """Return the policy that gives the header strata of `config` these rates, under its name."""
    strata = (*config.sampling.header_strata, HeaderStratum(name="default", rate=0.0))
    policy = Policy(
        epoch="",
        header_strata=tuple(
            msgspec.structs.replace(stratum, rate=rate) for stratum, rate in zip(strata, rates, strict=True)
        ),
        body_strata=(*body, BodyStratum(name="default", rate=base)),
    )
    return named(policy)


def named(policy: Policy) -> Policy:
    """Return the policy under the name that its rates have."""
    return msgspec.structs.replace(policy, epoch=name_of(policy))


def directive(
    *rates: float, issued_at: datetime = BEGIN, valid_s: float = 900.0, **given: Any
) -> PolicyMessage:
    """Return a directive that gives the header strata these rates."""
    return PolicyMessage(policy=policy_of_rates(rates, **given), issued_at=issued_at, valid_s=valid_s)


def evidence(
    slice_id: int, value: float, mass: float = 1e-6, verdict: Verdict = Verdict.OK
) -> SignalEvidence:
    """Return a budget detector's row with this evidence."""
    state = BUDGET.fresh(budget=0.01, scale=1.0, weighted=True, mass=0.0, at_us=0)
    state[fields.PAGE_MASS] = mass
    return SignalEvidence(
        slice_id=slice_id,
        model_version_id=1,
        verdict=verdict,
        kind=BUDGET.kind,
        evidence=value,
        state=dump_state(BUDGET.kind, state),
    )

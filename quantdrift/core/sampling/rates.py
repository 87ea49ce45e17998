"""The configured sampling rates as a policy, with its epoch and salt.

Both phases derive the same epoch from the same configuration and time, so that the relay passes on only its name.
"""

import hashlib

import msgspec

from quantdrift.core.config.schema import SamplingOptions
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy

EPOCH_S = 86_400.0
"""Time after which the salt changes, so that not always the same users are sampled. A shorter time would divide sessions."""


POLICY_S = 300.0
"""How often the monitor works out a sampling policy: sooner, the rates that it follows would be noise."""
POLICY_VALID_S = 900.0
"""Time for which sidecars apply a policy that is not confirmed: three times `POLICY_S`, enough for a change of the leader."""
LONGEST_VALID_S = 3600.0
"""A sidecar refuses a policy for longer: one message that was forged must not stop sampling for ever."""
LEAST_RATIO = 1e-6
"""A sidecar refuses rates below this part of the configured ones: far below what a monitor gives in the largest fleet that lags."""


def policy_at(sampling: SamplingOptions, now_s: float) -> Policy:
    """Return the policy of the configured rates at `now_s`.

    Parameters
    ----------
    sampling
        The configured rates.
    now_s
        Seconds since 1970, UTC.
    """
    return policy_of(sampling, f"{int(now_s // EPOCH_S):x}-{digest(sampling)}")


def policy_of(sampling: SamplingOptions, epoch: str) -> Policy:
    """Return the policy of a named epoch of this configuration."""
    header = (*sampling.header_strata, HeaderStratum(name="default", rate=sampling.rate))
    body = (*sampling.body_strata, BodyStratum(name="default", rate=sampling.body_rate))
    return Policy(
        epoch=epoch,
        header_strata=header,
        body_strata=body,
    )


def lowered(policy: Policy, factor: float) -> Policy:
    """Return the policy with every rate times `factor`: inclusion probabilities and their bounds scale alike."""
    return msgspec.structs.replace(
        policy,
        header_strata=tuple(msgspec.structs.replace(s, rate=s.rate * factor) for s in policy.header_strata),
        body_strata=tuple(msgspec.structs.replace(s, rate=s.rate * factor) for s in policy.body_strata),
    )


def epoch_salt(secret: bytes, epoch: str, phase: int) -> bytes:
    """Return the 16-byte hash key of one sampling phase of an epoch; the hashes of the phases are independent.

    Parameters
    ----------
    secret
        Shared by all sidecars if a sticky sample must be the same on each; else random at start.
    phase
        1 or 2.
    """
    return hashlib.blake2b(f"{phase}:{epoch}".encode(), key=secret[:64], digest_size=16).digest()


def uniform(key: bytes, salt: bytes) -> float:
    """Return a number in [0, 1), uniform over keys and fixed for each key: the keyed BLAKE2b hash of `key`."""
    digest = hashlib.blake2b(key, key=salt, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def digest(sampling: SamplingOptions) -> str:
    """Return a digest of the rates, for the names of epochs."""
    rates = msgspec.json.encode(
        [sampling.rate, sampling.header_strata, sampling.body_rate, sampling.body_strata]
    )
    return hashlib.blake2b(rates, digest_size=6).hexdigest()

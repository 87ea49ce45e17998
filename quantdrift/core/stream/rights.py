"""The rights that each role needs at NATS.

With these rights a stolen key of a sidecar can publish exchanges and tallies of its models and read the sampling policy. It cannot read,
delete or redirect what other sidecars captured: that needs a consumer of the stream, or the inbox of a shadow worker. JetStream
lets whoever may create or update a stream copy any other stream of the account into it. So only the shadow, which reads the
exchanges anyway, and the administrator may do that.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Final

import msgspec

from quantdrift.core.stream.subjects import copies, model_set, subject_token

_API = "$JS.API"
OWN_RIGHTS: Final = "$SYS.REQ.USER.INFO"
"""The subject at which NATS tells each user its own rights."""


class NatsRole(StrEnum):
    """Who connects to NATS: each role has its own rights and its own inbox."""

    SIDECAR = "sidecar"
    SHADOW = "shadow"
    MONITOR = "monitor"
    PAGE = "page"
    OPERATOR = "operator"
    ADMIN = "admin"


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """Subjects that a role may publish to and subscribe to; everything else is refused."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


PURPOSES: Final[Mapping[NatsRole, str]] = {
    NatsRole.SIDECAR: "publishes exchanges and tallies, reads policy and pause",
    NatsRole.SHADOW: "reads exchanges, copies of them and tallies, stores and reads exemplars, creates and updates their streams",
    NatsRole.MONITOR: "reads how much waits, and tallies while no shadow does; publishes the policy",
    NatsRole.PAGE: "`quantdrift web` with web.exemplars: reads exemplars",
    NatsRole.OPERATOR: "people and commands: status, pause and resume",
    NatsRole.ADMIN: "`quantdrift setup nats --apply`: creates streams and buckets",
}
"""What each role does, in words."""


def inbox(name: str, role: NatsRole) -> str:
    """Return the prefix of the subjects at which a role gets its answers, without a dot at the end."""
    return f"_INBOX.{name}.{role}"


def rights(name: str, role: NatsRole, models: Collection[str] = ()) -> Rights:
    """Return what a role may do.

    Parameters
    ----------
    name
        `stream.name`.
    models
        Of a sidecar: the models on which it may report; empty: all.
    """
    exchanges, tallies, exemplar = name, f"{name}-tally", f"{name}-exemplar"
    policy, pause = f"KV_{name}-policy", f"KV_{name}-pause"
    infos = tuple(f"{_API}.STREAM.INFO.{stream}" for stream in (exchanges, tallies, policy, pause))
    read_buckets = tuple(f"{_API}.DIRECT.GET.{bucket}.$KV.{bucket[3:]}.>" for bucket in (policy, pause))
    buckets = (f"$KV.{name}-policy.>", f"$KV.{name}-pause.>")
    own = (f"{inbox(name, role)}.>",)
    exchanges_of = [f"{name}.exchange.{subject_token(model)}" for model in models] or [f"{name}.exchange.>"]
    tallies_of = f"{name}.tally.{model_set(models)}.*.*" if models else f"{name}.tally.>"
    match role:
        case NatsRole.SIDECAR:
            return Rights(
                publish=(*exchanges_of, tallies_of, OWN_RIGHTS, *read_buckets),
                subscribe=(*own, *buckets),
            )
        case NatsRole.SHADOW:
            streams = tuple(
                f"{_API}.STREAM.{call}.{stream}"
                for stream in (exchanges, tallies, exemplar)
                for call in ("CREATE", "UPDATE")
            )
            return Rights(
                publish=(
                    *infos[:2],
                    f"{_API}.STREAM.INFO.{exemplar}",
                    *streams,
                    *_reading(exchanges),
                    *_reading(tallies),
                    *_reading(exemplar),
                    f"{_API}.CONSUMER.DELETE.{exemplar}.*",
                    f"{name}.exemplar.>",
                ),
                subscribe=(*own, copies(name, ">")),
            )
        case NatsRole.MONITOR:
            return Rights(
                publish=(
                    *infos,
                    f"{_API}.CONSUMER.INFO.{exchanges}.*",
                    *_reading(tallies),
                    *read_buckets,
                    buckets[0],
                ),
                subscribe=own,
            )
        case NatsRole.PAGE:
            return Rights(
                publish=(
                    f"{_API}.STREAM.INFO.{exemplar}",
                    *_reading(exemplar),
                    f"{_API}.CONSUMER.DELETE.{exemplar}.*",
                ),
                subscribe=own,
            )
        case NatsRole.OPERATOR:
            return Rights(
                publish=(*infos, f"{_API}.CONSUMER.INFO.{exchanges}.*", *read_buckets, buckets[1]),
                subscribe=(*own, *buckets),
            )
        case NatsRole.ADMIN:
            return Rights(publish=(f"{_API}.>",), subscribe=own)


def bound_models(name: str, answer: bytes) -> str:
    """Return the set of models to which a sidecar's key is bound, as in a subject; empty: to none.

    Parameters
    ----------
    answer
        What NATS says at `OWN_RIGHTS`.
    """
    try:
        allowed = msgspec.json.decode(answer, type=_RightsAnswer).data.permissions.publish.allow
    except msgspec.DecodeError:
        return ""
    start, end = f"{name}.tally.", ".*.*"
    bound = (subject for subject in allowed if subject.startswith(start) and subject.endswith(end))
    return next(bound, "").removeprefix(start).removesuffix(end)


class _Subjects(msgspec.Struct, frozen=True):
    allow: tuple[str, ...] = ()


class _Permissions(msgspec.Struct, frozen=True):
    publish: _Subjects = _Subjects()


class _UserRights(msgspec.Struct, frozen=True):
    permissions: _Permissions = _Permissions()


class _RightsAnswer(msgspec.Struct, frozen=True):
    data: _UserRights = _UserRights()


def _reading(stream: str) -> tuple[str, ...]:
    """Return the subjects of a worker that reads and acknowledges the messages of a stream."""
    return (
        f"{_API}.CONSUMER.CREATE.{stream}.>",
        f"{_API}.CONSUMER.DURABLE.CREATE.{stream}.>",
        f"{_API}.CONSUMER.INFO.{stream}.*",
        f"{_API}.CONSUMER.MSG.NEXT.{stream}.*",
        f"$JS.ACK.{stream}.>",
    )

"""Compared exchanges of one slice, as the choice of exemplars gets them."""

import uuid
from datetime import UTC, datetime

from quantdrift.core.records import Exchange, HeaderStratum, Policy, Sampling, Way
from quantdrift.core.slices import SliceKey
from quantdrift.storage.comparisons.rows import ComparedExchange, ComparedItem, VersionKey

ARCHIVE = SliceKey(model="digits", name="scanner=archive", predicate="archive")
_POLICY = Policy(epoch="e1", header_strata=(HeaderStratum(name="default", rate=0.5),), body_strata=())
_SAMPLING = Sampling(
    policy=_POLICY, header_stratum="default", body_stratum="default", pi1=0.5, pi2=1.0, u1=0.25, u2=0.25
)


def item_of(*, flip: bool = False, divergence: float = 0.0, key: SliceKey = ARCHIVE) -> ComparedItem:
    """Return an item of a slice."""
    return ComparedItem(
        slices=(key,),
        features={},
        flip=flip,
        topk=None,
        js=None,
        divergence=divergence,
        margin=None,
        candidate_margin=None,
        reference_margin=None,
        detail=None,
    )


def compared_of(*items: ComparedItem, way: Way = Way.RELAY) -> ComparedExchange:
    """Return a compared exchange with these items."""
    exchange = Exchange(
        id=uuid.uuid4().hex,
        captured_at=datetime(2026, 11, 23, tzinfo=UTC),
        source="pod",
        model="digits",
        version="int8",
        protocol="oip-v2-rest",
        inputs=(),
        outputs=(),
        sampling=_SAMPLING,
        way=way,
    )
    return ComparedExchange(
        stream_sequence=1,
        payload=b"",
        exchange=exchange,
        version=VersionKey(model="digits", candidate_version="int8", reference_digest="d" * 64),
        items=items,
    )

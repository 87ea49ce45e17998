"""The second sampling phase: overlapping strata by the decoded body, of which the largest rate counts."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.config.schema import Model, OutputKind
from quantdrift.core.config.strata import MARGIN
from quantdrift.core.records import GENERATED, BodyStratum, Policy, Predicate, Protocol, Tensor
from quantdrift.core.sampling.inclusion import second_rate
from quantdrift.core.sampling.rates import epoch_salt, uniform
from quantdrift.core.tasks import Task

_FLOATS = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
# Their floats are embeddings or log-probabilities of chosen tokens, not scores of classes.
_WITHOUT_CLASSES = GENERATED | {Protocol.OPENAI_EMBEDDINGS}


class SecondPhaseDraw(msgspec.Struct, frozen=True, kw_only=True):
    """The second phase's decision on one exchange.

    Parameters
    ----------
    stratum
        Name of the matching body stratum with the largest rate.
    pi2
        Probability of keeping it.
    u2
        The draw.
    kept
        Whether it is kept: u2 < pi2.
    """

    stratum: str
    pi2: float
    u2: float
    kept: bool


class SecondPhase:
    """The second phase of one policy: the largest rate of the strata whose conditions are all met.

    A policy may have hundreds of strata and an exchange has few attributes, so strata are indexed by the
    first value that they require.

    Parameters
    ----------
    strata
        Those of the policy; the last one has no conditions.
    salt
        Salt of the second phase of the epoch.
    """

    def __init__(self, strata: Sequence[BodyStratum], salt: bytes) -> None:
        self._salt = salt
        self._unindexed: list[BodyStratum] = []
        self._by_value: dict[tuple[str, str], list[BodyStratum]] = {}
        for stratum in strata:
            value = next(((p.key, p.equals) for p in stratum.where if p.equals is not None), None)
            (self._unindexed if value is None else self._by_value.setdefault(value, [])).append(stratum)
        self._base_rate = max((stratum.rate for stratum in strata if not stratum.where), default=0.0)
        self.needs_margin = any(where.key == MARGIN for stratum in strata for where in stratum.where)

    def surely_keeps(self, key: str, pi1: float) -> bool:
        """Return whether an exchange is kept whatever its body strata are; parameters as for `draw`."""
        return uniform(key.encode(), self._salt) < second_rate(self._base_rate, pi1)

    def draw(
        self, key: str, pi1: float, attributes: Mapping[str, str], margin: float | None
    ) -> SecondPhaseDraw:
        """Draw one exchange.

        Parameters
        ----------
        key
            The hashed key: the id of the exchange, or its group where groups are sampled whole.
        pi1
            Probability with which the first phase took it.
        attributes
            Those of the record, and the model under `MODEL`.
        margin
            The smallest margin of the candidate. None: there is none, and no condition on it is met.
        """
        best: BodyStratum | None = None
        for strata in (self._unindexed, *(self._by_value.get(item, ()) for item in attributes.items())):
            for stratum in strata:
                if (best is None or stratum.rate > best.rate) and all(
                    _matches(where, attributes, margin) for where in stratum.where
                ):
                    best = stratum
        assert best is not None  # the base rate has no conditions
        pi2, u2 = second_rate(best.rate, pi1), uniform(key.encode(), self._salt)
        return SecondPhaseDraw(stratum=best.name, pi2=pi2, u2=u2, kept=u2 < pi2)


def phase_salt(secret: bytes, epoch: str) -> bytes:
    """Return the hash key of the second phase in an epoch; it is independent of that of the first phase."""
    return epoch_salt(secret, epoch, 2)


def keeps_all(policy: Policy) -> bool:
    """Return whether the second phase of a policy keeps every exchange that the first one takes."""
    base_rate = max((stratum.rate for stratum in policy.body_strata if not stratum.where), default=0.0)
    return all(stratum.rate <= base_rate for stratum in policy.header_strata)


def candidate_margin(outputs: Sequence[Tensor], model: Model, protocol: Protocol) -> float | None:
    """Return the gap between the two top probabilities, in [0, 1], the smallest over the items.

    Parameters
    ----------
    outputs
        Those of the candidate. The tensor `model.output` is used, or without a name the first one of floating
        type. Shape (items, classes) or, if `model.batched` is false, any shape as one item. Logits go through
        a softmax.
    model
        The configuration of the model.
    protocol
        The protocol of the exchange.

    Returns
    -------
    float or None
        None if the model or the protocol gives no scores of classes, if there is no such tensor, or if the
        tensor has fewer than two classes, no items, or values that are not finite.
    """
    if protocol in _WITHOUT_CLASSES or model.task is not Task.CLASSIFICATION:
        return None
    tensor = next(
        (
            t
            for t in outputs
            if (t.name == model.output if model.output else True) and t.datatype in {*_FLOATS, "BF16"}
        ),
        None,
    )
    if tensor is None:
        return None
    values = _as_float64(tensor)
    n_items = tensor.shape[0] if model.batched and tensor.shape else 1
    if n_items == 0 or values.size < 2 * n_items or not np.isfinite(values).all():
        return None
    scores = values.reshape(n_items, -1)
    if model.output_kind is OutputKind.LOGITS:
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    top = np.partition(scores, -2, axis=1)[:, -2:]
    return float((top[:, 1] - top[:, 0]).min())


def _as_float64(tensor: Tensor) -> npt.NDArray[np.float64]:
    if tensor.datatype == "BF16":  # the upper half of a 32-bit float
        wide = np.frombuffer(tensor.data, dtype="<u2").astype("<u4") << 16
        return wide.view("<f4").astype(np.float64)
    stored: npt.NDArray[Any] = np.frombuffer(tensor.data, dtype=_FLOATS[tensor.datatype])
    return stored.astype(np.float64)


def _matches(where: Predicate, attributes: Mapping[str, str], margin: float | None) -> bool:
    if where.key != MARGIN:
        return where.equals is not None and attributes.get(where.key) == where.equals
    if margin is None:
        return False
    above = where.low is None or margin >= where.low
    return above and (where.high is None or margin < where.high)

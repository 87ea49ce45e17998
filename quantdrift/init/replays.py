"""The first comparisons: captured exchanges, read by a configuration and replayed through its reference as a worker does it."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
from scipy.stats import binom

from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Config, Provider
from quantdrift.core.errors import QuarantineError
from quantdrift.core.records import Exchange, Metric, Tensor
from quantdrift.core.signals import is_judged
from quantdrift.init.traffic import Kept
from quantdrift.models.runtimes.registry import opened_reference
from quantdrift.models.tensors.arrays import Array
from quantdrift.models.tensors.codec import decode
from quantdrift.shadow.pipeline.classify import classify
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import References
from quantdrift.shadow.replay.replay import compare_batch
from quantdrift.sidecar.capture.recorder import Recorder, SidecarIdentity
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.storage.comparisons.rows import Quarantined

_MOST_ITEMS = 64
_SOURCE = "init"
_CHANCE = 0.001


class FirstReplays(msgspec.Struct, frozen=True, kw_only=True):
    """What came of the first exchanges.

    Parameters
    ----------
    n_exchanges
        How many were captured.
    n_compared, n_changed
        Items that were compared, and how many of their answers the reference would have given otherwise.
    accepted
        The share that may change, where more changed than chance explains; None: it is not exceeded so clearly.
    problems
        How often an exchange was not compared, by the reason.
    """

    n_exchanges: int
    n_compared: int
    n_changed: int
    accepted: float | None = None
    problems: dict[str, int] = {}

    def __str__(self) -> str:
        text = f"{self.n_compared} answers of {self.n_exchanges} requests were compared with the reference: {self.n_changed} changed"
        if self.accepted is not None:
            text += (
                f".\n  That is more than the accepted {self.accepted:.2g}: this version would alert on its present traffic."
                " Look at what changed, or raise models.budget.flip"
            )
        return "\n".join(
            [f"{text}.", *(f"  not compared, {n}: {reason}" for reason, n in self.problems.items())]
        )


def recorded(config: Config, kept: Sequence[Kept]) -> tuple[list[Exchange], Counter[str]]:
    """Return captured exchanges as a sidecar with this configuration records them, and why others were lost."""
    recorder = Recorder(
        LiveConfig.of(config), SidecarIdentity(source=_SOURCE, version="", salt=b"", hmac_key=b"")
    )
    exchanges: list[Exchange] = []
    problems: Counter[str] = Counter()
    for raw in kept:
        try:
            heads = recorder.read_heads(raw.meta, raw.request, raw.response)
            asked = recorder.read_request(raw.meta, heads, raw.request)
            exchanges += recorder.record(raw.meta, asked, raw.response)
        except LostError as error:
            problems[str(error)] += 1
    return exchanges, problems


def joined(sides: Iterable[Sequence[Tensor]]) -> dict[str, Array]:
    """Return the tensors of exchanges by name : (items, ...); without those whose items have another shape than the first."""
    by_name: dict[str, list[Array]] = {}
    for tensors in sides:
        for tensor in tensors:
            array = decode(tensor)
            parts = by_name.setdefault(tensor.name, [])
            if array.ndim and (not parts or parts[0].shape[1:] == array.shape[1:]):
                parts.append(array)
    return {name: np.concatenate(parts) for name, parts in by_name.items() if parts}


def replay(config: Config, kept: Sequence[Kept]) -> FirstReplays:
    """Replay captured exchanges through the references of a configuration, on the CPU, and compare.

    Raises
    ------
    OperatorError, RetryError
        A reference cannot be opened.
    """
    exchanges, problems = recorded(config, kept)
    here = msgspec.structs.replace(
        config, shadow=msgspec.structs.replace(config.shadow, provider=Provider.CPU)
    )
    with contextlib.closing(
        References(here.models, lambda model, reference: opened_reference(here, model, reference))
    ) as references:
        prepared: list[PreparedExchange] = []
        for number, exchange in enumerate(exchanges):
            case = classify(
                encode(exchange), sequence=number, n_delivered=1, max_deliveries=1, references=references
            )
            if isinstance(case, PreparedExchange):
                prepared.append(case)
            elif isinstance(case, Quarantined):
                problems[f"{case.reason}: {case.detail}"] += 1
            else:
                problems[f"version {exchange.version} has no reference"] += 1
        n_compared = n_changed = 0
        for batch in _batches(prepared):
            for outcome in compare_batch(batch, most_items=_MOST_ITEMS):
                if isinstance(outcome, QuarantineError):
                    problems[f"{outcome.reason}: {outcome.detail}"] += 1
                else:
                    flips = outcome.divergences.flip
                    n_compared += int(np.isfinite(flips).sum())
                    n_changed += int((flips == 1).sum())
    flip = max(model.budget.flip if is_judged(Metric.FLIP, model.budget) else 1.0 for model in config.models)
    return FirstReplays(
        n_exchanges=len(kept),
        n_compared=n_compared,
        n_changed=n_changed,
        accepted=flip if binom.sf(n_changed - 1, n_compared, flip) < _CHANCE else None,
        problems=dict(problems.most_common()),
    )


def _batches(prepared: Sequence[PreparedExchange]) -> Iterator[list[PreparedExchange]]:
    by_signature: dict[tuple[object, ...], list[PreparedExchange]] = {}
    for entry in prepared:
        by_signature.setdefault(entry.signature, []).append(entry)
    for entries in by_signature.values():
        for start in range(0, len(entries), _MOST_ITEMS):
            yield entries[start : start + _MOST_ITEMS]

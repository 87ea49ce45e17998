"""The trained network, and what the shadow says of a candidate's answers to its held-out scans."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.config.schema import Model, Reference
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.tensors.codec import fit_inputs
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import VersionReference
from quantdrift.shadow.replay.replay import ReplayResult, compare_batch
from tests.support.shadow.onnx_models import exchange_of, tensor

Images = npt.NDArray[np.float32]
Logits = npt.NDArray[np.float32]
PER_EXCHANGE = 3


class Digits(NamedTuple):
    """A network, its ONNX file, scans that it has not seen, and those that it was trained on."""

    network: Any
    path: Path
    images: Images
    labels: npt.NDArray[np.int64]
    calibration: Images


class Divergence(NamedTuple):
    """What is said of a candidate: per scan whether it flips, and KL in nats."""

    flip: npt.NDArray[np.float64]
    divergence: npt.NDArray[np.float64]


def divergence_of(answers: Logits, digits: Digits, reference: ReferenceRuntime) -> Divergence:
    """Return what the shadow says of a candidate's answers, three scans to an exchange, all in one batch.

    Parameters
    ----------
    answers
        (scans, 10), of `digits.images`.
    digits
        The scans.
    reference
        What replays them.
    """
    model = Model(name="digits", references=(Reference(path=str(digits.path)),))
    version_reference = VersionReference(model=model, runtime=reference, comparator=comparator_of(model))
    batch = []
    for begin in range(0, len(answers), PER_EXCHANGE):
        part = slice(begin, begin + PER_EXCHANGE)
        inputs = (tensor("image", digits.images[part]),)
        exchange = msgspec.structs.replace(
            exchange_of(np.empty((1, 4), np.float32), answers[part]), inputs=inputs
        )
        batch.append(
            PreparedExchange(
                stream_sequence=begin,
                payload=b"",
                exchange=exchange,
                version_reference=version_reference,
                inputs=fit_inputs(exchange.inputs, reference.inputs, batched=True),
            )
        )
    found = [_divergences(outcome) for outcome in compare_batch(batch, most_items=64)]
    return Divergence(
        flip=np.concatenate([one.flip for one in found]),
        divergence=np.concatenate([one.divergence for one in found]),
    )


def _divergences(outcome: object) -> Divergences:
    assert isinstance(outcome, ReplayResult), outcome
    return outcome.divergences

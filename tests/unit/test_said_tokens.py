"""What is kept of generated text: the first token at which an answer left the reference, from the shadow's message to its context."""

import asyncio
import math
from datetime import UTC, datetime

import msgspec
import numpy as np
import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.codec import decode_exemplar
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.said_tokens import SaidTokens, divergent_tokens
from quantdrift.core.tasks import Task
from quantdrift.models.language.scoring import SCORES, Scores, objects
from quantdrift.shadow.pipeline.exemplars import ExemplarKeeper, Offer
from quantdrift.sidecar.protocols.json_tensors import text_tensor
from tests.support.shadow.compared_exchanges import compared_of, item_of

pytestmark = pytest.mark.unit

SERVED = (b"Die", b" Hauptstadt", b" ist", b" Oslo", b".")
FIRST = (b"Die", b" Hauptstadt", b" ist", b" Lima", b".")
LAGS = (0.0, 0.0, 0.0, 3.0, 0.0)


class KeptMessages:
    """Where exemplars go in these tests: a list."""

    max_payload_bytes = 1 << 20

    def __init__(self) -> None:
        self.wires: list[bytes] = []

    async def ensure_exemplars(self) -> None:
        """Do nothing: a list is there."""

    async def publish_exemplar(
        self, model: str, slice_name: str, kind: str, exchange_id: str, wire: bytes
    ) -> None:
        """Keep a message."""
        del model, slice_name, kind, exchange_id
        self.wires.append(wire)


def scores() -> Scores:
    """Return a reference's scores of `SERVED`: it would have said `FIRST`, each with half of its probability."""
    half = math.log(0.5)
    logprobs = np.array([half - lag for lag in LAGS])
    return Scores(
        tokens=SERVED,
        ids=(1, 2, 3, 4, 5),
        logprobs=logprobs,
        ranks=np.ones(5),
        top_tokens=tuple((b"\xc3", token) for token in FIRST),
        top_ids=np.zeros((5, 2), dtype=np.int64),
        top_logprobs=np.array([[-9.0, half]] * 5),
    )


def test_a_damaged_answer_is_kept_with_the_token_at_which_it_left_the_reference() -> None:
    """The context has the prompt, what came before and after, and both tokens with the reference's probabilities."""
    model = Model(name="digits", task=Task.GENERATION, exemplars=True)
    sink, clock = KeptMessages(), ManualClock(datetime(2026, 11, 23, tzinfo=UTC))
    keeper = ExemplarKeeper(Config(models=(model,)), sink, clock, count=lambda *_: None, draws=lambda: 1.0)
    compared = compared_of(item_of(flip=True, divergence=1.0))
    messages = text_tensor("messages", [b'[{"role": "user", "content": "Was ist die Hauptstadt von Peru?"}]'])
    exchange = msgspec.structs.replace(compared.exchange, inputs=(messages,))
    compared = msgspec.structs.replace(compared, exchange=exchange)
    keeper.offer(
        Offer(
            compared=[compared],
            outputs={1: {SCORES: objects([scores()])}},
            without_place=frozenset(),
            at=clock.now(),
        )
    )
    asyncio.run(keeper.keep_one())
    (token,) = divergent_tokens(decode_exemplar(sink.wires[0]))
    assert token.prompt == "Was ist die Hauptstadt von Peru?"
    assert (token.before, token.served, token.after) == ("Die Hauptstadt ist", " Oslo", ".")
    assert (token.expected, token.position) == (" Lima", 4)
    assert (token.expected_p, token.served_p) == pytest.approx((0.5, 0.5 * math.exp(-3)))


def test_a_token_that_is_nearly_as_likely_is_no_divergence() -> None:
    """Up to half as likely as the first choice it is what a sampled answer of an equal model has, too; so is one whose probability is not known."""
    said = SaidTokens(
        served=("a", "b"), first=("c", "d"), served_logprob=(-1.0, None), first_logprob=(-0.5, -0.1)
    )
    assert said.divergence() is None
    assert msgspec.structs.replace(said, served_logprob=(-1.3, None)).divergence() == 0


def test_exemplars_without_text_have_no_tokens() -> None:
    """Others keep the outputs of the reference as they were, also one that happens to be called as those of text are."""
    model = Model(name="digits", exemplars=True)
    sink, clock = KeptMessages(), ManualClock(datetime(2026, 11, 23, tzinfo=UTC))
    keeper = ExemplarKeeper(Config(models=(model,)), sink, clock, count=lambda *_: None, draws=lambda: 1.0)
    outputs = {1: {SCORES: np.zeros((1, 3), dtype=np.float32)}}
    keeper.offer(
        Offer(
            compared=[compared_of(item_of(flip=True))],
            outputs=outputs,
            without_place=frozenset(),
            at=clock.now(),
        )
    )
    asyncio.run(keeper.keep_one())
    kept = decode_exemplar(sink.wires[0])
    assert [tensor.datatype for tensor in kept.reference] == ["FP32"]
    assert not divergent_tokens(kept)

"""A reference that detects by self-tests that it is broken."""

import numpy as np
import pytest

from quantdrift.core.config.schema import Model, Reference, Runtime, Shadow
from quantdrift.core.errors import QuarantineError, QuarantineReason, RetryError
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.models.runtimes.protocol import BrokenRuntimeError, SuspectInputError
from quantdrift.models.runtimes.self_test import SelfTestedRuntime
from quantdrift.models.tensors.arrays import Array
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import References
from quantdrift.shadow.replay.replay import assemble, replay
from quantdrift.shadow.worker import longest_replay_s
from tests.support.shadow.onnx_models import BIAS, WEIGHT, exchange_of, inputs_of, logits_of

pytestmark = pytest.mark.unit

DEADLY = 1e6


class _Mortal(LinearRuntime):
    """Fails on everything once it is dead, and on zeros if it is picky."""

    def __init__(self, *, picky: bool = False) -> None:
        super().__init__(WEIGHT, BIAS)
        self.dead = False
        self.picky = picky

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return `logits`, or fail."""
        if self.dead or (self.picky and not inputs["x"].any()):
            raise QuarantineError(QuarantineReason.REPLAY, "an illegal memory access was encountered")
        return super().run(inputs)


@pytest.mark.parametrize("picky", [False, True])
def test_a_broken_device_is_distinguished_from_a_bad_input(*, picky: bool) -> None:
    """A bad input among good ones is quarantined; once nothing can be computed any more, that is said."""
    runtime = _Mortal(picky=picky)
    proven = SelfTestedRuntime(runtime)
    np.testing.assert_allclose(proven.run({"x": inputs_of(2)})["logits"], logits_of(inputs_of(2)), rtol=1e-5)
    with pytest.raises(QuarantineError):
        proven.run({"x": inputs_of(2)[:, :2]})
    runtime.dead = True
    with pytest.raises(BrokenRuntimeError, match="illegal memory access"):
        proven.run({"x": inputs_of(2)})


def test_a_reference_that_never_computed_anything_blames_the_input() -> None:
    """As long as nothing was computed, nothing tells a bad input from a dead device."""
    proven = SelfTestedRuntime(_Mortal(picky=True))
    with pytest.raises(QuarantineError):
        proven.run({"x": 0 * inputs_of(2)})


def test_what_is_kept_is_small() -> None:
    """Of the inputs that could be computed the smallest is kept."""
    runtime = _Mortal(picky=True)
    proven = SelfTestedRuntime(runtime)
    seen: list[int] = []
    for n_items in (50, 2, 30):
        proven.run({"x": inputs_of(n_items)})
    original = runtime.run

    def counted(inputs: dict[str, Array]) -> dict[str, Array]:
        seen.append(len(inputs["x"]))
        return original(inputs)

    runtime.run = counted  # type: ignore[method-assign]
    with pytest.raises(QuarantineError):
        proven.run({"x": inputs_of(9)[:, :2]})
    assert seen == [9, 2]


class _Slow(LinearRuntime):
    """Answers zeros in time, and nothing else."""

    def __init__(self) -> None:
        super().__init__(WEIGHT, BIAS)
        self.n_asked = 0

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return `logits`, or fail after the whole time."""
        self.n_asked += 1
        if inputs["x"].any():
            raise QuarantineError(QuarantineReason.REPLAY, "no answer within 30 s")
        return super().run(inputs)


def test_a_server_that_is_too_slow_is_not_taken_for_a_hang() -> None:
    """Every request of a batch may take all of its time: the worker, which has other models, does not end over it."""
    slow, shadow = _Slow(), Shadow()
    reference = Reference(runtime=Runtime.OIP_HTTP, url="http://slow:8000")
    model = Model(name="digits", references=(reference,))
    references = References([model], lambda *_: SelfTestedRuntime(slow, remote=True))
    version_reference = references.find("digits", "int8")
    assert version_reference is not None
    slow.n_asked = 0
    batch = [
        PreparedExchange(
            stream_sequence=seed,
            payload=b"",
            exchange=exchange_of(inputs_of(1, seed)),
            version_reference=version_reference,
            inputs={"x": inputs_of(1, seed)},
        )
        for seed in range(shadow.batch_items)
    ]
    answers = replay(assemble(batch), most_items=shadow.batch_items)
    assert all(isinstance(answer, QuarantineError) for answer in answers)
    assert longest_replay_s(shadow, [model]) > slow.n_asked * reference.timeout_s > 10 * shadow.ack_wait_s
    assert longest_replay_s(shadow, [Model(name="here")]) == 10 * shadow.ack_wait_s


class _Server(_Mortal):
    """Dies of one input."""

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return `logits`, or fail from now on."""
        self.dead = self.dead or bool((inputs["x"] == DEADLY).any())
        return super().run(inputs)


def test_a_server_that_fails_at_everything_is_waited_for() -> None:
    """Nothing is set aside and the worker goes on; when it is well again, so do its exchanges."""
    server = _Mortal()
    proven = SelfTestedRuntime(server, remote=True)
    x = inputs_of(2)
    server.dead = True
    for _ in range(3):
        with pytest.raises(RetryError, match="could compute before"):
            proven.run({"x": x})
    server.dead = False
    np.testing.assert_allclose(proven.run({"x": x})["logits"], logits_of(x), rtol=1e-5)
    with pytest.raises(QuarantineError, match="replay"):  # a bad input is still one
        proven.run({"x": x[:, :2]})


def test_an_input_that_crashes_a_server_is_set_aside() -> None:
    """It is waited for once, and given to a server that was well: the batch comes again, its exchanges alone."""
    server = _Server()
    proven = SelfTestedRuntime(server, remote=True)
    deadly = np.full((1, 4), DEADLY, np.float32)
    with pytest.raises(RetryError):
        proven.run({"x": deadly})
    with pytest.raises(RetryError, match="still"):
        proven.run({"x": deadly})
    server.dead = False
    with pytest.raises(SuspectInputError, match="fails on every input since"):
        proven.run({"x": deadly})
    with pytest.raises(RetryError):  # others wait
        proven.run({"x": inputs_of(2)})
    server.dead = False
    np.testing.assert_allclose(proven.run({"x": inputs_of(2)})["logits"], logits_of(inputs_of(2)), rtol=1e-5)

"""Candidates that list only their top classes, compared with the reference's whole output."""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from quantdrift.core.config.schema import Model, OutputKind
from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.records import Tensor
from quantdrift.models.comparators.classes.classification import ClassificationComparator
from quantdrift.models.comparators.protocol import SingleOutput
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.models.tensors.codec import fit_inputs
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import VersionReference
from quantdrift.shadow.replay.replay import ReplayResult, compare_batch
from quantdrift.sidecar.protocols.oip import OipRest
from tests.support.shadow.onnx_models import BIAS, WEIGHT, exchange_of, inputs_of, logits_of
from tests.support.sidecar.decode import answer

pytestmark = pytest.mark.unit

LOGITS = ClassificationComparator(OutputKind.LOGITS, 2)
PROBABILITIES = ClassificationComparator(OutputKind.PROBABILITIES, 2)

# What Triton answered for two rows of a softmax over three classes, asked for 1, 2 and 3 (and 9) of them.
ANSWERS = {
    1: b'["0.397406:2:high","0.569583:2:high"]',
    2: b'["0.397406:2:high","0.329461:1:middle","0.569583:2:high","0.286404:1:middle"]',
    3: b'["0.397406:2:high","0.329461:1:middle","0.273133:0:low","0.569583:2:high","0.286404:1:middle","0.144013:0:low"]',
}
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4) / np.float32(4)


def reference() -> npt.NDArray[np.float32]:
    """Return what that model computes."""
    weights = np.arange(12, dtype=np.float32).reshape(4, 3) / np.float32(8) - np.float32(0.5)
    powers = np.exp(ROWS @ weights)
    scores: npt.NDArray[np.float32] = powers / powers.sum(axis=1, keepdims=True)
    return scores


def listed(*items: Sequence[str]) -> npt.NDArray[np.object_]:
    """Return lists as they are decoded : (items, k)."""
    return np.array([[text.encode() for text in item] for item in items], dtype=object)


@pytest.mark.parametrize("k", ANSWERS)
def test_what_triton_lists_is_what_its_model_computed(k: int) -> None:
    """A candidate that is the reference itself neither flips nor leaves the set; its margin is off by the print."""
    body = b'{"outputs":[{"name":"scores","datatype":"BYTES","shape":[2,%d],"data":%s}]}' % (k, ANSWERS[k])
    (tensor,) = answer(OipRest(), body).outputs
    texts = np.array([text.encode() for text in msgspec.json.decode(ANSWERS[k])], dtype=object).reshape(2, k)
    assert tensor.shape == (2, k)
    found = PROBABILITIES.compare(texts, reference())
    assert found.flip.tolist() == found.topk.tolist() == [0, 0]
    assert found.detail["candidate_top"].tolist() == found.detail["reference_top"].tolist() == [2, 2]
    np.testing.assert_allclose(found.margin, [0, 0] if k > 1 else [np.nan] * 2, atol=2e-6)
    np.testing.assert_allclose(found.js, [0, 0] if k == 3 else [np.nan] * 2, atol=1e-9)
    assert np.isnan(found.divergence).all()
    assert found.candidate_finite.all()


def test_the_reference_is_reduced_to_what_was_listed() -> None:
    """A flip where the first differs; the sets of as many as were listed, at most k."""
    scores = np.array([[0.5, 0.3, 0.15, 0.05]] * 3)
    one = PROBABILITIES.compare(listed(["0.6:0"], ["0.6:1"], ["0.4:3:x:y"]), scores)
    assert one.flip.tolist() == one.topk.tolist() == [0, 1, 1]
    two = PROBABILITIES.compare(listed(["0.6:0", "0.4:1"], ["0.6:1", "0.4:0"], ["0.6:0", "0.4:2"]), scores)
    assert (two.flip.tolist(), two.topk.tolist()) == ([0, 1, 0], [0, 0, 1])
    np.testing.assert_allclose(two.candidate_margin, 0.2)
    np.testing.assert_allclose(two.margin, 0, atol=1e-12)
    three = PROBABILITIES.compare(
        listed(["0.6:0", "0.3:1", "0.1:3"], ["0.6:0", "0.3:2", "0.1:1"], ["0.6:0", "0.3:1", "0.1:2"]), scores
    )
    assert three.topk.tolist() == [0, 1, 0]


def test_of_what_the_reference_holds_equal_any_may_be_listed_first() -> None:
    """Triton's sort is not stable: with 17 classes or more equal outputs may be listed in another order."""
    reference = np.zeros((2, 17))
    reference[:, [3, 15]] = 5.0
    found = LOGITS.compare(listed(["5:15", "5:3"], ["5:15", "4:2"]), reference)
    assert found.flip.tolist() == [0.0, 0.0]
    assert found.topk.tolist() == [0.0, 1.0]
    assert LOGITS.compare(listed(["5:2"], ["5:3"]), reference).flip.tolist() == [1.0, 0.0]


def test_a_list_of_all_logits_gives_every_figure() -> None:
    """As many as there are classes are the whole output, in another order."""
    whole = np.array([[0.25, -1.5, 3.0], [2.0, 1.0, 0.5]])
    scores = np.array([[0.5, -1.0, 2.0], [1.0, 2.0, 0.0]])
    texts = listed(["3.000000:2", "0.250000:0", "-1.500000:1"], ["2.000000:0", "1.000000:1", "0.500000:2"])
    plain, found = LOGITS.compare(whole, scores), LOGITS.compare(texts, scores)
    for name in msgspec.structs.asdict(plain):
        np.testing.assert_equal(getattr(found, name), getattr(plain, name))


def test_a_list_of_some_logits_gives_no_probability() -> None:
    """What the others add up to is not known: only the classes are compared."""
    found = LOGITS.compare(listed(["3.0:2", "0.25:0"]), np.array([[0.25, -1.5, 3.0]]))
    assert (found.flip.tolist(), found.topk.tolist()) == ([0], [0])
    assert np.isnan([found.js[0], found.divergence[0], found.margin[0], found.candidate_margin[0]]).all()
    assert found.reference_margin[0] > 0.8


def test_a_printed_zero_makes_nothing_infinite() -> None:
    """Six decimals hide what is below: all probabilities still give no KL, but all else."""
    found = PROBABILITIES.compare(listed(["1.000000:0", "0.000000:1"]), np.array([[1 - 1e-7, 1e-7]]))
    assert np.isnan(found.divergence[0])
    assert (found.flip[0], found.js[0]) == (0, pytest.approx(0, abs=1e-6))


@pytest.mark.parametrize("texts", [["nan:0", "nan:1"], ["0.6:0", "nan:1"], ["inf:0", "0.1:1"]])
def test_a_list_that_is_not_finite_is_a_flip(texts: list[str]) -> None:
    """As with a whole output: the candidate has no top class where the reference has one."""
    scores = np.array([[0.6, 0.3, 0.1]])
    for comparator in (PROBABILITIES, LOGITS):
        found = comparator.compare(listed(texts), scores)
        assert (found.flip[0], found.topk[0], found.detail["candidate_top"][0]) == (1, 1, -1)
        assert not found.candidate_finite[0]
        assert np.isnan([found.margin[0], found.candidate_margin[0]]).all()
        undefined = comparator.compare(listed(["0.6:0", "0.3:1"]), np.array([[np.nan, 0.3, 0.1]]))
        assert np.isnan([undefined.flip[0], undefined.topk[0]]).all()


@pytest.mark.parametrize(
    ("texts", "scores", "hint"),
    [
        (listed(["cat"]), [[0.5, 0.5]], "not a list"),
        (listed(["0.5"]), [[0.5, 0.5]], "not a list"),
        (listed(["x:1"]), [[0.5, 0.5]], "not a list"),
        (listed(["0.5:-1"]), [[0.5, 0.5]], "not a list"),
        (listed(["0.5:2"]), [[0.5, 0.5]], "not below the 2 classes"),
        (listed(["0.5:1", "0.5:1"]), [[0.5, 0.5]], "twice"),
        (listed(["0.4:0", "0.6:1"]), [[0.5, 0.5]], "does not begin"),
        (listed(["0.4:0", "0.3:1", "0.2:2"]), [[0.5, 0.5]], "not a list of at most 2 classes"),
        (listed(["0.4:0"])[0], [[0.5, 0.5]], "items|not a list"),
        (listed(["0.5:0"], ["0.5:0"]), [[0.5, 0.5]], "2 items"),
        (listed(["0.5:0"]), [0.5], "floating-point"),
        (listed(["7.5:0"]), [[0.5, 0.5]], "output_kind"),
        (listed(["-0.5:0"]), [[0.5, 0.5]], "output_kind"),
    ],
)
def test_what_is_no_list_of_the_models_classes_is_set_aside(
    texts: npt.NDArray[np.object_], scores: list[list[float]], hint: str
) -> None:
    """With what is wrong."""
    with pytest.raises(QuarantineError, match=hint) as caught:
        PROBABILITIES.compare(texts, np.array(scores))
    assert caught.value.reason is QuarantineReason.OUTPUT


def test_lists_and_whole_outputs_are_replayed_together() -> None:
    """One client asks for classes, another for logits: each exchange is compared as it came."""
    runtime = LinearRuntime(WEIGHT, BIAS)
    version_reference = VersionReference(
        model=Model(name="digits"), runtime=runtime, comparator=SingleOutput(LOGITS)
    )
    x = inputs_of(2)
    whole = exchange_of(x)
    lines = [
        f"{row[index]:.6f}:{index}".encode()
        for row in logits_of(x)
        for index in np.argsort(-row, kind="stable")[:2].tolist()
    ]
    data = b"".join(len(line).to_bytes(4, "little") + line for line in lines)
    asked = msgspec.structs.replace(
        whole, outputs=(Tensor(name="logits", datatype="BYTES", shape=(2, 2), data=data),)
    )
    outcomes = compare_batch(
        [
            PreparedExchange(
                stream_sequence=1,
                payload=b"",
                exchange=exchange,
                version_reference=version_reference,
                inputs=fit_inputs(exchange.inputs, runtime.inputs, batched=True),
            )
            for exchange in (asked, whole, asked)
        ],
        most_items=64,
    )
    for outcome, known in zip(outcomes, (False, True, False), strict=True):
        assert isinstance(outcome, ReplayResult)
        assert outcome.divergences.flip.tolist() == outcome.divergences.topk.tolist() == [0, 0]
        assert np.isfinite(outcome.divergences.divergence).tolist() == [known] * 2

"""The second sampling phase, in the capture process."""

import math

import numpy as np
import pytest

from quantdrift.core.config.schema import Model, OutputKind
from quantdrift.core.records import BodyStratum, Predicate, Protocol, Tensor
from quantdrift.sidecar.sampling.second_phase import SecondPhase, candidate_margin, phase_salt

pytestmark = pytest.mark.unit

STRATA = (
    BodyStratum(
        name="faint and close",
        rate=1.0,
        where=(
            Predicate(key="header.x", equals="faint"),
            Predicate(key="feature.candidate_margin", low=0.1, high=0.2),
        ),
    ),
    BodyStratum(name="close", rate=0.5, where=(Predicate(key="feature.candidate_margin", high=0.2),)),
    BodyStratum(name="never", rate=0.0, where=(Predicate(key="header.x", equals="off"),)),
    BodyStratum(name="default", rate=0.25),
)
SALT = phase_salt(b"secret", "e1")
OIP = Protocol.OIP_REST


def tensor(values: list[object], dtype: str, datatype: str, name: str = "y") -> Tensor:
    """Return an output."""
    array = np.array(values, dtype)
    return Tensor(name=name, datatype=datatype, shape=array.shape, data=array.tobytes())


@pytest.mark.parametrize(
    ("attributes", "margin", "stratum", "pi2"),
    [
        ({"header.x": "faint"}, 0.1, "faint and close", 1.0),
        ({"header.x": "faint"}, 0.2, "default", 0.25),
        ({"header.x": "faint"}, 0.05, "close", 0.5),
        ({"header.x": "off"}, 0.05, "close", 0.5),
        ({}, 0.1, "close", 0.5),
        ({"header.x": "off"}, None, "default", 0.25),
        ({}, None, "default", 0.25),
    ],
)
def test_of_the_strata_whose_conditions_all_hold_the_largest_rate_decides(
    attributes: dict[str, str], margin: float | None, stratum: str, pi2: float
) -> None:
    """Intervals are half open; without a margin a condition on it does not hold."""
    decided = SecondPhase(STRATA, SALT).draw("a" * 32, 1.0, attributes, margin)
    assert (decided.stratum, decided.pi2) == (stratum, pi2)


def test_exchanges_are_kept_with_the_stratums_probability() -> None:
    """Of 4,000 fixed ids a quarter is kept within 5 standard errors; 0 and 1 are exact."""
    ids = [f"{i:032x}" for i in range(4000)]
    share = sum(SecondPhase(STRATA, SALT).draw(i, 1.0, {}, None).kept for i in ids) / len(ids)
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / len(ids))
    assert not any(SecondPhase(STRATA[2:3], SALT).draw(i, 1.0, {"header.x": "off"}, None).kept for i in ids)
    assert all(SecondPhase(STRATA, SALT).draw(i, 1.0, {"header.x": "faint"}, 0.1).kept for i in ids)


def test_the_rate_is_the_total_probability_as_far_as_the_first_phase_goes() -> None:
    """Taken with 0.4 before, 0.25 in all leaves 0.625 here; what the first phase takes with 0.1 is kept whole."""
    assert SecondPhase(STRATA, SALT).draw("a", 0.4, {}, None).pi2 == pytest.approx(0.625)
    assert SecondPhase(STRATA, SALT).draw("a", 0.1, {}, None).pi2 == 1.0


def test_the_decision_belongs_to_the_id_and_the_epoch() -> None:
    """The same id in the same epoch is decided the same; another epoch decides anew."""
    ids = [f"{i:032x}" for i in range(100)]
    first = [SecondPhase(STRATA, SALT).draw(i, 1.0, {}, None).kept for i in ids]
    assert first == [SecondPhase(STRATA, SALT).draw(i, 1.0, {}, None).kept for i in ids]
    assert first != [
        SecondPhase(STRATA, phase_salt(b"secret", "e2")).draw(i, 1.0, {}, None).kept for i in ids
    ]


def test_the_margin_of_logits_is_taken_after_the_softmax() -> None:
    """The smallest gap over the items counts, large logits do not overflow."""
    scores = [[1000.0, 1000.0 - math.log(3), -1e4], [9.0, 0.0, 0.0]]
    expected = 0.75 - 0.25
    for dtype, datatype, tolerance in (("<f8", "FP64", 1e-9), ("<f4", "FP32", 1e-3)):
        margin = candidate_margin([tensor(list(scores), dtype, datatype)], Model(name="m"), OIP)
        assert margin == pytest.approx(expected, abs=tolerance)


def test_the_margin_of_probabilities_is_taken_as_it_is() -> None:
    """The configured output is read, in the types that have no softmax to hide them."""
    model = Model(name="m", output="p", output_kind=OutputKind.PROBABILITIES)
    wide = np.array([[0.5, 0.25, 0.25]], "<f4").view("<u4")
    brain = Tensor(name="p", datatype="BF16", shape=(1, 3), data=(wide >> 16).astype("<u2").tobytes())
    half = tensor([[0.5, 0.25, 0.25]], "<f2", "FP16", "p")
    other = tensor([[1.0, 0.0]], "<f4", "FP32")
    assert candidate_margin([other, brain], model, OIP) == 0.25
    assert candidate_margin([other, half], model, OIP) == 0.25


def test_an_exchange_that_is_one_item_has_one_margin() -> None:
    """With `batched` off the whole tensor is one distribution."""
    model = Model(name="m", batched=False, output_kind=OutputKind.PROBABILITIES)
    assert candidate_margin([tensor([[0.6], [0.4]], "<f8", "FP64")], model, OIP) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        [tensor([[1]], "<i4", "INT32")],
        [tensor([[1.0]], "<f4", "FP32")],
        [tensor([], "<f4", "FP32")],
        [Tensor(name="y", datatype="FP32", shape=(0, 3), data=b"")],
        [tensor([[1.0, math.nan]], "<f4", "FP32")],
    ],
)
def test_without_two_finite_classes_there_is_no_margin(outputs: list[Tensor]) -> None:
    """No floating output, one class, no item and not-a-number have none."""
    assert candidate_margin(outputs, Model(name="m"), OIP) is None


@pytest.mark.parametrize(
    "protocol", [Protocol.OPENAI_CHAT, Protocol.OPENAI_COMPLETIONS, Protocol.OPENAI_EMBEDDINGS]
)
def test_what_is_no_classification_has_no_margin(protocol: Protocol) -> None:
    """An embedding and the log-probabilities of tokens are floats, and no scores of classes."""
    outputs = [tensor([[0.5, 0.25]], "<f4", "FP32", "embedding")]
    assert candidate_margin(outputs, Model(name="m"), OIP) is not None
    assert candidate_margin(outputs, Model(name="m"), protocol) is None


def test_a_margin_is_computed_only_where_a_stratum_asks() -> None:
    """Policies without such a condition do not pay for it."""
    assert SecondPhase(STRATA, SALT).needs_margin
    assert not SecondPhase(STRATA[-1:], SALT).needs_margin


def test_looking_strata_up_by_value_finds_what_looking_at_each_would() -> None:
    """Two hundred overlapping strata: the largest rate among those that hold, for 500 seeded exchanges."""
    rng = np.random.default_rng(5)
    strata = [
        BodyStratum(
            name=str(n),
            rate=float(rng.random()),
            where=tuple(
                Predicate(key=f"header.{key}", equals=str(rng.integers(3)))
                for key in rng.choice(["a", "b", "c"], size=rng.integers(0, 3), replace=False)
            )
            + ((Predicate(key="feature.candidate_margin", high=float(rng.random())),) if n % 2 else ()),
        )
        for n in range(200)
    ] + [BodyStratum(name="default", rate=0.01)]
    thinning = SecondPhase(strata, SALT)
    for number in range(500):
        attributes = {f"header.{key}": str(rng.integers(4)) for key in "abc" if rng.random() < 0.7}
        margin = float(rng.random())
        expected = max(
            stratum.rate
            for stratum in strata
            if all(
                (where.high is not None and margin < where.high)
                or (where.equals is not None and attributes.get(where.key) == where.equals)
                for where in stratum.where
            )
        )
        assert thinning.draw(str(number), 1.0, attributes, margin).pi2 == expected

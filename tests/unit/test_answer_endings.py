"""The place where the reference would have ended an answer that was served."""

import math

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from quantdrift.models.language.request_options import ended_itself
from quantdrift.models.language.scoring import NO_SCORES, Scores
from tests.support.shadow.score_streams import compared, scores_of, told

pytestmark = pytest.mark.unit


def _scored(ends: list[float], end_p: float = math.nan, upper: list[float] | None = None) -> Scores:
    served = tuple(0 for _ in range(max(len(ends), 1)))
    one = scores_of(np.log([[0.5, 0.5]] * len(served)), served)
    return msgspec.structs.replace(
        one, ends=_array(ends), ends_upper=_array(ends if upper is None else upper), end_p=end_p
    )


def _array(values: list[float]) -> npt.NDArray[np.float64]:
    return np.array(values, dtype=np.float64)


@pytest.mark.parametrize(("p", "n"), [(0.01, 1), (0.01, 300), (0.5, 4), (1e-9, 1000)])
def test_an_end_as_likely_everywhere_is_geometric(p: float, n: int) -> None:
    """In closed form: it has ended before n with 1 - (1 - p)^n, and reaches token i with (1 - p)^i."""
    found = told(compared(None, _scored([p] * n, end_p=0.7)))
    assert found["early_end"] == pytest.approx(-math.expm1(n * math.log1p(-p)), rel=1e-6)
    assert found["early_end_upper"] == found["early_end"]
    expected = sum((1 - p) ** i for i in range(1, n + 1)) / n
    assert found["kept_share"] == pytest.approx(expected)
    assert found["end_p"] == 0.7


def test_the_expected_length_is_that_of_drawn_ends() -> None:
    """Lengths drawn place by place have that mean over the served one, and end early that often."""
    rng = np.random.default_rng(7)
    ends = [0.05, 0.3, 0.0, 0.1, 0.6]
    drawn = rng.random((200_000, len(ends))) < ends
    lengths = np.where(drawn.any(axis=1), drawn.argmax(axis=1), len(ends))
    found = told(compared(None, _scored(ends)))
    assert found["early_end"] == pytest.approx(drawn.any(axis=1).mean(), abs=5e-3)
    assert found["kept_share"] == pytest.approx(lengths.mean() / len(ends), abs=5e-3)


def test_a_list_that_lacks_the_end_leaves_bounds() -> None:
    """The truth lies between; the share that is kept is an upper bound."""
    truth = told(compared(None, _scored([0.1, 0.2])))
    found = told(compared(None, _scored([0.1, 0.0], upper=[0.1, 0.25])))
    assert found["early_end"] < truth["early_end"] < found["early_end_upper"]
    assert found["kept_share"] >= truth["kept_share"]


@pytest.mark.parametrize("scores", [NO_SCORES, _scored([], math.nan), _scored([0.1, math.nan])])
def test_unknown_endings_are_not_reported(scores: Scores) -> None:
    """Of no token, of a server that names no end, and of lists without ids."""
    found = told(compared(None, scores))
    assert np.isnan([found[name] for name in ("end_p", "early_end", "early_end_upper")]).all()


def test_an_answer_that_ended_at_once_could_not_end_earlier() -> None:
    """How likely that end was is told all the same."""
    found = told(compared(None, _scored([], end_p=0.4)))
    assert (found["end_p"], found["early_end"]) == (0.4, 0)
    assert math.isnan(found["kept_share"])


def test_a_reference_that_gives_no_numbers_says_nothing_of_ends() -> None:
    """As of everything else."""
    broken = msgspec.structs.replace(_scored([0.1], end_p=0.4), logprobs=np.array([math.nan]))
    assert math.isnan(told(compared(None, broken))["end_p"])


@pytest.mark.parametrize(
    ("options", "reason", "ended"),
    [
        ({}, "stop", True),
        ({}, "tool_calls", True),
        ({}, "length", False),
        ({}, "", None),
        ({"stop": ["\n"]}, "stop", None),
        ({"stop_token_ids": [5]}, "stop", None),
        ({"stop": ["\n"]}, "length", False),
        ({}, "content_filter", None),
    ],
)
def test_who_ended_an_answer(options: dict[str, object], reason: str, *, ended: bool | None) -> None:
    """The model, a limit, or perhaps the client's own sequence."""
    assert ended_itself(options, reason) is ended

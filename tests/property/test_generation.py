"""What a list of the likeliest tokens tells of the whole distributions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr

from tests.support.shadow.score_streams import compared, scores_of, told

pytestmark = pytest.mark.property


@given(
    seed=st.integers(0, 2**32 - 1),
    listed=st.integers(0, 30),
    known=st.integers(1, 30),
    spread=st.floats(0.1, 6.0),
)
def test_bounds_hold_the_truth(seed: int, listed: int, known: int, spread: float) -> None:
    """KL is at least what is told; total variation and Jensen-Shannon lie between their bounds."""
    generator = np.random.default_rng(seed)
    n_places, n_tokens = 4, 30
    logits = generator.normal(size=(2, n_places, n_tokens)) * spread
    p, q = (one - np.log(np.exp(one).sum(axis=1, keepdims=True)) for one in logits)
    served = generator.integers(0, n_tokens, size=n_places).tolist()
    found = told(compared(scores_of(q, served, listed), scores_of(p, served, known)))
    slack = 1e-6  # a tail below 1e-7 is taken for 1e-7
    kl = rel_entr(np.exp(p), np.exp(q)).sum(axis=1).mean()
    assert 0 <= found["kl"] <= kl + slack
    tv = np.abs(np.exp(p) - np.exp(q)).sum(axis=1).mean() / 2
    assert found["tv"] - slack <= tv <= found["tv_upper"] + slack
    js = (jensenshannon(np.exp(p), np.exp(q), axis=1) ** 2).mean()
    assert found["js"] - slack <= js <= found["js_upper"] + slack
    if listed == known == n_tokens:
        assert found["kl"] == pytest.approx(kl, abs=1e-6)
        assert found["js"] == pytest.approx(js, abs=1e-6)

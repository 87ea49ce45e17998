"""What every signal must do, of the one of quantdrift's own in which chance decides."""

import msgspec
import numpy as np
import pytest

from quantdrift.core.config.schema import Model
from quantdrift.core.records import Metric
from quantdrift.core.signals import signal_of
from quantdrift.core.tasks import MEASURES, Task
from quantdrift.models.comparators.registry import comparator_of, task_plugin
from quantdrift.models.language.answer import Answer
from quantdrift.models.language.scoring import ANSWER, SCORES, objects
from quantdrift.models.language.unlikely import unlikely_share
from quantdrift.models.tensors.arrays import Outputs
from quantdrift.testing.comparators import N_ITEMS, ComparatorCase
from quantdrift.testing.signals import SignalCase, SignalSuite
from tests.support.shadow.score_streams import scores_of

pytestmark = pytest.mark.contract
_MODEL = Model(name="m", task=Task.GENERATION)


def _drawn(seed: int) -> Outputs:
    """Answers of 200 tokens that are drawn from the reference's own distributions over 40 tokens."""
    rng = np.random.default_rng(seed)
    scores = []
    for _ in range(N_ITEMS):
        p = rng.dirichlet(np.full(40, 0.3), size=200)
        served = [int(rng.choice(40, p=row)) for row in p]
        own = p[np.arange(200), served]
        below = np.where(p < own[:, None], p, 0.0).sum(axis=1)
        found = scores_of(np.log(np.maximum(p, 1e-300)), tuple(served), k=5)
        scores.append(msgspec.structs.replace(found, unlikely=unlikely_share(below, own)))
    answers = [Answer(text="said", finish_reason="length", temperature=1.0) for _ in scores]
    return {SCORES: objects(scores), ANSWER: objects(answers)}


class TestUnlikelyTokens(SignalSuite):
    """Equal models have 5 % in the mean, and not 0."""

    cases = (
        SignalCase(
            "unlikely-tokens",
            signal_of(Metric.UNLIKELY),
            ComparatorCase(
                "generation",
                lambda: comparator_of(_MODEL),
                MEASURES[Task.GENERATION],
                _drawn,
                types=task_plugin(Task.GENERATION).types,
                nothing=None,
                is_numeric=False,
            ),
        ),
    )

"""The options of a model's task."""

from pathlib import Path

import pytest

from quantdrift.core.config.load import load
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.config.tasks import SECTIONS
from quantdrift.core.errors import OperatorError

pytestmark = pytest.mark.unit


def _loaded(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "config.toml"
    path.write_text(f'[[models]]\nname = "m"\n{text}')
    return load(path, {})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            'task = "tensor"\n[models.regression]\nfloor = 1.0',
            "[models.regression] belongs to task `regression`",
        ),
        (
            "tolerance = 0.1",
            "tolerance belongs to task `regression` or `embedding` or `segmentation` or `tensor`",
        ),
        ('task = "regression"\ntolerance = -0.1', "tolerance = -0.1: it must be a number from 0"),
        ('task = "tensor"\ntolerance = inf', "tolerance = inf: it must be a number from 0"),
        ("top_k = 0", "top_k = 0: it must be a whole number from 1 to 100000"),
        ('task = "ranking"\ntop_k = -1', "top_k = -1: it must be a whole number from 0 to 100000"),
        ("background = 0", "background belongs to task `detection` or `segmentation`"),
        ("threshold = 0.1", "threshold belongs to task `multilabel` or `detection`"),
        ('interest = ["fraud"]', "names `fraud`, which is not in labels"),
        ('labels = ["a"]\ninterest = [1]', "interest names 1"),
        ("interest = [-1]", "interest names -1"),
        ('task = "multilabel"\nthreshold = 1.0', "threshold must be a probability"),
        ('task = "multilabel"\nthreshold = []', "threshold must be a probability"),
        (
            'task = "multilabel"\nlabels = ["a", "b", "c"]\nthreshold = [0.5, 0.1]',
            "threshold has 2 entries, and labels 3",
        ),
        ('task = "detection"\nthreshold = [0.5]', "threshold of a detector must be one number from 0 to 1"),
        ('task = "detection"\nthreshold = 1.1', "threshold of a detector must be one number from 0 to 1"),
        (
            'task = "regression"\n[models.regression]\nquantiles = [0.5]',
            "regression.quantiles must be two or more",
        ),
        ('task = "regression"\n[models.regression]\nquantiles = [0.9, 0.1]', "rising"),
        ('task = "regression"\n[models.regression]\nfloor = 0.0', "floor"),
        (
            'task = "tensor"\noutput = "a"\n[models.tensor]\noutputs = ["b"]',
            "give only one of output and tensor.outputs",
        ),
        ('task = "tensor"\n[models.tensor]\noutputs = ["b", "b"]', "twice"),
        ('task = "tensor"\n[models.tensor]\nelement_type = "INT8"', "element_type"),
        ('task = "detection"\n[models.detection]\nboxes = "b"', "`boxes` needs `scores`"),
        (
            'task = "detection"\noutput = "d"\n[models.detection]\nboxes = "b"\nscores = "s"',
            "give only one of output and detection.boxes",
        ),
        (
            'task = "detection"\n[models.detection]\nboxes = "b"\nscores = "s"\nclasses = "c"\nactivation = "softmax"',
            "over classes",
        ),
        ('task = "detection"\n[models.detection]\nscores = "s"', "`scores` needs `boxes`"),
        ('task = "detection"\n[models.detection]\nactivation = "softmax"', "one score"),
        (
            'task = "detection"\n[models.detection]\ncolumns = ["box", "box", "box", "score"]',
            "four times",
        ),
        (
            'task = "detection"\n[models.detection]\ncolumns = ["box", "box", "box", "box", "score", "class", "class"]',
            "at most once",
        ),
        (
            'task = "detection"\n[models.detection]\ncolumns = ["item", "box", "box", "box", "box", "score"]',
            "must be named in `models.output`",
        ),
        ('task = "ranking"\n[models.ranking]\npadding = inf', "ranking.padding must be a finite number"),
        ('task = "ranking"\n[models.ranking]\npadding = nan', "ranking.padding must be a finite number"),
        ('task = "regression"\n[models.regression]\nfloor = inf', "regression.floor must be a finite number"),
        ("[models.budget]\ncap = inf", "budget.cap must be a finite number"),
        ("[models.segmentation]\nboundary = 3", "belongs to task `segmentation`"),
        (
            'task = "generation"\n[models.generation]\nown_share = 0.1\nown_s = 61.0',
            "own_s must not be above shadow.ack_wait_s",
        ),
        ('task = "generation"\n[models.generation]\nown_share = 1.1', "from 0 to 1"),
        ('task = "ranking"\ntopk = 3', "did you mean `top_k`"),
    ],
)
def test_a_contradiction_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    """At start, with what to change."""
    with pytest.raises(OperatorError) as error:
        _loaded(tmp_path, text)
    assert problem in str(error.value)


def test_options_of_every_task_are_read(tmp_path: Path) -> None:
    """A threshold is one number or a list; an infinite padding is TOML's."""
    config = _loaded(tmp_path, 'task = "multilabel"\nthreshold = 0.25\ninterest = [3]')
    assert config.models[0].thresholds == (0.25,)
    config = _loaded(tmp_path, 'task = "multilabel"\nthreshold = [0.25, 0.5]')
    assert config.models[0].thresholds == (0.25, 0.5)
    config = _loaded(tmp_path, 'task = "ranking"\n[models.ranking]\npadding = -inf')
    assert config.models[0].ranking.padding == float("-inf")


def test_every_table_is_one_of_a_model() -> None:
    """By the key under which it is checked and documented."""
    model = Model(name="m")
    for name, (_, kind) in SECTIONS.items():
        assert getattr(model, name) == kind()

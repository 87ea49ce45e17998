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
        ("[models.vectors]\nneighbours = 5", "[models.vectors] belongs to task `embedding`"),
        ('[models.classification]\ninterest = ["fraud"]', "names `fraud`, which is not in labels"),
        ('labels = ["a"]\n[models.classification]\ninterest = [1]', "interest names 1"),
        ("[models.classification]\ninterest = [-1]", "interest names -1"),
        (
            'task = "multilabel"\n[models.multilabel]\nthreshold = 1.0',
            "multilabel.threshold is a probability",
        ),
        ('task = "multilabel"\n[models.multilabel]\nthreshold = []', "multilabel.threshold is a probability"),
        (
            'task = "multilabel"\nlabels = ["a", "b", "c"]\n[models.multilabel]\nthreshold = [0.5, 0.1]',
            "multilabel.threshold has 2 entries, and labels 3",
        ),
        (
            'task = "regression"\n[models.regression]\nquantiles = [0.5]',
            "regression.quantiles are two or more",
        ),
        ('task = "regression"\n[models.regression]\nquantiles = [0.9, 0.1]', "rising"),
        ('task = "regression"\n[models.regression]\nfloor = 0.0', "floor"),
        ('task = "ranking"\n[models.ranking]\npersistence = 1.0', "persistence"),
        ('task = "tensor"\noutput = "a"\n[models.tensor]\noutputs = ["b"]', "exclude each other"),
        ('task = "tensor"\n[models.tensor]\noutputs = ["b", "b"]', "twice"),
        ('task = "tensor"\n[models.tensor]\nelement_type = "INT8"', "element_type"),
        ('task = "detection"\n[models.detection]\nboxes = "b"', "`boxes` needs `scores`"),
        (
            'task = "detection"\n[models.detection]\nboxes = "b"\nscores = "s"\ndetections = "d"',
            "exclude each other",
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
            "must be named in `detections`",
        ),
        ('task = "detection"\n[models.detection]\niou = 0', "> 0"),
        ('task = "detection"\noutput = "a"\n[models.detection]\ndetections = "b"', "exclude each other"),
        ('task = "ranking"\n[models.ranking]\npadding = inf', "ranking.padding must be a finite number"),
        ('task = "ranking"\n[models.ranking]\npadding = nan', "ranking.padding must be a finite number"),
        ('task = "regression"\n[models.regression]\nfloor = inf', "regression.floor must be a finite number"),
        ("[models.budget]\ncap = inf", "budget.cap must be a finite number"),
        ("[models.segmentation]\nignore = 255", "belongs to task `segmentation`"),
        (
            'task = "generation"\n[models.generation]\nown_share = 0.1\nown_s = 61.0',
            "own_s must not be above shadow.ack_wait_s",
        ),
        ('task = "generation"\n[models.generation]\nown_share = 1.1', "<= 1"),
        ('task = "ranking"\n[models.ranking]\ntopk = 3', "did you mean `top_k`"),
    ],
)
def test_a_contradiction_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    """At start, with what to change."""
    with pytest.raises(OperatorError) as error:
        _loaded(tmp_path, text)
    assert problem in str(error.value)


def test_options_of_every_task_are_read(tmp_path: Path) -> None:
    """A threshold is one number or a list; an infinite padding is TOML's."""
    config = _loaded(tmp_path, 'task = "multilabel"\n[models.multilabel]\nthreshold = 0.25\ninterest = [3]')
    assert config.models[0].multilabel.thresholds == (0.25,)
    config = _loaded(tmp_path, 'task = "multilabel"\n[models.multilabel]\nthreshold = [0.25, 0.5]')
    assert config.models[0].multilabel.thresholds == (0.25, 0.5)
    config = _loaded(tmp_path, 'task = "ranking"\n[models.ranking]\npadding = -inf')
    assert config.models[0].ranking.padding == float("-inf")


def test_every_table_is_one_of_a_model() -> None:
    """By the key under which it is checked and documented."""
    model = Model(name="m")
    for name, (_, kind) in SECTIONS.items():
        assert getattr(model, name) == kind()

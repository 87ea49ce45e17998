"""Which options of tasks on images go together."""

from collections import Counter
from collections.abc import Iterator

from quantdrift.core.config.models import Model
from quantdrift.core.config.vision import Activation, Column


def vision_problems(model: Model) -> Iterator[str]:
    """Return what does not go together in the options of `model`, each as a sentence that says what to change."""
    if model.output and model.detection.boxes:
        yield f"models `{model.name}`: give only one of output and detection.boxes"
    yield from (f"models `{model.name}`: {problem}" for problem in _detection(model))


def _detection(model: Model) -> Iterator[str]:
    options = model.detection
    if options.boxes:
        if not options.scores:
            yield "detection: `boxes` needs `scores`"
        if options.classes and options.activation is Activation.SOFTMAX:
            yield "detection: a softmax is over classes, but with `classes` there is one score for each box"
        return
    if alone := [name for name in ("scores", "classes", "count") if getattr(options, name)]:
        yield f"detection: `{alone[0]}` needs `boxes`"
    if options.activation is Activation.SOFTMAX:
        yield "detection: a softmax is over classes, and a row of a table has one score"
    counts = Counter(options.columns)
    if counts[Column.BOX] != 4 or counts[Column.SCORE] != 1:
        yield "detection: `columns` names `box` four times and `score` once"
    if counts[Column.CLASS] > 1 or counts[Column.ITEM] > 1:
        yield "detection: `columns` names `class` and `item` at most once"
    if counts[Column.ITEM] and not model.output:
        yield "detection: with `item` among its columns the output must be named in `models.output`"

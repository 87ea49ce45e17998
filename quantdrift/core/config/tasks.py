"""Options of each task, in a table `[models.<task>]` of its own."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final

from msgspec import Meta

from quantdrift.core.config.section import Section, about
from quantdrift.core.config.vision import Detection, Segmentation
from quantdrift.core.tasks import Task

Interest = tuple[str | int, ...]
CountTies = Annotated[
    bool,
    about(
        "Whether an item flips where the first entry differs only because several entries share "
        "the largest score of a side, as scores in 8 bits often do. `tie` marks such items either "
        "way. No: a flip then means that neither order of equal scores gives the same answer."
    ),
]


class Classification(Section, frozen=True, kw_only=True):
    """For a classifier (`task = "classification"`)."""

    interest: Annotated[
        Interest,
        about(
            "Classes of interest, by name in `labels` or by number from 0: flips into and out of "
            "them are reported as `gained` and `lost` in a comparison's detail."
        ),
    ] = ()
    count_ties: CountTies = True


class Multilabel(Section, frozen=True, kw_only=True):
    """For a multi-label classifier (`task = "multilabel"`)."""

    threshold: Annotated[
        float | tuple[float, ...],
        about(
            "Probability above which a label is assigned, between 0 and 1: one for all labels, or "
            "a list with one for each."
        ),
    ] = 0.5
    interest: Annotated[
        Interest,
        about(
            "Labels of interest, by name in `labels` or by number from 0: they are reported as "
            "`gained` and `lost` in a comparison's detail."
        ),
    ] = ()

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The thresholds as a list: of one entry, which is for all labels, or of one for each."""
        return self.threshold if isinstance(self.threshold, tuple) else (self.threshold,)


class Regression(Section, frozen=True, kw_only=True):
    """For a model that predicts numbers (`task = "regression"`)."""

    floor: Annotated[
        float,
        about(
            "Errors are relative to the reference's value, or to this if it is larger, in the "
            "unit of the output: the smallest value whose relative error matters.",
            gt=0,
        ),
    ] = 1e-3
    tolerance: Annotated[
        float, about("An item flips when an output's relative error exceeds this.", gt=0)
    ] = 0.05
    quantiles: Annotated[
        tuple[float, ...],
        about(
            "The quantiles in the last dimension of the output, rising: `[0.1, 0.5, 0.9]`. "
            "Crossing quantiles and the interval's width are then reported. Empty: no quantiles."
        ),
    ] = ()


class Vectors(Section, frozen=True, kw_only=True):
    """For a model that gives embeddings (`task = "embedding"`). `models.embedding` is another thing."""

    tolerance: Annotated[
        float, about("An item flips when the cosine distance, 0 to 2, exceeds this.", gt=0, le=2)
    ] = 0.05
    neighbours: Annotated[
        int,
        about(
            "How many nearest vectors of the reference are looked up for each side; the share in "
            "common is reported.",
            ge=1,
            le=100,
        ),
    ] = 10


class Ranking(Section, frozen=True, kw_only=True):
    """For a model that scores things to be ranked (`task = "ranking"`)."""

    top_k: Annotated[
        int,
        about(
            "NDCG loss and overlap are of the first so many places. 0: of all.",
            ge=0,
            le=100_000,
        ),
    ] = 10
    padding: Annotated[
        float,
        about(
            "Things that the reference scores at or below this are padding: they are left out on "
            "both sides. Minus infinity always is."
        ),
    ] = -1e9
    persistence: Annotated[
        float,
        about(
            "Of rank-biased overlap: the probability that a reader goes on to the next place. At "
            "0.9 the first ten places have 86 % of the weight.",
            gt=0,
            lt=1,
        ),
    ] = 0.9
    count_ties: CountTies = True


class RawTensor(Section, frozen=True, kw_only=True):
    """For a model whose outputs have no known meaning (`task = "tensor"`)."""

    outputs: Annotated[
        tuple[str, ...],
        about("Outputs to compare; the worst one counts. Empty: that of `models.output`."),
    ] = ()
    tolerance: Annotated[
        float, about("An item flips when the relative error of an output exceeds this.", gt=0, lt=1)
    ] = 0.05
    element_type: Annotated[
        str,
        about(
            "`FP16`, `BF16`, `FP32` or `FP64`: the type whose steps errors are counted in, if the "
            "candidate computes in another type than it sends. Empty: as sent, BF16 as FP32."
        ),
        Meta(pattern="^(|BF16|FP(16|32|64))$"),
    ] = ""


class Generation(Section, frozen=True, kw_only=True):
    """For a language model (`task = "generation"`)."""

    max_tokens: Annotated[
        int,
        about(
            "Most tokens of an answer that the reference scores; later ones are ignored.",
            "{token}",
            ge=1,
            le=131_072,
        ),
    ] = 2048
    top: Annotated[
        int,
        about(
            "How many of its likeliest tokens the reference returns at each place. More bring KL "
            "nearer to its true value. vLLM allows 20, unless it runs with a higher "
            "`--max-logprobs`.",
            "{token}",
            ge=1,
            le=1000,
        ),
    ] = 20
    tie: Annotated[
        float,
        about(
            "Two tokens count as equally likely when the reference's log-probabilities differ by "
            "at most this. Raise it if a flip should mean that the reference clearly prefers "
            "another token.",
            "nat",
            ge=0,
        ),
    ] = 0.001
    repetition_penalty: Annotated[
        float,
        about(
            "Penalty that the candidate's server uses when a request names none. vLLM takes it "
            "from the model's `generation_config.json` (1.05 for Qwen2.5), also at temperature 0, "
            "unless it runs with `--generation-config vllm`. With anything but 1 no such answer "
            "counts as greedy.",
            gt=0,
        ),
    ] = 1.0
    end_ids: Annotated[
        tuple[int, ...],
        about(
            "Ids of the tokens that end an answer. Empty: as a reference's folder says; of a "
            "reference at a server they are then unknown."
        ),
    ] = ()
    own_share: Annotated[
        float,
        about(
            "Share of exchanges that the reference also answers itself, to compare finish reason "
            "and length. An answer takes one pass for each token: 0.01 may double the cost of "
            "replays.",
            ge=0,
            le=1,
        ),
    ] = 0.0
    own_tokens: Annotated[
        int,
        about(
            "Most tokens of such an answer. Both answers are compared up to there.",
            "{token}",
            ge=1,
            le=131_072,
        ),
    ] = 256
    own_s: Annotated[
        float,
        about(
            "Longest time in a batch for such answers, while other exchanges wait. What does not "
            "fit is left out and counted.",
            "s",
            gt=0,
        ),
    ] = 10.0


SECTIONS: Final[Mapping[str, tuple[Task, type[Section]]]] = MappingProxyType(
    {
        "classification": (Task.CLASSIFICATION, Classification),
        "multilabel": (Task.MULTILABEL, Multilabel),
        "regression": (Task.REGRESSION, Regression),
        "vectors": (Task.EMBEDDING, Vectors),
        "ranking": (Task.RANKING, Ranking),
        "detection": (Task.DETECTION, Detection),
        "segmentation": (Task.SEGMENTATION, Segmentation),
        "generation": (Task.GENERATION, Generation),
        "tensor": (Task.TENSOR, RawTensor),
    }
)
"""The tables by their key in `[[models]]`."""

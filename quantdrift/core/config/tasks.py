"""The options of a model's kind of output: one table for each task, `[models.<task>]`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final

from msgspec import Meta

from quantdrift.core.config.section import Section, about
from quantdrift.core.config.vision import Detection, Segmentation
from quantdrift.core.tasks import Task

Interest = tuple[str | int, ...]


class Classification(Section, frozen=True, kw_only=True):
    """Of a classifier (`task = "classification"`)."""

    interest: Annotated[
        Interest,
        about(
            "Classes of interest, by name in `labels` or by number from 0: flips into and out of them are told apart, as "
            "`gained` and `lost` in the detail of a comparison."
        ),
    ] = ()


class Multilabel(Section, frozen=True, kw_only=True):
    """Of a multi-label classifier (`task = "multilabel"`)."""

    threshold: Annotated[
        float | tuple[float, ...],
        about(
            "Probability above which a label is given, between 0 and 1: one for all labels, or a list with one for each."
        ),
    ] = 0.5
    interest: Annotated[
        Interest,
        about(
            "Labels of interest, by name in `labels` or by number from 0: their coming and going is told as `gained` and "
            "`lost` in the detail of a comparison."
        ),
    ] = ()

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The thresholds as a list: of one entry, which is for all labels, or of one for each."""
        return self.threshold if isinstance(self.threshold, tuple) else (self.threshold,)


class Regression(Section, frozen=True, kw_only=True):
    """Of a model that gives numbers (`task = "regression"`)."""

    floor: Annotated[
        float,
        about(
            "Errors are relative to the reference's value, or to this where that is smaller, in the unit of the output: set "
            "it to the smallest value whose relative error matters.",
            gt=0,
        ),
    ] = 1e-3
    tolerance: Annotated[
        float, about("An item flips where an output's relative error is above this.", gt=0)
    ] = 0.05
    quantiles: Annotated[
        tuple[float, ...],
        about(
            "Which quantiles the outputs of the last dimension are, rising: `[0.1, 0.5, 0.9]`. Quantiles that cross, and the "
            "width of the interval, are told then. Empty: they are none."
        ),
    ] = ()


class Vectors(Section, frozen=True, kw_only=True):
    """Of a model that gives embeddings (`task = "embedding"`); `models.embedding` is another thing."""

    tolerance: Annotated[
        float, about("An item flips where the cosine distance, 0 to 2, is above this.", gt=0, le=2)
    ] = 0.05
    neighbours: Annotated[
        int,
        about(
            "How many nearest vectors of the reference are looked up for each side: those in common are told.",
            ge=1,
            le=100,
        ),
    ] = 10
    reservoir: Annotated[
        int,
        about(
            "Last vectors of the reference among which neighbours are looked up; at least ten times `neighbours`. Each takes 4 "
            "bytes a dimension in every shadow process.",
            ge=10,
            le=65_536,
        ),
    ] = 1024


class Ranking(Section, frozen=True, kw_only=True):
    """Of a model that scores things to be put in order (`task = "ranking"`)."""

    top_k: Annotated[
        int,
        about(
            "Places that count: the NDCG loss and the overlap are of the first so many. 0: of all.",
            ge=0,
            le=100_000,
        ),
    ] = 10
    padding: Annotated[
        float,
        about(
            "Things that the reference scores at or below this fill up a batch and are none: they are left out on both sides. "
            "Minus infinity always is."
        ),
    ] = -1e9
    persistence: Annotated[
        float,
        about(
            "Of rank-biased overlap: the probability that a reader goes on to the next place. At 0.9 the first ten have 86 % of "
            "the weight.",
            gt=0,
            lt=1,
        ),
    ] = 0.9


class RawTensor(Section, frozen=True, kw_only=True):
    """Of a model of whose outputs nothing is known (`task = "tensor"`)."""

    outputs: Annotated[
        tuple[str, ...],
        about("Outputs that are compared, of which the worst counts. Empty: the one of `models.output`."),
    ] = ()
    tolerance: Annotated[
        float, about("An item flips where the relative error of an output is above this.", gt=0, lt=1)
    ] = 0.05
    element_type: Annotated[
        str,
        about(
            "`FP16`, `BF16`, `FP32` or `FP64`: the floating type in whose steps errors are counted, where the candidate computes "
            "in another one than it sends. Empty: as sent, BF16 as FP32."
        ),
        Meta(pattern="^(|BF16|FP(16|32|64))$"),
    ] = ""


class Generation(Section, frozen=True, kw_only=True):
    """Of a language model (`task = "generation"`)."""

    max_tokens: Annotated[
        int,
        about(
            "Most tokens of an answer that the reference scores; what comes after is not looked at.",
            "{token}",
            ge=1,
            le=131_072,
        ),
    ] = 2048
    top: Annotated[
        int,
        about(
            "How many of its likeliest tokens the reference tells at each place. More bring KL nearer to its true value. "
            "vLLM allows 20, unless it runs with a higher `--max-logprobs`.",
            "{token}",
            ge=1,
            le=1000,
        ),
    ] = 20
    tie: Annotated[
        float,
        about(
            "Two tokens count as equally likely where the reference's log-probabilities differ by at most this. Raise it where "
            "a flip should mean that the reference clearly prefers another token.",
            "nat",
            ge=0,
        ),
    ] = 0.001
    repetition_penalty: Annotated[
        float,
        about(
            "Penalty that the candidate's server takes where a request names none. vLLM has it from the model's "
            "`generation_config.json` (1.05 for Qwen2.5), also at temperature 0, unless it runs with "
            "`--generation-config vllm`. Other than 1: no such answer is greedy.",
            gt=0,
        ),
    ] = 1.0
    end_ids: Annotated[
        tuple[int, ...],
        about(
            "Ids of the tokens that end an answer. Empty: a folder tells them itself, of a server nothing is said of ends."
        ),
    ] = ()
    own_share: Annotated[
        float,
        about(
            "Share of the exchanges that the reference answers itself too, to tell finish reason and length beside its own. "
            "An answer takes as many passes as it has tokens: 0.01 may well double what a replay costs.",
            ge=0,
            le=1,
        ),
    ] = 0.0
    own_tokens: Annotated[
        int,
        about(
            "Most tokens of such an answer. Both answers are looked at up to there.",
            "{token}",
            ge=1,
            le=131_072,
        ),
    ] = 256
    own_s: Annotated[
        float,
        about(
            "Longest time that such answers may take in a batch, and with it the others may wait; what does not fit into it "
            "is left out, and counted.",
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

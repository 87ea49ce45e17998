"""Options of each task, in a table `[models.<task>]` of its own."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final

from msgspec import Meta

from quantdrift.core.config.section import Section, about
from quantdrift.core.config.vision import Detection, Segmentation
from quantdrift.core.tasks import Task


class Regression(Section, frozen=True, kw_only=True):
    """For a model that predicts numbers (`task = "regression"`)."""

    floor: Annotated[
        float,
        about(
            "Smallest value whose relative error matters, in the unit of the output: the error of a smaller one is divided by this.",
            gt=0,
        ),
    ] = 1e-3
    quantiles: Annotated[
        tuple[float, ...],
        about(
            "The quantiles in the last dimension of the output, rising: `[0.1, 0.5, 0.9]`. "
            "Crossing quantiles and the interval's width are then reported. Empty: no quantiles."
        ),
    ] = ()


class Ranking(Section, frozen=True, kw_only=True):
    """For a model that scores things to be ranked (`task = "ranking"`)."""

    padding: Annotated[
        float,
        about(
            "Entries that the reference scores at or below this are padding: they are left out on both sides, as minus infinity always is."
        ),
    ] = -1e9


class RawTensor(Section, frozen=True, kw_only=True):
    """For a model whose outputs have no known meaning (`task = "tensor"`)."""

    outputs: Annotated[
        tuple[str, ...],
        about("Outputs to compare; the worst one counts. Empty: that of `models.output`."),
    ] = ()
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
    batch_tokens: Annotated[
        int,
        about(
            "Most tokens of prompts and answers that a reference computes together. This bounds the memory of a batch, of the shadow and of a "
            "reference's server. A longer answer is computed alone.",
            "{token}",
            ge=1,
        ),
    ] = 16_384
    max_replay_tokens_per_s: Annotated[
        float,
        about(
            "Most tokens of prompts and answers per second that a worker replays of this model. Above it exchanges wait in the stream. "
            "0: no limit.",
            "{token}/s",
            ge=0,
        ),
    ] = 0.0
    prefix_bytes: Annotated[
        int,
        about(
            "Most bytes that a reference in a folder keeps of what it computed, so that the turns of a conversation and the samples of one "
            "prompt share their beginning. A copy of the candidate keeps as much of its own. 0: nothing is kept.",
            "bytes",
            ge=0,
        ),
    ] = 256 * 2**20
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
            "Longest time in a batch for such answers, while other exchanges wait. Answers that do not fit are left out and counted.",
            "s",
            gt=0,
        ),
    ] = 10.0


SHARED: Final[Mapping[str, frozenset[Task]]] = MappingProxyType(
    {
        "tolerance": frozenset({Task.REGRESSION, Task.EMBEDDING, Task.SEGMENTATION, Task.TENSOR}),
        "threshold": frozenset({Task.MULTILABEL, Task.DETECTION}),
        "top_k": frozenset({Task.CLASSIFICATION, Task.RANKING}),
        "interest": frozenset({Task.CLASSIFICATION, Task.MULTILABEL}),
        "count_ties": frozenset({Task.CLASSIFICATION, Task.RANKING}),
        "background": frozenset({Task.DETECTION, Task.SEGMENTATION}),
    }
)
"""The options of `[[models]]` that belong to several tasks, and to which."""
SECTIONS: Final[Mapping[str, tuple[Task, type[Section]]]] = MappingProxyType(
    {
        "regression": (Task.REGRESSION, Regression),
        "ranking": (Task.RANKING, Ranking),
        "detection": (Task.DETECTION, Detection),
        "segmentation": (Task.SEGMENTATION, Segmentation),
        "generation": (Task.GENERATION, Generation),
        "tensor": (Task.TENSOR, RawTensor),
    }
)
"""The tables by their key in `[[models]]`."""

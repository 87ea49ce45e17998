"""The lists: models with their references and budgets, and slices."""

from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from quantdrift.core.config.address import without_mark
from quantdrift.core.config.copies import CandidateCopy
from quantdrift.core.config.section import Section, about
from quantdrift.core.config.tasks import Generation, Ranking, RawTensor, Regression
from quantdrift.core.config.vision import Detection, Segmentation
from quantdrift.core.plugins import Extensible
from quantdrift.core.records import Metric, TextAttribute
from quantdrift.core.tasks import Task

_OF_TEXT: Final = {
    Metric.CHANGED_TOKENS.value: 0.15,
    Metric.BROKEN.value: 0.01,
    Metric.UNLIKELY.value: 0.1,  # 0.05 of equal models
}
"""The budgets of the signals that generated text alone has."""
_DIVERGENCE_OF_TEXT: Final = 0.1  # nat per token: what a sound model at 4 bits has in its worst slices
_BEYOND_P99: Final = 0.01
"""The share that may be beyond a budget that is a 99 % quantile."""
_NOT_GIVEN: Final = float("0.02")
"""The budget of the divergence if no file gives one, known by being this object: a model that generates text has another default."""
_FLIP, _DIVERGENCE = Metric.FLIP.value, Metric.DIVERGENCE.value
PROGRAM: Final = ".pt2"
"""Suffix of an exported program of PyTorch."""


class OutputKind(StrEnum):
    """What the classification output holds."""

    LOGITS = "logits"  # unnormalised
    PROBABILITIES = "probabilities"


class Runtime(Extensible):
    """What replays a reference."""

    ONNX = "onnx"  # ONNX Runtime
    TORCH = "torch"  # PyTorch
    OIP_HTTP = "oip-http"  # a server of the Open Inference Protocol v2, over HTTP
    OIP_GRPC = "oip-grpc"  # the same, over gRPC
    TRANSFORMERS = (
        "transformers"  # a causal language model in a folder or a GGUF file, which scores what was served
    )
    OPENAI = "openai"  # the same at an OpenAI-compatible server


class Medium(StrEnum):
    """What a message can contain besides text."""

    IMAGE = "image"
    AUDIO = "audio"


class ReferenceInput(Section, frozen=True, kw_only=True):
    """An input of a reference that has another name or type than the captured tensor."""

    name: Annotated[str, about("Name of the reference's input."), Meta(min_length=1)]
    captured: Annotated[str, about("Name of the captured tensor. Empty: the same name.")] = ""
    cast: Annotated[
        bool,
        about(
            "Convert the values to the reference's type. Floats are rounded; an exchange with an integer "
            "that the type cannot hold exactly is not compared."
        ),
    ] = False
    scale: Annotated[
        float,
        about(
            "Scale of captured integers: the reference gets (value - zero_point) * scale. 0: the values are used as they are.",
            ge=0,
        ),
    ] = 0.0
    zero_point: Annotated[int, about("The captured integer that stands for 0, with `scale`.")] = 0


class Reference(Section, frozen=True, kw_only=True):
    """An FP32 reference, and the candidate versions that were made from it."""

    runtime: Annotated[
        Runtime,
        about(
            "What runs the reference: `onnx` or `torch`, or a server: `oip-http`, `oip-grpc`. For text: "
            "`transformers`, or `openai` for a server. Or the runtime of a plug-in."
        ),
    ] = Runtime.ONNX
    path: Annotated[
        str,
        about(
            "File of the reference, relative to this configuration file: ONNX; for `torch` an "
            "exported program (`.pt2`), safetensors weights for `factory` (a "
            "`.safetensors.index.json` if they are in parts), or TorchScript under any other suffix; for `transformers` "
            "the folder from `save_pretrained`."
        ),
    ] = ""
    versions: Annotated[
        tuple[str, ...],
        about(
            "Candidate versions that are compared with this reference, with shell wildcards: `7`, `int8-*`, `*`."
        ),
    ] = ("*",)
    options: Annotated[
        dict[str, Any], about("Options of a plug-in's runtime: its documentation lists them.")
    ] = msgspec.field(default_factory=dict)
    allow_reduced_precision: Annotated[
        tuple[str, ...],
        about(
            "Reduced-precision types that the reference may contain, e.g. `bfloat16` if the "
            "original model is BF16; they are recorded. Empty: FP32 only."
        ),
    ] = ()
    digest: Annotated[
        str,
        about(
            "`sha256:...`: refuse any other file. Required for `.pt2` and TorchScript, which are "
            "code. `quantdrift config check --references` prints it."
        ),
        Meta(pattern=r"^(|sha256:[0-9a-f]{64})$"),
    ] = ""
    inputs: Annotated[
        tuple[ReferenceInput, ...],
        about("Inputs whose name or type differs from the captured tensors."),
    ] = ()
    output: Annotated[
        str,
        about("The reference's output to compare, if it has another name than `models.output`."),
    ] = ""
    output_scale: Annotated[
        float,
        about(
            "Scale of the candidate's quantised output: (value - output_zero_point) * output_scale is compared. 0: the output is not quantised.",
            ge=0,
        ),
    ] = 0.0
    output_zero_point: Annotated[
        int, about("The integer in the candidate's output that stands for 0, with `output_scale`.")
    ] = 0
    canaries: Annotated[
        str,
        about(
            "File of inputs and expected outputs, from `quantdrift reference record`, that the "
            "reference must reproduce. Empty: none."
        ),
    ] = ""
    canary_tolerance: Annotated[
        float,
        about(
            "Largest accepted error of a canary's output, relative to its largest recorded "
            "magnitude. FP32 on another device is off by some 1e-6, TF32 or FP16 by some 1e-3.",
            ge=0,
            le=1,
        ),
    ] = 1e-4
    canary_interval_s: Annotated[
        float,
        about(
            "How often a reference at a server is checked with its canaries; 0: with each batch. "
            "If another model is loaded there, comparisons since the last check are wrong.",
            "s",
            ge=0,
        ),
    ] = 60.0
    factory: Annotated[
        str,
        about(
            "`torch`: `package.module:function` that returns the module which the weights in "
            "`path` belong to. The shadow imports and runs this code."
        ),
        Meta(pattern=r"^(|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"),
    ] = ""
    compile: Annotated[bool, about("`torch`: use `torch.compile`; the shadow then needs a C++ compiler.")] = (
        False
    )
    buckets: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=65536)], ...],
        about(
            "`torch`: batch sizes, rising, that batches are split into and padded to, so that "
            "`compile` and `cuda_graphs` meet no others; eight at most. Empty: batches as they "
            "come."
        ),
        Meta(max_length=8),
    ] = ()
    cuda_graphs: Annotated[
        bool,
        about(
            "`torch`: capture each of the `buckets` as a CUDA graph, which makes small operators "
            "cheaper. Without a CUDA device it has no effect."
        ),
    ] = False
    url: Annotated[
        str,
        about(
            "Address of the reference's server: `https://HOST:PORT` for `oip-http` and `openai`, `grpcs://HOST:PORT` for "
            "`oip-grpc`. Without TLS: `http://` and `grpc://` on this machine, `http+plaintext://` and `grpc+plaintext://` "
            "elsewhere."
        ),
        Meta(pattern=r"^(|(https|grpcs|(http|grpc)(\+plaintext)?)://[^/?#@\s]+(/[^?#\s]*)?)$"),
    ] = ""
    model: Annotated[str, about("The model's name at that server. Empty: as models.name.")] = ""
    model_version: Annotated[str, about("The model's version at that server. Empty: the server chooses.")] = (
        ""
    )
    timeout_s: Annotated[
        float,
        about(
            "Longest wait for the answer of that server, or of the copy's, to one batch.", "s", gt=0, le=3600
        ),
    ] = 30.0
    token_file: Annotated[
        str,
        about(
            "File with a bearer token for that server, read again for each request. Empty: "
            "QUANTDRIFT_REFERENCE_TOKEN, if it is set."
        ),
    ] = ""
    media: Annotated[
        tuple[Medium, ...],
        about(
            "`openai`: what that server reads in the messages of chats besides text: `image`, `audio`. The messages are sent there as "
            "clients sent them; the start tries it. Empty: text only, and exchanges with anything else are quarantined as `media`."
        ),
    ] = ()
    copy: CandidateCopy = CandidateCopy()

    @property
    def is_torchscript(self) -> bool:
        """Whether `path` is TorchScript: what runtime `torch` takes that is neither a program nor weights."""
        return not self.factory and not self.path.endswith(PROGRAM)

    def where(self, model: str) -> str:
        """Return where the reference of `model` is: a file, or a model at a server."""
        return self.path or (
            f"{without_mark(self.url).rstrip('/')}/{self.model or model}" if self.url else ""
        )


class ModelTensor(Section, frozen=True, kw_only=True):
    """An input or output of a model, as the server's metadata describes it; needed where requests do not say."""

    name: Annotated[str, about("The tensor's name."), Meta(min_length=1)]
    datatype: Annotated[
        str,
        about("Open Inference datatype: BOOL, UINT8..64, INT8..64, FP16, BF16, FP32, FP64 or BYTES."),
        Meta(pattern=r"^(BOOL|U?INT(8|16|32|64)|BF16|FP(16|32|64)|BYTES)$"),
    ]
    shape: Annotated[
        tuple[int, ...],
        about("Dimensions, with -1 for one that varies. Needed for raw-binary requests only."),
    ] = ()


class Budget(Section, frozen=True, kw_only=True):
    """How much divergence the owner of a model accepts, as means over exchanges."""

    flip: Annotated[
        float,
        about("Share of exchanges whose decision may change: of a classifier, the top class.", ge=1e-5, lt=1),
    ] = 0.01
    divergence: Annotated[
        float,
        about(
            "Mean divergence, in the unit of the task: of a classifier, KL in nats. Of generated text 0.1 nat per token, if it is not given.",
            ge=1e-5,
        ),
    ] = _NOT_GIVEN
    cap: Annotated[
        float,
        about(
            "A single divergence counts at most this much, in the same unit; KL can be infinite. "
            "If the divergence cannot exceed 1, a cap of 1 detects drift sooner.",
            gt=0,
        ),
    ] = 2.0
    divergence_p99: Annotated[
        float,
        about(
            "Of generated text: at most 1 % of the tokens, in the mean over the answers, may diverge by more than this many nats from the "
            "reference. `signals` accepts another share as `far-tokens`. 0: no budget.",
            ge=0,
        ),
    ] = 0.0
    latency_p99_s: Annotated[
        float,
        about(
            "At most 1 % of the exchanges may take longer than this many seconds, as the relay sees it: from the last byte of the "
            "request to the last byte of the response. More opens a ticket, never a page. 0: no budget.",
            ge=0,
        ),
    ] = 0.0
    first_token_p99_s: Annotated[
        float,
        about(
            "Of generated text: at most 1 % of the streamed answers may send their first token later than this many seconds after the "
            "request, as the relay sees it. More opens a ticket, never a page. 0: no budget.",
            ge=0,
        ),
    ] = 0.0
    per_token_p99_s: Annotated[
        float,
        about(
            "Of generated text: at most 1 % of the streamed answers may take longer than this many seconds for each further token, in "
            "the mean of the answer. More opens a ticket, never a page. 0: no budget.",
            ge=0,
        ),
    ] = 0.0
    latency_growth: Annotated[
        float,
        about(
            "At most 1 % of the exchanges of a slice may take longer than this many times the 99 % quantile that was learned of it "
            "in a week. 2 leaves room for the load of the day; a smaller one opens tickets at its peaks. More opens a ticket, never "
            "a page. At least 1; 0: nothing is learned.",
            ge=0,
            le=100,
        ),
    ] = 0.0
    latency_p95_s: Annotated[
        float,
        about(
            "In a load test (`quantdrift load`), at most 5 % of the requests may take this many seconds or longer; the test also asks for "
            "`latency_p99_s`. Live traffic is not judged by it. 0: no budget.",
            ge=0,
        ),
    ] = 0.0
    throughput_per_s: Annotated[
        float,
        about("In a load test, the least number of requests answered per second. 0: no budget.", ge=0),
    ] = 0.0
    error_share: Annotated[
        float,
        about(
            "In a load test, the share of requests without an answer must be below this. 0: no budget.",
            ge=0,
            lt=1,
        ),
    ] = 0.0
    signals: Annotated[
        dict[str, Annotated[float, Meta(ge=0, lt=1)]],
        about(
            "Of named signals the accepted mean, from 0 to 1; 0: not watched. Of generated text `changed-tokens`, 0.15 if it is not given, "
            "`broken-answers`, 0.01, and `unlikely-tokens`, 0.1; and those of plug-ins, which are watched where they have a budget."
        ),
    ] = msgspec.field(default_factory=dict)
    watch: Annotated[
        tuple[Annotated[str, Meta(pattern=f"^({_FLIP}|{_DIVERGENCE})$")], ...],
        about(
            "Which of `flip` and `divergence` are judged and can alert, beside the named `signals`. Empty: both; of generated text "
            "`divergence` alone, since a long answer changes somewhere under any quantisation."
        ),
    ] = ()


class Recheck(Section, frozen=True, kw_only=True):
    """A replica of the candidate without traffic of its own. Some exchanges are sent to it again, to measure the candidate's own noise."""

    url: Annotated[
        str,
        about(
            "Address of the replica, as `models.references.url`, for the Open Inference Protocol. Payloads are sent there. "
            "Empty: none."
        ),
        Meta(pattern=r"^(|(https|grpcs|(http|grpc)(\+plaintext)?)://[^/?#@\s]+(/[^?#\s]*)?)$"),
    ] = ""
    versions: Annotated[
        tuple[str, ...],
        about(
            "Candidate versions that it serves, with shell wildcards. Differences between versions would count as noise."
        ),
    ] = ()
    model: Annotated[str, about("The model's name at the replica. Empty: as models.name.")] = ""
    model_version: Annotated[str, about("The model's version at the replica. Empty: the server chooses.")] = (
        ""
    )
    token_file: Annotated[
        str, about("File with a bearer token, read again for each request. Empty: none.")
    ] = ""


class Model(Section, frozen=True, kw_only=True):
    """A served model, its references and its budget."""

    name: Annotated[str, about("The name in requests."), Meta(min_length=1)]
    version: Annotated[
        str,
        about(
            "Candidate version if neither request nor answer names one. Empty: MODEL_VERSION, or `unversioned`."
        ),
    ] = ""
    aliases: Annotated[
        tuple[str, ...],
        about("Other names of it in requests, such as further served names of one language model."),
    ] = ()
    version_from: Annotated[
        str,
        about(
            "What else in an answer names the version: `system_fingerprint` of an OpenAI-compatible server, or a response header, as "
            "`header.x-model-version`. It comes before what the protocol says. Empty: nothing else."
        ),
        Meta(pattern=r"^(|system_fingerprint|header\.[A-Za-z0-9-]+)$"),
    ] = ""
    task: Annotated[
        Task,
        about(
            "Kind of output: `classification`, `multilabel`, `regression`, `embedding`, "
            "`ranking`, `detection`, `segmentation`, `generation`, `tensor` for anything else, or the task of a plug-in."
        ),
    ] = Task.CLASSIFICATION
    options: Annotated[
        dict[str, Any], about("Options of a plug-in's task: its documentation lists them.")
    ] = msgspec.field(default_factory=dict)
    output: Annotated[
        str, about("Output tensor to compare. Empty: the first that candidate and reference have in common.")
    ] = ""
    output_kind: Annotated[
        OutputKind, about("What a classification output holds: `logits` or `probabilities`.")
    ] = OutputKind.LOGITS
    tolerance: Annotated[
        float | None,
        about(
            "An item flips when its error exceeds this. Regression and `tensor`: relative error, 0.05 if it is not "
            "given. Embedding: cosine distance, 0.05. Segmentation: share of the pixels, 0.02."
        ),
    ] = None
    threshold: Annotated[
        float | tuple[float, ...] | None,
        about(
            "Multilabel: probability above which a label is assigned, or a list with one for each label; 0.5 if it is "
            "not given. Detection: least score of an object, 0.3; a partner may have half of it, so that a score that "
            "rounding moves across the threshold is not a new object."
        ),
    ] = None
    top_k: Annotated[
        int | None,
        about(
            "How many of the first places are compared. Classification: as a set, 5 if it is not given. Ranking: 10; "
            "0 means all."
        ),
    ] = None
    interest: Annotated[
        tuple[str | int, ...],
        about(
            "Classification and multilabel: classes of interest, by name in `labels` or by number from 0. Flips into "
            "and out of them are reported as `gained` and `lost`."
        ),
    ] = ()
    count_ties: Annotated[
        bool,
        about(
            "Classification and ranking: whether an item flips where the first entry differs only because several entries "
            "share the largest score of a side, as scores in 8 bits often do. `tie` marks such items either way."
        ),
    ] = True
    background: Annotated[
        int,
        about(
            "Detection: the class that means no object. Segmentation: the class whose pixels are ignored where both "
            "sides have it. -1: none.",
            ge=-1,
        ),
    ] = -1
    embedding: Annotated[
        str,
        about(
            "Output or layer of the reference whose vectors are clustered into learned slices, or "
            "`features`: those of [[slices]]. Empty: none."
        ),
    ] = ""
    columns: Annotated[
        tuple[str, ...],
        about(
            "Names of the columns of the input, if it is a table, in its order: [[slices]] and diagnoses call them so. Empty: they are "
            "counted from 0."
        ),
    ] = ()
    batched: Annotated[
        bool, about("True: the first dimension of each tensor counts items. False: an exchange is one item.")
    ] = True
    inputs: Annotated[
        tuple[ModelTensor, ...],
        about(
            "Inputs of the model, needed if requests have no types: raw-binary requests, KServe v1, JSON of TorchServe."
        ),
    ] = ()
    outputs: Annotated[
        tuple[ModelTensor, ...], about("Outputs of the model, needed if answers have no types.")
    ] = ()
    labels: Annotated[
        tuple[str, ...],
        about("Names of the classes in the order of the output, needed if answers name classes."),
    ] = ()
    adapter: Annotated[
        str,
        about(
            "How to read TorchServe's bodies: `bytes`, `json`, `scores`, or `package.module:Name` "
            "for an adapter of yours, which the capture process imports and runs."
        ),
        Meta(pattern=r"^(|bytes|json|scores|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"),
    ] = ""
    exemplars: Annotated[
        bool,
        about(
            "Keep up to 64 damaged and 64 random exchanges of each slice WITH THEIR PAYLOAD in NATS, for 7 days at most, for "
            "`diagnose` and repairs. Have NATS encrypt its disk first: `quantdrift up` does."
        ),
    ] = False
    share: Annotated[
        float,
        about(
            "Weight among models that share a worker: replay time is divided in proportion.",
            gt=0,
            le=1000,
        ),
    ] = 1.0
    max_replay_ratio: Annotated[
        float,
        about(
            "Largest share of a worker's time for this model's replays, in seconds per second. 0: no limit.",
            ge=0,
            le=1,
        ),
    ] = 0.0
    value_per_request: Annotated[
        float | None,
        about(
            "What a request of this model costs you when its answer changes, in cost.currency, instead of cost.value_per_request.",
        ),
    ] = None
    references: tuple[Reference, ...] = ()
    budget: Budget = Budget()
    recheck: Recheck = Recheck()
    regression: Regression = Regression()
    ranking: Ranking = Ranking()
    detection: Detection = Detection()
    segmentation: Segmentation = Segmentation()
    tensor: RawTensor = RawTensor()
    generation: Generation = Generation()

    def __post_init__(self) -> None:
        if self.task is Task.GENERATION:
            budget = msgspec.structs.replace(
                self.budget,
                divergence=_DIVERGENCE_OF_TEXT
                if self.budget.divergence is _NOT_GIVEN
                else self.budget.divergence,
                watch=self.budget.watch or (_DIVERGENCE,),
                signals={**_OF_TEXT, **self._of_quantiles(), **self.budget.signals},
            )
            msgspec.structs.force_setattr(self, "budget", budget)

    def _of_quantiles(self) -> dict[str, float]:
        """Return the share that is accepted beyond each 99 % quantile that the budget has, by signal."""
        limits = {
            Metric.FAR_TOKENS: self.budget.divergence_p99,
            Metric.SLOW_START: self.budget.first_token_p99_s,
            Metric.SLOW_TOKENS: self.budget.per_token_p99_s,
        }
        return {metric.value: _BEYOND_P99 for metric, limit in limits.items() if limit}

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The thresholds of labels: one for all of them, or one for each."""
        threshold = 0.5 if self.threshold is None else self.threshold
        return threshold if isinstance(threshold, tuple) else (threshold,)


class Slice(Section, frozen=True, kw_only=True):
    """A part of the traffic that is watched by itself: by attribute (`header`, `parameter`, `json`, `text`, `time`), by input `feature`, or by the `cross` of other slices."""

    name: Annotated[
        str, about("Name of the slice in alerts; the value or bin is appended."), Meta(min_length=1)
    ]
    model: Annotated[str, about("Model it applies to. Empty: every model.")] = ""
    header: Annotated[
        str, about("Request header whose values make the slices; it must be in capture.headers.")
    ] = ""
    parameter: Annotated[
        str, about("Request parameter whose values make the slices; it must be in capture.parameters.")
    ] = ""
    json: Annotated[str, about("JSON path whose values make the slices; it must be in capture.json.")] = ""
    text: Annotated[
        str,
        about(
            "What the sidecar says of a text makes the slices, such as `language` or `turns`; it must be in capture.text."
        ),
        Meta(pattern=f"^(|{'|'.join(TextAttribute)})$"),
    ] = ""
    time: Annotated[
        str,
        about(
            "Times of capture that make the slices: `week` (weekday, weekend), `day` (monday to sunday) or `hours` "
            "(00-06, 06-12, 12-18, 18-24), in capture.time_zone."
        ),
        Meta(pattern="^(|week|day|hours)$"),
    ] = ""
    values: Annotated[
        tuple[str, ...],
        about(
            "Values that become slices; with the feature `value`, numbers that stand for groups. Empty: each value that is seen."
        ),
    ] = ()
    max_values: Annotated[
        int,
        about(
            "Most slices made of values if `values` is empty, or of combinations of a cross: those with the most traffic; the others share the slice `other`.",
            ge=1,
            le=1000,
        ),
    ] = 32
    feature: Annotated[
        str,
        about(
            "Input feature whose values make the slices: length, rank, size, norm, mean, contrast or missing, or value, the number in one `column`."
        ),
        Meta(pattern="^(|length|rank|size|norm|mean|contrast|missing|value)$"),
    ] = ""
    input: Annotated[str, about("Input tensor of the feature. Empty: the first.")] = ""
    column: Annotated[
        int | str | None,
        about(
            "With the feature `value` or `missing`: which number of the item, counted from 0, such as the column of a table; or its "
            "name in models.columns."
        ),
    ] = None
    edges: Annotated[
        tuple[float, ...],
        about(
            "Edges of the bins of a feature, or of the numbers at a JSON path, rising: n edges make n + 1 slices."
        ),
    ] = ()
    cross: Annotated[
        tuple[str, ...],
        about(
            "Names of two or more other slices: each combination that is seen, at most max_values of them."
        ),
    ] = ()

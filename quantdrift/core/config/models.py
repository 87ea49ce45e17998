"""The lists: models with their references and budgets, and slices."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from quantdrift.core.config.copies import Copy
from quantdrift.core.config.section import Section, about
from quantdrift.core.config.tasks import (
    Classification,
    Generation,
    Multilabel,
    Ranking,
    RawTensor,
    Regression,
    Vectors,
)
from quantdrift.core.config.vision import Detection, Segmentation
from quantdrift.core.tasks import Task


class OutputKind(StrEnum):
    """What the classification output holds."""

    LOGITS = "logits"  # unnormalised
    PROBABILITIES = "probabilities"


class Runtime(StrEnum):
    """What replays a reference."""

    ONNX = "onnx"  # ONNX Runtime
    TORCH = "torch"  # PyTorch
    OIP_HTTP = "oip-http"  # a server of the Open Inference Protocol v2, over HTTP
    OIP_GRPC = "oip-grpc"  # the same, over gRPC
    TRANSFORMERS = "transformers"  # a causal language model in a folder, which scores what was served
    OPENAI = "openai"  # the same at an OpenAI-compatible server


class ReferenceInput(Section, frozen=True, kw_only=True):
    """What an input of a reference is made of, where that is not the captured tensor of the same name and type."""

    name: Annotated[str, about("The reference's input."), Meta(min_length=1)]
    captured: Annotated[str, about("The captured tensor. Empty: the one of the same name.")] = ""
    cast: Annotated[
        bool,
        about(
            "Cast it to the type that the reference takes. Floating point is rounded; an integer that would change "
            "sets its exchange aside."
        ),
    ] = False
    scale: Annotated[
        float,
        about(
            "The captured integers are quantised: the reference is given (value - zero_point) * scale. 0: they are not.",
            ge=0,
        ),
    ] = 0.0
    zero_point: Annotated[int, about("The captured integer that stands for 0, with `scale`.")] = 0


class Reference(Section, frozen=True, kw_only=True):
    """An FP32 reference and the candidate versions that were made from it."""

    runtime: Annotated[
        Runtime,
        about(
            "`onnx`, `torch`, or a server that holds it: `oip-http`, `oip-grpc`. For text: `transformers`, or `openai` for a "
            "server."
        ),
    ] = Runtime.ONNX
    path: Annotated[
        str,
        about(
            "Its file, relative to this configuration file: ONNX, or for `torch` an exported program (`.pt2`), the "
            "safetensors weights of `factory` (a `.safetensors.index.json` where they are in parts), or TorchScript; for "
            "`transformers` the folder that `save_pretrained` wrote."
        ),
    ] = ""
    versions: Annotated[
        tuple[str, ...],
        about("Candidate versions it answers for, with shell wildcards: `7`, `int8-*`, `*`."),
    ] = ("*",)
    allow_reduced_precision: Annotated[
        tuple[str, ...],
        about(
            "Reduced-precision element types of the reference, e.g. `bfloat16` where the parent itself is BF16; the record "
            "tells them. Empty: strict FP32."
        ),
    ] = ()
    digest: Annotated[
        str,
        about(
            "`sha256:...`: refuse any other artefact. Required for `.pt2` and TorchScript, which are code. `quantdrift config "
            "check --references` prints it."
        ),
        Meta(pattern=r"^(|sha256:[0-9a-f]{64})$"),
    ] = ""
    inputs: Annotated[
        tuple[ReferenceInput, ...],
        about("Inputs that have another name or type in what is captured; the others are taken as they are."),
    ] = ()
    output: Annotated[
        str,
        about(
            "The reference's output that is compared, where it is called otherwise than `models.output`, the candidate's."
        ),
    ] = ""
    output_scale: Annotated[
        float,
        about(
            "The candidate's compared output is quantised: compared is (value - output_zero_point) * output_scale. 0: it is not.",
            ge=0,
        ),
    ] = 0.0
    output_zero_point: Annotated[
        int, about("The integer in the candidate's output that stands for 0, with `output_scale`.")
    ] = 0
    canaries: Annotated[
        str,
        about(
            "File of inputs and recorded outputs, made by `quantdrift reference record`, that it must reproduce. Empty: none."
        ),
    ] = ""
    canary_tolerance: Annotated[
        float,
        about(
            "How far an output may be off, over its largest recorded magnitude. FP32 on another device is some 1e-6 off, "
            "TF32 or FP16 some 1e-3.",
            ge=0,
            le=1,
        ),
    ] = 1e-4
    canary_interval_s: Annotated[
        float,
        about(
            "A reference at a server is held to them again after so long. 0: with each batch. What was compared since the "
            "last time is what another model there could spoil.",
            "s",
            ge=0,
        ),
    ] = 60.0
    factory: Annotated[
        str,
        about(
            "`torch`: `package.module:function`, which returns the module that `path` holds the weights of. The shadow "
            "imports and calls it: it is code that runs there."
        ),
        Meta(pattern=r"^(|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"),
    ] = ""
    torchscript: Annotated[
        bool, about("`torch`: `path` is TorchScript. It is code that runs in the shadow.")
    ] = False
    compile: Annotated[
        bool, about("`torch`: run it through `torch.compile`; needs a C++ compiler where the shadow runs.")
    ] = False
    buckets: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=65536)], ...],
        about(
            "`torch`: batch sizes, rising, that batches are split into and filled up to, so that `compile` and `cuda_graphs` "
            "meet no other; eight at most. Empty: batches as they come."
        ),
        Meta(max_length=8),
    ] = ()
    cuda_graphs: Annotated[
        bool,
        about(
            "`torch`: capture each of the `buckets` as a CUDA graph, which saves the launches of small operators. Without a "
            "CUDA device it changes nothing."
        ),
    ] = False
    url: Annotated[
        str,
        about(
            "Of the server that holds it: `http://HOST:PORT` or `https://...` for `oip-http` and `openai`, "
            "`grpc://HOST:PORT` or `grpcs://...` for `oip-grpc`."
        ),
        Meta(pattern=r"^(|(https?|grpcs?)://[^/?#@\s]+(/[^?#\s]*)?)$"),
    ] = ""
    model: Annotated[str, about("Its name at that server. Empty: as models.name.")] = ""
    model_version: Annotated[str, about("Its version at that server. Empty: the server chooses.")] = ""
    timeout_s: Annotated[
        float, about("Longest wait for that server's answer to one batch.", "s", gt=0, le=3600)
    ] = 30.0
    token_file: Annotated[
        str,
        about(
            "File with a bearer token for that server, read anew for each request. Empty: QUANTDRIFT_REFERENCE_TOKEN, if set."
        ),
    ] = ""
    copy: Copy = Copy()

    def where(self, model: str) -> str:
        """Return where the reference of `model` is: a file, or a model at a server."""
        return self.path or (f"{self.url.rstrip('/')}/{self.model or model}" if self.url else "")


class ModelTensor(Section, frozen=True, kw_only=True):
    """What a model takes or gives, where the wire does not tell: as the server's metadata names it."""

    name: Annotated[str, about("The tensor's name."), Meta(min_length=1)]
    datatype: Annotated[
        str,
        about("Open Inference datatype: BOOL, UINT8..64, INT8..64, FP16, BF16, FP32, FP64 or BYTES."),
        Meta(pattern=r"^(BOOL|U?INT(8|16|32|64)|BF16|FP(16|32|64)|BYTES)$"),
    ]
    shape: Annotated[
        tuple[int, ...], about("Dimensions, -1 for one that varies. Needed for raw-binary requests only.")
    ] = ()


class Budget(Section, frozen=True, kw_only=True):
    """How much divergence the owner of a model accepts, as means over exchanges."""

    flip: Annotated[
        float,
        about("Share of exchanges whose decision (of a classifier the top class) may change.", ge=1e-5, lt=1),
    ] = 0.01
    divergence: Annotated[
        float,
        about("Mean of the task's graded divergence, in its unit: of a classifier KL in nats.", ge=1e-5),
    ] = 0.02
    cap: Annotated[
        float,
        about(
            "Single divergences count at most this much, in the same unit: a class ruled out has an infinite KL. Where the "
            "divergence cannot be above 1, a cap of 1 finds drifts sooner.",
            gt=0,
        ),
    ] = 2.0


class Recheck(Section, frozen=True, kw_only=True):
    """A replica of the candidate that serves nobody, asked again for some exchanges: the candidate's own noise."""

    url: Annotated[
        str,
        about(
            "Where it is: `http://HOST:PORT` or `https://...` for the Open Inference Protocol over HTTP, `grpc://HOST:PORT` "
            "or `grpcs://...`. Empty: the candidate is not asked. Payloads are sent there."
        ),
        Meta(pattern=r"^(|(https?|grpcs?)://[^/?#@\s]+(/[^?#\s]*)?)$"),
    ] = ""
    versions: Annotated[
        tuple[str, ...],
        about(
            "Candidate versions that it serves, with shell wildcards: another one's answers would be taken for noise."
        ),
    ] = ()
    max_per_s: Annotated[
        float,
        about(
            "Most requests per second of each worker, whatever `shadow.noise_share` chooses.",
            "1/s",
            gt=0,
            le=100,
        ),
    ] = 0.2
    model: Annotated[str, about("Its name there. Empty: as models.name.")] = ""
    model_version: Annotated[str, about("Its version there. Empty: the server chooses.")] = ""
    timeout_s: Annotated[float, about("Longest wait for an answer.", "s", gt=0, le=600)] = 10.0
    token_file: Annotated[str, about("File with a bearer token, read anew each time. Empty: none.")] = ""


class Model(Section, frozen=True, kw_only=True):
    """A served model, its references and its budget."""

    name: Annotated[str, about("The name on the wire."), Meta(min_length=1)]
    version: Annotated[
        str,
        about("Candidate version where the wire does not tell it. Empty: MODEL_VERSION, else `unversioned`."),
    ] = ""
    task: Annotated[
        Task,
        about(
            "What the model gives: `classification`, `multilabel`, `regression`, `embedding`, `ranking`, `detection`, "
            "`segmentation`, `generation`, or `tensor` where nothing is known of it."
        ),
    ] = Task.CLASSIFICATION
    output: Annotated[str, about("Output tensor that is compared. Empty: the first one both sides have.")] = (
        ""
    )
    output_kind: Annotated[OutputKind, about("`logits` or `probabilities`.")] = OutputKind.LOGITS
    top_k: Annotated[int, about("Size of the set of top classes that is compared.", ge=1, le=100)] = 5
    embedding: Annotated[
        str,
        about(
            "Output or layer of the reference whose vectors make learned slices, or `features`: those of [[slices]]. Empty: none."
        ),
    ] = ""
    batched: Annotated[bool, about("The first dimension counts items. False: an exchange is one item.")] = (
        True
    )
    inputs: Annotated[
        tuple[ModelTensor, ...],
        about("Inputs where the wire tells no type: raw-binary requests, KServe v1, JSON of TorchServe."),
    ] = ()
    outputs: Annotated[tuple[ModelTensor, ...], about("Outputs where the wire tells no type.")] = ()
    labels: Annotated[
        tuple[str, ...],
        about("Names of the classes in the order of the output, where the wire names classes instead."),
    ] = ()
    adapter: Annotated[
        str,
        about(
            "How TorchServe's bodies are read: `bytes`, `json`, `scores`, or `package.module:Name` of your own, which the "
            "capture process imports and runs."
        ),
        Meta(pattern=r"^(|bytes|json|scores|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"),
    ] = ""
    share: Annotated[
        float,
        about(
            "Its weight among models that wait for the same shadow: replay time is divided by it.",
            gt=0,
            le=1000,
        ),
    ] = 1.0
    max_replay_ratio: Annotated[
        float,
        about(
            "Most seconds of replay per second that it may take of a shadow worker. 0: no limit.", ge=0, le=1
        ),
    ] = 0.0
    references: tuple[Reference, ...] = ()
    budget: Budget = Budget()
    recheck: Recheck = Recheck()
    classification: Classification = Classification()
    multilabel: Multilabel = Multilabel()
    regression: Regression = Regression()
    vectors: Vectors = Vectors()
    ranking: Ranking = Ranking()
    detection: Detection = Detection()
    segmentation: Segmentation = Segmentation()
    tensor: RawTensor = RawTensor()
    generation: Generation = Generation()


class Slice(Section, frozen=True, kw_only=True):
    """A sub-distribution: by attribute (`header`, `parameter`, `json`), by `feature`, or the `cross` of others."""

    name: Annotated[str, about("Shown in alerts; values or bins are appended."), Meta(min_length=1)]
    model: Annotated[str, about("Model it applies to. Empty: every model.")] = ""
    header: Annotated[str, about("Slice by this request header (must be in capture.headers).")] = ""
    parameter: Annotated[str, about("Slice by this request parameter (must be in capture.parameters).")] = ""
    json: Annotated[str, about("Slice by this JSON path (must be in capture.json).")] = ""
    values: Annotated[
        tuple[str, ...], about("Values that are slices of their own. Empty: each value as it is seen.")
    ] = ()
    max_values: Annotated[
        int,
        about(
            "Most values followed where `values` is empty, or combinations of a cross; the rest share `other`.",
            ge=1,
            le=1000,
        ),
    ] = 32
    feature: Annotated[
        str,
        about("Slice by this input feature: length, rank, size, norm, mean, contrast or missing."),
        Meta(pattern="^(|length|rank|size|norm|mean|contrast|missing)$"),
    ] = ""
    input: Annotated[str, about("Input tensor the feature is taken of. Empty: the first.")] = ""
    edges: Annotated[tuple[float, ...], about("Bin edges, rising: n edges make n + 1 slices.")] = ()
    cross: Annotated[
        tuple[str, ...],
        about("Names of two or more other slices: each combination that is seen, up to max_values of them."),
    ] = ()

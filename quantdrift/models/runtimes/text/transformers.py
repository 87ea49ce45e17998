"""Causal language models from a local folder, run by `transformers`: strict FP32, from safetensors, no model code."""

import importlib.metadata
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from quantdrift.core.errors import OperatorError
from quantdrift.models.language.free_running_answer import FreeAnswer, FreeAnswerOutcome, FreeAnswerRequest
from quantdrift.models.language.scoring import UNKNOWN, Scores, ScoringRequest, TokenRow, replay_error
from quantdrift.models.language.unlikely import is_drawn, unlikely_share
from quantdrift.models.runtimes.onnx.device import driver_version
from quantdrift.models.runtimes.protocol import (
    Artefact,
    Provenance,
    check_pin,
    digest_of,
    digest_of_parts,
    error_text,
)
from quantdrift.models.runtimes.pytorch.determinism import configure_torch, device_for, limit_memory
from quantdrift.models.runtimes.pytorch.errors import computed
from quantdrift.models.runtimes.pytorch.precision import Finding, PrecisionRecorder, precision_of
from quantdrift.models.runtimes.registry import RuntimeRequest
from quantdrift.models.runtimes.remote.protocol import UNVERIFIED
from quantdrift.models.runtimes.text.scoring_runtime import ScoringRuntime

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from quantdrift.models.runtimes.text.generate import answered, ending_ids, is_able
except ImportError as error:
    raise OperatorError(
        "runtime `transformers` needs the extra `text`: pip install 'quantdrift[text]'"
    ) from error

_LOG = logging.getLogger(__name__)
_READ: Final = (".json", ".jinja", ".model", ".safetensors", ".txt")
_PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")
_FULL: Final = frozenset({"F32", "F64", "I64", "I32", "BOOL"})
_TYPES: Final[Mapping[str, str]] = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
}
_TEMPLATE: Final = frozenset({"add_generation_prompt", "continue_final_message", "documents"})
_LOGITS_BYTES: Final = 512 * 2**20
_TOKENS: Final = 16_384
_POSITIONS: Final = 256


class TransformersLanguage:
    """A causal language model with its tokenizer.

    Raises
    ------
    OperatorError
        The folder cannot be read, has no safetensors, needs its own code, is quantised or of reduced precision although it is
        not a replica of a candidate, lacks weights, or is not the pinned one; or the device is missing.
    """

    def __init__(self, request: RuntimeRequest) -> None:
        reference = request.reference
        configure_torch(request.threads)
        self._device = device_for(request.provider)
        limit_memory(self._device, request.gpu_bytes)
        self._top = request.model.generation.top
        folder = Path(reference.path)
        digest = _digest(folder)
        check_pin(folder, digest, reference.digest)
        config = _checked(folder, is_copy=request.is_copy)
        stored = [] if request.is_copy else list(_stored(folder))
        disable_progress_bar()
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            model, loading = AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype="auto" if request.is_copy else torch.float32,
                output_loading_info=True,
            )
        except Exception as error:
            raise OperatorError(
                f"transformers cannot load the reference {folder}: {error_text(error)}"
            ) from error
        if lacking := sorted(loading["missing_keys"]) or sorted(map(str, loading["mismatched_keys"])):
            raise OperatorError(
                f"the weights in {folder} do not fit its config.json: {', '.join(lacking[:3])} would be random. Save the "
                "model again with save_pretrained"
            )
        self._model: Any = model.eval().requires_grad_(requires_grad=False).to(self._device)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.longest = _longest(model.config)
        self._spellings: dict[int, bytes] = {}
        self.end_ids: tuple[int, ...] = ()
        with PrecisionRecorder() as recorder:
            self._n_logits = self._logits([TokenRow(prompt=(0,), served=(0,))])[0].shape[-1]
        self.end_ids = ending_ids(model, request.model.generation.end_ids, self._n_logits)
        self.artefact = Artefact(
            path=reference.path,
            digest=digest,
            precision=UNVERIFIED
            if request.is_copy
            else precision_of(folder, [*stored, *recorder.findings], reference.allow_reduced_precision),
            opset=0,
            producer=f"transformers {config.get('transformers_version', '')}".strip(),
        )
        on_gpu = self._device.type == "cuda"
        self.provenance = Provenance(
            runtime="transformers",
            version=f"{importlib.metadata.version('transformers')}, torch {torch.__version__}",
            provider=self._device.type,
            device=torch.cuda.get_device_name(self._device) if on_gpu else "cpu",
            driver=driver_version() if on_gpu else "",
        )
        _LOG.info("reference %s: transformers on %s, TF32 off", folder, self.provenance.device)

    def chat_ids(self, request: ScoringRequest) -> tuple[int, ...]:
        """Return the tokens of a chat, by the tokenizer's own chat template."""
        settings_of_request = dict(request.template)
        more = settings_of_request.pop("chat_template_kwargs", None) or {}
        settings = {"add_generation_prompt": True, **settings_of_request, **more}
        own_names = inspect.signature(self._tokenizer.apply_chat_template).parameters.keys() - _TEMPLATE
        if reserved := sorted(own_names & settings.keys()):
            raise replay_error(
                f"the client's chat_template_kwargs {reserved} are arguments of the tokenizer itself"
            )
        messages = [_message(message) for message in request.messages]
        try:
            ids = self._tokenizer.apply_chat_template(
                messages,
                tools=list(request.tools) or None,
                tokenize=True,
                return_dict=False,
                **settings,
            )
        except Exception as error:  # a template is a program, and raises what it likes
            raise replay_error(f"the chat template fails: {type(error).__name__}") from error
        return tuple(ids)

    def text_ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the tokens of a text."""
        return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def score(self, rows: Sequence[TokenRow]) -> list[Scores]:
        """Return the scores of the answer of each row.

        Raises
        ------
        QuarantineError
            Reason `replay`: a token is unknown to the model, or PyTorch failed.
        """
        if self._model is None:
            raise replay_error("the reference is closed")
        n_tokens = int(self._model.get_input_embeddings().num_embeddings)
        if any(not 0 <= token < n_tokens for row in rows for token in (*row.prompt, *row.served)):
            raise replay_error(
                f"a token id is not below the reference's {n_tokens}: candidate and reference have different tokenizers"
            )
        # Rows of similar length together, so that little padding is computed.
        order = sorted(range(len(rows)), key=lambda index: _length(rows[index]))
        parts = self._parts([rows[index] for index in order])
        scores = computed(lambda: list(chain.from_iterable(map(self._scored, parts))))
        score_of_row = dict(zip(order, scores, strict=True))
        return [score_of_row[index] for index in range(len(rows))]

    def answer(
        self,
        request: ScoringRequest,
        answer_request: FreeAnswerRequest,
        prompt: Callable[[], tuple[int, ...]],
        within_s: float,
    ) -> FreeAnswer:
        """Return the model's free-running answer.

        Raises
        ------
        QuarantineError
            Reason `replay`: the prompt is invalid or leaves no room, or PyTorch failed.
        """
        if self._model is None:
            raise replay_error("the reference is closed")
        if not is_able(answer_request.options):
            return FreeAnswer(outcome=FreeAnswerOutcome.UNABLE)

        def compute() -> FreeAnswer:
            ids = prompt()
            room = answer_request.max_tokens if self.longest is None else self.longest - len(ids)
            return answered(
                model=self._model,
                tokenizer=self._tokenizer,
                prompt=ids,
                answer_request=msgspec.structs.replace(
                    answer_request, max_tokens=min(answer_request.max_tokens, room)
                ),
                end_ids=self.end_ids,
                within_s=within_s,
            )

        return computed(compute)

    def close(self) -> None:
        """Free the model, and the device memory that PyTorch caches."""
        self._model = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _parts(self, rows: Sequence[TokenRow]) -> Iterator[list[TokenRow]]:
        """Yield rows to compute together: as many as fit the limits on tokens and on logits."""
        part: list[TokenRow] = []
        for row in rows:
            more = [*part, row]
            length = max(map(_length, more))
            n_logits = len(more) * (_kept(more) if self._keeps else length) * self._n_logits
            if part and (n_logits * 4 > _LOGITS_BYTES or len(more) * length > _TOKENS):
                yield part
                part = []
            part.append(row)
        if part:
            yield part

    def _scored(self, rows: Sequence[TokenRow]) -> Iterator[Scores]:
        logits, first = self._logits(rows)
        for index, row in enumerate(rows):
            begin = len(row.prompt) - 1 - first
            yield self._scores_of(row, logits[index, begin : begin + len(row.served)])

    def _logits(self, rows: Sequence[TokenRow]) -> tuple[torch.Tensor, int]:
        """Return logits : (rows, positions, tokens), and the position of the first ones.

        Rows are padded at their end. No token sees those after it, so the padding does not matter.
        """
        length = max(_length(row) for row in rows)
        ids = torch.zeros((len(rows), length), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : _length(row)] = torch.tensor((*row.prompt, *row.served[:-1]))
            mask[index, : _length(row)] = 1
        more: dict[str, Any] = {}
        first = 0
        if self._keeps:
            first = min(len(row.prompt) for row in rows) - 1
            more["logits_to_keep"] = length - first
        with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
            output = self._model(
                input_ids=ids.to(self._device),
                attention_mask=mask.to(self._device),
                use_cache=False,
                **more,
            )
        return output.logits, first

    def _scores_of(self, row: TokenRow, logits: torch.Tensor) -> Scores:
        """Return the scores of the answer of `row` : (positions,), from `logits` : (positions, tokens)."""
        served = row.served
        k = min(self._top, logits.shape[-1])
        columns: list[tuple[torch.Tensor, ...]] = []
        with torch.inference_mode():
            targets = torch.tensor(served, device=logits.device)[:, None]
            ending = torch.tensor(self.end_ids, dtype=torch.long, device=logits.device)
            for begin in range(0, len(served), _POSITIONS):
                part = slice(begin, begin + _POSITIONS)
                logprobs = torch.log_softmax(logits[part].double(), dim=-1)
                own = logprobs.gather(1, targets[part])
                top = logprobs.topk(k, dim=-1)
                ends = logprobs[:, ending].exp().sum(dim=-1)
                above = (logprobs > own).sum(dim=-1) + 1
                columns.append(
                    (own[:, 0], above, top.indices, top.values, ends, *_around(logprobs, own, row))
                )
        joined = [
            torch.cat(columns_of_batch).cpu().numpy() for columns_of_batch in zip(*columns, strict=True)
        ]
        of_served, ranks, top_ids, top_logprobs, ends_p, *around = joined
        ends_p = ends_p.clip(0.0, 1.0) if self.end_ids else UNKNOWN
        return Scores(
            tokens=tuple(map(self._spelt, served)),
            ids=served,
            logprobs=of_served,
            ranks=ranks.astype(np.float64),
            top_tokens=tuple(tuple(map(self._spelt, of_position)) for of_position in top_ids.tolist()),
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            ends=ends_p,
            ends_upper=ends_p,
            unlikely=unlikely_share(*around) if around else UNKNOWN,
        )

    def _spelt(self, token: int) -> bytes:
        """Return a token's text, as OpenAI-compatible servers spell it."""
        spelling = self._spellings.get(token)
        if spelling is None:
            text = self._tokenizer.decode(
                [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            spelling = self._spellings[token] = text.encode()
        return spelling


def open_reference(request: RuntimeRequest) -> ScoringRuntime:
    """Return the reference; errors as of `TransformersLanguage`."""
    return ScoringRuntime(request, TransformersLanguage(request))


def _around(logprobs: torch.Tensor, own: torch.Tensor, row: TokenRow) -> tuple[torch.Tensor, ...]:
    """Return the probabilities of what is less likely than a token, and of what is as likely, (positions,) each; () without a temperature.

    Parameters
    ----------
    logprobs
        (positions, tokens).
    own
        (positions, 1), of the served tokens.
    """
    if not is_drawn(row.temperature):
        return ()
    p = torch.softmax(logprobs / row.temperature, dim=-1)
    return (p * (logprobs < own)).sum(dim=-1), (p * (logprobs == own)).sum(dim=-1)


def _length(row: TokenRow) -> int:
    """Return the number of tokens that the model reads: the last served one is not read, only scored."""
    return len(row.prompt) + len(row.served) - 1


def _kept(rows: Sequence[TokenRow]) -> int:
    return max(_length(row) for row in rows) - min(len(row.prompt) for row in rows) + 1


def _digest(folder: Path) -> str:
    """Return the digest over all files that are loaded: config, tokenizer, template and weights."""
    try:
        names = sorted(
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix in _READ
        )
        return digest_of_parts([(name, digest_of(folder / name)) for name in names])
    except OSError as error:
        raise OperatorError(f"the reference {folder} cannot be read: {error.strerror}") from error


def _checked(folder: Path, *, is_copy: bool) -> dict[str, Any]:
    """Return the content of config.json, after checking that the folder holds only data and no code."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise OperatorError(
            f"the reference {folder} is not a folder with a config.json: set `path` to the folder that save_pretrained wrote"
        ) from error
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
        raise OperatorError(
            f"the reference {folder} holds no safetensors{f', but {pickled}, which is code' if pickled else ''}: save it "
            "again with save_pretrained"
        )
    if "auto_map" in config:
        raise OperatorError(
            f"the reference {folder} needs its own code (`auto_map`), which is not run here: serve it with vLLM and use "
            "runtime `openai`"
        )
    if "quantization_config" in config and not is_copy:
        raise OperatorError(
            f"the reference {folder} is itself quantised: configure the model that the candidate was made from"
        )
    return config


def _stored(folder: Path) -> Iterator[Finding]:
    """Yield the stored tensors that are not full precision."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise OperatorError(f"{path} cannot be read as safetensors: {error}") from error
        for name, kind in kinds.items():
            if kind not in _FULL:
                yield f"stored tensor `{name}`", _TYPES.get(kind, kind.lower())


def _longest(config: Any) -> int | None:
    longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates take it: text parts joined, arguments of calls as objects."""
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise replay_error("a message has parts that are not text")
        content = "\n".join(str(part.get("text", "")) for part in content)
    converted = {**message, "content": content}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        converted["tool_calls"] = [_call(call) for call in calls]
    return converted


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}

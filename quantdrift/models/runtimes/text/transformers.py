"""Causal language models from a local folder or a GGUF file, run by `transformers`: strict FP32, from safetensors, no model code.

Of a GGUF file the stored blocks are read exactly and computed in FP32: what llama.cpp's kernels round besides, the activations, is not in it.
"""

import importlib.metadata
import importlib.util
import inspect
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from quantdrift.core.errors import OperatorError
from quantdrift.models.language.free_running_answer import FreeAnswer, FreeAnswerOutcome, FreeAnswerRequest
from quantdrift.models.language.scoring import (
    UNKNOWN,
    Scores,
    ScoringRequest,
    TokenRow,
    replay_error,
    tokenizer_error,
)
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
from quantdrift.models.runtimes.text.scoring_runtime import Question, ScoringRuntime

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from quantdrift.models.runtimes.text.generate import answered, answered_together, ending_ids, is_able
    from quantdrift.models.runtimes.text.prefixes import (
        LEAST_SHARED,
        NO_PREFIX,
        KeptPrefixes,
        Prefix,
        Tokens,
        bytes_per_token,
        joined,
        layers_of,
        waves,
    )
except ImportError as error:
    raise OperatorError(
        "runtime `transformers` needs the extra `text`: pip install 'quantdrift[text]'"
    ) from error

_LOG = logging.getLogger(__name__)
GGUF: Final = ".gguf"
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
_POSITIONS: Final = 256
_LONGEST: Final = 16_384  # tokens, where a model says nothing of its longest text
_SAME: Final = 1e-4  # nats, of two ways to compute the same in FP32


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
        self._batch_tokens = request.model.generation.batch_tokens
        folder = Path(reference.path)
        is_gguf = folder.suffix == GGUF
        digest = _digest(folder)
        check_pin(folder, digest, reference.digest)
        config = {} if is_gguf else _checked(folder, is_copy=request.is_copy)
        stored = [] if request.is_copy else list(_stored_gguf(folder) if is_gguf else _stored(folder))
        disable_progress_bar()
        try:
            with _loadable(folder) as (place, more):
                self._tokenizer: Any = AutoTokenizer.from_pretrained(
                    place, local_files_only=True, trust_remote_code=False, **more
                )
                model, loading = AutoModelForCausalLM.from_pretrained(
                    place,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    dtype="auto" if request.is_copy and not is_gguf else torch.float32,
                    output_loading_info=True,
                    **more,
                )
        except OperatorError:
            raise
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
        self.media = ()
        self._spellings: dict[int, bytes] = {}
        self.end_ids: tuple[int, ...] = ()
        self.n_computed = 0
        self._hidden: torch.Tensor | None = None
        head = self._model.get_output_embeddings()
        self.width = 0 if head is None else int(head.weight.shape[-1])
        if request.embedding and head is not None:
            head.register_forward_pre_hook(self._take_hidden)
        self._prefixes = KeptPrefixes(request.model.generation.prefix_bytes)
        self._token_bytes = 0
        with PrecisionRecorder() as recorder:
            self._n_logits = self._logits([_Part(row=TokenRow(prompt=(0,), served=(0,)))]).values.shape[-1]
        if request.model.generation.prefix_bytes:
            self._token_bytes = self._kept_bytes_per_token(folder)
        self.end_ids = ending_ids(model, request.model.generation.end_ids, self._n_logits)
        self.artefact = Artefact(
            path=reference.path,
            digest=digest,
            precision=UNVERIFIED
            if request.is_copy
            else precision_of(folder, [*stored, *recorder.findings], reference.allow_reduced_precision),
            opset=0,
            producer="gguf" if is_gguf else f"transformers {config.get('transformers_version', '')}".strip(),
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

    @property
    def network(self) -> torch.nn.Module:
        """The network; who changes its weights must have `models.generation.prefix_bytes` at 0."""
        network: torch.nn.Module = self._model
        return network

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

    def spelling(self, ids: Sequence[int]) -> str | None:
        """Return the text of tokens, without special ones; None if one of them is unknown."""
        if any(not 0 <= token < len(self._tokenizer) for token in ids):
            return None  # to score them says so
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def score(self, rows: Sequence[TokenRow]) -> list[Scores]:
        """Return the scores of the answer of each row.

        Raises
        ------
        QuarantineError
            Reason `tokenizer`: a token is unknown to the model. `replay`: PyTorch failed.
        """
        if self._model is None:
            raise replay_error("the reference is closed")
        n_tokens = int(self._model.get_input_embeddings().num_embeddings)
        if any(not 0 <= token < n_tokens for row in rows for token in (*row.prompt, *row.served)):
            raise tokenizer_error(
                f"a token id is not below the reference's {n_tokens}: candidate and reference have different tokenizers"
            )
        scores: dict[int, Scores] = {}
        for wave in self._waves(rows):
            parts = {index: self._part(rows[index]) for index in wave}
            # Rows of similar length together, so that little padding is computed.
            order = sorted(wave, key=lambda index: parts[index].n_tokens)
            scores |= zip(order, self._computed([parts[index] for index in order]), strict=True)
        return [scores[index] for index in range(len(rows))]

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
                has_tools=bool(request.tools),
            )

        return computed(compute)

    def answers(self, questions: Sequence[Question], within_s: float) -> list[FreeAnswer] | None:
        """Return the answers to questions with the same options, as many computed together as are scored together.

        None: they must be asked one at a time, since the model cannot share, the options have a `stop`, or a prompt leaves less room than the
        options allow.

        Raises
        ------
        QuarantineError
            Reason `replay`: a prompt is invalid, or PyTorch failed.
        """
        first = questions[0].answer_request
        if (
            self._model is None
            or not self._token_bytes
            or first.options.get("stop")
            or not is_able(first.options)
        ):
            return None
        prompts = [question.prompt() for question in questions]
        most = max(map(len, prompts)) + first.max_tokens
        if self.longest is not None and most > self.longest:
            return None
        n_rows = max(min(self._batch_tokens, self._prefixes.most_bytes // self._token_bytes) // most, 1)
        by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        until_s = time.monotonic() + within_s
        answers: dict[int, FreeAnswer] = {}
        for begin in range(0, len(prompts), n_rows):
            rows = by_length[begin : begin + n_rows]
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                answers |= dict.fromkeys(rows, FreeAnswer(outcome=FreeAnswerOutcome.LATE))
                continue
            together = partial(
                answered_together,
                model=self._model,
                tokenizer=self._tokenizer,
                prompts=[prompts[row] for row in rows],
                answer_request=questions[rows[0]].answer_request,
                end_ids=self.end_ids,
                within_s=left_s,
                has_tools=bool(questions[0].request.tools),
            )
            answers |= dict(zip(rows, computed(together), strict=True))
        return [answers[index] for index in range(len(prompts))]

    def close(self) -> None:
        """Free the model, and the device memory that PyTorch caches."""
        self._model = None
        self._prefixes.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _computed(self, parts: Sequence["_Part"]) -> list[Scores]:
        return computed(lambda: list(chain.from_iterable(map(self._scored, self._batches(parts)))))

    def _waves(self, rows: Sequence[TokenRow]) -> list[list[int]]:
        """Return indices of rows in the order in which to compute them, so that a shared beginning is computed once."""
        return waves([_read(row) for row in rows]) if self._token_bytes else [[*range(len(rows))]]

    def _part(self, row: TokenRow) -> "_Part":
        """Return a row without the beginning that need not be computed."""
        if not self._token_bytes:
            return _Part(row=row)
        return _Part(row=row, prefix=self._prefixes.find(_read(row), len(row.prompt) - 1))

    def _batches(self, parts: Sequence["_Part"]) -> Iterator[list["_Part"]]:
        """Yield parts to compute together: as many as fit the limits on tokens, on logits and on what is kept of them."""
        batch: list[_Part] = []
        for part in parts:
            more = [*batch, part]
            length = max(one.n_tokens for one in more)
            n_logits = len(more) * (_n_kept(more) if self._keeps else length) * self._n_logits
            n_tokens = len(more) * (_n_shared(more) + length)
            if batch and (
                n_logits * 4 > _LOGITS_BYTES
                or n_tokens > self._batch_tokens
                or not self._prefixes.fits(n_tokens * self._token_bytes)
            ):
                yield batch
                batch = []
            batch.append(part)
        if batch:
            yield batch

    def _scored(self, batch: Sequence["_Part"]) -> Iterator[Scores]:
        logits = self._logits(batch)
        self.n_computed += sum(part.n_tokens for part in batch)
        for index, part in enumerate(batch):
            begin = part.first - logits.first
            scores = self._scores_of(part.row, logits.values[index, begin : begin + len(part.row.served)])
            if logits.hidden is not None:
                vector = logits.hidden[index, begin].float().cpu().numpy()
                scores = msgspec.structs.replace(scores, vector=vector)
            yield scores
            if logits.cache is not None:
                shared = _n_shared(batch)
                layers = layers_of(logits.cache, index, shared - part.prefix.n_tokens, shared + part.n_tokens)
                self._prefixes.keep(_read(part.row), layers)

    def _logits(self, batch: Sequence["_Part"]) -> "_Logits":
        """Return the logits of a batch.

        Rows are padded at their end: no token sees those after it, so the padding does not matter. Their prefixes are padded at the
        beginning, and masked there.
        """
        length, shared = max(part.n_tokens for part in batch), _n_shared(batch)
        ids = torch.zeros((len(batch), length), dtype=torch.long)
        mask = torch.zeros((len(batch), shared + length), dtype=torch.long)
        positions = torch.zeros_like(ids)
        for index, part in enumerate(batch):
            n_before = part.prefix.n_tokens
            ids[index, : part.n_tokens] = torch.tensor(_read(part.row)[n_before:])
            mask[index, shared - n_before : shared + part.n_tokens] = 1
            positions[index] = torch.arange(n_before, n_before + length)
        more: dict[str, Any] = {}
        first = 0
        if self._keeps:
            first = min(part.first for part in batch)
            more["logits_to_keep"] = length - first
        if shared:
            more["past_key_values"] = joined([part.prefix for part in batch])
            more["position_ids"] = positions.to(self._device)
        is_kept = self._token_bytes > 0 and self._prefixes.fits(mask.numel() * self._token_bytes)
        with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
            output = self._model(
                input_ids=ids.to(self._device),
                attention_mask=mask.to(self._device),
                use_cache=is_kept or shared > 0,
                **more,
            )
        hidden, self._hidden = self._hidden, None
        return _Logits(
            hidden=hidden,
            values=output.logits,
            first=first,
            cache=output.past_key_values if is_kept else None,
        )

    def _kept_bytes_per_token(self, folder: Path) -> int:
        """Return the bytes that are kept for a token, so that shared beginnings are computed once; 0: the model cannot.

        It is tried, since nothing says so of a model: rows must have the same scores with beginnings that are kept as without.
        """
        rows = [TokenRow(prompt=tuple(range(n)), served=(n,)) for n in (2 * LEAST_SHARED, 3 * LEAST_SHARED)]
        takes = inspect.signature(self._model.forward).parameters
        longest = min(self.longest or _LONGEST, int(self._model.get_input_embeddings().num_embeddings))
        if "position_ids" not in takes or "past_key_values" not in takes or longest <= 4 * LEAST_SHARED:
            return 0
        try:
            with torch.inference_mode():
                ids = torch.tensor([rows[1].prompt], device=self._device)
                cache = self._model(input_ids=ids, use_cache=True).past_key_values
                n_bytes = bytes_per_token(cache)
                if not n_bytes:
                    return 0
                whole = [_Part(row=row) for row in rows]
                layers = layers_of(cache, 0, 0, 3 * LEAST_SHARED)
                shared = [
                    _Part(row=row, prefix=Prefix(n_tokens=n, layers=layers))
                    for row, n in zip(rows, (LEAST_SHARED, 2 * LEAST_SHARED + 5), strict=True)
                ]
                of_whole, of_shared = (self._last(batch) for batch in (whole, shared))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            _LOG.info("reference %s: no beginnings are shared (%s)", folder, error_text(error))
            return 0
        if not torch.allclose(of_whole, of_shared, rtol=0, atol=_SAME):
            _LOG.info("reference %s: no beginnings are shared, since its scores would change", folder)
            return 0
        return n_bytes

    def _take_hidden(self, _: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        """Keep what the head of the model gets, which is the last hidden state at the positions of the logits."""
        self._hidden = given[0]

    def _last(self, batch: Sequence["_Part"]) -> torch.Tensor:
        """Return the log-probabilities at the last position of each row : (rows, tokens)."""
        logits = self._logits(batch)
        places = [part.n_tokens - 1 - logits.first for part in batch]
        last = torch.stack([logits.values[index, place] for index, place in enumerate(places)])
        return last.double().log_softmax(dim=-1)

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
                values = logits[part]
                # Of the whole vocabulary only the normaliser is computed in FP64: with a large one this work costs as much as the layers.
                total = values.double().logsumexp(dim=-1, keepdim=True)
                own = values.gather(1, targets[part])
                top = values.topk(k, dim=-1)
                ends = (values[:, ending].double() - total).exp().sum(dim=-1)
                above = (values > own).sum(dim=-1) + 1
                own_logprob = (own.double() - total)[:, 0]
                of_top = top.values.double() - total
                columns.append((own_logprob, above, top.indices, of_top, ends, *_around(values, own, row)))
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


def _around(logits: torch.Tensor, own: torch.Tensor, row: TokenRow) -> tuple[torch.Tensor, ...]:
    """Return the probabilities of what is less likely than a token, and of what is as likely, (positions,) each; () without a temperature.

    Parameters
    ----------
    logits
        (positions, tokens).
    own
        (positions, 1), of the served tokens.
    """
    if not is_drawn(row.temperature):
        return ()
    # FP32 is enough for shares: they are wrong by 1e-6 at most.
    p = logits.float().sub(logits.amax(dim=-1, keepdim=True)).div_(row.temperature).exp_()
    total = p.sum(dim=-1)
    less = p.masked_fill(logits >= own, 0.0).sum(dim=-1)
    same = p.masked_fill_(logits != own, 0.0).sum(dim=-1)
    return (less / total).double(), (same / total).double()


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """A row, and the beginning of it that need not be computed."""

    row: TokenRow
    prefix: Prefix = NO_PREFIX

    @property
    def n_tokens(self) -> int:
        """The tokens to compute: the last served one is not read, only scored."""
        return len(self.row.prompt) + len(self.row.served) - 1 - self.prefix.n_tokens

    @property
    def first(self) -> int:
        """The position of the first score, among those that are computed."""
        return len(self.row.prompt) - 1 - self.prefix.n_tokens


class _Logits(msgspec.Struct, frozen=True, kw_only=True):
    """What a model gave for a batch.

    Parameters
    ----------
    values
        (rows, positions, tokens).
    first
        The position of the first ones.
    cache
        Keys and values of all rows; None: they are not to be kept.
    hidden
        (rows, positions, width), what the logits were computed of; None: it is not asked for.
    """

    values: torch.Tensor
    first: int
    cache: Any = None
    hidden: torch.Tensor | None = None


def _read(row: TokenRow) -> Tokens:
    """Return the tokens that the model reads."""
    return (*row.prompt, *row.served[:-1])


def _n_shared(batch: Sequence[_Part]) -> int:
    return max(part.prefix.n_tokens for part in batch)


def _n_kept(batch: Sequence[_Part]) -> int:
    return max(part.n_tokens for part in batch) - min(part.first for part in batch)


def _digest(folder: Path) -> str:
    """Return the digest over all files that are loaded: config, tokenizer, template and weights."""
    try:
        if folder.suffix == GGUF:
            return digest_of(folder)
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


@contextmanager
def _loadable(folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield where transformers finds a model, and what else it must be given; a GGUF file alone, without what else lies beside it."""
    if folder.suffix != GGUF:
        yield folder, {}
        return
    if lacking := [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]:
        raise OperatorError(
            f"the reference {folder} is a GGUF file, which needs `{lacking[0]}`: pip install 'quantdrift[gguf]'"
        )
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / folder.name).symlink_to(folder.resolve())
        yield Path(place), {"gguf_file": folder.name}


def _stored_gguf(file: Path) -> Iterator[Finding]:
    """Yield the stored tensors of a GGUF file that are not full precision."""
    with _loadable(file):
        from gguf import GGUFReader  # noqa: PLC0415 - of the extra `gguf`
    try:
        tensors = [(str(tensor.name), tensor.tensor_type.name) for tensor in GGUFReader(file).tensors]
    except (OSError, ValueError) as error:
        raise OperatorError(f"{file} cannot be read as GGUF: {error}") from error
    for name, kind in tensors:
        if kind not in _FULL:
            yield f"stored tensor `{name}`", _TYPES.get(kind, kind.lower())


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

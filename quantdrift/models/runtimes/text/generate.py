"""Free-running answers with `transformers`: a client's options translated for `generate`."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from transformers import GenerationConfig

from quantdrift.core.errors import OperatorError
from quantdrift.models.language.answer import ToolCall
from quantdrift.models.language.free_running_answer import FreeAnswer, FreeAnswerOutcome, FreeAnswerRequest
from quantdrift.models.language.request_options import constraints, forces_tool, json_asked
from quantdrift.models.language.scoring import replay_error
from quantdrift.models.language.written_calls import written_calls

_KNOWN: Final = frozenset({"min_tokens", "no_repeat_ngram_size", "repetition_penalty"})
_OF_JSON: Final = frozenset({"guided_json", "json_schema", "structured_outputs"})
# Defaults where neither the client nor the model's generation_config.json sets an option, as in vLLM.
_NEUTRAL: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
}


def ending_ids(model: Any, configured: tuple[int, ...], n_tokens: int) -> tuple[int, ...]:
    """Return the tokens that end an answer: the configured ones, or those of the model's folder.

    Raises
    ------
    OperatorError
        A configured one is not among the model's `n_tokens` tokens.
    """
    if unknown_ids := [token for token in configured if not 0 <= token < n_tokens]:
        raise OperatorError(
            f"models.generation.end_ids names {unknown_ids}, but the reference has only the token ids 0 to {n_tokens - 1}"
        )
    generation_config = getattr(model, "generation_config", None) or model.config
    ids = getattr(generation_config, "eos_token_id", None)
    of_folder = (ids,) if isinstance(ids, int) else tuple(ids or ())
    return configured or tuple(token for token in of_folder if 0 <= token < n_tokens)


def is_able(options: Mapping[str, Any]) -> bool:
    """Return whether `generate` supports all options of the request, apart from the JSON grammar."""
    supported = _KNOWN | _OF_JSON if json_asked(options)[0] else _KNOWN
    return constraints(options) <= supported and not forces_tool(options)


def answered(
    *,
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    answer_request: FreeAnswerRequest,
    end_ids: tuple[int, ...],
    within_s: float,
    has_tools: bool = False,
) -> FreeAnswer:
    """Return the model's answer; it is late if the time was over before the answer ended.

    Parameters
    ----------
    model, tokenizer
        Model and tokenizer of `transformers`.
    prompt
        Token ids.
    end_ids
        Tokens that end the answer.
    within_s
        Longest time of generation. Reading the prompt is not interrupted.
    has_tools
        Whether tools were offered: then calls are read out of the text, in the form of the chat template.
    """
    (answer,) = answered_together(
        model=model,
        tokenizer=tokenizer,
        prompts=[prompt],
        answer_request=answer_request,
        end_ids=end_ids,
        within_s=within_s,
        has_tools=has_tools,
    )
    return answer


def answered_together(
    *,
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    answer_request: FreeAnswerRequest,
    end_ids: tuple[int, ...],
    within_s: float,
    has_tools: bool = False,
) -> list[FreeAnswer]:
    """Return the answers to several prompts with the same options, as of `answered`.

    Sampled ones are drawn with one seed: another company gives others. Several need a model that masks what pads the shorter prompts, and
    options without `stop`.
    """
    if answer_request.max_tokens < 1:
        raise replay_error("the prompt fills the reference's context: there is no room for an answer")
    options = answer_request.options
    ends = (*end_ids, *(token for token in options.get("stop_token_ids") or () if type(token) is int))
    stops = [options["stop"]] if isinstance(options.get("stop"), str) else list(options.get("stop") or ())
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * n + list(prompt) for n, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * n + [1] * len(prompt) for n, prompt in zip(padding, prompts, strict=True)])
    with (
        torch.inference_mode(),
        torch.autocast(model.device.type, enabled=False),
        torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []),
    ):
        torch.manual_seed(options["seed"] if type(options.get("seed")) is int else answer_request.seed)
        generated = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=_settings(model, answer_request, ends, stops, within_s),
            tokenizer=tokenizer if stops else None,
        )
    return [
        _read(tokens, tokenizer, answer_request, ends, stops, has_tools=has_tools)
        for tokens in generated[:, longest:].tolist()
    ]


def _read(
    tokens: list[int],
    tokenizer: Any,
    answer_request: FreeAnswerRequest,
    ends: Sequence[int],
    stops: Sequence[str],
    *,
    has_tools: bool,
) -> FreeAnswer:
    """Return the answer that a row of tokens is; what follows its end pads it to the longest answer."""
    end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    tokens = tokens[: end + 1]
    options = answer_request.options
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    stopped = min((position for position in map(text.find, stops) if position >= 0), default=-1)
    is_ended = stopped >= 0 or (bool(tokens) and tokens[-1] in ends)
    if not is_ended and len(tokens) < answer_request.max_tokens:
        return FreeAnswer(outcome=FreeAnswerOutcome.LATE)
    said = text[:stopped] if stopped >= 0 else text
    calls: tuple[ToolCall, ...] | None = None if has_tools else ()
    if has_tools and is_ended and stopped < 0:
        written = written_calls(
            tokenizer.decode(tokens[:-1], skip_special_tokens=False, clean_up_tokenization_spaces=False),
            _template(tokenizer),
        )
        if written is not None:
            calls = written.calls
            said = written.text if calls else said
    return FreeAnswer(
        outcome=FreeAnswerOutcome.UNFORCED if json_asked(options)[0] else FreeAnswerOutcome.DONE,
        text=said,
        calls=calls,
        finish_reason=("tool_calls" if calls else "stop") if is_ended else "length",
        n_tokens=len(tokens),
        max_tokens=answer_request.max_tokens,
        is_capped=answer_request.is_capped,
        ids=() if stopped >= 0 else tuple(tokens),
    )


def _template(tokenizer: Any) -> str:
    """Return the chat template with which tools are offered; empty: there is none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default") or ""
    return str(template)


def _settings(
    model: Any, answer_request: FreeAnswerRequest, ends: Sequence[int], stops: Sequence[str], within_s: float
) -> GenerationConfig:
    options = answer_request.options
    folder = getattr(model, "generation_config", None)

    def setting(name: str) -> Any:
        for value in (options.get(name), getattr(folder, name, None)):
            if isinstance(value, int | float):
                return value
        return _NEUTRAL[name]

    sampled = setting("temperature") > 0 and setting("top_k") != 1
    sampling = {}
    if sampled:
        sampling = {name: setting(name) for name in ("temperature", "top_p", "min_p", "typical_p")}
        sampling["top_k"] = max(setting("top_k"), 0)  # -1 is all of them, to servers
    return GenerationConfig(
        max_new_tokens=answer_request.max_tokens,
        max_time=within_s,
        min_new_tokens=options.get("min_tokens") or None,
        do_sample=sampled,
        repetition_penalty=setting("repetition_penalty"),
        no_repeat_ngram_size=setting("no_repeat_ngram_size"),
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0,
        stop_strings=list(stops) or None,
        num_beams=1,
        **sampling,
    )

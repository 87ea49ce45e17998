"""The options of a request to an OpenAI-compatible server, and what follows from them for its answer."""

from collections.abc import Mapping
from typing import Any, Final

_TEMPLATE: Final = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "documents")
# Options under which the generated token need not be the most likely one, each with its neutral value.
_CONSTRAINTS: Final[Mapping[str, Any]] = {
    "allowed_token_ids": None,
    "bad_words": [],
    "dry_multiplier": 0,
    "frequency_penalty": 0,
    "ignore_eos": False,
    "logit_bias": {},
    "logits_processors": None,
    "min_tokens": 0,
    "mirostat": 0,
    "no_repeat_ngram_size": 0,
    "presence_penalty": 0,
    "repeat_penalty": 1,
    "repetition_penalty": 1,
    "thinking_token_budget": None,
    "use_beam_search": False,
    "xtc_probability": 0,
}
# Options that name a grammar.
_GRAMMARS: Final = (
    "ebnf",
    "grammar",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "json_schema",
    "regex",
    "structured_outputs",
)
# `server_tools` and `stored_prompt` are what a decoder found: tools that the server runs, and parts of the prompt that it keeps.
_CHANGES_PROMPT: Final = (
    "chat_template",
    "suffix",
    "truncate_prompt_tokens",
    "server_tools",
    "stored_prompt",
)
_FREE_CHOICE: Final = (None, "auto", "none")
_ENDED: Final = frozenset({"stop", "tool_calls", "function_call"})


def object_of(value: Any) -> dict[str, Any]:
    """Return a JSON object as it is, and an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def json_asked(options: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Return whether the client asked for JSON, and the schema that it asked for (or an empty one)."""
    wanted = object_of(options.get("response_format"))
    kind = wanted.get("type")
    if kind == "json_schema":
        return True, object_of(object_of(wanted.get("json_schema")).get("schema"))
    guided = options.get("guided_json") or object_of(options.get("structured_outputs")).get("json")
    guided = guided or options.get("json_schema")
    return kind == "json_object" or guided is not None, object_of(guided)


def draws_nothing(options: Mapping[str, Any]) -> bool:
    """Return whether no token was drawn by chance. Without a temperature the server's own applies: it may be."""
    return options.get("temperature") == 0 or options.get("top_k") == 1


def takes_likeliest(options: Mapping[str, Any]) -> bool:
    """Return whether decoding was greedy: the likeliest of all tokens at each position."""
    return draws_nothing(options) and not constraints(options) and not has_grammar(options)


def sampling_temperature(options: Mapping[str, Any]) -> float | None:
    """Return the temperature at which tokens were drawn: 1 where the request has none, as OpenAI's.

    None if decoding was greedy, or if more than the temperature says how likely the drawn tokens were, apart from samplers that only
    remove less likely tokens.
    """
    temperature = options.get("temperature")
    temperature = 1.0 if temperature is None else temperature
    if type(temperature) not in {int, float} or not temperature > 0 or options.get("top_k") == 1:
        return None
    moved = options.get("typical_p", 1) not in {None, 1} or bool(options.get("dynatemp_range"))
    return None if moved or constraints(options) or has_grammar(options) else float(temperature)


def constraints(options: Mapping[str, Any]) -> set[str]:
    """Return the options that forbid, favour or penalise tokens, apart from `response_format` and `tool_choice`."""
    grammars = {name for name in _GRAMMARS if options.get(name) is not None}
    return grammars | {
        name for name, neutral in _CONSTRAINTS.items() if options.get(name, neutral) != neutral
    }


def forces_tool(options: Mapping[str, Any]) -> bool:
    """Return whether the client required a tool call."""
    return options.get("tool_choice") not in _FREE_CHOICE


def has_grammar(options: Mapping[str, Any]) -> bool:
    """Return whether a grammar restricted the tokens at each position.

    vLLM removes forbidden tokens from the logits before it reports log-probabilities, raw ones too: they are relative to the
    remaining tokens, and not the model's own.
    """
    wanted = object_of(options.get("response_format")).get("type", "text")
    return (
        forces_tool(options) or wanted != "text" or any(options.get(name) is not None for name in _GRAMMARS)
    )


def changes_prompt(options: Mapping[str, Any]) -> str:
    """Return the option that would make the reference's template or tokenizer build another prompt; empty if none."""
    return next((name for name in _CHANGES_PROMPT if options.get(name)), "")


def template_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the chat template; `reasoning_effort` becomes one of `chat_template_kwargs`."""
    settings = {name: options[name] for name in _TEMPLATE if name in options}
    if "reasoning_effort" in options:
        more = object_of(settings.get("chat_template_kwargs"))
        settings["chat_template_kwargs"] = {"reasoning_effort": options["reasoning_effort"], **more}
    return settings


def functions(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the offered functions: the protocol's older form of tools."""
    offered = options.get("functions")
    return [object_of(function) for function in offered] if isinstance(offered, list) else []


def may_be_cut(options: Mapping[str, Any], finish_reason: str) -> bool:
    """Return whether a client's stop sequence may have cut the text, possibly within a token or before the first one."""
    return bool(options.get("stop")) and finish_reason in {"", "stop"}


def ended_itself(options: Mapping[str, Any], finish_reason: str) -> bool | None:
    """Return whether the model ended the answer; None if unknown, or if a client's stop sequence may have."""
    if finish_reason in _ENDED:
        return None if options.get("stop") or options.get("stop_token_ids") else True
    return False if finish_reason == "length" else None


def wanted_choices(options: Mapping[str, Any]) -> int:
    """Return the number of answers asked for each prompt."""
    n = options.get("n")
    return n if type(n) is int and n > 0 else 1

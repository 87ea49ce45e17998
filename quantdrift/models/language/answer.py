"""A candidate's answer as text: what is checked of it without the reference."""

from typing import Any

import msgspec


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call: the tool's name, and the JSON of its arguments as generated."""

    name: str
    arguments: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, with the options of its request that it is checked against.

    Parameters
    ----------
    finish_reason
        Why it ended; empty if unknown.
    is_empty
        Whether it has no text, no reasoning, no refusal and no tool call.
    n_tokens
        Number of tokens; None if unknown.
    is_cut
        Whether a stop sequence of the client may have removed tokens from the text.
    is_greedy
        Whether each token had to be the most likely one: no sampling, and nothing that forbids, favours or penalises
        tokens.
    is_repeatable
        Whether no token was drawn by chance, whatever forbids or favours tokens: an equal model with the same options gives the same
        answer.
    has_grammar
        Whether a grammar, a schema or a forced tool restricted its tokens.
    forced
        Of each served token, whether the grammar left no other; None: there was no grammar, or it is not known.
    forced_tokens
        The spellings of these tokens; empty: the reference scores them by their ids.
    temperature
        At which its tokens were drawn; None if it is greedy or that is not known.
    wants_json
        Whether the client asked for JSON.
    schema
        The JSON schema that the client asked for; empty if none.
    tools
        The offered tools: name to the JSON schema of its parameters.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    finish_reason: str = ""
    is_empty: bool = False
    n_tokens: int | None = None
    is_cut: bool = False
    is_greedy: bool = False
    is_repeatable: bool = False
    has_grammar: bool = False
    forced: tuple[bool, ...] | None = None
    forced_tokens: tuple[bytes, ...] = ()
    temperature: float | None = None
    wants_json: bool = False
    schema: dict[str, Any] = {}
    tools: dict[str, dict[str, Any]] = {}

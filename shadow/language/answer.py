"""What a candidate said, besides the tokens it said it with: what its answers are judged by alone."""

from typing import Any

import msgspec


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool: its name, and the JSON of its arguments as it was generated."""

    name: str
    arguments: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer.

    Parameters
    ----------
    text
        What it says.
    calls
        The tools it calls.
    finish_reason
        Why it ended; empty where that is not told.
    is_empty
        Whether it says nothing at all: no text, no reasoning, no refusal, no call of a tool.
    n_tokens
        How many tokens it has; None where that is not told.
    is_cut
        Whether a stop of the client's may have taken some of them out of the text.
    is_greedy
        Whether each token had to be the likeliest: no sampling, and nothing that forbids, favours or penalises tokens.
    wants_json
        Whether JSON was asked for.
    schema
        The JSON schema that was asked for; empty where none was.
    tools
        Name to the JSON schema of its parameters, of each tool that was offered.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    finish_reason: str = ""
    is_empty: bool = False
    n_tokens: int | None = None
    is_cut: bool = False
    is_greedy: bool = False
    wants_json: bool = False
    schema: dict[str, Any] = {}
    tools: dict[str, dict[str, Any]] = {}

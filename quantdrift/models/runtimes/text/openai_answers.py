"""Free-running answers from an OpenAI-compatible server, with the client's options."""

from typing import Any, Final

import msgspec

from quantdrift.core.errors import OperatorError
from quantdrift.models.language.answer import ToolCall
from quantdrift.models.language.free_running_answer import FreeAnswer, FreeAnswerOutcome, FreeAnswerRequest
from quantdrift.models.language.request_options import changes_prompt
from quantdrift.models.language.scoring import ScoringRequest, replay_error
from quantdrift.models.runtimes.registry import RuntimeRequest
from quantdrift.models.runtimes.remote.protocol import RefusedError
from quantdrift.models.runtimes.text.openai_server import OpenAIServer, unreadable

# Options that are not passed on: they ask for more answers or details, or build a prompt that is known as tokens.
_LEFT: Final = frozenset(
    """
    best_of chat_template echo logprobs max_completion_tokens max_tokens n prompt_logprobs return_token_ids
    return_tokens_as_token_ids stream stream_options suffix top_logprobs truncate_prompt_tokens
    """.split()  # noqa: SIM905 - a list of so many words would be a page
)


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str = ""


class _Called(msgspec.Struct):
    function: _Function = msgspec.field(default_factory=_Function)


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Called] | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Answered(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class OpenAIAnswers:
    """Asks a server for answers, over its own connection, so that an interrupted answer disturbs no scoring request.

    No answer is waited for longer than `models.generation.own_s`.
    """

    def __init__(self, request: RuntimeRequest) -> None:
        longest_s = min(request.reference.timeout_s, request.model.generation.own_s)
        reference = msgspec.structs.replace(request.reference, timeout_s=longest_s)
        self._server = OpenAIServer(msgspec.structs.replace(request, reference=reference))

    def answer(self, request: ScoringRequest, answer_request: FreeAnswerRequest) -> FreeAnswer:
        """Return the server's answer; its outcome is `late` if it takes too long.

        Raises
        ------
        QuarantineError
            Reason `replay`: the server refuses, fails, or its answer cannot be read.
        RetryError
            It is unreachable.
        """
        question: dict[str, Any] = {
            **{name: value for name, value in answer_request.options.items() if name not in _LEFT},
            "model": self._server.name,
            "max_tokens": answer_request.max_tokens,
        }
        path = "/v1/completions"
        if request.messages and not (request.prompt_ids and changes_prompt(answer_request.options)):
            path = "/v1/chat/completions"
            question["messages"] = request.messages
            if request.tools:
                question["tools"] = request.tools
        else:
            question["prompt"] = request.prompt if request.prompt_ids is None else request.prompt_ids
        try:
            response = self._server.ask("POST", path, _Answered, question)
            return _own(response, answer_request)
        except TimeoutError:
            return FreeAnswer(outcome=FreeAnswerOutcome.LATE)
        except (RefusedError, OperatorError) as error:
            raise replay_error(f"no free-running answer: {type(error).__name__}") from error

    def close(self) -> None:
        """Close the connection."""
        self._server.close()


def _own(response: _Answered, answer_request: FreeAnswerRequest) -> FreeAnswer:
    if not response.choices:
        raise unreadable("no choice")
    choice = response.choices[0]
    message = choice.message or _Message(content=choice.text)
    return FreeAnswer(
        outcome=FreeAnswerOutcome.DONE,
        text=message.content or "",
        calls=tuple(
            ToolCall(name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ),
        finish_reason=choice.finish_reason or "",
        n_tokens=(response.usage.completion_tokens if response.usage else None) or None,
        max_tokens=answer_request.max_tokens,
        is_capped=answer_request.is_capped,
    )

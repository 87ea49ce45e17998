"""Language models at an OpenAI-compatible server, which returns the log-probabilities of a prompt that ends in the answer.

There are two ways to ask, and the first that the server accepts is used:

- vLLM's `prompt_logprobs` on `/v1/completions`: the served token and the k most likely at each position, with ids and
  ranks;
- OpenAI's former `echo` with `logprobs` and no generated token: no ids, and ranks only of listed tokens.

Prompts and answers are sent as token ids. Texts without ids are tokenised by `/tokenize`, with the server's own tokenizer
and chat template. A chat with an image or sound is sent as it was, the answer as its last message: vLLM returns `prompt_logprobs` of
chats, too. The precision of such a reference cannot be checked: it is `unverified`.
"""

import http
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta

from quantdrift.core.config.schema import Medium
from quantdrift.core.errors import OperatorError
from quantdrift.core.tasks import Task
from quantdrift.models.language.answer import ToolCall
from quantdrift.models.language.free_running_answer import FreeAnswer, FreeAnswerOutcome, FreeAnswerRequest
from quantdrift.models.language.request_options import changes_prompt, object_of
from quantdrift.models.language.scoring import (
    NO_SCORES,
    UNKNOWN,
    Scores,
    ScoringRequest,
    TokenRow,
    replay_error,
)
from quantdrift.models.runtimes.embedding import unknown_embedding
from quantdrift.models.runtimes.protocol import ReferenceRuntime, check_inputs
from quantdrift.models.runtimes.registry import RuntimeRequest
from quantdrift.models.runtimes.remote.protocol import Refusal, RefusedError
from quantdrift.models.runtimes.text.chat_question import probe_question, question_of
from quantdrift.models.runtimes.text.openai_server import OpenAIServer, unreadable
from quantdrift.models.runtimes.text.scoring_runtime import Question, ScoringRuntime
from quantdrift.models.tensors.arrays import Array, TensorSpec

_PROBE: Final = (0, 0)
_INPUT: Final = "input"
_EMBEDDING: Final = "embedding"
_PROBE_TEXT: Final = "text"
# Options that are not passed on: they ask for more answers or details, or build a prompt that is known as tokens.
_LEFT: Final = frozenset(
    """
    best_of chat_template echo logprobs max_completion_tokens max_tokens n prompt_logprobs return_token_ids
    return_tokens_as_token_ids server_tools stored_prompt stream stream_options suffix thinking top_logprobs
    truncate_prompt_tokens
    """.split()  # noqa: SIM905 - a list of so many words would be a page
)


class _Tokens(msgspec.Struct):
    tokens: list[Annotated[int, Meta(ge=0)]]


class _Text(msgspec.Struct):
    prompt: str


class _Likely(msgspec.Struct):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class _Echoed(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    prompt_logprobs: list[dict[str, _Likely] | None] | None = None
    logprobs: _Echoed | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Chat(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Likely] | None] | None = None
    prompt_token_ids: list[int] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens of its prompt."""
        return tuple(self.prompt_token_ids or ())


class OpenAILanguage:
    """A language model at a server.

    Raises
    ------
    OperatorError
        The server does not know the model, refuses access, or returns no log-probabilities of prompts.
    RetryError
        The server is unreachable, or does not answer.
    """

    def __init__(self, request: RuntimeRequest, server: OpenAIServer) -> None:
        self._where = request.reference.where(request.model.name)
        self._top = request.model.generation.top
        self._most = request.model.generation.max_tokens
        self._batch_tokens = request.model.generation.batch_tokens
        self._server = server
        self._answers = OpenAIAnswers(request)
        self.end_ids = request.model.generation.end_ids
        self.media = request.reference.media
        self.width = 0
        self._ask, self.artefact, self.provenance, longest = server.opened(self._scoring_method)
        # One token is generated with each request: there must be room for it.
        self.longest = None if longest is None else longest - 1

    def chat_ids(self, request: ScoringRequest) -> tuple[int, ...]:
        """Return the tokens of a chat, by the server's chat template."""
        question = {"messages": request.messages, **request.template}
        if documents := question.pop(
            "documents", None
        ):  # /tokenize reads them only beside what else a template takes
            more = {"documents": documents, **object_of(question.get("chat_template_kwargs"))}
            question["chat_template_kwargs"] = more
        if request.tools:
            question["tools"] = request.tools
        return self._tokens(question)

    def text_ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the tokens of a text."""
        return self._tokens({"prompt": text, "add_special_tokens": add_special_tokens})

    def score(self, rows: Sequence[TokenRow]) -> list[Scores]:
        """Return the scores of the answer of each row. Rows are asked for together, up to `models.generation.batch_tokens` of them.

        Raises
        ------
        QuarantineError
            Reason `replay`: the server refuses, does not answer in time, or its answer cannot be read.
        RetryError
            The server is unreachable, fails, or refuses access.
        """
        scored = iter(
            [
                scores
                for batch in _batches([row for row in rows if row.chat is None], self._batch_tokens)
                for scores in self._server.guarded(partial(self._ask, batch))
            ]
        )
        return [
            next(scored) if row.chat is None else self._server.guarded(partial(self._by_messages, row.chat))
            for row in rows
        ]

    def answer(
        self,
        request: ScoringRequest,
        answer_request: FreeAnswerRequest,
        prompt: Callable[[], tuple[int, ...]],
        within_s: float,
    ) -> FreeAnswer:
        """Return the server's free-running answer. `prompt` and `within_s` are not used: the connection has its time limit.

        Raises
        ------
        QuarantineError
            Reason `replay`: the server refuses, fails, or its answer cannot be read.
        RetryError
            It is unreachable.
        """
        return self._answers.answer(request, answer_request)

    def answers(self, questions: Sequence[Question], within_s: float) -> None:
        """Return None: each answer has a request of its own."""

    def close(self) -> None:
        """Close the connections."""
        self._answers.close()
        self._server.close()

    def _scoring_method(self) -> Callable[[Sequence[TokenRow]], list[Scores]]:
        """Return the way of asking that the server accepts."""
        # With the end tokens: a server that does not know them would refuse answers later.
        row = TokenRow(prompt=_PROBE[:1], served=(*_PROBE[1:], *self.end_ids))
        problems = []
        for way in (self._by_prompt_logprobs, self._by_echo):
            try:
                way([row])
            except RefusedError as error:
                if error.kind is Refusal.ACCESS:
                    raise
                problems.append(str(error))
            else:
                self._check_media()
                return way
        ends = f" that contains models.generation.end_ids {list(self.end_ids)}" if self.end_ids else ""
        raise OperatorError(
            f"the server of the reference {self._where} returns no log-probabilities of a prompt{ends} ({'; '.join(problems)}): "
            "serve the reference with vLLM, or use runtime `transformers`"
        )

    def _check_media(self) -> None:
        """Try each medium that the server is said to read."""
        if not self.media:
            return
        n_without = self._n_probed(None)
        for medium in self.media:
            if self._n_probed(medium) <= n_without:
                raise OperatorError(self._unread(medium, "it leaves it out of the prompt"))

    def _n_probed(self, medium: Medium | None) -> int:
        """Return the number of tokens of a short chat with its answer."""
        try:
            return len(self._asked_chat(question_of(probe_question(medium), is_answered=True)).ids)
        except RefusedError as error:
            if error.kind is Refusal.ACCESS:
                raise
            raise OperatorError(self._unread(medium, str(error))) from error

    def _unread(self, medium: Medium | None, why: str) -> str:
        what = "whose answer is given" if medium is None else f"with {medium.value}"
        return (
            f"the server of the reference {self._where} gives no log-probabilities of a chat {what} ({why}): serve a model that reads"
            " it with vLLM, or change models.references.media"
        )

    def _by_messages(self, request: ScoringRequest) -> Scores:
        """Return the scores of an answer to messages that are sent as they were."""
        chat = self._asked_chat(question_of(request, is_answered=True))
        # Asked for last: what the server has just read is cheap to read again.
        prompt = self._asked_chat(question_of(request, is_answered=False), is_scored=False).ids
        n_of_candidate = request.n_prompt_tokens or len(request.prompt_ids or prompt)
        if len(prompt) != n_of_candidate:
            raise replay_error(
                f"the candidate made {n_of_candidate} tokens of the prompt, the reference makes {len(prompt)}: their tokenizers, chat"
                " templates or image processors differ"
            )
        if chat.ids[: len(prompt)] != prompt:
            raise replay_error("the chat template renders a prompt otherwise where its answer follows")
        # Its text, so it has no end token, and may have other tokens than were served: then the comparator says so.
        answer = chat.ids[len(prompt) :]
        answer = (answer[:-1] if request.is_cut else answer)[: self._most]
        if not answer:
            return NO_SCORES
        row = TokenRow(prompt=(), served=answer, temperature=request.temperature)
        begin = len(prompt)
        scores = self._of_prompt(row, (chat.prompt_logprobs or ())[begin : begin + len(answer)])
        return msgspec.structs.replace(scores, n_read=len(chat.ids))

    def _asked_chat(self, question: Mapping[str, Any], *, is_scored: bool = True) -> _Chat:
        """Return what the server says of a chat, of which it generates no more than it must."""
        body = {
            **question,
            "model": self._server.name,
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
        }
        if is_scored:
            body["prompt_logprobs"] = self._top
        chat = self._server.ask("POST", "/v1/chat/completions", _Chat, body)
        if chat.prompt_token_ids is None:
            raise unreadable("no tokens of the chat")
        if is_scored and len(chat.prompt_logprobs or ()) != len(chat.ids):
            raise unreadable("not the log-probabilities of each token of the chat")
        return chat

    def _tokens(self, question: Mapping[str, Any]) -> tuple[int, ...]:
        return self._server.guarded(lambda: self._tokenized({"model": self._server.name, **question}))

    def spelling(self, ids: Sequence[int]) -> str | None:
        """Return the text of tokens, by vLLM's `/detokenize`; None if the server does not say."""
        question = {"model": self._server.name, "tokens": list(ids)}

        def asked() -> str | None:
            try:
                return self._server.ask("POST", "/detokenize", _Text, question).prompt
            except (RefusedError, TimeoutError):
                return None

        return self._server.guarded(asked)

    def _tokenized(self, question: Mapping[str, Any]) -> tuple[int, ...]:
        try:
            return tuple(self._server.ask("POST", "/tokenize", _Tokens, question).tokens)
        except RefusedError as error:
            if (
                not str(error).startswith(f"HTTP {http.HTTPStatus.NOT_FOUND:d}")
                or not self._server.is_ready()
            ):
                raise
            raise RefusedError(
                "the server has no /tokenize: have clients set `return_token_ids`", Refusal.INPUT
            ) from error

    def _by_prompt_logprobs(self, rows: Sequence[TokenRow]) -> list[Scores]:
        choices = self._completed(rows, {"max_tokens": 1, "prompt_logprobs": self._top})
        return [
            self._of_prompt(row, choice.prompt_logprobs) for row, choice in zip(rows, choices, strict=True)
        ]

    def _by_echo(self, rows: Sequence[TokenRow]) -> list[Scores]:
        choices = self._completed(rows, {"max_tokens": 0, "echo": True, "logprobs": self._top})
        return [
            _of_echo(row, choice.logprobs, self._top, self.end_ids)
            for row, choice in zip(rows, choices, strict=True)
        ]

    def _completed(self, rows: Sequence[TokenRow], question: Mapping[str, Any]) -> list[_Choice]:
        body = {
            "model": self._server.name,
            "prompt": [(*row.prompt, *row.served) for row in rows],
            "temperature": 0,
            **question,
        }
        choices = self._server.ask("POST", "/v1/completions", _Completion, body).choices
        choices.sort(key=lambda choice: choice.index)
        if len(choices) != len(rows):
            raise unreadable(f"{len(choices)} choices for {len(rows)} prompts")
        return choices

    def _of_prompt(
        self, row: TokenRow, prompt_logprobs: Sequence[dict[str, _Likely] | None] | None
    ) -> Scores:
        n_prompt = len(row.prompt)
        if prompt_logprobs is None or len(prompt_logprobs) != n_prompt + len(row.served):
            raise unreadable("no log-probabilities of the prompt, or not of each token")
        try:
            positions = [
                {int(token): likely for token, likely in (likely_tokens or {}).items()}
                for likely_tokens in prompt_logprobs[n_prompt:]
            ]
            own = [likely_tokens[token] for token, likely_tokens in zip(row.served, positions, strict=True)]
        except (ValueError, KeyError) as error:
            raise unreadable("a served token without its log-probability") from error
        k = max(map(len, positions))
        rows = [
            sorted(likely_tokens.items(), key=lambda item: (-item[1].logprob, item[0]))
            for likely_tokens in positions
        ]
        filled = [[*row, *([(-1, _Likely(logprob=math.nan))] * (k - len(row)))] for row in rows]
        ends, ends_upper = _ends(positions, self.end_ids, self._top)
        return Scores(
            tokens=tuple(_spelt(likely) for likely in own),
            ids=row.served,
            logprobs=np.array([likely.logprob for likely in own], dtype=np.float64),
            ranks=np.array(
                [_rank(likely, likely_tokens) for likely, likely_tokens in zip(own, positions, strict=True)]
            ),
            top_tokens=tuple(tuple(_spelt(likely) for _, likely in row) for row in filled),
            top_ids=np.array([[token for token, _ in row] for row in filled], dtype=np.int64),
            top_logprobs=np.array(
                [[likely.logprob for _, likely in row] for row in filled], dtype=np.float64
            ),
            ends=ends,
            ends_upper=ends_upper,
        )


def _batches(rows: Sequence[TokenRow], most_tokens: int) -> Iterator[list[TokenRow]]:
    """Yield the rows in their order, as many together as have `most_tokens`; a longer row alone."""
    batch: list[TokenRow] = []
    n_tokens = 0
    for row in rows:
        if batch and n_tokens + row.n_tokens > most_tokens:
            yield batch
            batch, n_tokens = [], 0
        batch.append(row)
        n_tokens += row.n_tokens
    if batch:
        yield batch


def open_reference(request: RuntimeRequest) -> ReferenceRuntime:
    """Return the reference at a server; errors as of `OpenAILanguage` or `EmbeddingsRuntime`."""
    server = OpenAIServer(request)
    try:
        if request.model.task is Task.EMBEDDING:
            return EmbeddingsRuntime(request, server)
        return ScoringRuntime(request, OpenAILanguage(request, server))
    except BaseException:
        server.close()
        raise


def _ends(
    positions: Sequence[Mapping[int, _Likely]], end_ids: Collection[int], top: int
) -> tuple[Array, Array]:
    """Return the lower and upper bound of the end's probability at each position.

    An unlisted token has at most the probability of the least likely listed one, and all unlisted tokens together at most
    what the list leaves.
    """
    if not end_ids:
        return UNKNOWN, UNKNOWN
    least = np.zeros(len(positions))
    more = np.zeros(len(positions))
    for index, likely_tokens in enumerate(positions):
        listed = sorted((math.exp(likely.logprob) for likely in likely_tokens.values()), reverse=True)
        least[index] = sum(
            math.exp(likely_tokens[token].logprob) for token in end_ids if token in likely_tokens
        )
        n_hidden = sum(token not in likely_tokens for token in end_ids)
        more[index] = min(n_hidden * listed[:top][-1], max(1.0 - sum(listed), 0.0))
    return least.clip(0.0, 1.0), (least + more).clip(0.0, 1.0)


def _of_echo(row: TokenRow, echoed: _Echoed | None, top: int, end_ids: Collection[int]) -> Scores:
    n_prompt, n_tokens = len(row.prompt), len(row.prompt) + len(row.served)
    if echoed is None or min(len(echoed.tokens), len(echoed.token_logprobs)) < n_tokens:
        raise unreadable("no log-probabilities of what is echoed, or not of each token")
    tops = [top or {} for top in (echoed.top_logprobs or [])[n_prompt:n_tokens]]
    tops += [{}] * (len(row.served) - len(tops))
    own = np.array(
        [math.nan if logprob is None else logprob for logprob in echoed.token_logprobs[n_prompt:n_tokens]],
        dtype=np.float64,
    )
    k = max(map(len, tops))
    filled = [[*top.items(), *([("", math.nan)] * (k - len(top)))] for top in tops]
    top_logprobs = np.array([[value for _, value in row] for row in filled], dtype=np.float64).reshape(-1, k)
    above = (top_logprobs > own[:, np.newaxis]).sum(axis=1)
    # Lists have no ids, so the end's probability is known only where an end token was scored.
    ends = np.where(np.isin(row.served, list(end_ids)), np.exp(own), math.nan) if end_ids else UNKNOWN
    return Scores(
        tokens=tuple(token.encode() for token in echoed.tokens[n_prompt:n_tokens]),
        ids=row.served,
        logprobs=own,
        # A token below all listed ones has an unknown rank.
        ranks=np.where(above < min(top, k), above + 1.0, np.nan),
        top_tokens=tuple(tuple(name.encode() for name, _ in row) for row in filled),
        top_ids=np.full(top_logprobs.shape, -1, dtype=np.int64),
        top_logprobs=top_logprobs,
        ends=ends,
        ends_upper=ends,
    )


def _rank(own: _Likely, likely_tokens: Mapping[int, _Likely]) -> float:
    """Return the rank from the server, or computed from the list; vLLM counts tokens that are at least as likely."""
    if own.rank is not None:
        return float(own.rank)
    return 1.0 + sum(likely.logprob > own.logprob for likely in likely_tokens.values())


def _spelt(likely: _Likely) -> bytes:
    return (likely.decoded_token or "").encode()


class _Vector(msgspec.Struct):
    index: Annotated[int, Meta(ge=0)]
    embedding: list[float]


class _Vectors(msgspec.Struct):
    data: list[_Vector]


class EmbeddingsRuntime:
    """A reference that computes embeddings of texts at a server.

    Raises
    ------
    OperatorError
        The server does not know the model, refuses access, or has no embeddings; or `models.embedding` names another output.
    RetryError
        The server is unreachable, or does not answer.
    """

    def __init__(self, request: RuntimeRequest, server: OpenAIServer) -> None:
        if request.embedding not in {"", _EMBEDDING}:
            raise OperatorError(unknown_embedding(request.embedding, [_EMBEDDING]))
        self._server = server
        probed, self.artefact, self.provenance, _ = server.opened(
            lambda: self._request_vectors([_PROBE_TEXT])
        )
        self.inputs = (TensorSpec(name=_INPUT, dtype=np.dtype(object), shape=(None,)),)
        self.outputs = (
            TensorSpec(name=_EMBEDDING, dtype=np.dtype(np.float32), shape=(None, probed.shape[1])),
        )
        self.embedding = request.embedding

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return `embedding` : (items, dimensions) of `input` : (items,), texts; errors as of `OpenAIServer.guarded`."""
        check_inputs(inputs, self.inputs)
        texts = inputs[_INPUT].tolist()
        return {_EMBEDDING: self._server.guarded(lambda: self._request_vectors(texts))}

    def close(self) -> None:
        """Close the connection."""
        self._server.close()

    def _request_vectors(self, texts: list[str]) -> Array:
        question = {"model": self._server.name, "input": texts, "encoding_format": "float"}
        entries = self._server.ask("POST", "/v1/embeddings", _Vectors, question).data
        entries.sort(key=lambda entry: entry.index)
        if [entry.index for entry in entries] != list(range(len(texts))):
            raise unreadable("not one vector for each text")
        if len({len(entry.embedding) for entry in entries}) != 1 or not entries[0].embedding:
            raise unreadable("vectors of different lengths, or empty ones")
        return np.array([entry.embedding for entry in entries], dtype=np.float32)


class _AnswerFunction(msgspec.Struct):
    name: str = ""
    arguments: str = ""


class _Called(msgspec.Struct):
    function: _AnswerFunction = msgspec.field(default_factory=_AnswerFunction)


class _AnswerMessage(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Called] | None = None


class _AnswerChoice(msgspec.Struct):
    message: _AnswerMessage | None = None
    text: str = ""
    finish_reason: str | None = None


class _AnswerUsage(msgspec.Struct):
    completion_tokens: int | None = None


class _Answered(msgspec.Struct):
    choices: list[_AnswerChoice]
    usage: _AnswerUsage | None = None


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
    message = choice.message or _AnswerMessage(content=choice.text)
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

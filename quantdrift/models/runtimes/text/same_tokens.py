"""The check that the candidate's server makes the same tokens as the reference, of a dozen texts and of a chat, before anything is compared.

vLLM and llama.cpp have `/tokenize`, which leaves out what it does not know of a question. A server without it is not checked. vLLM tokenises
`messages` there; llama.cpp renders them by `/apply-template`, and the reference makes tokens of that text.
"""

import http.client
import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from quantdrift.core.errors import QuarantineError
from quantdrift.models.language.scoring import ScoringRequest
from quantdrift.models.runtimes.text.scoring_runtime import LanguageModel

TEXTS: Final = (
    "The quick brown fox jumps over the lazy dog.",
    "Größe, Maß und Öl: 3,5 km/h!",
    "¿Dónde está la biblioteca? À bientôt, l'été.",
    "Быстрая коричневая лиса",
    "敏捷的棕色狐狸跳过了懒狗。",
    "素早い茶色の狐、カタカナ",
    "الثعلب البني السريع",
    "def f(x):\n    return {'a': [1, 2.50], \"b\": x**2}\n",
    "  two  spaces\tand\ttabs \n\n\n",
    '{"name": "weather", "arguments": {"city": "Ulm"}}',
    "1234567890 0x7f 1e-5 $99.99",
    "😀👩‍💻 naïve café",
)
_CHAT: Final = ({"role": "user", "content": "Say one word."},)
_TIMEOUT_S: Final = 5.0
_MOST_BYTES: Final = 1 << 20


class CandidateServer:
    """The candidate's server, asked for what it makes of texts. What it does not answer is None.

    Parameters
    ----------
    address
        HOST:PORT, as in `sidecar.backend`.
    model
        The model's name in requests.
    """

    def __init__(self, address: str, model: str) -> None:
        self._address, self._model = address, model

    def tokens(self, question: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Return the tokens of a question to `/tokenize`."""
        tokens = self._asked("/tokenize", question).get("tokens")
        if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
            return None
        return tuple(tokens)

    def rendered(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        """Return the text that llama.cpp's chat template makes of messages, up to where the answer begins."""
        text = self._asked("/apply-template", {"messages": messages}).get("prompt")
        return text if isinstance(text, str) else None

    def _asked(self, path: str, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer to a question; empty if there is none that is an object of JSON."""
        try:
            connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)
        except http.client.HTTPException:  # no port
            return {}
        try:
            body = json.dumps({"model": self._model, **question})
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            found = json.loads(answer.read(_MOST_BYTES)) if answer.status == HTTPStatus.OK else None
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        finally:
            connection.close()
        return found if isinstance(found, dict) else {}


def other_tokens(reference: LanguageModel, candidate: CandidateServer) -> str:
    """Return what reference and candidate tokenise differently, as a clause; empty: nothing, or the server does not say.

    Raises
    ------
    QuarantineError
        The reference has no chat template.
    RetryError
        Its server is unreachable.
    """
    for text in TEXTS:
        of_candidate = candidate.tokens(
            {"prompt": text, "content": text, "add_special_tokens": False, "add_special": False}
        )
        if not of_candidate:
            return ""
        of_reference = reference.text_ids(text, add_special_tokens=False)
        if of_reference != of_candidate:
            return f"{_both(repr(text), of_candidate, of_reference)}: their tokenizers differ"
    of_candidate = candidate.tokens({"messages": _CHAT, "add_generation_prompt": True})
    if not of_candidate:  # llama.cpp answers with no token
        rendered = candidate.rendered(_CHAT)
        of_candidate = reference.text_ids(rendered, add_special_tokens=False) if rendered else None
    if not of_candidate:
        return ""
    of_reference = reference.chat_ids(ScoringRequest(messages=_CHAT))
    # llama.cpp leaves out a token that begins every text, and adds it to the tokens.
    if of_candidate in {of_reference, of_reference[1:]}:
        return ""
    return f"{_both('a chat of one message', of_candidate, of_reference)}: their chat templates differ"


def doubt_of(reference: LanguageModel, address: str, model: str) -> str:
    """Return what is wrong with tokenizer or template of a reference, with what to do; empty: nothing that is known.

    Parameters
    ----------
    address, model
        As of `CandidateServer`.
    """
    try:
        other = other_tokens(reference, CandidateServer(address, model))
    except QuarantineError as error:
        return f"the chat template of the reference: {error.detail}"
    if not other:
        return ""
    return (
        f"{other}. Serve the reference with the tokenizer and the chat template of the candidate ({address})"
    )


def _both(what: str, of_candidate: tuple[int, ...], of_reference: tuple[int, ...]) -> str:
    return (
        f"the candidate's server makes {len(of_candidate)} tokens of {what}, {_begin(of_candidate)}, and the reference"
        f" {len(of_reference)}, {_begin(of_reference)}"
    )


def _begin(ids: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, ids[:4]))}{', ...' if len(ids) > 4 else ''}]"
